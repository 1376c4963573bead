"""From the logits of a step to the tokens of its rows, and their logprobs."""

from collections.abc import Sequence
from itertools import accumulate

import torch
from torch import Tensor

from services.worker.runner import RowPlan, Sampled, StepPlan, TokenScores
from services.worker.sampling.logprobs import score_tokens
from services.worker.sampling.sampler import Chosen, SampleRow, choose_allowed, choose_tokens

Place = tuple[int, int]
"""(index of a row, how many tokens of its draft come before): where a token is sampled."""


def sample_step(logits: Tensor, plan: StepPlan) -> Sampled:
    """logits: float32 [S, vocab], the wanted ones of each row in order; scratch space afterwards."""
    rows = plan.rows
    ends = list(accumulate(row.num_logits for row in rows))
    assert (ends[-1] if ends else 0) == len(logits), f"{len(logits)} rows of logits, {ends[-1]} were asked for"
    # Sampling works in place; logprobs are of the logits as the model gave them.
    scored = {
        index: logits[end - row.num_logits : end].clone()
        for index, (row, end) in enumerate(zip(rows, ends, strict=True))
        if row.scores
    }
    places = [
        (index, num_drafted)
        for index, row in enumerate(rows)
        if row.samples and row.can_sample
        for num_drafted in range(1 + len(row.draft))
    ]
    sampled = Sampled({})
    if places:
        last = [ends[index] - 1 - len(rows[index].draft) + num_drafted for index, num_drafted in places]
        chosen = _choose(logits if len(last) == len(logits) else logits[last], places, plan)
        sampled = _by_row(chosen, places)
    sampled.scores = {
        index: _scores(own, rows[index], sampled.token_ids.get(index, ())) for index, own in scored.items()
    }
    return sampled


def _choose(logits: Tensor, places: Sequence[Place], plan: StepPlan) -> Chosen:
    chosen = choose_tokens(logits, [_sample_row(plan.rows[index], num_drafted) for index, num_drafted in places])
    if chosen.refused:
        matchers = {place: plan.rows[places[place][0]].sequence.matcher for place in chosen.refused}
        refusing = [matcher for matcher in dict.fromkeys(matchers.values()) if matcher is not None]
        for matcher in refusing:
            matcher.note_refusal()
        assert plan.masks is not None
        plan.masks.fill(refusing)
        masks = {place: m.masks[places[place][1]] for place, m in matchers.items() if m is not None and m.has_masks}
        choose_allowed(logits, chosen, masks)
    return chosen


def _sample_row(row: RowPlan, num_drafted: int) -> SampleRow:
    controls, matcher, position = row.sequence.controls, row.sequence.matcher, row.end + num_drafted
    if matcher is None:
        return SampleRow(controls, position)
    if matcher.has_masks:
        return SampleRow(controls, position, matcher.masks[num_drafted])
    assert controls.greedy, "a row that draws from what is allowed has waited for its mask"
    return SampleRow(controls, position, allows=lambda token: matcher.allows(token, num_drafted))


def _by_row(chosen: Chosen, places: Sequence[Place]) -> Sampled:
    sampled = Sampled({})
    token_ids: dict[int, list[int]] = {}
    for place, (index, num_drafted) in enumerate(places):
        if place in chosen.failures:
            # Behind a draft it is a failure only if the draft proves right, and then the next step will meet it again.
            if num_drafted == 0:
                sampled.failures[index] = chosen.failures[place]
        elif place not in chosen.refused and len(token_ids.get(index, ())) == num_drafted:
            token_ids.setdefault(index, []).append(chosen.token_ids[place])
    sampled.token_ids.update(token_ids)
    return sampled


def _scores(logits: Tensor, row: RowPlan, sampled: Sequence[int]) -> TokenScores:
    targets = torch.tensor([*row.known_targets().tolist(), *sampled], device=logits.device)
    return score_tokens(logits[: len(targets)], targets, row.sequence.sampling.num_logprobs or 0)
