"""A model whose tokens are bytes, as the gateway knows it."""

import itertools
from collections.abc import AsyncIterator

import pytest

from services.gateway.actor import load_facts
from services.gateway.api.dialect import Circumstances
from services.gateway.config import GatewayConfig
from services.gateway.model_facts import ModelFacts
from tests.support.gateway_world import MODEL, World, gateway_world, write_model_folder


@pytest.fixture(scope="session")
def facts(tmp_path_factory) -> ModelFacts:
    folder = write_model_folder(tmp_path_factory.mktemp("model"))
    return load_facts(GatewayConfig(model=MODEL, model_path=str(folder)))[0]


@pytest.fixture
def circumstances(facts) -> Circumstances:
    seeds = itertools.count(1000)
    return Circumstances(
        facts=facts, config=GatewayConfig(), tool_parser="hermes", now_s=1, draw_seed=lambda: next(seeds)
    )


@pytest.fixture
async def world(tmp_path) -> AsyncIterator[World]:
    async with gateway_world(tmp_path) as running:
        yield running
