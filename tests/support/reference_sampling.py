"""Sampling as its documentation says it, one row at a time, in float64 and with sorts: slow, and right at a glance."""

from collections import Counter
from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from shared.messages.sampling import SamplingParams


def adjusted_logits(
    logits: NDArray[np.float32],
    params: SamplingParams,
    prompt: Sequence[int],
    generated: Sequence[int],
    end_token_ids: Sequence[int],
) -> NDArray[np.float64]:
    """After penalties, logit bias and the ban on early ends."""
    result = logits.astype(np.float64)
    for token in {*prompt, *generated}:
        factor = params.repetition_penalty
        result[token] = result[token] / factor if result[token] > 0 else result[token] * factor
    for token, times in Counter(generated).items():
        result[token] -= params.presence_penalty + params.frequency_penalty * times
    for token, bias in params.logit_bias:
        result[token] += bias
    if len(generated) < params.min_new_tokens:
        ends = set(params.stop_token_ids) | (set() if params.ignore_eos else set(end_token_ids))
        result[sorted(ends)] = -np.inf
    return result


def distribution(logits: NDArray[np.float64], params: SamplingParams) -> NDArray[np.float64]:
    """Probabilities after temperature, top-k, top-p and min-p."""
    if params.temperature == 0:
        return (np.arange(len(logits)) == logits.argmax()).astype(np.float64)
    weights = np.exp((logits - logits.max()) / params.temperature)
    ordered = np.sort(weights)[::-1]
    if params.top_k:
        ordered = ordered[: params.top_k]
    mass_before = np.cumsum(ordered) - ordered
    ordered = ordered[mass_before < params.top_p * ordered.sum()] if params.top_p < 1 else ordered
    weights[weights < max(ordered[-1], params.min_p)] = 0
    return weights / weights.sum()
