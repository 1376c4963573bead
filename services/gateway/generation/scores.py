"""Log probabilities of tokens as the APIs show them, from the packed numbers of the worker."""

import math
from collections.abc import Sequence
from typing import NamedTuple

from services.gateway.text.detokenizer import Detokenizer
from services.gateway.text.vocabulary import Vocabulary
from shared.messages.packing import unpack_float32, unpack_int32
from shared.messages.sampling import Logprobs

LOWEST_LOGPROB = -9999.0
"""Stands for minus infinity, which JSON cannot write."""


class TopScore(NamedTuple):
    token_id: int
    logprob: float


class Score(NamedTuple):
    """One token with its log probability; `offset` is where it starts in the text, in characters."""

    token_id: int
    logprob: float | None
    """None for the first token of a prompt, which nothing predicts."""
    top: Sequence[TopScore]
    """The likeliest tokens, likeliest first; the chosen one need not be among them."""
    offset: int = 0


def unpack_scores(logprobs: Logprobs) -> list[tuple[float, list[TopScore]]]:
    """Per token its logprob and the likeliest tokens, all finite."""
    chosen = unpack_float32(logprobs.chosen)
    ids, values = unpack_int32(logprobs.top_ids), unpack_float32(logprobs.top)
    k = logprobs.num_top
    assert len(ids) == len(values) == k * len(chosen), (len(ids), len(values), k, len(chosen))
    return [
        (
            finite(logprob),
            [TopScore(ids[i], finite(values[i])) for i in range(row * k, row * k + k)],
        )
        for row, logprob in enumerate(chosen)
    ]


def finite(logprob: float) -> float:
    """Minus infinity (a masked token) and NaN become the lowest logprob that is written; nothing exceeds 0."""
    if math.isnan(logprob):
        return LOWEST_LOGPROB
    return min(0.0, max(LOWEST_LOGPROB, logprob))


def score_prompt(token_ids: Sequence[int], logprobs: Logprobs, vocabulary: Vocabulary) -> list[Score]:
    """The prompt's tokens with logprobs from position 1 on; offsets count characters of the detokenized prompt."""
    rows = unpack_scores(logprobs)
    first = len(token_ids) - len(rows)
    assert first >= 0, (len(token_ids), len(rows))
    detokenizer, offset = Detokenizer(vocabulary, skip_special_tokens=False), 0
    scores = []
    for position, token_id in enumerate(token_ids):
        logprob, top = (None, ()) if position < first else rows[position - first]
        scores.append(Score(token_id, logprob, top, offset))
        offset += len(detokenizer.push((token_id,)))
    return scores
