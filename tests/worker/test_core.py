from contextlib import closing

import numpy as np
import pytest

from services.worker.core import BadStep, WorkerCore
from services.worker.matching.matchers import Matchers
from services.worker.runner import ModelLimits, Sampled, TokenScores
from shared.messages.execution import RowEnd
from shared.messages.packing import unpack_float32, unpack_int32
from shared.messages.sampling import SamplingParams
from tests.support.worker_engine import no_tokenizer
from tests.support.worker_steps import Row, new_sequence, rows, step

END = 2
LIMITS = ModelLimits(num_slots=4000, context_len=300, vocab_size=1000, end_token_ids=(END,))


@pytest.fixture
def core():
    with closing(Matchers(no_tokenizer, LIMITS.vocab_size)) as matchers:
        yield WorkerCore(LIMITS, matchers)


def sample(plan, tokens=(), **sampled):
    """What a runner gives back: `tokens` for the rows that sample, in order."""
    sampling = [index for index, row in enumerate(plan.rows) if row.samples]
    return Sampled({index: [token] for index, token in zip(sampling, tokens, strict=True)}, **sampled)


def run(core, message, tokens=(), **sampled):
    plan = core.plan(message)
    result = core.commit(sample(plan, tokens, **sampled))
    core.check_invariants()
    return result


def computed(plan):
    return [(row.sequence.handle, row.start, row.end, row.samples) for row in plan.rows]


def admitted(core, handle=1, tokens=(10, 11, 12), first=20, **kwargs):
    """A sequence whose prompt is computed and whose first token is `first`."""
    run(core, step(admit=[new_sequence(handle, tokens, **kwargs)], extend=[(handle, len(tokens))]), [first])


# ---------------------------------------------------------------- rows


def test_an_extend_samples_only_when_it_reaches_the_last_token(core):
    first = core.plan(step(1, admit=[new_sequence(1, range(10, 17))], extend=[(1, 4)]))
    assert computed(first) == [(1, 0, 4, False)]
    assert first.rows[0].num_logits == 0
    assert rows(core.commit(sample(first))) == [Row([], RowEnd.RUNNING)]
    second = core.plan(step(2, extend=[(1, 3)]))
    assert computed(second) == [(1, 4, 7, True)]
    assert rows(core.commit(sample(second, (20,)))) == [Row([20], RowEnd.RUNNING)]


def test_a_decode_row_computes_the_last_token_without_being_told_it(core):
    admitted(core, tokens=[10, 11, 12], first=20)
    plan = core.plan(step(2, decode=[1]))
    assert computed(plan) == [(1, 3, 4, True)]
    assert plan.rows[0].sequence.tokens[3] == 20
    assert rows(core.commit(sample(plan, (21,)))) == [Row([21], RowEnd.RUNNING)]


def test_a_cached_prefix_is_not_computed(core):
    plan = core.plan(step(admit=[new_sequence(1, range(10, 20), prefix_len=9)], extend=[(1, 1)]))
    assert computed(plan) == [(1, 9, 10, True)]


def test_results_come_in_the_order_of_decode_then_extend_rows(core):
    for handle in (1, 2):
        admitted(core, handle=handle)
    message = step(2, decode=[2, 1], extend=[(3, 2), (4, 1)], admit=[new_sequence(4, [5, 6]), new_sequence(3, [7, 8])])
    result = run(core, message, [102, 101, 103])
    assert [row.tokens for row in rows(result)] == [[102], [101], [103], []]


# ---------------------------------------------------------------- ends


def test_an_end_token_ends_the_sequence_and_later_rows_are_dropped(core):
    admitted(core)
    assert rows(run(core, step(2, decode=[1]), [END])) == [Row([END], RowEnd.STOP)]
    plan = core.plan(step(3, decode=[1]))
    assert plan.rows == []
    assert rows(core.commit(sample(plan))) == [Row([], RowEnd.DROPPED)]


def test_ignore_eos_ignores_the_models_end_tokens_and_nothing_else(core):
    sampling = SamplingParams(ignore_eos=True, stop_token_ids=(7,))
    admitted(core, first=END, sampling=sampling)
    assert rows(run(core, step(2, decode=[1]), [END])) == [Row([END], RowEnd.RUNNING)]
    assert rows(run(core, step(3, decode=[1]), [7])) == [Row([7], RowEnd.STOP)]


def test_the_length_limit_counts_tokens_generated_before(core):
    message = step(admit=[new_sequence(1, [10, 11, 20, 21], prompt_len=2, max_new_tokens=4)], extend=[(1, 4)])
    assert rows(run(core, message, [22])) == [Row([22], RowEnd.RUNNING)]
    assert rows(run(core, step(2, decode=[1]), [23])) == [Row([23], RowEnd.LENGTH)]


def test_an_end_token_at_the_length_limit_is_a_stop(core):
    message = step(admit=[new_sequence(1, [10], max_new_tokens=1)], extend=[(1, 1)])
    assert rows(run(core, message, [END])) == [Row([END], RowEnd.STOP)]


def test_without_new_tokens_the_prompt_is_computed_and_nothing_sampled(core):
    plan = core.plan(step(admit=[new_sequence(1, [10, 11], max_new_tokens=0)], extend=[(1, 2)]))
    assert computed(plan) == [(1, 0, 2, False)]
    assert rows(core.commit(sample(plan))) == [Row([], RowEnd.LENGTH)]


def test_no_sequence_grows_beyond_the_context(core):
    message = step(admit=[new_sequence(1, [5] * 299, extents=[(0, 300)], max_new_tokens=50)], extend=[(1, 299)])
    assert rows(run(core, message, [6])) == [Row([6], RowEnd.LENGTH)]


# ---------------------------------------------------------------- extents


def extents_of(core, handle=1):
    return core.sequence(handle).extents


def test_extents_grow_and_neighbours_become_one(core):
    admitted(core, extents=[(100, 4)])
    run(core, step(2, update=[(1, 4, [(104, 2), (50, 3)])], decode=[1]), [21])
    assert extents_of(core) == [(100, 6), (50, 3)]


def test_an_update_replaces_slots_from_its_start_on(core):
    admitted(core, tokens=range(10, 18), extents=[(100, 4), (200, 8)])
    run(core, step(2, update=[(1, 2, [(300, 4), (206, 6)])], decode=[1]), [21])
    assert extents_of(core) == [(100, 2), (300, 4), (206, 6)]
    run(core, step(3, update=[(1, 0, [(40, 12)])], decode=[1]), [21])
    assert extents_of(core) == [(40, 12)]


def test_release_comes_before_admit_so_a_step_may_reuse_slots(core):
    admitted(core, extents=[(100, 4)])
    message = step(2, release=[1], admit=[new_sequence(2, [1, 2], extents=[(100, 4)])], extend=[(2, 2)])
    assert rows(run(core, message, [9])) == [Row([9], RowEnd.RUNNING)]
    assert core.num_sequences == 1


# ---------------------------------------------------------------- failures


@pytest.mark.parametrize(
    ("description", "reason"),
    [
        ({"tokens": [5, 1000]}, "the vocabulary has 1000"),
        ({"tokens": [5, -1]}, "the vocabulary has 1000"),
        ({"tokens": [5] * 301}, "301 tokens, the model takes 300"),
        ({"tokens": [5, 6], "prompt_len": 3}, "prompt_len is 3 of 2 tokens"),
        ({"tokens": [5, 6], "prefix_len": 2}, "prefix_len is 2 of 2 tokens"),
        ({"tokens": [5, 6], "extents": [(3999, 2)]}, "outside the pool of 4000"),
        ({"tokens": [5, 6], "prefix_len": 1, "extents": []}, "0 slots for 1 computed tokens"),
        ({"tokens": [5, 6], "sampling": SamplingParams(logit_bias=((1000, 1.0),))}, "logit_bias names token 1000"),
    ],
)
def test_a_sequence_that_makes_no_sense_fails_alone_and_once(core, description, reason):
    admit = [new_sequence(1, [10]), new_sequence(2, **description)]
    result = run(core, step(1, admit=admit, extend=[(1, 1), (2, 1)]), [20])
    assert [row.end for row in rows(result)] == [RowEnd.RUNNING, RowEnd.FAILED]
    assert [handle for handle, _ in result.failures] == [2]
    assert reason in result.failures[0][1]
    again = run(core, step(2, decode=[1, 2], update=[(2, 0, [(0, 9)])]), [21])
    assert [row.end for row in rows(again)] == [RowEnd.RUNNING, RowEnd.DROPPED]
    assert again.failures == ()
    run(core, step(3, release=[2]))


@pytest.mark.parametrize(
    ("message", "reason"),
    [
        (step(2, extend=[(1, 2)]), "a row of 2 tokens, but 1 are not computed"),
        (step(2, extend=[(1, 0)]), "a row of 0 tokens, but 1 are not computed"),
        (step(2, update=[(1, 3, [])], decode=[1]), "a row up to token 4, but there are slots for 3"),
        (step(2, update=[(1, 2, [])], decode=[1]), "2 slots for 3 computed tokens"),
        (step(2, update=[(1, 999, [(0, 4)])], decode=[1]), "extents from position 999"),
    ],
)
def test_a_row_that_makes_no_sense_fails_alone(core, message, reason):
    admitted(core)
    result = run(core, message)
    assert [row.end for row in rows(result)] == [RowEnd.FAILED]
    assert reason in result.failures[0][1]


def test_a_decode_row_before_prefill_is_done_fails(core):
    run(core, step(admit=[new_sequence(1, range(10, 15))], extend=[(1, 2)]))
    result = run(core, step(2, decode=[1]))
    assert result.failures == ((1, "a decode row, but 3 tokens are not computed yet"),)


def test_a_row_that_failed_in_the_runner_ends_that_request_alone(core):
    for handle in (1, 2):
        admitted(core, handle=handle)
    result = run(core, step(2, decode=[1, 2]), [0, 22], failures={0: "NaN"})
    assert rows(result) == [Row([], RowEnd.FAILED), Row([22], RowEnd.RUNNING)]
    assert result.failures == ((1, "NaN"),)
    assert rows(run(core, step(3, decode=[1, 2]), [23])) == [Row([], RowEnd.DROPPED), Row([23], RowEnd.RUNNING)]


def test_a_failed_pass_ends_its_rows_and_no_other_sequence(core):
    for handle in (1, 2):
        admitted(core, handle=handle)
    core.plan(step(2, decode=[1]))
    result = core.fail("out of memory")
    assert rows(result) == [Row([], RowEnd.FAILED)]
    assert result.failures == ((1, "out of memory"),)
    assert rows(run(core, step(3, decode=[1, 2]), [21])) == [Row([], RowEnd.DROPPED), Row([21], RowEnd.RUNNING)]


@pytest.mark.parametrize(
    "message",
    [
        step(2, decode=[9]),
        step(2, release=[9]),
        step(2, update=[(9, 0, [(0, 1)])]),
        step(2, admit=[new_sequence(1, [1])]),
        step(2, decode=[1, 1]),
        step(2, decode=[1], extend=[(1, 1)]),
    ],
)
def test_a_step_that_contradicts_what_the_worker_knows_is_refused_as_a_whole(core, message):
    admitted(core)
    with pytest.raises(BadStep):
        core.plan(message)


def test_a_reset_forgets_everything(core):
    admitted(core)
    core.plan(step(2, decode=[1]))
    core.reset()
    assert core.num_sequences == 0
    admitted(core)


# ---------------------------------------------------------------- logprobs


def scores(first, num, num_top=1):
    """Scores that tell which is which: logprob -n for the n-th."""
    values = -np.arange(first, first + num, dtype=np.float32)
    return TokenScores(values, np.zeros((num, num_top), np.int32), np.zeros((num, num_top), np.float32))


def test_logprobs_of_the_output_come_with_their_token(core):
    message = step(admit=[new_sequence(1, [10, 11], sampling=SamplingParams(num_logprobs=1))], extend=[(1, 2)])
    plan = core.plan(message)
    assert (plan.rows[0].num_logits, plan.rows[0].scores) == (1, True)
    result = core.commit(sample(plan, (20,), scores={0: scores(5, 1)}))
    assert unpack_float32(result.logprobs[1].chosen) == [-5]
    assert result.logprobs[1].num_top == 1
    assert result.prompt_logprobs == {}


@pytest.mark.parametrize("chunks", [[8], [3, 5], [1, 6, 1], [2, 2, 2, 2]])
@pytest.mark.parametrize("start", [0, 1, 3, 7])
def test_each_prompt_token_from_the_start_on_is_scored_once_in_any_chunks(core, chunks, start):
    sampling = SamplingParams(prompt_logprobs_start=start, num_logprobs=0)
    admit, targets = [new_sequence(1, range(10, 18), sampling=sampling)], []
    for seq, length in enumerate(chunks, 1):
        plan = core.plan(step(seq, admit=admit, extend=[(1, length)]))
        admit, row = [], plan.rows[0]
        known = row.known_targets().tolist()
        given = scores(0, len(known) + row.samples)
        result = core.commit(sample(plan, (20,) if row.samples else (), scores={0: given} if row.scores else {}))
        if prompt := result.prompt_logprobs.get(1):
            assert unpack_float32(prompt.chosen) == [-n for n in range(len(known))]
            targets += known
    assert targets == list(range(10 + max(start, 1), 18))
    assert unpack_float32(result.logprobs[1].chosen) == [-float(len(known))]


def test_resumed_tokens_are_not_scored_as_prompt(core):
    sampling = SamplingParams(prompt_logprobs_start=0, num_logprobs=0)
    new = new_sequence(1, [10, 11, 20, 21], prompt_len=2, sampling=sampling)
    plan = core.plan(step(admit=[new], extend=[(1, 4)]))
    result = core.commit(sample(plan, (22,), scores={0: scores(0, 4)}))
    assert unpack_float32(result.prompt_logprobs[1].chosen) == [0]
    assert unpack_float32(result.logprobs[1].chosen) == [-3]


def test_the_result_names_its_step_and_packs_counts_per_row(core):
    result = run(core, step(7, epoch=3, admit=[new_sequence(1, [10, 11])], extend=[(1, 1)]))
    assert (result.epoch, result.seq, unpack_int32(result.counts)) == (3, 7, [0])
