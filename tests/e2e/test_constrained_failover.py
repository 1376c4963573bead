"""A constrained stream whose replica dies goes on elsewhere: the grammar is replayed over the tokens that were there."""

import json
from collections.abc import Callable
from typing import Any

import httpx
import jsonschema
import pytest

from tests.support.default_model import default_model_folder
from tests.support.stack import Stack

pytestmark = pytest.mark.slow

# Tokens that depend on seed and position alone, and real matchers: no weights are needed to follow a grammar.
WORKER = ("--model-kind", "simulated", "--simulated-step-ms", "20", "--num-slots", "8192")
SCHEMA = {
    "type": "object",
    "properties": {
        "identifiers": {
            "type": "array",
            "items": {"type": "integer", "minimum": 0, "maximum": 10**9},
            "minItems": 24,
            "maxItems": 24,
        },
        "a property that comes last": {"enum": ["yes", "no"]},
    },
    "required": ["identifiers", "a property that comes last"],
    "additionalProperties": False,
}


def stream(stack: Stack, after_10_events: Callable[[], None] = lambda: None) -> tuple[str, str]:
    """(text, finish_reason) of one seeded stream; something happens in its middle."""
    body: dict[str, Any] = {
        "model": stack.model,
        "prompt": "Write.",
        "max_tokens": 1000,
        "seed": 5,
        "stream": True,
        "response_format": {"type": "json_schema", "json_schema": {"name": "answer", "schema": SCHEMA}},
    }
    text, finish, num_events = "", "", 0
    with httpx.stream("POST", f"{stack.base_url}/v1/completions", json=body, timeout=60, trust_env=False) as response:
        assert response.status_code == 200, response.read()
        for line in response.iter_lines():
            if not line.startswith("data: {"):
                continue
            for choice in json.loads(line[6:])["choices"]:
                text += choice["text"]
                finish = choice["finish_reason"] or finish
            num_events += 1
            if num_events == 10:
                after_10_events()
    return text, finish


def kill_busy_scheduler(stack: Stack) -> None:
    replicas = httpx.get(f"{stack.base_url}/server_info", trust_env=False).json()["replicas"]
    busy = next(each["load"]["replica_id"] for each in replicas if each["load"]["num_running_reqs"])
    stack.services.pop(f"scheduler-{busy.removeprefix('s')}").kill()


def test_a_constrained_stream_goes_on_where_it_was() -> None:
    with Stack(model_path=str(default_model_folder())) as stack:
        for number in (1, 2):
            stack.start(f"worker-{number}", *WORKER, "--instance", f"w{number}", module="services.worker")
            stack.start(f"scheduler-{number}", "--instance", f"s{number}", module="services.scheduler")
        for name in ("tokenizer", "grammar", "router"):
            stack.start(name)
        stack.start("gateway", "--host", "127.0.0.1", "--port", str(stack.port))
        stack.wait_ready()
        undisturbed = stream(stack)
        assert undisturbed[1] == "stop"
        jsonschema.validate(json.loads(undisturbed[0]), SCHEMA)
        assert stream(stack, lambda: kill_busy_scheduler(stack)) == undisturbed
