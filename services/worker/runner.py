"""What the core asks of a runner: compute the rows of one step and choose their next tokens.

`torch_runner` does it with a model, `simulated_runner` with a clock; the core does not know which.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Protocol

import numpy as np
from numpy.typing import NDArray

from services.worker.matching.matchers import StepMasks
from services.worker.sequence import SequenceState


@dataclass(frozen=True, slots=True)
class ModelLimits:
    """What bounds a sequence: facts about the loaded model and its KV pool."""

    num_slots: int
    context_len: int
    vocab_size: int
    """Width of the logits."""
    end_token_ids: tuple[int, ...]


@dataclass(slots=True, eq=False)
class RowPlan:
    """One row of a step: compute positions `start` to `end` of a sequence, whose tokens are all known.

    The logits of the last `num_logits` positions are wanted. Those at position p speak about the token at p + 1: with
    `samples` the token at `end` is chosen from the last ones; with `scores` all these tokens get their logprobs, as far
    as they are known or chosen.
    """

    sequence: SequenceState
    start: int
    end: int
    num_logits: int
    samples: bool
    scores: bool
    num_forced: int = 0
    """How many of the sequence's last tokens the grammar has forced in this very step."""
    draft: Sequence[int] = ()
    """Tokens that may come next, computed behind `end` on trial: there is a logit for `end` and after each of them, and a
    token is sampled from each of these logits. The slots reach that far."""

    @property
    def token_ids(self) -> NDArray[np.int32]:
        """The tokens to compute, from position `start` on."""
        tokens = self.sequence.tokens[self.start : self.end]
        return np.append(tokens, np.array(self.draft, np.int32)) if self.draft else tokens

    @property
    def can_sample(self) -> bool:
        """The row's grammar, if it has one, is compiled, and its masks are not just being filled."""
        matcher = self.sequence.matcher
        return matcher is None or matcher.is_ready

    def known_targets(self) -> NDArray[np.int32]:
        """The tokens that the wanted logits speak about, without the one that is still to be chosen."""
        return self.sequence.tokens[self.end - self.num_logits + 1 : min(self.end + 1, self.sequence.num_tokens)]


@dataclass(slots=True, eq=False)
class StepPlan:
    """The rows of one step that compute something. Sequences must not change until the step has run."""

    rows: list[RowPlan]
    masks: StepMasks | None = None
    """To wait for before sampling; None: no row that samples has a grammar."""


@dataclass(frozen=True, slots=True)
class TokenScores:
    """Logprobs of a run of n tokens.

    chosen   float32 [n]
    top_ids  int32 [n, k]    likeliest first
    top      float32 [n, k]
    """

    chosen: NDArray[np.float32]
    top_ids: NDArray[np.int32]
    top: NDArray[np.float32]


@dataclass(slots=True)
class Sampled:
    """What a step's rows gave."""

    token_ids: dict[int, Sequence[int]]
    """By index into `StepPlan.rows`, for each row that samples and whose grammar was ready: the token at `end`, then one
    after each token of the draft, fewer if from some logits nothing could be sampled. They hold as long as the draft before
    them has proved right. None of a failed row."""
    failures: dict[int, str] = field(default_factory=dict)
    """By index into `StepPlan.rows`: that row alone went wrong."""
    scores: dict[int, TokenScores] = field(default_factory=dict)
    """By index into `StepPlan.rows`, for the rows that ask for it."""


class ForwardFailed(Exception):
    """The step's rows could not be computed; the runner itself is sound and takes further steps."""


class Runner(Protocol):
    limits: ModelLimits

    def run(self, plan: StepPlan) -> Sampled:
        """Compute and sample. Raises ForwardFailed; after any other exception nothing may be run any more."""
