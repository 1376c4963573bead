import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from services.worker.sampling.controls import SamplingControls
from services.worker.sampling.sampler import SampleRow, choose_tokens, inverse_cdf
from services.worker.sampling.truncation import sorted_thresholds, thresholds
from shared.messages.sampling import SamplingParams
from tests.support.reference_sampling import adjusted_logits, distribution

ENDS = (3, 5)


def row(params, *, vocab, prompt=(), generated=(), position=None):
    controls = SamplingControls(params, np.array(prompt, np.int32), np.array(generated, np.int32), ENDS, vocab)
    return SampleRow(controls, len(prompt) + len(generated) if position is None else position)


def draw_many(logits, params, num_draws, **context):
    """Tokens at `num_draws` positions from the same logits."""
    rows = [row(params, vocab=len(logits), position=position, **context) for position in range(num_draws)]
    chosen = choose_tokens(torch.from_numpy(logits).expand(num_draws, -1).clone(), rows)
    assert chosen.failures == {}
    return np.array(chosen.token_ids)


def random_logits(seed, vocab, spread=3.0):
    return (np.random.default_rng(seed).standard_normal(vocab) * spread).astype(np.float32)


PARAMS = st.builds(
    SamplingParams,
    temperature=st.sampled_from([0.0, 0.3, 1.0, 2.5]),
    top_k=st.sampled_from([0, 1, 2, 7, 50, 10_000]),
    top_p=st.sampled_from([1.0, 0.95, 0.5, 1e-6]),
    min_p=st.sampled_from([0.0, 0.05, 0.7]),
    presence_penalty=st.sampled_from([0.0, 1.5, -0.5]),
    frequency_penalty=st.sampled_from([0.0, 0.4]),
    repetition_penalty=st.sampled_from([1.0, 1.3, 0.8]),
    logit_bias=st.sampled_from([(), ((3, 5.0), (9, -100.0))]),
    min_new_tokens=st.sampled_from([0, 4]),
    stop_token_ids=st.sampled_from([(), (7, 9)]),
    ignore_eos=st.booleans(),
    seed=st.integers(-(2**63), 2**63 - 1),
)


@settings(max_examples=300, deadline=None)
@given(
    params=PARAMS,
    seed=st.integers(0, 2**32),
    vocab=st.sampled_from([20, 256, 300]),
    prompt=st.lists(st.integers(0, 19), min_size=1, max_size=8),
    generated=st.lists(st.integers(0, 19), max_size=8),
)
def test_every_token_is_one_that_the_controls_leave(params, seed, vocab, prompt, generated):
    logits = random_logits(seed, vocab)
    allowed = distribution(adjusted_logits(logits, params, prompt, generated, ENDS), params)
    # At the edge of a set float32 and float64 may differ by a rounding.
    rounded = distribution(adjusted_logits(logits, params, prompt, generated, ENDS) * (1 + 1e-9), params)
    token = draw_many(logits, params, 1, prompt=prompt, generated=generated)[0]
    assert allowed[token] > 0 or rounded[token] > 0


@pytest.mark.parametrize(
    "params",
    [
        SamplingParams(),
        SamplingParams(temperature=0.5, top_k=5),
        SamplingParams(temperature=1.5, top_p=0.8),
        SamplingParams(min_p=0.1),
        SamplingParams(temperature=2, top_k=20, top_p=0.9, min_p=0.02),
        SamplingParams(presence_penalty=1, frequency_penalty=0.5, repetition_penalty=1.2, logit_bias=((2, 3.0),)),
    ],
)
def test_frequencies_follow_the_distribution(params):
    logits = random_logits(seed=1, vocab=300, spread=2.0)
    context = {"prompt": [1, 2, 2], "generated": [4, 4, 6]}
    expected = distribution(adjusted_logits(logits, params, **context, end_token_ids=ENDS), params)
    num_draws = 20_000
    counts = np.bincount(draw_many(logits, params, num_draws, **context), minlength=len(logits))
    assert (counts[expected == 0] == 0).all()
    likely = expected * num_draws >= 5
    observed = np.append(counts[likely], counts[~likely].sum())
    wanted = np.append(expected[likely], expected[~likely].sum()) * num_draws
    chi_square = ((observed - wanted)[wanted > 0] ** 2 / wanted[wanted > 0]).sum()
    degrees = np.count_nonzero(wanted) - 1
    assert chi_square < degrees + 5 * np.sqrt(2 * degrees) + 5


def test_a_seed_gives_the_same_tokens_in_any_batch():
    vocab, num_rows = 1000, 24
    kinds = [
        SamplingParams(temperature=0),
        SamplingParams(),
        SamplingParams(top_p=0.9),
        SamplingParams(top_k=300),
        SamplingParams(frequency_penalty=1),
    ]
    rows = [
        row(kinds[i % len(kinds)], vocab=vocab, prompt=[i % 7 + 1], generated=[i, i], position=i)
        for i in range(num_rows)
    ]
    logits = torch.from_numpy(np.stack([random_logits(i, vocab) for i in range(num_rows)]))
    alone = [choose_tokens(logits[i : i + 1].clone(), [rows[i]]).token_ids[0] for i in range(num_rows)]
    assert choose_tokens(logits.clone(), rows).token_ids == alone
    order = np.random.default_rng(0).permutation(num_rows).tolist()
    shuffled = choose_tokens(logits[order].clone(), [rows[i] for i in order]).token_ids
    assert shuffled == [alone[i] for i in order]


def test_seed_and_position_decide_and_different_ones_differ():
    logits = random_logits(seed=3, vocab=500, spread=0.5)
    first = draw_many(logits, SamplingParams(seed=1), 50)
    assert (first == draw_many(logits, SamplingParams(seed=1), 50)).all()
    assert (first != draw_many(logits, SamplingParams(seed=2), 50)).sum() > 40


def test_greedy_takes_the_lowest_id_of_equals_and_so_does_top_k_one():
    logits = np.zeros(400, np.float32)
    logits[[17, 200, 399]] = 2.0
    for params in (SamplingParams(temperature=0), SamplingParams(top_k=1)):
        assert set(draw_many(logits, params, 20).tolist()) == {17}


@pytest.mark.parametrize("temperature", [1e-45, 1e-40, 1e-12])
def test_a_tiny_temperature_is_greedy_up_to_ties(temperature):
    logits = random_logits(seed=4, vocab=300)
    logits[5] = -np.inf
    assert set(draw_many(logits, SamplingParams(temperature=temperature), 20).tolist()) == {int(logits.argmax())}
    logits[:] = -1e4
    logits[[8, 9]] = 1e4
    assert set(draw_many(logits, SamplingParams(temperature=temperature), 200).tolist()) == {8, 9}


@pytest.mark.parametrize("temperature", [1e6, 1e38, 1e300])
def test_a_huge_temperature_is_uniform_over_what_is_not_forbidden(temperature):
    logits = random_logits(seed=5, vocab=8)
    logits[3] = -np.inf
    counts = np.bincount(draw_many(logits, SamplingParams(temperature=temperature), 7000), minlength=8)
    assert counts[3] == 0
    assert (abs(np.delete(counts, 3) - 1000) < 200).all()


def test_top_k_keeps_ties_of_the_last_token():
    logits = np.array([5, 4, 3, 3, 3, 1], np.float32)
    assert set(draw_many(logits, SamplingParams(top_k=3), 2000).tolist()) == {0, 1, 2, 3, 4}


@settings(max_examples=200, deadline=None)
@given(
    params=st.lists(PARAMS, min_size=1, max_size=4),
    seed=st.integers(0, 2**32),
    vocab=st.sampled_from([20, 300, 3000]),
    spread=st.sampled_from([0.01, 1.0, 8.0]),
)
def test_selecting_and_sorting_find_the_same_threshold(params, seed, vocab, spread):
    logits = torch.from_numpy(np.stack([random_logits(seed + n, vocab, spread) for n in range(len(params))]))
    weights = (logits - logits.amax(-1, keepdim=True)).exp()
    selected, by_sort = thresholds(weights, params), sorted_thresholds(weights, params)
    # A sum's rounding may move the boundary by one token.
    kept = [(weights >= each.unsqueeze(1)).sum(-1) for each in (selected, by_sort)]
    assert ((kept[0] - kept[1]).abs() <= 1).all()


def test_a_flat_distribution_needs_more_candidates_than_the_first_few_and_stays_exact():
    vocab = 6000
    logits = np.linspace(0, 1e-3, vocab, dtype=np.float32)
    tokens = draw_many(logits, SamplingParams(top_p=0.9), 500)
    # The least likely tenth is cut off.
    assert tokens.min() >= vocab * 0.1 - 2
    assert tokens.min() < vocab * 0.12
    assert draw_many(logits, SamplingParams(top_k=5000), 500).min() >= 1000


def test_a_row_with_nan_or_nothing_allowed_fails_alone():
    vocab = 64
    logits = torch.zeros(4, vocab)
    logits[1, 7] = float("nan")
    logits[2] = float("-inf")
    logits[:, 9] += 1
    rows = [row(SamplingParams(temperature=t), vocab=vocab) for t in (0, 0, 1, 1)]
    logits[2] = float("-inf")
    chosen = choose_tokens(logits, rows)
    assert chosen.failures == {1: "the model's logits are not finite (nan)", 2: "no token is allowed"}
    assert chosen.token_ids[0] == 9


def test_the_inverse_cdf_never_hits_a_token_of_weight_zero():
    weights = torch.zeros(3, 700)
    weights[0, 699] = 1e-30
    weights[1, [0, 300]] = torch.tensor([1.0, 1e-7])
    weights[2, 256] = 1.0
    for number in (0.0, 0.5, 1 - 2**-53):
        tokens = inverse_cdf(weights, torch.full((3,), number, dtype=torch.float64)).tolist()
        assert tokens == [699, 300 if number > 0.9 else 0, 256]


@given(st.integers(0, 2**32), st.floats(0, 1, exclude_max=True), st.sampled_from([1, 255, 256, 257, 1000]))
def test_the_inverse_cdf_agrees_with_a_plain_running_sum(seed, number, vocab):
    weights = np.random.default_rng(seed).exponential(size=vocab).astype(np.float32)
    sums = np.cumsum(weights.astype(np.float64)) / weights.astype(np.float64).sum()
    token = inverse_cdf(torch.from_numpy(weights)[None], torch.tensor([number], dtype=torch.float64)).item()
    low = sums[token - 1] if token else 0.0
    assert low - 1e-6 <= number <= sums[token] + 1e-6


@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_a_mask_leaves_its_row_what_the_grammar_allows_and_its_neighbours_everything(temperature):
    vocab, allowed = 100, [0, 7, 31, 32, 98]
    bits = np.zeros(128, np.uint8)
    bits[allowed] = 1
    mask = np.packbits(bits, bitorder="little").view(np.int32)
    logits = random_logits(seed=8, vocab=vocab, spread=0.3)
    free = [row(SamplingParams(temperature=temperature), vocab=vocab, position=n) for n in range(400)]
    mixed = [SampleRow(each.controls, each.position, mask) if n % 2 else each for n, each in enumerate(free)]

    def choose(rows):
        return choose_tokens(torch.from_numpy(logits).expand(len(rows), -1).clone(), rows).token_ids

    tokens = choose(mixed)
    assert tokens[::2] == choose(free)[::2]
    likeliest = max(allowed, key=lambda token: logits[token])
    assert set(tokens[1::2]) == (set(allowed) if temperature else {likeliest})


def test_a_mask_that_allows_nothing_fails_its_row():
    rows = [SampleRow(row(SamplingParams(), vocab=64).controls, 0, np.zeros(2, np.int32))]
    assert choose_tokens(torch.zeros(1, 64), rows).failures == {0: "no token is allowed"}
