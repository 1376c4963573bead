"""End-to-end tests share one engine with the real model; those that break things start their own."""

from collections.abc import Iterator

import pytest

from tests.support.default_model import default_model_folder
from tests.support.stack import Stack


@pytest.fixture(scope="package")
def engine() -> Iterator[Stack]:
    """The default model in float32 behind a gateway."""
    with Stack(model_path=str(default_model_folder())) as stack:
        stack.start_all("--dtype", "float32", "--num-slots", "24000")
        yield stack
