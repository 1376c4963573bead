"""The OpenAPI document is the truth: whatever it allows or forbids, the answer is a documented one and no 5xx."""

import json
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from random import Random
from typing import Any

import httpx
import pytest
import requests
import schemathesis
from hypothesis import HealthCheck, Phase, given, settings, strategies
from schemathesis import APIOperation, BaseSchema, Case, GenerationMode
from schemathesis.checks import (
    content_type_conformance,
    response_headers_conformance,
    response_schema_conformance,
    status_code_conformance,
)

from tests.support.default_model import default_model_folder
from tests.support.stack import Stack

pytestmark = pytest.mark.slow

CONTEXT_LEN = 256
"""A request that names no limit is soon done."""
NUM_EXAMPLES = {"GET": 25, "DELETE": 25, "POST": 130}
"""By method, of valid and of invalid requests each."""
MIN_EXAMPLES = 2000
MIN_SERVED = 250
"""Requests that are no mistake: the others end at the border."""
ALTERNATIVES = {"/generate": ("text", "input_ids"), "/tokenize": ("prompt", "messages")}
"""Exactly one of two fields must be there, which a schema made from types does not say."""
CHECKS = (
    status_code_conformance,
    content_type_conformance,
    response_headers_conformance,
    response_schema_conformance,
)


@pytest.fixture(scope="module")
def stack(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Stack]:
    """A whole mesh around a worker that takes no time, for a model of a short context."""
    folder: Path = tmp_path_factory.mktemp("short")
    for file in default_model_folder().iterdir():
        (folder / file.name).symlink_to(file.resolve())
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").unlink()
    (folder / "config.json").write_text(json.dumps(config | {"max_position_embeddings": CONTEXT_LEN}))
    with Stack(model_path=str(folder)) as running:
        running.start_all(
            *("--model-kind", "simulated", "--simulated-step-ms", "0", "--num-slots", "4096"),
            gateway_flags=("--max-choices", "8"),
        )
        yield running


@pytest.fixture(scope="module")
def schema(stack: Stack) -> BaseSchema:
    document = httpx.get(f"{stack.base_url}/openapi.json", trust_env=False).json()
    return schemathesis.openapi.from_dict(document)


def test_every_answer_is_documented(stack: Stack, schema: BaseSchema) -> None:
    answered: Counter[int] = Counter()
    with requests.Session() as session:
        session.trust_env = False
        for result in schema.get_all_operations():
            operation = result.ok()
            for mode in (GenerationMode.POSITIVE, GenerationMode.NEGATIVE):
                if mode is GenerationMode.POSITIVE or takes_input(operation):
                    answered += answers_of(operation, mode, stack.base_url, session)
    assert sum(answered.values()) >= MIN_EXAMPLES, answered
    assert answered[200] >= MIN_SERVED, answered
    # After all that it serves as before.
    body = {"model": stack.model, "prompt": "Once", "max_tokens": 5}
    reply = httpx.post(f"{stack.base_url}/v1/completions", json=body, timeout=30, trust_env=False)
    assert reply.json()["usage"]["completion_tokens"] == 5


def takes_input(operation: APIOperation) -> bool:
    """Without a body nothing can be wrong: a path takes any text."""
    return "requestBody" in operation.definition.raw


def thinned(body: dict[str, Any], operation: APIOperation, random: Random) -> dict[str, Any]:
    """With a few of its optional fields: of all of them at once, two nearly always exclude each other."""
    name = operation.definition.raw["requestBody"]["content"]["application/json"]["schema"]["$ref"].split("/")[-1]
    required = operation.schema.raw_schema["components"]["schemas"][name].get("required", ())
    kept = {*required, *random.sample(sorted(body), min(3, len(body)))}
    if operation.path in ALTERNATIVES:
        one, other = ALTERNATIVES[operation.path] if random.random() < 0.5 else ALTERNATIVES[operation.path][::-1]
        kept = kept - {other} | {one}
    return {name: value for name, value in body.items() if name in kept}


def answers_of(operation: APIOperation, mode: GenerationMode, base_url: str, session: requests.Session) -> Counter[int]:
    """Send requests of one kind; the answers by status."""
    answered: Counter[int] = Counter()

    @settings(
        max_examples=NUM_EXAMPLES[operation.method.upper()],
        deadline=None,
        database=None,
        derandomize=True,
        phases=(Phase.explicit, Phase.generate),
        suppress_health_check=list(HealthCheck),
    )
    @given(operation.as_strategy(generation_mode=mode), strategies.randoms(use_true_random=False))
    def send(case: Case, random: Random) -> None:
        if mode is GenerationMode.POSITIVE and isinstance(case.body, dict):
            case.body = thinned(case.body, operation, random)
        response = case.call(base_url=base_url, session=session, timeout=60)
        answered[response.status_code] += 1
        case.validate_response(response, checks=list(CHECKS))
        # A deadline of the client's own choice may well pass.
        if not (response.status_code == 504 and isinstance(case.body, dict) and "timeout" in case.body):
            assert response.status_code < 500, (response.status_code, response.text, case.as_curl_command())

    send()
    return answered
