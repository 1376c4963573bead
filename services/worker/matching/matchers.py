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

NUM_FILLERS = 2
"""Threads that fill masks when a step waits for them: then the model does not need the cores."""

PATIENCE_S = 0.005
"""How long a step waits for grammars and masks once its logits are there. Rows for which that is too soon sample in the next."""


class StepMasks:
    """The masks of one step's rows: some are being filled while the model runs, others when they turn out to be needed."""

    def __init__(self, pool: ThreadPoolExecutor, constrained: Sequence[Matcher], ahead: Sequence[Matcher]) -> None:
        """Starts to fill those of `ahead`, as far as their grammars are compiled."""
        self._pool = pool
        self._constrained = constrained
        self._ahead = ahead
        wanting = [matcher for matcher in ahead if matcher.wants_masks]
        if wanting:
            self._submit(wanting)

    def wait(self) -> None:
        """Return when all grammars are compiled and all masks of `ahead` are there, or patience is over."""
        _wait(self._constrained)
        # Grammars that were compiled while the model ran.
        self.fill(self._ahead)

    def fill(self, matchers: Sequence[Matcher]) -> None:
        """Fill the masks that `matchers` lack now, for as long as patience lasts: see `Matcher.has_masks`."""
        wanting = [matcher for matcher in matchers if matcher.wants_masks]
        if wanting:
            for start in range(min(NUM_FILLERS, len(wanting))):
                self._submit(wanting[start::NUM_FILLERS])
            _wait(wanting)

    def _submit(self, matchers: Sequence[Matcher]) -> None:
        job = self._pool.submit(_fill_all, matchers)
        for matcher in matchers:
            matcher.filled_by(job)


def _wait(matchers: Sequence[Matcher]) -> None:
    """For as long as patience lasts. What was late before is not waited for again: it has cost the other rows enough."""
    jobs = (matcher.pending for matcher in matchers if not matcher.is_late)
    pending: set[Future[Any]] = {job for job in jobs if job is not None}
    wait(pending, PATIENCE_S)
    for matcher in matchers:
        matcher.prepare()
        matcher.is_late = matcher.is_busy


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
        self._filling = ThreadPoolExecutor(NUM_FILLERS, thread_name_prefix="mask")
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

    def masks(self, constrained: Sequence[Matcher], ahead: Sequence[Matcher]) -> StepMasks:
        """For a step in which the sequences of `constrained` sample; those of `ahead` are sure or likely to need their masks."""
        return StepMasks(self._filling, constrained, ahead)

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
