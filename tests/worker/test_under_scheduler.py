"""The scheduler's core drives the worker's engine, with forced tokens, late grammars, small pools and retractions."""

import random
from contextlib import closing

import pytest
from llguidance import LLMatcher

from services.worker.matching.matchers import Matchers
from shared.messages.execution import StepResult
from shared.messages.generation import FinishReason
from shared.messages.sampling import SamplingParams
from tests.support.scheduling import Bench, submit
from tests.support.worker_engine import VOCAB, limits, make_engine, open_tokenizer

CONTEXT_LEN = 250
TOKENIZER = open_tokenizer()


class EngineWorker:
    """The engine in the place of a bench's own worker."""

    def __init__(self, engine):
        self.engine = engine

    def execute(self, step):
        result = self.engine.run(step)
        assert isinstance(result, StepResult), result
        return result


def grammar(number, seed):
    kinds = [
        None,
        LLMatcher.grammar_from_lark(f'start: "number {number} of {seed}: The quick brown fox " /[a-z]{{5}}/ " jumps"'),
        LLMatcher.grammar_from_lark(f'start: ("dog {seed}, " | "fox, ")+ "the end."'),
    ]
    return kinds[number % 3]


def make_requests(seed):
    draw = random.Random(seed)
    return [
        submit(
            f"r{number}",
            [draw.randrange(300, 500) for _ in range(draw.randrange(1, 60))],
            max_new_tokens=draw.choice([1, 7, 60, 100]),
            grammar=grammar(number, seed),
            sampling=SamplingParams(seed=number),
        )
        for number in range(12)
    ]


def serve(requests, seed, *, num_slots, **scheduler_limits):
    """All requests, submitted while others already run; returns each one's tokens and the bench."""
    draw = random.Random(seed)
    matchers = Matchers(lambda: TOKENIZER, VOCAB)
    with closing(make_engine(seed, limits(num_slots, CONTEXT_LEN), matchers)) as engine:
        bench = Bench(num_slots=num_slots, context_len=CONTEXT_LEN, **scheduler_limits)
        bench.worker = EngineWorker(engine)
        for request in requests:
            bench.feed(request)
            for _ in range(draw.randrange(3)):
                if bench.steps:
                    bench.answer()
        bench.run()
    return bench


@pytest.mark.parametrize("seed", range(12))
def test_every_request_ends_as_it_would_alone(seed):
    requests = make_requests(seed)
    draw = random.Random(seed)
    together = serve(
        requests,
        seed,
        num_slots=draw.choice([170, 300, 4000]),
        max_prefill_tokens=draw.choice([16, 64, 512]),
        reserve_slots=draw.choice([1, 4, 64]),
    )
    for request in requests:
        request_id = request.submit.request_id
        alone = serve([request], seed, num_slots=4000)
        assert together.output[request_id] == alone.output[request_id]
        assert together.last[request_id].finish == alone.last[request_id].finish
        assert together.last[request_id].finish in (FinishReason.STOP, FinishReason.LENGTH)


def test_some_of_these_histories_contain_retractions():
    benches = [serve(make_requests(seed), seed, num_slots=170, reserve_slots=1) for seed in range(6)]
    assert sum(bench.core.planner.num_retracted_reqs for bench in benches) > 0
