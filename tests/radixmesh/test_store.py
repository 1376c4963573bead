"""The model cache: whole models only, built once."""

import threading
from pathlib import Path

import pytest

from radixmesh.errors import CommandError
from radixmesh.models.store import ModelStore, cache_root, missing_files


def ignore_waiting(key: str) -> None:
    pass


def write_model(folder: Path) -> None:
    folder.mkdir()
    for name in ("config.json", "tokenizer.json", "model.safetensors"):
        (folder / name).write_text("{}")


def test_a_model_is_built_once_and_found_afterwards(tmp_path):
    store = ModelStore(tmp_path, on_wait=ignore_waiting)
    built = []

    def build(staging: Path, model: Path) -> None:
        built.append(staging)
        write_model(model)

    assert not store.has("tiny")
    assert store.ensure("tiny", build) == store.ensure("tiny", build) == tmp_path / "models" / "tiny"
    assert len(built) == 1
    assert missing_files(store.folder("tiny")) == []


def test_a_failed_build_leaves_nothing_and_can_be_tried_again(tmp_path):
    store = ModelStore(tmp_path, on_wait=ignore_waiting)

    def fail(staging: Path, model: Path) -> None:
        (staging / "half.whl").write_text("x")
        raise CommandError("the network is gone")

    with pytest.raises(CommandError, match="the network is gone"):
        store.ensure("tiny", fail)
    assert [path.name for path in (tmp_path / "models").iterdir() if path.is_dir()] == []
    store.ensure("tiny", lambda staging, model: write_model(model))


def test_an_incomplete_model_is_refused_by_the_files_it_lacks(tmp_path):
    store = ModelStore(tmp_path, on_wait=ignore_waiting)

    def build(staging: Path, model: Path) -> None:
        write_model(model)
        (model / "tokenizer.json").unlink()

    with pytest.raises(CommandError, match=r"tiny lacks tokenizer\.json"):
        store.ensure("tiny", build)
    assert not store.has("tiny")


def test_what_a_killed_start_left_is_removed_by_the_next_one(tmp_path):
    abandoned = tmp_path / "models" / ".tiny.staging-dead"
    abandoned.mkdir(parents=True)
    ModelStore(tmp_path, on_wait=ignore_waiting).ensure("tiny", lambda staging, model: write_model(model))
    assert not abandoned.exists()


def test_two_starts_at_once_build_once_and_the_second_says_that_it_waits(tmp_path):
    building, waiting = threading.Event(), threading.Event()
    built = []

    def build(staging: Path, model: Path) -> None:
        built.append(threading.current_thread().name)
        building.set()
        assert waiting.wait(10)  # until the other thread has met the lock
        write_model(model)

    first = threading.Thread(target=ModelStore(tmp_path, on_wait=ignore_waiting).ensure, args=("tiny", build))
    first.start()
    assert building.wait(10)
    ModelStore(tmp_path, on_wait=lambda key: waiting.set()).ensure("tiny", build)
    first.join(10)
    assert len(built) == 1


def test_a_cache_that_cannot_be_written_is_named(tmp_path):
    (tmp_path / "file").write_text("")
    store = ModelStore(tmp_path / "file", on_wait=ignore_waiting)
    with pytest.raises(CommandError, match=r"cannot write the model cache .*file"):
        store.ensure("tiny", lambda staging, model: write_model(model))


def test_the_cache_lies_where_the_environment_says(monkeypatch, tmp_path):
    monkeypatch.setenv("RADIXMESH_CACHE", str(tmp_path / "here"))
    assert cache_root() == tmp_path / "here"
    monkeypatch.delenv("RADIXMESH_CACHE")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "xdg"))
    assert cache_root() == tmp_path / "xdg" / "radixmesh"
