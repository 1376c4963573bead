"""Fixtures that any test may ask for."""

import os
from collections.abc import Iterator

import pytest
from hypothesis import settings

from tests.support.nats import NatsServer

# As services.worker sets it, for the references that tests compute with torch: see there.
os.environ.setdefault("GOMP_SPINCOUNT", "1000")

# Examples run on shared and busy machines: how long one takes says nothing about the code.
settings.register_profile("default", deadline=None)
settings.load_profile("default")


@pytest.fixture(scope="session")
def nats_server() -> Iterator[NatsServer]:
    """One server for all tests that leave it running; keep apart by subjects."""
    server = NatsServer()
    server.start()
    yield server
    server.close()


@pytest.fixture
def own_nats_server() -> Iterator[NatsServer]:
    """A server that the test may kill, pause and restart."""
    server = NatsServer()
    server.start()
    yield server
    server.close()
