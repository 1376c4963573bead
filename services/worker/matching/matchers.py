"""Makes matchers: grammars are compiled once, off the executor's thread, and copied per sequence."""

from collections import OrderedDict
from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor, wait
from typing import Any

import numpy as np
from llguidance import LLMatcher, LLParserLimits, LLTokenizer

from services.worker.matching.matcher import BITS_PER_WORD, GrammarError, Matcher, Prototype

NUM_COMPILERS = 2
"""Grammars that are compiled at the same time: one that takes long holds up no other."""

PATIENCE_S = 0.005
"""How long a step waits for grammars and masks once its logits are there. Rows for which that is too soon sample in the next."""


class PendingMasks:
    """The masks of one step's rows, while they are being filled and the model runs."""

    def __init__(self, matchers: Sequence[Matcher]) -> None:
        self._matchers = matchers

    def wait(self) -> None:
        """Return when all masks are there, or patience is over: see `Matcher.has_masks`."""
        pending: set[Future[Any]] = {job for matcher in self._matchers if (job := matcher.pending) is not None}
        wait(pending, PATIENCE_S)
        for matcher in self._matchers:
            # A grammar that was compiled while the model ran.
            if matcher.wants_masks:
                matcher.fill_masks()


class Matchers:
    """Prototypes of the last `max_grammars` grammars, and the threads that compile them and fill masks."""

    def __init__(
        self,
        open_tokenizer: Callable[[], LLTokenizer],
        vocab_size: int,
        *,
        jump_forward: bool = True,
        max_grammars: int = 256,
        limits: LLParserLimits | None = None,
    ) -> None:
        """`open_tokenizer` is called in a compiling thread; what it raises fails the sequences that need it."""
        self._num_words = -(-vocab_size // BITS_PER_WORD)
        self._jump_forward = jump_forward
        self._max_grammars = max_grammars
        self._limits = limits
        self._compiling = ThreadPoolExecutor(NUM_COMPILERS, thread_name_prefix="grammar")
        self._filling = ThreadPoolExecutor(1, thread_name_prefix="mask")
        self._tokenizer = self._compiling.submit(open_tokenizer)
        self._prototypes: OrderedDict[str, Future[Prototype]] = OrderedDict()

    @property
    def num_grammars(self) -> int:
        return len(self._prototypes)

    def open(self, grammar: str, generated: Sequence[int]) -> Matcher:
        """A matcher that has seen `generated`; it is ready as soon as its grammar is compiled."""
        matcher = Matcher(self._prototype(grammar), generated, self._num_words, self._jump_forward)
        matcher.prepare()
        return matcher

    def fill(self, matchers: Sequence[Matcher]) -> PendingMasks:
        """Start to fill the masks of `matchers`, as far as their grammars are compiled."""
        wanting = [matcher for matcher in matchers if matcher.wants_masks]
        if wanting:
            job = self._filling.submit(_fill_all, wanting)
            for matcher in wanting:
                matcher.filled_by(job)
        return PendingMasks(matchers)

    def close(self) -> None:
        for pool in (self._compiling, self._filling):
            pool.shutdown(wait=False, cancel_futures=True)

    def _prototype(self, grammar: str) -> Future[Prototype]:
        prototype = self._prototypes.get(grammar)
        if prototype is None:
            prototype = self._prototypes[grammar] = self._compiling.submit(self._compile, grammar)
            if len(self._prototypes) > self._max_grammars:
                self._prototypes.popitem(last=False)
        else:
            self._prototypes.move_to_end(grammar)
        return prototype

    def _compile(self, grammar: str) -> Prototype:
        """Runs in a compiling thread. Raises GrammarError."""
        try:
            tokenizer = self._tokenizer.result()
        except (OSError, ValueError) as error:
            raise GrammarError(f"this worker has no tokenizer for constraints: {error}") from error
        prototype = LLMatcher(tokenizer, grammar, log_level=0, limits=self._limits)
        # The first mask takes many times longer than the next; copies share what it has worked out.
        words = np.empty(self._num_words, np.int32)
        if not prototype.is_error():
            prototype.unsafe_compute_mask_ptr(words.ctypes.data, words.nbytes)
        if prototype.is_error():
            raise GrammarError(f"the grammar cannot be compiled: {prototype.get_error().strip()}")
        return Prototype(prototype, tokenizer)


def _fill_all(matchers: Sequence[Matcher]) -> None:
    for matcher in matchers:
        matcher.fill_masks()
