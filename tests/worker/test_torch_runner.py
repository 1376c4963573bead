import numpy as np
import pytest
import torch

from services.worker.core import WorkerCore
from services.worker.matching.matchers import Matchers
from services.worker.runner import ForwardFailed, ModelLimits
from services.worker.torch_runner import TorchRunner
from shared.messages.execution import RowEnd
from shared.messages.packing import unpack_float32, unpack_int32
from shared.messages.sampling import SamplingParams
from tests.support.worker_engine import no_tokenizer
from tests.support.worker_steps import Row, new_sequence, rows, step

VOCAB = 100
LIMITS = ModelLimits(num_slots=4000, context_len=300, vocab_size=VOCAB, end_token_ids=(2,))
GREEDY = SamplingParams(temperature=0)


class BigramModel:
    """A model that looks one token back: its logits are a row of a table, so every expectation can be read off."""

    def __init__(self, seed=0):
        table = np.random.default_rng(seed).standard_normal((VOCAB, VOCAB)) * 2
        table[:, LIMITS.end_token_ids] = -50
        self.table = torch.from_numpy(table.astype(np.float32))
        self.error = None

    def forward(self, batch):
        if self.error is not None:
            raise self.error
        return self.table[torch.from_numpy(batch.token_ids[batch.logit_index])].clone()

    def logprob(self, token, following):
        return float(self.table[token].double().log_softmax(-1)[following])


@pytest.fixture
def model():
    return BigramModel()


@pytest.fixture
def run(model):
    matchers = Matchers(no_tokenizer, VOCAB)
    core, runner = WorkerCore(LIMITS, matchers), TorchRunner(model, LIMITS, torch.device("cpu"))
    yield lambda message: core.commit(runner.run(core.plan(message)))
    matchers.close()


def likeliest(model, token):
    return int(model.table[token].argmax())


def test_each_row_gets_the_token_of_its_own_last_logits(model, run):
    admit = [new_sequence(handle, [10 + handle, 20 + handle], sampling=GREEDY) for handle in (1, 2, 3)]
    result = run(step(admit=admit, extend=[(1, 2), (2, 1), (3, 2)]))
    assert [row.tokens for row in rows(result)] == [[likeliest(model, 21)], [], [likeliest(model, 23)]]
    again = run(step(2, decode=[1, 3], extend=[(2, 1)]))
    assert [row.tokens for row in rows(again)] == [
        [likeliest(model, likeliest(model, 21))],
        [likeliest(model, likeliest(model, 23))],
        [likeliest(model, 22)],
    ]


def test_a_step_that_samples_nothing_needs_no_logits(run):
    assert rows(run(step(admit=[new_sequence(1, [5, 6, 7])], extend=[(1, 2)]))) == [Row([], RowEnd.RUNNING)]


@pytest.mark.parametrize("chunks", [[6], [2, 4], [1, 1, 3, 1]])
@pytest.mark.parametrize("start", [0, 3])
def test_prompt_logprobs_are_the_same_in_any_chunks(model, run, chunks, start):
    prompt = [10, 11, 12, 13, 14, 15]
    sampling = SamplingParams(temperature=0, prompt_logprobs_start=start, num_logprobs=2)
    admit, chosen, top = [new_sequence(1, prompt, sampling=sampling)], [], []
    for seq, length in enumerate(chunks, 1):
        result = run(step(seq, admit=admit, extend=[(1, length)]))
        admit = []
        if logprobs := result.prompt_logprobs.get(1):
            chosen += unpack_float32(logprobs.chosen)
            top += unpack_int32(logprobs.top_ids)
    pairs = [(prompt[i - 1], prompt[i]) for i in range(max(1, start), 6)]
    assert np.allclose(chosen, [model.logprob(*pair) for pair in pairs], atol=1e-5)
    assert top == [i for token, _ in pairs for i in model.table[token].topk(2).indices.tolist()]
    output = result.logprobs[1]
    assert np.allclose(unpack_float32(output.chosen), [model.logprob(15, likeliest(model, 15))], atol=1e-5)


def test_logprobs_are_of_the_model_and_not_of_what_sampling_makes_of_it(model, run):
    forced = 7
    sampling = SamplingParams(temperature=0.3, logit_bias=((forced, 100.0),), num_logprobs=1)
    result = run(step(admit=[new_sequence(1, [10], sampling=sampling)], extend=[(1, 1)]))
    assert rows(result)[0].tokens == [forced]
    assert np.allclose(unpack_float32(result.logprobs[1].chosen), [model.logprob(10, forced)], atol=1e-5)
    assert unpack_int32(result.logprobs[1].top_ids) == [likeliest(model, 10)]


def test_controls_of_a_row_do_not_touch_its_neighbours(model, run):
    plain = new_sequence(1, [10], sampling=GREEDY)
    biased = new_sequence(2, [10], sampling=SamplingParams(temperature=0, logit_bias=((7, 100.0),)))
    result = run(step(admit=[plain, biased], extend=[(1, 1), (2, 1)]))
    assert [row.tokens for row in rows(result)] == [[likeliest(model, 10)], [7]]


def test_penalties_follow_the_tokens_that_were_generated(model, run):
    best = likeliest(model, 10)
    # A model that would repeat one token for ever.
    model.table[best] = model.table[10]
    sampling = SamplingParams(temperature=0, frequency_penalty=100.0)
    outputs = rows(run(step(admit=[new_sequence(1, [10], sampling=sampling)], extend=[(1, 1)])))
    outputs += rows(run(step(2, decode=[1])))
    assert outputs[0].tokens == [best]
    assert outputs[1].tokens == [int(model.table[10].topk(2).indices[1])]


def test_logits_that_are_not_numbers_fail_their_row_alone(model, run):
    model.table[11] = float("nan")
    admit = [new_sequence(handle, [9 + handle], sampling=GREEDY) for handle in (1, 2, 3)]
    result = run(step(admit=admit, extend=[(1, 1), (2, 1), (3, 1)]))
    assert [row.end for row in rows(result)] == [RowEnd.RUNNING, RowEnd.FAILED, RowEnd.RUNNING]
    assert result.failures == ((2, "the model's logits are not finite (nan)"),)


@pytest.mark.parametrize("error", [RuntimeError("kernel"), MemoryError()])
def test_a_failed_pass_is_told_apart_from_a_crash(model, run, error):
    model.error = error
    with pytest.raises(ForwardFailed):
        run(step(admit=[new_sequence(1, [10])], extend=[(1, 1)]))


def test_our_own_mistake_is_a_crash(model, run):
    model.error = AssertionError("a batch has at least one row")
    with pytest.raises(AssertionError):
        run(step(admit=[new_sequence(1, [10])], extend=[(1, 1)]))


def test_on_an_accelerator_a_failed_kernel_is_a_crash(model):
    core = WorkerCore(LIMITS, Matchers(no_tokenizer, VOCAB))
    runner = TorchRunner(model, LIMITS, torch.device("cuda"))
    plan = core.plan(step(admit=[new_sequence(1, [10])], extend=[(1, 1)]))
    model.error = RuntimeError("illegal memory access")
    with pytest.raises(RuntimeError, match="illegal memory access"):
        runner.run(plan)
    model.error = torch.OutOfMemoryError("8 GiB")
    with pytest.raises(ForwardFailed, match="out of memory in a step of 1 tokens"):
        runner.run(plan)
