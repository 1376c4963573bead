import re
from contextlib import closing

import numpy as np
from llguidance import LLMatcher, LLTokenizer

from services.worker.core import WorkerCore
from services.worker.engine import Engine
from services.worker.matching.matchers import Matchers
from services.worker.runner import ModelLimits
from services.worker.simulated_runner import SimulatedRunner
from shared.messages.packing import unpack_float32
from shared.messages.sampling import SamplingParams
from tests.support.lagging_scheduler import LaggingScheduler
from tests.support.tokenizer_models import tokenizer_json
from tests.support.worker_engine import no_tokenizer
from tests.support.worker_steps import new_sequence, rows, step

LIMITS = ModelLimits(num_slots=1000, context_len=200, vocab_size=50, end_token_ids=(0, 7))


class Clock:
    def __init__(self):
        self.now = 0.0
        self.slept = []

    def sleep(self, seconds):
        self.slept.append(seconds)
        self.now += seconds


def generate(sampling, num_tokens, prompt=(5, 6)):
    clock = Clock()
    runner = SimulatedRunner(LIMITS, 0.005, lambda: clock.now, clock.sleep)
    core = WorkerCore(LIMITS, Matchers(no_tokenizer, LIMITS.vocab_size))
    admit = [new_sequence(1, prompt, sampling=sampling)]
    results = [core_step(core, runner, step(1, admit=admit, extend=[(1, len(prompt))]))]
    results += [core_step(core, runner, step(seq, decode=[1])) for seq in range(2, num_tokens + 1)]
    return results, clock


def core_step(core, runner, message):
    return core.commit(runner.run(core.plan(message)))


def tokens_of(results):
    return [rows(result)[0].tokens[0] for result in results]


def test_a_step_takes_the_time_it_is_told():
    _, clock = generate(SamplingParams(), 4)
    assert np.allclose(clock.slept, [0.005] * 4)


def test_tokens_are_a_function_of_seed_and_position_and_never_end_the_text():
    first, second = (tokens_of(generate(SamplingParams(seed=seed), 100)[0]) for seed in (1, 2))
    assert first == tokens_of(generate(SamplingParams(seed=1), 100)[0])
    assert first != second
    assert set(first).isdisjoint(LIMITS.end_token_ids)
    assert len(set(first)) > 30


def test_its_one_possible_token_has_logprob_zero():
    sampling = SamplingParams(num_logprobs=5, prompt_logprobs_start=0)
    result = generate(sampling, 1, prompt=(5, 6, 9))[0][0]
    assert unpack_float32(result.logprobs[1].chosen) == [0]
    assert unpack_float32(result.prompt_logprobs[1].chosen) == [0, 0]
    assert result.logprobs[1].num_top == 1


def test_with_a_grammar_it_stays_within_what_is_allowed():
    tokenizer = LLTokenizer(tokenizer_json("byte_level"), n_vocab=640, eos_token=[0])
    limits = ModelLimits(num_slots=1 << 20, context_len=200, vocab_size=640, end_token_ids=(0,))
    engine = Engine(SimulatedRunner(limits, 0), Matchers(lambda: tokenizer, 640))
    grammar = LLMatcher.grammar_from_lark('start: "size: " /[0-9]{3}/ " px"')
    with closing(engine):
        output = LaggingScheduler(engine).run({1: new_sequence(1, [400], grammar=grammar)})[1]
    assert re.fullmatch(r"size: [0-9]{3} px", tokenizer.decode_str(output.token_ids[:-1]))
