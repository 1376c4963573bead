"""Readiness and silence, from what the others last said."""

import msgspec
import pytest

from services.gateway.cluster_view import ClusterView
from shared.messages.cluster import Heartbeat, Load, ServiceState

SILENCE_S, STALL_S = 3.0, 10.0


def load(replica: str = "r1", **changes) -> Load:
    idle = Load(
        replica_id=replica,
        epoch=1,
        num_running_reqs=0,
        num_waiting_reqs=0,
        num_uncached_tokens=0,
        num_used_slots=0,
        num_cached_slots=0,
        num_slots=100,
        accepting=True,
    )
    return msgspec.structs.replace(idle, **changes)


def view_with(*loads: Load, roles: tuple[str, ...] = ("tokenizer", "router"), at_s: float = 100.0) -> ClusterView:
    view = ClusterView(SILENCE_S, STALL_S)
    for role in roles:
        view.take_heartbeat(Heartbeat(role=role, instance=f"{role}-1", state=ServiceState.READY), at_s)
    for each in loads:
        view.take_load(each, at_s)
    return view


def test_it_is_ready_when_a_request_would_be_routed():
    assert view_with(load()).why_not_ready(101.0) is None


@pytest.mark.parametrize(
    ("view", "reason"),
    [
        (view_with(load(), roles=("router",)), "no tokenizer is ready"),
        (view_with(load(), roles=("tokenizer",)), "no router is ready"),
        (view_with(), "no replica is running"),
        (view_with(load(accepting=False)), "none of 1 replicas accepts requests"),
    ],
)
def test_what_is_missing_is_said(view, reason):
    assert view.why_not_ready(101.0) == reason


def test_a_draining_member_does_not_count():
    view = view_with(load())
    view.take_heartbeat(Heartbeat(role="router", instance="router-1", state=ServiceState.DRAINING), 101.0)
    assert view.why_not_ready(101.0) == "no router is ready"


def test_silence_ends_readiness():
    assert view_with(load()).why_not_ready(100.0 + SILENCE_S + 0.1) is not None


def test_a_busy_replica_without_steps_is_stalled_and_an_idle_one_is_not():
    busy, idle = view_with(), view_with()
    for second in range(12):
        for view, running in ((busy, 1), (idle, 0)):
            for role in ("tokenizer", "router"):
                heartbeat = Heartbeat(role=role, instance=f"{role}-1", state=ServiceState.READY)
                view.take_heartbeat(heartbeat, 100.0 + second)
            view.take_load(load(num_running_reqs=running, num_steps=7), 100.0 + second)
    assert busy.why_not_ready(111.0) == "no replica has made a step for 11 s"
    assert idle.why_not_ready(111.0) is None
    busy.take_load(load(num_running_reqs=1, num_steps=8), 111.0)
    assert busy.why_not_ready(111.0) is None


def test_silence_counts_only_while_it_could_be_heard():
    view = view_with(load())
    assert view.is_silent("r1", 104.0)
    view.take_connection(False, 104.0)
    assert not view.is_silent("r1", 200.0)
    view.take_connection(True, 200.0)
    assert not view.is_silent("r1", 202.0)
    assert view.is_silent("r1", 204.0)


def test_after_a_pause_of_this_process_the_others_get_time_to_be_heard():
    view = view_with(load())
    view.take_gap(150.0)
    assert not view.is_silent("r1", 152.0)
    assert view.is_silent("r1", 154.0)


def test_the_longest_sequence_is_that_of_the_largest_replica():
    assert view_with().max_total_tokens(100.0) is None
    assert view_with(load("a", max_total_tokens=5), load("b", max_total_tokens=9)).max_total_tokens(100.0) == 9


def test_who_was_silent_for_long_is_forgotten():
    view = view_with(load())
    view.forget_silent(100.0 + 10 * SILENCE_S + 1)
    view.take_gap(0.0)
    assert not list(view.replicas(100.0))
