"""Faults that take longer than a lease lives, and their repair: real processes, a model that takes only time.

What happens at the moment of a death is in test_gateway_failover.py; small pools are in test_exactness.py.
"""

import json
import threading
import time
from collections.abc import Callable, Iterator, Mapping

import httpx
import pytest

from tests.support.bus_client import BusClient
from tests.support.controlled_mesh import ControlledMesh

pytestmark = pytest.mark.slow

NUM_TOKENS = 300
SIMULATED = ("--model-kind", "simulated", "--simulated-step-ms", "10")
OUTAGE_S = 4.0
"""Longer than leases and heartbeats live."""


@pytest.fixture(scope="module")
def spare() -> Iterator[ControlledMesh]:
    """One replica and a worker to spare."""
    with ControlledMesh(num_workers=2, num_schedulers=1, worker_flags=SIMULATED).running() as mesh:
        yield mesh


def stream(
    mesh: ControlledMesh, faults: Mapping[int, Callable[[], None]] | None = None, max_tokens: int = NUM_TOKENS
) -> tuple[str, str]:
    """Text and finish reason of one seeded stream. `faults` happen at its n-th events."""
    options = {"max_tokens": max_tokens, "seed": 1, "ignore_eos": True, "stream": True}
    body = {"model": mesh.stack.model, "prompt": "Write.", **options}
    events: list[str] = []
    url = f"{mesh.stack.base_url}/v1/completions"
    with httpx.stream("POST", url, json=body, timeout=60, trust_env=False) as response:
        for line in response.iter_lines():
            if line.startswith("data: "):
                events.append(line.removeprefix("data: "))
                if faults is not None and len(events) in faults:
                    faults[len(events)]()
    assert events[-1] == "[DONE]", events[-1]
    choices = [choice for event in events[:-1] for choice in json.loads(event)["choices"]]
    (finish,) = [choice["finish_reason"] for choice in choices if choice["finish_reason"]]
    return "".join(choice["text"] for choice in choices), finish


@pytest.fixture(scope="module")
def alone(spare: ControlledMesh) -> tuple[str, str]:
    return stream(spare)


def test_a_frozen_worker_is_replaced_its_late_messages_are_ignored_and_it_can_serve_again(
    spare: ControlledMesh, alone: tuple[str, str]
) -> None:
    frozen = spare.serving_worker()
    # By the 60th event the other worker computes: at most two steps were under way when the first one froze.
    assert stream(spare, {20: spare.pause_worker, 60: spare.resume_worker}) == alone
    assert spare.serving_worker() != frozen
    spare.wait_for(lambda: spare.is_free(frozen), "the worker that was frozen is free", timeout_s=10)
    assert stream(spare, {20: spare.kill_worker}) == alone
    assert spare.serving_worker() == frozen
    spare.restart_worker()


def test_an_outage_of_the_bus_longer_than_a_lease_costs_a_pause(spare: ControlledMesh, alone: tuple[str, str]) -> None:
    def lose_bus() -> None:
        spare.stop_bus()
        time.sleep(OUTAGE_S)
        spare.start_bus()

    assert stream(spare, {20: lose_bus}) == alone


def test_messages_that_arrive_three_times_change_nothing(spare: ControlledMesh, alone: tuple[str, str]) -> None:
    spare.duplicate_messages()
    assert stream(spare) == alone
    spare.deliver_once()


async def test_the_requests_of_a_gateway_that_was_killed_end_and_free_their_slots(spare: ControlledMesh) -> None:
    def leave_alone() -> None:
        with pytest.raises(httpx.TransportError):
            stream(spare, max_tokens=4000)  # far longer than the test waits

    client = threading.Thread(target=leave_alone)
    async with BusClient(spare.stack.nats.url, spare.stack.model) as bus:
        client.start()
        while (await bus.next_load()).num_running_reqs == 0:
            pass
        spare.stop("gateway", kill=True)
        killed = time.monotonic()
        while (load := await bus.next_load()).num_running_reqs:
            pass
        assert time.monotonic() - killed < 3.0 + 1.0
        assert load.num_used_slots == 0
    client.join()
    spare.start_gateway()
    spare.wait_ready()


def test_parts_may_start_before_the_bus_they_need(spare: ControlledMesh, alone: tuple[str, str]) -> None:
    spare.start_order(["worker", "gateway", "bus"])
    assert stream(spare) == alone


def test_without_a_spare_worker_requests_go_to_the_other_replica() -> None:
    with ControlledMesh(num_workers=2, num_schedulers=2, worker_flags=SIMULATED).running() as mesh:
        alone = stream(mesh)
        assert stream(mesh, {20: mesh.kill_worker}) == alone
