"""Where requests go: to live replicas, spread by load, near their cached prefix."""

from array import array
from collections import Counter

import pytest
from hypothesis import given
from hypothesis import strategies as st

from services.router.config import RouterConfig
from services.router.core import Announce, AskSnapshot, Forward, Reject, Route, RouterCore
from shared.kv_hashes import DEFAULT_BLOCK_SIZE, block_hashes
from shared.messages.cluster import Booked, Heartbeat, KvEvents, Load, ServiceState
from shared.messages.generation import RejectCode, Submit
from shared.messages.packing import pack, pack_int32

CONFIG = RouterConfig(instance="r1")


def load(replica_id: str, **changes) -> Load:
    quiet = {
        "replica_id": replica_id,
        "epoch": 1,
        "num_running_reqs": 0,
        "num_waiting_reqs": 0,
        "num_uncached_tokens": 0,
        "num_used_slots": 0,
        "num_cached_slots": 0,
        "num_slots": 10_000,
        "accepting": True,
    }
    return Load(**(quiet | changes))


def route(
    tokens=range(64), *, draw: float = 0.0, deadline_ms: int | None = None, namespace: str = "", max_new_tokens: int = 8
):
    submit = Submit(
        request_id="q", gateway_id="g", prompt=pack_int32(tokens), max_new_tokens=max_new_tokens, namespace=namespace
    )
    return Route(submit=submit, payload=pack(submit), reply="inbox", deadline_ms=deadline_ms, draw=draw)


def caches(replica_id: str, tokens, namespace: str = "") -> KvEvents:
    hashes = block_hashes(namespace, pack_int32(tokens))
    return KvEvents(replica_id=replica_id, epoch=1, first=1, stored=array("Q", hashes).tobytes())


def core_with(*loads: Load, now_ms: int = 0) -> RouterCore:
    core = RouterCore("r1", CONFIG)
    core.step(now_ms, loads)
    return core


def targets(effects) -> list[str]:
    return [effect.replica_id for effect in effects if isinstance(effect, Forward)]


def rejections(effects) -> list[RejectCode]:
    return [effect.answer.code for effect in effects if isinstance(effect, Reject)]


def test_a_submit_goes_on_as_it_came_with_the_reply_of_its_gateway():
    request = route()
    effects = core_with(load("a")).step(10, [request])
    assert Forward("a", request.payload, "inbox") in effects


def test_without_a_replica_the_client_is_told_to_come_back():
    (effect,) = core_with().step(0, [route()])
    assert effect.answer.code is RejectCode.NO_REPLICA
    assert effect.answer.retry_after_s > 0


@pytest.mark.parametrize(
    "news", [load("a", accepting=False), Heartbeat(role="scheduler", instance="a", state=ServiceState.DRAINING)]
)
def test_a_replica_that_takes_no_work_gets_none(news):
    core = core_with(load("a"), load("b"))
    core.step(1, [news])
    assert set(targets(core.step(2, [route() for _ in range(20)]))) == {"b"}


def test_a_replica_that_resumes_is_used_again():
    core = core_with(load("a"))
    core.step(1, [Heartbeat(role="scheduler", instance="a", state=ServiceState.DRAINING)])
    assert rejections(core.step(2, [route()])) == [RejectCode.NO_REPLICA]
    core.step(3, [Heartbeat(role="scheduler", instance="a", state=ServiceState.READY)])
    assert targets(core.step(4, [route()])) == ["a"]


def test_the_heartbeat_of_another_role_with_the_same_name_means_nothing():
    core = core_with(load("a"))
    core.step(1, [Heartbeat(role="worker", instance="a", state=ServiceState.DRAINING)])
    assert targets(core.step(2, [route()])) == ["a"]


def test_a_silent_replica_is_forgotten():
    core = core_with(load("a"))
    assert rejections(core.step(3001, [route()])) == [RejectCode.NO_REPLICA]


def test_a_replica_that_has_gone_quiet_is_the_last_resort():
    core = core_with(load("a"), load("b", num_running_reqs=50))
    core.step(1000, [load("b", num_running_reqs=50)])
    assert targets(core.step(1001, [route()])) == ["b"]
    assert targets(core_with(load("a")).step(1001, [route()])) == ["a"]


def test_expired_work_is_dropped_with_a_typed_answer():
    (effect,) = core_with(load("a")).step(100, [route(deadline_ms=100)])
    assert effect.answer.code is RejectCode.DEADLINE
    assert effect.answer.retry_after_s is None


def test_a_request_goes_where_it_fits():
    core = core_with(load("small", max_total_tokens=64), load("large", max_total_tokens=1000, num_running_reqs=9))
    assert targets(core.step(1, [route(range(100))])) == ["large"]
    assert targets(core_with(load("small", max_total_tokens=64)).step(1, [route(range(100))])) == ["small"]


def test_a_burst_spreads_before_any_load_arrives():
    core = core_with(*(load(name) for name in "abcd"))
    sent = targets(core.step(1, [route() for _ in range(100)]))
    assert set(Counter(sent).values()) == {25}


def test_bookings_of_a_peer_count_and_own_echoes_do_not():
    core = core_with(load("a"), load("b"))
    core.step(1, [Booked(router_id="r2", replica_id="a", num_prefill_tokens=5000)])
    assert targets(core.step(2, [route()])) == ["b"]
    core = core_with(load("a"), load("b", num_running_reqs=1))
    core.step(1, [Booked(router_id="r1", replica_id="a", num_prefill_tokens=5000)])
    assert targets(core.step(2, [route()])) == ["a"]


def test_every_dispatch_is_announced_with_its_uncached_tokens():
    core = core_with(load("a"), load("b"))
    core.step(1, [caches("a", range(64))])
    effects = core.step(2, [route(range(100))])
    announced = [effect.booked for effect in effects if isinstance(effect, Announce)]
    assert announced == [Booked(router_id="r1", replica_id="a", num_prefill_tokens=100 - 64)]


def test_a_load_ends_the_bookings_it_can_know_of():
    core = core_with(load("a"))
    core.step(0, [route(range(500))])
    core.step(CONFIG.settle_ms - 1, [load("a")])
    assert core.replicas["a"].num_booked_tokens == 500
    core.step(CONFIG.settle_ms, [load("a", num_uncached_tokens=500)])
    assert core.replicas["a"].num_booked_tokens == 0


def test_equal_prompts_go_where_they_are_cached():
    core = core_with(load("a"), load("b"))
    core.step(1, [caches("b", range(640))])
    for now_ms in range(100, 1000, 100):
        core.step(now_ms, [load("a"), load("b")])
        assert targets(core.step(now_ms + 1, [route(range(650), draw=0.0)])) == ["b"]


def test_a_cached_prefix_does_not_outweigh_an_overload():
    core = core_with(load("a"), load("b"))
    core.step(1, [caches("b", range(640))])
    core.step(2, [load("b", num_uncached_tokens=5000)])
    assert targets(core.step(3, [route(range(650))])) == ["a"]


def test_caches_of_another_namespace_attract_nothing():
    core = core_with(load("a"), load("b", num_running_reqs=1))
    core.step(1, [caches("b", range(640), namespace="tenant")])
    assert targets(core.step(2, [route(range(650))])) == ["a"]
    assert targets(core.step(3, [route(range(650), namespace="tenant")])) == ["b"]


def test_a_wholly_cached_prompt_still_counts_its_last_token():
    core = core_with(load("a"), load("b"))
    core.step(1, [caches("a", range(DEFAULT_BLOCK_SIZE * 4))])
    effects = core.step(2, [route(range(DEFAULT_BLOCK_SIZE * 4))])
    assert [effect.booked.num_prefill_tokens for effect in effects if isinstance(effect, Announce)] == [1]


def test_a_new_replica_is_asked_for_its_cache_and_again_only_after_a_while():
    core = RouterCore("r1", CONFIG)
    assert core.step(0, [load("a")]) == [AskSnapshot("a")]
    assert core.step(100, [load("a")]) == []
    assert core.step(1000, [load("a")]) == [AskSnapshot("a")]


news = st.one_of(
    st.builds(
        load,
        st.sampled_from("abc"),
        accepting=st.booleans(),
        num_running_reqs=st.integers(0, 100),
        num_uncached_tokens=st.integers(0, 10_000),
        epoch=st.integers(1, 3),
    ),
    st.builds(
        Heartbeat,
        role=st.just("scheduler"),
        instance=st.sampled_from("abc"),
        state=st.sampled_from([ServiceState.READY, ServiceState.DRAINING]),
    ),
    st.builds(
        KvEvents,
        replica_id=st.sampled_from("abc"),
        epoch=st.integers(1, 3),
        first=st.integers(1, 9),
        stored=st.lists(st.sampled_from(block_hashes("", pack_int32(range(64))))).map(
            lambda b: array("Q", b).tobytes()
        ),
    ),
    st.builds(
        Booked, router_id=st.just("r2"), replica_id=st.sampled_from("abc"), num_prefill_tokens=st.integers(0, 9999)
    ),
)


@given(st.lists(st.tuples(st.integers(0, 1500), news)), st.floats(0, 1, exclude_max=True))
def test_a_request_reaches_a_live_replica_whenever_there_is_one(history, draw):
    core = RouterCore("r1", CONFIG)
    now_ms = 0
    heard: dict[str, tuple[int, bool]] = {}
    draining: dict[str, bool] = {}
    for wait_ms, event in history:
        now_ms += wait_ms
        core.step(now_ms, [event])
        for name in [name for name, (at, _) in heard.items() if now_ms - at > 3000]:
            del heard[name]
            draining.pop(name, None)
        if isinstance(event, Load):
            heard[event.replica_id] = (now_ms, event.accepting)
        if isinstance(event, Heartbeat) and event.instance in heard:
            draining[event.instance] = event.state is ServiceState.DRAINING
        live = {name for name, (_, accepting) in heard.items() if accepting and not draining.get(name, False)}
        effects = core.step(now_ms, [route(draw=draw)])
        assert len(targets(effects)) + len(rejections(effects)) == 1
        assert set(targets(effects)) <= live
        assert bool(targets(effects)) == bool(live)
