from pathlib import Path

import pytest

from services.grammar.config import GrammarConfig
from services.grammar.vetting import Task, Vetter, make_vetter
from tests.support.grammars import write_byte_level_model


@pytest.fixture(scope="session")
def model_path(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("model")
    write_byte_level_model(folder)
    return folder


@pytest.fixture(scope="session")
def vetter(model_path: Path) -> Vetter:
    return make_vetter(Task(model_path=str(model_path), tool_format="hermes", limits=GrammarConfig().limits))
