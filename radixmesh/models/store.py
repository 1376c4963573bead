"""The folder of fetched and converted models. A model is there whole or not at all, however many processes start at once."""

import os
import shutil
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from tempfile import mkdtemp

from filelock import FileLock, Timeout

from radixmesh.errors import CommandError

NEEDED_FILES = ("config.json", "tokenizer.json")


def cache_root() -> Path:
    """`$RADIXMESH_CACHE`, or `radixmesh` in the user's cache folder."""
    if chosen := os.environ.get("RADIXMESH_CACHE"):
        return Path(chosen).expanduser()
    return Path(os.environ.get("XDG_CACHE_HOME") or "~/.cache").expanduser() / "radixmesh"


def missing_files(folder: Path) -> list[str]:
    """What a model folder lacks to be served."""
    missing = [name for name in NEEDED_FILES if not (folder / name).is_file()]
    if not any(folder.glob("*.safetensors")):
        missing.append("*.safetensors")
    return missing


def point_to(link: Path, folder: Path) -> None:
    """Make `link` lead to `folder`, in one step for whoever looks. Raises CommandError when something else lies there."""
    if link.exists() and not link.is_symlink():
        raise CommandError(f"{link} exists and is no link")
    fresh = link.with_name(f".{link.name}.{os.getpid()}")
    try:
        fresh.symlink_to(folder)
        fresh.replace(link)
    except OSError as error:
        raise CommandError(f"cannot write {link}: {error.strerror}") from error


class ModelStore:
    """Converted models by key, each in `<root>/models/<key>`.

    A model is built in a staging folder beside its place and renamed when it is complete, under a lock per key: a start
    that is killed leaves a staging folder (removed by the next one), never half a model.
    """

    def __init__(self, root: Path, *, on_wait: Callable[[str], None]) -> None:
        """`on_wait` is told the key when another process is already building it."""
        self._models = root / "models"
        self._on_wait = on_wait

    def folder(self, key: str) -> Path:
        assert key and "/" not in key and not key.startswith("."), f"not a folder name: {key!r}"
        return self._models / key

    def has(self, key: str) -> bool:
        return self.folder(key).is_dir()

    def ensure(self, key: str, build: Callable[[Path, Path], None]) -> Path:
        """The folder of `key`; `build(staging, model)` makes it if it is not there.

        `staging` is an empty folder for downloads, `model` the path (not yet existing) that the complete model must have
        afterwards. Raises CommandError when the cache cannot be written.
        """
        if self.has(key):
            return self.folder(key)
        try:
            self._models.mkdir(parents=True, exist_ok=True)
            with self._locked(key):
                if not self.has(key):
                    self._build(key, build)
        except OSError as error:
            raise CommandError(f"cannot write the model cache {self._models}: {error.strerror or error}") from error
        return self.folder(key)

    def _build(self, key: str, build: Callable[[Path, Path], None]) -> None:
        for abandoned in self._models.glob(f".{key}.staging-*"):  # we hold the lock, so nobody builds there
            shutil.rmtree(abandoned)
        staging = Path(mkdtemp(prefix=f".{key}.staging-", dir=self._models))
        try:
            model = staging / "model"
            build(staging, model)
            if missing := missing_files(model):
                raise CommandError(f"the converted model {key} lacks {', '.join(missing)}")
            model.rename(self.folder(key))
        finally:
            shutil.rmtree(staging, ignore_errors=True)

    @contextmanager
    def _locked(self, key: str) -> Iterator[None]:
        lock = FileLock(self._models / f".{key}.lock")
        try:
            lock.acquire(timeout=0)
        except Timeout:
            self._on_wait(key)
            lock.acquire()
        try:
            yield
        finally:
            lock.release()
