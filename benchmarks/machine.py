"""What a benchmark runs on: the machine, which is printed beside every figure, and the model."""

import os
import platform
from pathlib import Path

from radixmesh.models.registry import DEFAULT_MODEL
from radixmesh.models.store import cache_root


def describe_machine() -> str:
    """One line: processor, cores that this process may use, Python."""
    cpuinfo = Path("/proc/cpuinfo")
    names = [line.partition(":")[2].strip() for line in _lines(cpuinfo) if line.startswith("model name")]
    name = names[0] if names else platform.processor() or platform.machine()
    return f"machine   {name}, {len(os.sched_getaffinity(0))} cores, Python {platform.python_version()}"


def default_model() -> str:
    """Folder of the default model: `$RADIXMESH_TEST_MODEL`, or where `radixmesh` keeps it. Ends the program if it is not there."""
    chosen = os.environ.get("RADIXMESH_TEST_MODEL")
    for folder in [Path(chosen)] if chosen else sorted((cache_root() / "models").glob(f"{DEFAULT_MODEL}*")):
        if (folder / "config.json").is_file():
            return str(folder)
    raise SystemExit(f"no model: `radixmesh models pull {DEFAULT_MODEL}` first, or name a folder with --model")


def _lines(path: Path) -> list[str]:
    return path.read_text().splitlines() if path.exists() else []
