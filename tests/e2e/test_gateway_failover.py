"""A stream goes on, token for token, whatever dies behind the gateway: real processes, a model that takes only time."""

import json
from collections.abc import Callable, Iterator

import httpx
import pytest

from tests.support.default_model import default_model_folder
from tests.support.stack import Stack

pytestmark = pytest.mark.slow

NUM_TOKENS = 200
WORKER = ("--model-kind", "simulated", "--simulated-step-ms", "15", "--num-slots", "8192")


@pytest.fixture(scope="module")
def stack() -> Iterator[Stack]:
    with Stack(model_path=str(default_model_folder())) as running:
        for number in (1, 2, 3):
            running.start(f"worker-{number}", *WORKER, "--instance", f"w{number}", module="services.worker")
            running.start(f"scheduler-{number}", "--instance", f"s{number}", module="services.scheduler")
        for name in ("tokenizer", "grammar", "router"):
            running.start(name)
        running.start("gateway", "--host", "127.0.0.1", "--port", str(running.port))
        running.wait_ready()
        yield running


def stream(stack: Stack, after_20_events: Callable[[], None] = lambda: None) -> tuple[str, int]:
    """The text and the number of generated tokens of one seeded stream; something happens in its middle."""
    body = {
        "model": stack.model,
        "prompt": "Write.",
        "max_tokens": NUM_TOKENS,
        "seed": 1,
        "ignore_eos": True,
        "stream": True,
        "stream_options": {"include_usage": True},
    }
    events = []
    with httpx.stream("POST", f"{stack.base_url}/v1/completions", json=body, timeout=60, trust_env=False) as response:
        for line in response.iter_lines():
            if line.startswith("data: "):
                events.append(line.removeprefix("data: "))
                if len(events) == 20:
                    after_20_events()
    assert events[-1] == "[DONE]", events[-1]
    decoded = [json.loads(event) for event in events[:-1]]
    text = "".join(choice["text"] for event in decoded for choice in event["choices"])
    return text, decoded[-1]["usage"]["completion_tokens"]


def busy_replica(stack: Stack) -> str:
    replicas = httpx.get(f"{stack.base_url}/server_info", trust_env=False).json()["replicas"]
    return next(each["load"]["replica_id"] for each in replicas if each["load"]["num_running_reqs"])


def kill(stack: Stack, name: str) -> None:
    """For good: it is not missed any more."""
    stack.services.pop(name).kill()


def worker_of(stack: Stack, replica: str) -> str:
    members = httpx.get(f"{stack.base_url}/server_info", trust_env=False).json()["members"]
    group = next(m["info"]["group"] for m in members if m["role"] == "scheduler" and m["instance"] == replica)
    worker = next(m["instance"] for m in members if m["role"] == "worker" and m["info"]["group"] == group)
    return f"worker-{worker.removeprefix('w')}"


def test_nothing_is_lost_or_repeated(stack):
    alone = stream(stack)
    assert alone[1] == NUM_TOKENS

    def scheduler_dies() -> None:
        kill(stack, f"scheduler-{busy_replica(stack).removeprefix('s')}")

    def worker_dies() -> None:
        kill(stack, worker_of(stack, busy_replica(stack)))

    def router_dies() -> None:
        kill(stack, "router")
        stack.start("router")

    def bus_restarts() -> None:
        stack.nats.kill()
        stack.nats.start()

    for disaster in (scheduler_dies, worker_dies, router_dies, bus_restarts):
        assert stream(stack, disaster) == alone, disaster.__name__
        stack.wait_ready()
