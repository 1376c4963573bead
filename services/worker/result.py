"""What became of a step's rows, and the StepResult that says so."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from services.worker.runner import RowPlan, TokenScores
from shared.messages.execution import RowEnd, Step, StepResult
from shared.messages.packing import pack_int32
from shared.messages.sampling import Logprobs


@dataclass(slots=True)
class Outcome:
    """What becomes of one row of a step."""

    handle: int
    end: RowEnd = RowEnd.RUNNING
    failure: str = ""
    row: RowPlan | None = None
    """None: nothing is computed."""
    token_ids: tuple[int, ...] = ()
    """New tokens: forced ones, sampled ones, an ending that follows by itself."""
    num_without_kv: int = 0
    """Of a sequence that has ended: how many tokens before the last have not been computed."""


def make_result(step: Step, outcomes: Sequence[Outcome], scores: Mapping[int, TokenScores]) -> StepResult:
    """`scores` go by index among the rows that were computed."""
    logprobs: dict[int, Logprobs] = {}
    prompt_logprobs: dict[int, Logprobs] = {}
    computed = [outcome for outcome in outcomes if outcome.row is not None]
    for index, row_scores in scores.items():
        if computed[index].end is not RowEnd.FAILED:
            _split_scores(computed[index], row_scores, logprobs, prompt_logprobs)
    return StepResult(
        epoch=step.epoch,
        seq=step.seq,
        counts=pack_int32(len(outcome.token_ids) for outcome in outcomes),
        token_ids=pack_int32(token for outcome in outcomes for token in outcome.token_ids),
        ends=bytes(outcome.end for outcome in outcomes),
        failures=tuple((outcome.handle, outcome.failure) for outcome in outcomes if outcome.failure),
        logprobs=logprobs,
        prompt_logprobs=prompt_logprobs,
        without_kv={outcome.handle: outcome.num_without_kv for outcome in outcomes if outcome.num_without_kv},
    )


def _split_scores(
    outcome: Outcome, scores: TokenScores, logprobs: dict[int, Logprobs], prompt_logprobs: dict[int, Logprobs]
) -> None:
    """Sort a row's scores into those of prompt tokens and those of tokens that are new in this step."""
    row = outcome.row
    assert row is not None
    num_scored = len(scores.chosen)
    num_in_prompt = min(max(0, row.sequence.prompt_len - (row.end - row.num_logits + 1)), num_scored)
    if num_in_prompt:
        prompt_logprobs[outcome.handle] = _pack_scores(scores, 0, num_in_prompt)
    num_new = len(outcome.token_ids)
    if num_new and row.sequence.sampling.num_logprobs is not None:
        assert num_new <= num_scored, f"{num_new} new tokens, {num_scored} scores"
        logprobs[outcome.handle] = _pack_scores(scores, num_scored - num_new, num_scored)


def _pack_scores(scores: TokenScores, start: int, stop: int) -> Logprobs:
    return Logprobs(
        num_top=scores.top.shape[1],
        chosen=scores.chosen[start:stop].astype("<f4").tobytes(),
        top_ids=scores.top_ids[start:stop].astype("<i4").tobytes(),
        top=scores.top[start:stop].astype("<f4").tobytes(),
    )
