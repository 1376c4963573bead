"""The sampling controls of one sequence, in the form in which a step needs them."""

import numpy as np
from numpy.typing import NDArray

from services.worker.sampling.penalties import TokenCounts
from shared.messages.sampling import SamplingParams


class SamplingControls:
    """Built once per sequence; `accept` is told every token the sequence takes.

    A control that is off is None or empty here, so that a step can skip it for all rows at once.
    """

    def __init__(
        self,
        params: SamplingParams,
        prompt: NDArray[np.int32],
        generated: NDArray[np.int32],
        end_token_ids: tuple[int, ...],
        vocab_size: int,
    ) -> None:
        self.params = params
        self.seed = params.seed
        # The likeliest token alone survives top_k = 1: the same as greedy, ties included.
        self.greedy = params.temperature == 0 or params.top_k == 1
        self.truncates = params.top_k > 0 or params.top_p < 1 or params.min_p > 0
        self.stop_ids = frozenset(params.stop_token_ids) | (
            frozenset() if params.ignore_eos else frozenset(end_token_ids)
        )
        self.counts: TokenCounts | None = None
        if params.presence_penalty or params.frequency_penalty or params.repetition_penalty != 1:
            self.counts = TokenCounts(prompt if params.repetition_penalty != 1 else prompt[:0], generated)
        self.bias_ids = np.array([token for token, _ in params.logit_bias], np.int32)
        self.bias_values = np.array([bias for _, bias in params.logit_bias], np.float32)
        self._num_generated = len(generated)
        self._min_new_tokens = params.min_new_tokens
        self._banned_ids = np.array(sorted(token for token in self.stop_ids if token < vocab_size), np.int32)

    def accept(self, token: int) -> None:
        """The sequence has taken `token`."""
        self._num_generated += 1
        if self.counts is not None:
            self.counts.add(token)

    def allow_end(self) -> None:
        """Nothing but an end token can follow: `min_new_tokens` no longer holds."""
        self._min_new_tokens = 0

    @property
    def banned_ids(self) -> NDArray[np.int32]:
        """int32 [n]: tokens that would end the sequence before `min_new_tokens`; empty once that is reached."""
        return self._banned_ids if self._num_generated < self._min_new_tokens else self._banned_ids[:0]

    @property
    def adjusts(self) -> bool:
        """Whether this row's logits change before a token is chosen."""
        return self.counts is not None or len(self.bias_ids) > 0 or self._num_generated < self._min_new_tokens
