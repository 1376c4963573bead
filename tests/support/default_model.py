"""The default model's folder, for tests that need the real tokenizer or weights."""

import json
import os
from pathlib import Path

import pytest

from radixmesh.models.registry import DEFAULT_MODEL
from radixmesh.models.store import cache_root


def default_model_folder() -> Path:
    """`$RADIXMESH_TEST_MODEL`, else where `radixmesh` keeps the default model; the test is skipped where neither is."""
    chosen = os.environ.get("RADIXMESH_TEST_MODEL")
    folders = [Path(chosen)] if chosen else sorted((cache_root() / "models").glob(f"{DEFAULT_MODEL}*"))
    for folder in folders:
        if (folder / "tokenizer.json").is_file():
            return folder
    pytest.skip(f"{DEFAULT_MODEL} is not here: fetch it with `radixmesh models pull {DEFAULT_MODEL}`")


def naughty_strings() -> list[str]:
    """Strings that broke other software; the test is skipped where the shared data is absent."""
    file = Path(__file__).parents[2].parent / "shared" / "data" / "prompts" / "naughty_strings.json"
    if not file.is_file():
        pytest.skip(f"no {file.name} beside the repository")
    strings: list[str] = json.loads(file.read_text(encoding="utf-8"))
    return strings
