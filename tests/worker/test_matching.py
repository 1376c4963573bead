import json
import threading
import time
from contextlib import closing
from itertools import zip_longest

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from llguidance import LLMatcher

from services.worker.core import WorkerCore
from services.worker.jump_forward import MAX_JUMPED_TOKENS
from services.worker.matching.matchers import Matchers
from services.worker.runner import Sampled
from shared.messages.execution import RowEnd
from shared.messages.sampling import SamplingParams
from tests.support import worker_engine
from tests.support.lagging_scheduler import LaggingScheduler
from tests.support.worker_engine import END, VOCAB, no_tokenizer, open_tokenizer
from tests.support.worker_steps import new_sequence, rows, step

PROFILE = {
    "type": "object",
    "properties": {
        "name": {"type": "string", "maxLength": 12},
        "age": {"type": "integer", "minimum": 0, "maximum": 120},
        "role": {"enum": ["administrator", "assistant", "user"]},
        "tags": {"type": "array", "items": {"enum": ["quick", "brown", "lazy"]}, "maxItems": 3},
    },
    "required": ["name", "age", "role", "tags"],
    "additionalProperties": False,
}


def json_grammar(schema):
    return LLMatcher.grammar_from_json_schema(schema, defaults={"whitespace_flexible": False})


PROFILE_GRAMMAR = json_grammar(PROFILE)
FIXED_GRAMMAR = LLMatcher.grammar_from_lark('start: "The quick brown fox jumps over the lazy dog." /[0-9]{2}/')
PROMPT = [400, 401, 402]


TOKENIZER = open_tokenizer()


def make_engine(*, jump_forward=True, model_seed=0, opening=open_tokenizer):
    matchers = Matchers(opening, VOCAB, jump_forward=jump_forward)
    return worker_engine.make_engine(model_seed, worker_engine.limits(), matchers)


def generate(engine, *, window=2, reserve=16, prompt=PROMPT, **description):
    scheduler = LaggingScheduler(engine, window=window, reserve=reserve)
    description = {"grammar": PROFILE_GRAMMAR, "max_new_tokens": 200} | description
    return scheduler.run({1: new_sequence(1, prompt, **description)})[1]


def text_of(generated):
    return TOKENIZER.decode_str([token for token in generated.token_ids if token != END])


@pytest.fixture
def engine():
    with closing(make_engine()) as engine:
        yield engine


@pytest.fixture
def sampling_engine():
    """Without jump-forward: every token is sampled."""
    with closing(make_engine(jump_forward=False)) as engine:
        yield engine


# ---------------------------------------------------------------- what comes out


@pytest.mark.parametrize("temperature", [0.0, 1.0, 5.0])
def test_the_output_is_always_valid_and_ends_with_an_end_token(engine, temperature):
    for seed in range(10):
        engine.reset()
        generated = generate(engine, sampling=SamplingParams(temperature=temperature, seed=seed))
        assert generated.end is RowEnd.STOP
        assert generated.token_ids[-1] == END
        profile = json.loads(text_of(generated))
        assert profile["role"] in PROFILE["properties"]["role"]["enum"]
        assert set(profile) == set(PROFILE["required"])


@settings(max_examples=60, deadline=None)
@given(
    seed=st.integers(0, 1000),
    window=st.sampled_from([1, 2]),
    reserve=st.sampled_from([0, 1, 2, 7, 64]),
    max_new_tokens=st.sampled_from([1, 2, 5, 30, 200]),
    grammar=st.sampled_from([PROFILE_GRAMMAR, FIXED_GRAMMAR]),
    temperature=st.sampled_from([0.0, 1.0]),
    presence_penalty=st.sampled_from([0.0, 0.5]),
)
def test_jumping_ahead_changes_no_token_whatever_the_window_and_the_slots(
    seed, window, reserve, max_new_tokens, grammar, temperature, presence_penalty
):
    sampling = SamplingParams(temperature=temperature, seed=seed, presence_penalty=presence_penalty)
    outputs = []
    for jump_forward in (False, True):
        with closing(make_engine(jump_forward=jump_forward, model_seed=seed)) as engine:
            outputs.append(
                generate(
                    engine,
                    window=window,
                    reserve=reserve,
                    sampling=sampling,
                    grammar=grammar,
                    max_new_tokens=max_new_tokens,
                )
            )
    sampled, jumped = outputs
    assert jumped.token_ids == sampled.token_ids
    assert (jumped.end, jumped.failure) == (sampled.end, "")
    assert len(jumped.token_ids) <= max_new_tokens


def test_forced_tokens_come_several_in_one_step_and_in_fewer_steps(engine, sampling_engine):
    sampling = SamplingParams(temperature=0)
    slow = generate(sampling_engine, sampling=sampling, reserve=64)
    fast = generate(engine, sampling=sampling, reserve=64)
    assert fast.token_ids == slow.token_ids
    # While the grammar compiles a row gives nothing.
    assert set(slow.counts) <= {0, 1}
    assert max(fast.counts) > 3
    assert sum(count > 0 for count in fast.counts) < 0.7 * sum(count > 0 for count in slow.counts)


def test_forced_tokens_are_those_of_the_tokenizer(engine):
    generated = generate(engine, grammar=FIXED_GRAMMAR, reserve=64)
    text = text_of(generated)
    assert text.startswith("The quick brown fox jumps over the lazy dog.")
    assert generated.token_ids[:-1] == TOKENIZER.tokenize_str(text)


def test_a_step_takes_only_so_many_forced_tokens_for_all_its_rows(engine):
    grammar = LLMatcher.grammar_from_lark('start: /[ab]/ "The quick brown fox jumps over the lazy dog." /[0-9]{2}/')
    fox = TOKENIZER.tokenize_str("The quick brown fox jumps over the lazy dog.")
    num_rows = 2 * MAX_JUMPED_TOKENS // len(fox)
    greedy = SamplingParams(temperature=0)
    news = {n: new_sequence(n, PROMPT, grammar=grammar, sampling=greedy) for n in range(1, 1 + num_rows)}
    outputs = LaggingScheduler(engine, reserve=64).run(news).values()
    assert all(output.token_ids[1 : 1 + len(fox)] == fox for output in outputs)
    num_forced = [
        sum(max(0, count - 1) for count in counts) for counts in zip_longest(*(o.counts for o in outputs), fillvalue=0)
    ]
    assert MAX_JUMPED_TOKENS // 2 < max(num_forced) <= MAX_JUMPED_TOKENS


def test_without_spare_slots_no_forced_token_is_taken_and_none_is_lost(engine):
    generated = generate(engine, grammar=FIXED_GRAMMAR, reserve=0)
    assert max(generated.counts[:-1]) == 1
    assert text_of(generated).startswith("The quick brown fox")


def test_truncation_by_the_length_limit_is_a_length(engine):
    for limit in range(1, 12):
        engine.reset()
        generated = generate(engine, grammar=FIXED_GRAMMAR, max_new_tokens=limit, reserve=64)
        assert generated.end is RowEnd.LENGTH
        assert len(generated.token_ids) == limit


def test_the_end_token_follows_by_itself_once_nothing_else_may(engine, sampling_engine):
    last = [generate(e, grammar=FIXED_GRAMMAR, reserve=64).counts[-1] for e in (engine, sampling_engine)]
    assert last == [2, 1]


def test_logprobs_are_those_of_sampling_every_token(engine, sampling_engine):
    sampling = SamplingParams(temperature=1, num_logprobs=2, seed=3)
    jumped, sampled = (generate(e, sampling=sampling, reserve=64) for e in (engine, sampling_engine))
    assert jumped.token_ids == sampled.token_ids
    assert len(jumped.logprobs) == len(jumped.token_ids)
    assert np.allclose(jumped.logprobs, sampled.logprobs, atol=1e-6)


def test_a_resumed_sequence_goes_on_as_if_nothing_had_happened(engine):
    sampling = SamplingParams(temperature=1, seed=5)
    whole = generate(engine, sampling=sampling).token_ids
    for cut in range(1, len(whole), 3):
        engine.reset()
        again = generate(engine, prompt=PROMPT + whole[:cut], prompt_len=len(PROMPT), sampling=sampling)
        assert again.token_ids == whole


def test_many_sequences_with_different_grammars_each_follow_their_own(engine):
    grammars = {n: LLMatcher.grammar_from_lark(f'start: "number {n}: " /[a-z]{{{n}}}/') for n in range(1, 9)}
    news = {
        n: new_sequence(n, PROMPT, grammar=grammar, max_new_tokens=100, sampling=SamplingParams(seed=n))
        for n, grammar in grammars.items()
    }
    news[9] = new_sequence(9, PROMPT, max_new_tokens=20, sampling=SamplingParams(logit_bias=((END, -100.0),)))
    outputs = LaggingScheduler(engine).run(news)
    for n in grammars:
        head, tail = text_of(outputs[n]).split(": ")
        assert (head, len(tail), outputs[n].end) == (f"number {n}", n, RowEnd.STOP)
    assert (len(outputs[9].token_ids), outputs[9].end) == (20, RowEnd.LENGTH)


# ---------------------------------------------------------------- ends


def test_an_optional_end_is_the_models_choice_and_min_new_tokens_delays_it(engine):
    digits = LLMatcher.grammar_from_lark("start: /[0-9]+/")
    willing = SamplingParams(temperature=1, logit_bias=((END, 50.0),))
    assert len(generate(engine, grammar=digits, sampling=willing).token_ids) == 2
    engine.reset()
    delayed = SamplingParams(temperature=1, logit_bias=((END, 50.0),), min_new_tokens=7)
    generated = generate(engine, grammar=digits, sampling=delayed)
    assert (len(generated.token_ids), generated.end) == (8, RowEnd.STOP)


@pytest.mark.parametrize("jump_forward", [True, False])
@pytest.mark.parametrize("controls", [{"min_new_tokens": 50}, {"ignore_eos": True}])
def test_a_complete_text_ends_even_if_the_request_would_rather_go_on(jump_forward, controls):
    with closing(make_engine(jump_forward=jump_forward)) as engine:
        generated = generate(engine, grammar=FIXED_GRAMMAR, sampling=SamplingParams(**controls))
    assert generated.end is RowEnd.STOP
    assert generated.token_ids[-1] == END


def test_a_forced_ending_comes_with_the_token_that_decides_it_and_without_kv(engine, sampling_engine):
    grammar = LLMatcher.grammar_from_lark('start: /[0-9]/ " lazy dog."')
    ending = len(TOKENIZER.tokenize_str(" lazy dog."))
    outputs = [generate(e, grammar=grammar, reserve=64) for e in (engine, sampling_engine)]
    assert outputs[0].token_ids == outputs[1].token_ids
    assert [output.counts[-1] for output in outputs] == [1 + ending + 1, 1]
    assert [output.without_kv for output in outputs] == [1 + ending, 0]


@pytest.mark.parametrize(("sampled", "taken"), [([" ", "q"], [" ", "q"]), ([" a", "q"], [" a"])])
def test_a_draft_that_is_right_brings_a_token_more_and_one_that_is_wrong_changes_nothing(sampled, taken):
    # A token may hold " " and letters behind it, so after the first letter "the" is forced and " " is only likely.
    grammar = LLMatcher.grammar_from_lark('start: /[ab]/ "the " /[a-z]+/ "!"')
    a, the, space = (TOKENIZER.tokenize_str(text) for text in ("a", "the", " "))
    sampled, taken = ([TOKENIZER.tokenize_str(text)[0] for text in texts] for texts in (sampled, taken))
    with closing(Matchers(open_tokenizer, VOCAB)) as matchers:
        core = WorkerCore(worker_engine.limits(), matchers)
        greedy = SamplingParams(temperature=0)
        core.plan(step(1, admit=[new_sequence(1, PROMPT, grammar=grammar, sampling=greedy)], extend=[(1, 3)]))
        sequence = core.sequence(1)
        sequence.matcher.pending.result(timeout=30)
        sequence.matcher.prepare()
        core.commit(Sampled({0: a}))
        (row,) = core.plan(step(2, decode=[1])).rows
        assert (row.token_ids.tolist(), row.num_logits, row.draft) == (a + the + space, 2, space)
        (got,) = rows(core.commit(Sampled({0: sampled})))
        assert got.tokens == the + taken
        assert sequence.num_computed == sequence.num_tokens - 1
        assert core.plan(step(3, decode=[1])).rows[0].start == sequence.num_computed


def test_a_stop_token_among_forced_ones_ends_the_sequence_there(engine):
    fox = TOKENIZER.tokenize_str("The quick brown fox jumps over the lazy dog.")
    sampling = SamplingParams(stop_token_ids=(fox[4],))
    generated = generate(engine, grammar=FIXED_GRAMMAR, sampling=sampling, reserve=64)
    assert generated.token_ids == fox[: fox.index(fox[4]) + 1]
    assert generated.end is RowEnd.STOP


# ---------------------------------------------------------------- late and failing grammars


def test_a_grammar_that_compiles_late_delays_its_own_row_alone():
    may_open = threading.Event()

    def open_late():
        assert may_open.wait(10)
        return open_tokenizer()

    with closing(make_engine(opening=open_late)) as engine:
        admit = [new_sequence(1, PROMPT, grammar=FIXED_GRAMMAR), new_sequence(2, PROMPT)]
        first = rows(engine.run(step(1, admit=admit, extend=[(1, 3), (2, 3)])))
        assert [len(row.tokens) for row in first] == [0, 1]
        second = rows(engine.run(step(2, decode=[1, 2])))
        assert [len(row.tokens) for row in second] == [0, 1]
        may_open.set()
        seq, tokens = 3, []
        while not tokens:
            row = rows(engine.run(step(seq, decode=[1])))[0]
            seq, tokens = seq + 1, row.tokens
        assert TOKENIZER.decode_str(tokens).startswith("The")


def test_a_step_waits_for_a_late_grammar_once(monkeypatch):
    monkeypatch.setattr("services.worker.matching.matchers.PATIENCE_S", 0.5)
    may_open = threading.Event()

    def open_late():
        assert may_open.wait(10)
        return open_tokenizer()

    with closing(make_engine(opening=open_late)) as engine:
        times = [time.monotonic()]
        admit = [new_sequence(1, PROMPT, grammar=FIXED_GRAMMAR), new_sequence(2, PROMPT)]
        engine.run(step(1, admit=admit, extend=[(1, 3), (2, 3)]))
        times.append(time.monotonic())
        engine.run(step(2, decode=[1, 2]))
        times.append(time.monotonic())
        may_open.set()
    assert times[1] - times[0] > 0.5 > times[2] - times[1]


@pytest.mark.parametrize("grammar", ["start: (((", "no grammar at all", 'start: "a" start "b"'])
def test_a_grammar_that_cannot_be_used_fails_its_request_alone(engine, grammar):
    news = {1: new_sequence(1, PROMPT, grammar=grammar), 2: new_sequence(2, PROMPT, max_new_tokens=5)}
    outputs = LaggingScheduler(engine).run(news)
    assert outputs[1].end is RowEnd.FAILED
    assert outputs[1].failure
    assert outputs[2].end is not RowEnd.FAILED


def test_without_a_tokenizer_constrained_requests_fail_with_the_reason():
    with closing(make_engine(opening=no_tokenizer)) as engine:
        generated = generate(engine)
        assert generated.end is RowEnd.FAILED
        assert "no tokenizer.json" in generated.failure
        engine.reset()
        assert generate(engine, grammar=None, max_new_tokens=3).end is not RowEnd.FAILED


def test_generated_tokens_that_do_not_fit_the_grammar_fail_the_request(engine):
    generated = generate(engine, prompt=[*PROMPT, 500, 501], prompt_len=3)
    assert generated.end is RowEnd.FAILED
    assert "cannot be followed" in generated.failure


def test_compiled_grammars_are_kept_up_to_a_bound():
    with closing(Matchers(open_tokenizer, VOCAB, max_grammars=3)) as matchers:
        for n in range(5):
            matchers.open(f'start: "{n}"', [])
        assert matchers.num_grammars == 3
        again = matchers.open('start: "4"', [])
        assert matchers.num_grammars == 3
        matchers.masks([again], [again]).wait()


def test_a_mask_allows_what_the_grammar_allows_and_no_padding():
    with closing(Matchers(open_tokenizer, VOCAB, jump_forward=False)) as matchers:
        matcher = matchers.open("start: /[ab]/", [])
        while not matcher.prepare():
            pass
        matchers.masks([matcher], [matcher]).wait()
        bits = np.unpackbits(matcher.masks[0].view(np.uint8), bitorder="little")[:VOCAB]
        assert {TOKENIZER.decode_str([token]) for token in np.flatnonzero(bits).tolist()} == {"a", "b"}
        assert matcher.forced == []
        matcher.accept(TOKENIZER.tokenize_str("a")[0])
        assert matcher.is_complete
        assert not matcher.has_masks
