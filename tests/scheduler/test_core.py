"""The scheduler core, one rule a test."""

import dataclasses

from services.scheduler import events as ev
from shared.messages.execution import Lease, RowEnd, StepResult
from shared.messages.generation import (
    UNKNOWN_REQUEST,
    Abort,
    Accepted,
    CacheFlushed,
    Drain,
    Finish,
    FinishReason,
    FlushCache,
    RejectCode,
    Rejected,
    Resync,
)
from shared.messages.packing import pack_int32, unpack_int32
from shared.messages.sampling import SamplingParams
from tests.support.checked_worker import expected_output
from tests.support.scheduling import Bench, decode_rows, extend_lens, submit

PROMPT = list(range(1, 41))
LONG = list(range(1, 301))


def replies(bench: Bench) -> list[object]:
    return [effect.message for effect in bench.of(ev.Reply)]  # type: ignore[attr-defined]


# ---------------------------------------------------------------- pipelining


def test_step_n_plus_1_is_sent_while_n_runs() -> None:
    bench = Bench()
    bench.feed(submit("a", PROMPT))
    assert [extend_lens(step) for step in bench.steps] == [[40], []]
    assert len(decode_rows(bench.steps[1])) == 1


def test_never_more_than_the_window_is_unanswered() -> None:
    for window in (1, 2):
        bench = Bench(window=window)
        bench.feed(*(submit(f"r{i}", [i, 2, 3], max_new_tokens=20) for i in range(5)))
        while bench.steps:
            assert len(bench.steps) <= window
            bench.answer()


def test_no_row_is_sent_beyond_the_length_limit() -> None:
    bench = Bench()
    bench.feed(submit("a", PROMPT, max_new_tokens=1))
    assert len(bench.steps) == 1


def test_a_row_under_way_behind_an_end_token_is_ignored() -> None:
    prompt = next([n, 5] for n in range(1, 1000) if len(expected_output([n, 5], 9)) == 2)
    bench = Bench()
    bench.feed(submit("a", prompt, max_new_tokens=9))
    bench.run()
    assert bench.output["a"] == expected_output(prompt, 9)
    assert bench.last["a"].finish is FinishReason.STOP
    assert bench.last["a"].stop_token == 0
    assert bench.core.is_idle


def test_a_result_that_comes_twice_counts_once() -> None:
    bench = Bench()
    bench.feed(submit("a", PROMPT, max_new_tokens=6))
    result = bench.answer()
    before = list(bench.output["a"])
    bench.feed(ev.StepDone(result))
    assert bench.output["a"] == before
    bench.run()
    assert bench.output["a"] == expected_output(PROMPT, 6)


def test_a_missed_result_is_asked_for() -> None:
    bench = Bench()
    bench.feed(submit("a", PROMPT, max_new_tokens=6))
    lost = bench.worker.execute(bench.steps.pop(0))
    bench.feed(ev.StepDone(bench.worker.execute(bench.steps.pop(0))))
    (ask,) = bench.of(ev.AskResend)
    assert ask.resend.seq == lost.seq  # type: ignore[attr-defined]


def test_an_overdue_step_is_asked_for_and_then_costs_the_worker() -> None:
    bench = Bench()
    bench.feed(submit("a", PROMPT))
    bench.now_ms = 1500
    bench.feed(ev.Tick())
    assert bench.of(ev.AskResend) and not bench.of(ev.ReclaimWorker)
    bench.now_ms = 2500
    bench.feed(ev.Tick())
    assert bench.of(ev.ReclaimWorker)
    assert len(bench.core.waiting) == 1 and bench.core.lease is None


def test_after_an_outage_of_the_bus_nothing_is_late() -> None:
    bench = Bench()
    bench.feed(submit("a", PROMPT))
    bench.now_ms = 60_000
    bench.feed(ev.Reconnected())
    assert bench.of(ev.AskResend)
    bench.now_ms += 900
    bench.feed(ev.Tick())
    assert not bench.of(ev.AskResend)


# ---------------------------------------------------------------- prefill and decode in one step


def test_a_long_prompt_is_prefilled_in_chunks_beside_running_streams() -> None:
    bench = Bench(max_prefill_tokens=64)
    bench.feed(submit("a", [7, 8], max_new_tokens=40))
    bench.answer()
    bench.feed(submit("b", LONG))
    num_chunks = 0
    while "b" not in bench.output:
        bench.answer()
        assert decode_rows(bench.steps[-1]), "the running stream has a row in every step"
        assert all(len(decode_rows(step)) + sum(extend_lens(step)) <= 64 for step in bench.steps)
        num_chunks += 1
    assert num_chunks >= 300 // 64
    bench.run()
    assert bench.output["b"] == expected_output(LONG, 4)


def test_decode_rows_come_before_prefill() -> None:
    bench = Bench(max_prefill_tokens=32)
    bench.feed(submit("a", [7, 8], max_new_tokens=40))
    bench.answer()
    bench.feed(submit("b", LONG))
    bench.answer()
    step = bench.steps[-1]
    assert len(decode_rows(step)) == 1 and extend_lens(step) == [31]


def test_max_new_tokens_0_computes_the_prompt_and_samples_nothing() -> None:
    bench = Bench()
    bench.feed(submit("a", PROMPT, max_new_tokens=0))
    bench.run()
    assert bench.output["a"] == []
    assert bench.last["a"].finish is FinishReason.LENGTH
    bench.feed(submit("b", PROMPT, max_new_tokens=1))
    bench.run()
    assert bench.last["b"].cached_tokens == len(PROMPT) - 1


# ---------------------------------------------------------------- the prefix cache


def test_a_cached_prefix_is_not_prefilled_again() -> None:
    bench = Bench()
    bench.feed(submit("a", PROMPT))
    bench.run()
    bench.feed(submit("b", [*PROMPT, 900, 901]))
    assert extend_lens(bench.steps[0]) == [2]
    bench.run()
    assert bench.last["b"].cached_tokens == 40
    assert bench.output["b"] == expected_output([*PROMPT, 900, 901], 4)


def test_the_same_prompt_twice_still_computes_its_last_token() -> None:
    bench = Bench()
    for request_id in ("a", "b"):
        bench.feed(submit(request_id, PROMPT))
        bench.run()
    assert bench.last["a"].cached_tokens == 0
    assert bench.last["b"].cached_tokens == len(PROMPT) - 1
    assert bench.output["a"] == bench.output["b"]


def test_turn_2_finds_all_of_turn_1() -> None:
    prompt = next([n, *PROMPT] for n in range(1, 1000) if 0 not in expected_output([n, *PROMPT], 8))
    bench = Bench()
    bench.feed(submit("a", prompt, max_new_tokens=8))
    bench.run()
    bench.feed(submit("b", [*prompt, *bench.output["a"], 1, 2]))
    bench.run()
    # The last token of turn 1 was sampled and never computed.
    assert bench.last["b"].cached_tokens == len(prompt) + 8 - 1


def test_namespaces_never_share() -> None:
    bench = Bench()
    for namespace in ("", "x", "y"):
        bench.feed(submit(namespace, PROMPT, namespace=namespace))
        bench.run()
        assert bench.last[namespace].cached_tokens == 0


def test_a_prefilled_chunk_is_shared_while_its_request_still_runs() -> None:
    bench = Bench()
    bench.feed(submit("a", PROMPT, max_new_tokens=60))
    bench.answer()
    bench.feed(submit("b", [*PROMPT, 900]))
    bench.answer()
    assert bench.core.requests["b"].cached_tokens == 40


def test_nothing_is_shared_before_its_result_is_there() -> None:
    bench = Bench(min_shared_prefix=100)
    bench.feed(submit("a", PROMPT), submit("b", PROMPT))
    assert extend_lens(bench.steps[0]) == [40, 40]
    bench.run()
    assert bench.output["a"] == bench.output["b"] == expected_output(PROMPT, 4)


def test_two_that_computed_the_same_side_by_side_keep_one_copy() -> None:
    bench = Bench(min_shared_prefix=100, reserve_slots=1)
    bench.feed(submit("a", PROMPT, max_new_tokens=6), submit("b", PROMPT, max_new_tokens=6))
    bench.answer()
    cache = bench.core.cache
    assert cache is not None
    assert cache.tree.num_slots == 40
    updates = [update for step in bench.steps for update in step.update]
    assert [update.start for update in updates if update.start == 0] == [0]
    bench.run()  # the worker checks every slot that the remapped sequence reads


def test_waiting_requests_let_the_first_compute_what_they_share() -> None:
    bench = Bench()
    bench.feed(*(submit(f"r{i}", [*PROMPT, 900 + i]) for i in range(4)))
    assert extend_lens(bench.steps[0]) == [41]
    bench.run()
    assert [bench.last[f"r{i}"].cached_tokens for i in range(4)] == [0, 40, 40, 40]


def test_a_waiting_request_does_not_wait_for_a_leader_that_is_gone() -> None:
    bench = Bench()
    bench.feed(submit("a", PROMPT), submit("b", [*PROMPT, 900]))
    bench.feed(Abort(request_id="a"))
    bench.run()
    assert bench.output["b"] == expected_output([*PROMPT, 900], 4)


def test_prompt_logprobs_recompute_from_where_they_start() -> None:
    bench = Bench()
    bench.feed(submit("a", PROMPT))
    bench.run()
    bench.feed(submit("b", PROMPT, sampling=SamplingParams(prompt_logprobs_start=11, num_logprobs=0)))
    assert extend_lens(bench.steps[0]) == [30]


def test_flush_drops_only_what_nobody_uses() -> None:
    bench = Bench()
    bench.feed(submit("a", PROMPT))
    bench.run()
    bench.feed(submit("b", [500, 501], max_new_tokens=90))
    bench.answer()
    bench.feed(ev.FlushRequested(FlushCache(), "flush"))
    (flushed,) = replies(bench)
    assert isinstance(flushed, CacheFlushed)
    assert flushed.num_freed_tokens == 40 + 3
    assert flushed.num_kept_tokens == 2
    bench.run()
    assert bench.output["b"] == expected_output([500, 501], 90)


# ---------------------------------------------------------------- ending early


def test_abort_works_in_every_phase_and_frees_everything() -> None:
    for num_answers in range(6):
        bench = Bench(max_prefill_tokens=128)
        bench.feed(submit("a", LONG, max_new_tokens=50), submit("b", [7, 8], max_new_tokens=5))
        for _ in range(num_answers):
            bench.answer()
        bench.feed(Abort(request_id="a"))
        assert "a" not in bench.core.requests
        bench.run()
        assert bench.last["a"].finish is FinishReason.ABORT
        assert bench.output["b"] == expected_output([7, 8], 5)
        cache = bench.core.cache
        assert cache is not None and cache.num_private_slots == 0
        assert cache.num_available_slots == cache.pool.num_slots


def test_an_aborted_request_still_yields_its_usage() -> None:
    bench = Bench()
    bench.feed(submit("a", PROMPT))
    bench.feed(Abort(request_id="a"))
    (usage,) = bench.of(ev.RecordUsage)
    assert usage.prompt_tokens == 40 and usage.finish is FinishReason.ABORT  # type: ignore[attr-defined]


def test_an_abort_that_trails_the_finish_is_ignored() -> None:
    bench = Bench()
    bench.feed(submit("a", PROMPT))
    bench.run()
    assert bench.feed(Abort(request_id="a"), Abort(request_id="never seen")) == []


def test_a_stop_string_ends_the_request_and_counts_up_to_it() -> None:
    bench = Bench()
    bench.feed(submit("a", PROMPT, max_new_tokens=50))
    for _ in range(4):
        bench.answer()
    bench.feed(Finish(request_id="a", num_tokens=2))
    (usage,) = bench.of(ev.RecordUsage)
    assert usage.generated_tokens == 2  # type: ignore[attr-defined]
    assert bench.last["a"].finish is FinishReason.STOP


def test_a_failed_row_ends_its_request_alone() -> None:
    bench = Bench()
    bench.feed(submit("a", [1, 2, 3]), submit("b", [4, 5, 6]))
    step = bench.steps.pop(0)
    true = bench.worker.execute(step)
    first, second = unpack_int32(step.extend)[::2]
    bench.feed(
        ev.StepDone(
            StepResult(
                epoch=1,
                seq=true.seq,
                counts=pack_int32([0, 1]),
                token_ids=true.token_ids[4:],
                ends=bytes([RowEnd.FAILED, RowEnd.RUNNING]),
                failures=((first, "NaN in the logits"),),
            )
        )
    )
    assert bench.last["a"].finish is FinishReason.ERROR
    assert bench.last["a"].error == "NaN in the logits"
    assert "b" in bench.core.requests and second


def test_a_deadline_ends_waiting_and_running_requests_and_says_which() -> None:
    bench = Bench(max_running_reqs=1)
    bench.feed(submit("a", PROMPT, 400, deadline_ms=100), submit("b", PROMPT, deadline_ms=100))
    bench.now_ms = 101
    bench.feed(ev.Tick())
    assert "generating" in (bench.last["a"].error or "")
    assert "queued" in (bench.last["b"].error or "")


def test_requests_of_a_silent_gateway_are_reaped() -> None:
    bench = Bench()
    bench.feed(submit("a", PROMPT), submit("b", LONG))
    bench.feed(ev.GatewayLost("another"))
    assert len(bench.core.requests) == 2
    bench.feed(ev.GatewayLost("g"))
    assert not bench.core.requests


# ---------------------------------------------------------------- admission


def test_a_submit_is_answered_once_and_a_second_copy_runs_nothing() -> None:
    bench = Bench()
    bench.feed(submit("a", PROMPT))
    assert replies(bench) == [Accepted(replica_id="r", epoch=1)]
    bench.feed(submit("a", PROMPT))
    assert replies(bench) == [Accepted(replica_id="r", epoch=1)]
    bench.run()
    assert bench.output["a"] == expected_output(PROMPT, 4)


def test_what_can_never_fit_is_refused_with_both_numbers() -> None:
    bench = Bench(num_slots=1000, context_len=500)
    bench.feed(submit("a", range(1, 501)))
    (rejected,) = replies(bench)
    assert isinstance(rejected, Rejected) and rejected.code is RejectCode.TOO_LONG
    assert "500" in rejected.message and "context" in rejected.message
    bench = Bench(num_slots=100, context_len=500)
    bench.feed(submit("a", range(1, 201)))
    (rejected,) = replies(bench)
    assert isinstance(rejected, Rejected)
    assert "200" in rejected.message and "100" in rejected.message and "pool" in rejected.message


def test_a_limit_beyond_the_pool_is_capped() -> None:
    prompt = next([n, 5] for n in range(1, 1000) if 0 not in expected_output([n, 5], 98))
    bench = Bench(num_slots=100, context_len=500)
    bench.feed(submit("a", prompt, max_new_tokens=400))
    bench.run()
    assert len(bench.output["a"]) == 98
    assert bench.last["a"].finish is FinishReason.LENGTH


def test_a_full_queue_refuses_with_retry_after() -> None:
    bench = Bench(max_running_reqs=1)
    bench.core.settings = type(bench.core.settings)(replica_id="r", max_waiting_reqs=2)
    bench.feed(*(submit(f"r{i}", [i, i]) for i in range(3)))
    rejected = [message for message in replies(bench) if isinstance(message, Rejected)]
    assert [message.code for message in rejected] == [RejectCode.QUEUE_FULL]
    assert rejected[0].retry_after_s


def test_higher_priority_is_admitted_first() -> None:
    bench = Bench(max_running_reqs=1)
    bench.feed(submit("first", [1, 2]))
    bench.feed(submit("low", [3, 4]), submit("high", [5, 6], priority=5))
    bench.run()
    assert list(bench.output) == ["first", "high", "low"]


def test_the_longest_cached_prefix_is_admitted_first_but_nobody_starves() -> None:
    bench = Bench(max_running_reqs=1)
    bench.feed(submit("a", PROMPT))
    bench.run()
    bench.feed(submit("busy", [1, 2], max_new_tokens=2))
    bench.feed(submit("old", [3, 4]))
    bench.now_ms = 100
    bench.feed(submit("cached", [*PROMPT, 900]))
    bench.run()
    assert list(bench.output)[1:] == ["busy", "cached", "old"]
    bench.feed(submit("busy again", [1, 2], max_new_tokens=2))
    bench.feed(submit("aged", [7, 7]))
    bench.now_ms += 5000
    bench.feed(submit("cached again", [*PROMPT, 901]))
    bench.run()
    assert list(bench.output)[-2:] == ["aged", "cached again"]


def test_draining_refuses_new_work_and_finishes_the_old() -> None:
    bench = Bench()
    bench.feed(submit("a", PROMPT), Drain())
    bench.feed(submit("b", PROMPT))
    (rejected,) = replies(bench)
    assert isinstance(rejected, Rejected) and rejected.code is RejectCode.DRAINING
    bench.run()
    assert bench.output["a"] == expected_output(PROMPT, 4)
    assert bench.core.is_idle


def test_a_replica_without_a_worker_refuses() -> None:
    bench = Bench()
    bench.feed(ev.WorkerLost("gone"))
    bench.feed(submit("a", PROMPT))
    (rejected,) = replies(bench)
    assert isinstance(rejected, Rejected) and rejected.code is RejectCode.NO_REPLICA


# ---------------------------------------------------------------- what was lost


def test_a_resync_sends_tokens_again_for_running_and_for_ended_requests() -> None:
    bench = Bench()
    bench.feed(submit("a", PROMPT, max_new_tokens=6))
    for _ in range(3):
        bench.answer()
    before = list(bench.output["a"])
    bench.feed(Resync(request_id="a", gateway_id="g", position=1))
    assert bench.output["a"] == before + before[1:]
    bench.run()
    bench.output["a"].clear()
    bench.feed(Resync(request_id="a", gateway_id="g", position=0))
    assert bench.output["a"] == expected_output(PROMPT, 6)
    assert bench.last["a"].finish is FinishReason.LENGTH


def test_a_resumed_request_goes_on_behind_its_tokens() -> None:
    whole = expected_output(PROMPT, 8)
    bench = Bench()
    bench.feed(submit("a", PROMPT, max_new_tokens=8, resumed=pack_int32(whole[:3])))
    assert extend_lens(bench.steps[0]) == [43]
    bench.answer()
    assert bench.last["a"].position == 3
    bench.run()
    assert bench.output["a"] == whole[3:]


def test_requests_survive_their_worker_in_order() -> None:
    bench = Bench()
    bench.feed(submit("a", PROMPT, max_new_tokens=9), submit("b", [7, 8], max_new_tokens=9))
    bench.answer()
    bench.answer()
    bench.feed(ev.WorkerLost("killed"))
    assert [request.request_id for request in bench.core.waiting] == ["a", "b"]
    bench.steps.clear()
    bench.worker = type(bench.worker)(1000)
    bench.feed(
        ev.WorkerJoined(Lease(group="w", epoch=2, num_slots=1000, context_len=500, vocab_size=1000, end_token_ids=(0,)))
    )
    bench.run()
    assert bench.output["a"] == expected_output(PROMPT, 9)
    assert bench.output["b"] == expected_output([7, 8], 9)


def test_requests_that_find_no_new_worker_are_handed_back_and_may_return() -> None:
    bench = Bench()
    bench.feed(submit("a", PROMPT, max_new_tokens=9))
    bench.answer()
    bench.feed(ev.WorkerLost("killed"))
    bench.steps.clear()
    bench.now_ms += 1999
    bench.feed(ev.Tick())
    assert bench.last["a"].finish is None
    bench.now_ms += 1
    bench.feed(ev.Tick())
    assert (bench.last["a"].error, bench.last["a"].position) == (UNKNOWN_REQUEST, 1)
    assert bench.last["a"].num_worker_deaths == 1
    assert bench.core.is_idle
    assert not bench.of(ev.RecordUsage)
    bench.worker = type(bench.worker)(1000)
    bench.feed(
        ev.WorkerJoined(Lease(group="w", epoch=2, num_slots=1000, context_len=500, vocab_size=1000, end_token_ids=(0,)))
    )
    bench.feed(submit("a", PROMPT, max_new_tokens=9, resumed=pack_int32(bench.output["a"])))
    bench.run()
    assert bench.output["a"] == expected_output(PROMPT, 9)


def test_a_worker_that_goes_of_its_own_accord_is_no_death() -> None:
    bench = Bench()
    bench.core.settings = dataclasses.replace(bench.core.settings, max_worker_deaths=1)
    bench.feed(submit("a", PROMPT, max_new_tokens=9))
    bench.feed(ev.WorkerLost("it shuts down", is_death=False))
    assert [request.request_id for request in bench.core.waiting] == ["a"]


def test_deaths_at_other_replicas_count() -> None:
    bench = Bench()
    bench.feed(submit("a", PROMPT, max_new_tokens=9, num_worker_deaths=1))
    bench.feed(ev.WorkerLost("killed"))
    assert bench.last["a"].error == "poison: under way when its worker died, 2 times"


def test_where_no_request_may_move_one_death_of_its_worker_ends_it() -> None:
    bench = Bench()
    bench.core.settings = dataclasses.replace(bench.core.settings, max_worker_deaths=1)
    bench.feed(submit("a", PROMPT, max_new_tokens=9))
    bench.feed(ev.WorkerLost("killed"))
    assert bench.last["a"].finish is FinishReason.ERROR
    assert bench.last["a"].error == "poison: under way when its worker died, 1 times"
