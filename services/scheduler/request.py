"""One generation inside the scheduler: its tokens, where its KV lies, and which of its rows are under way."""

from dataclasses import dataclass, field

from services.scheduler.kv_cache import Placement
from services.scheduler.token_buffer import TokenBuffer
from shared.messages.generation import FinishReason, Submit
from shared.messages.sampling import SamplingParams


@dataclass(slots=True, eq=False)
class Request:
    """A request is waiting (no placement), running (placement and handle), or finished.

    Of a running request's `tokens`, `computed_len` have KV that a result has confirmed; rows that were sent but not yet
    answered reach up to `sent_len`. While it decodes, the last token is always the one that has no KV yet.
    """

    submit: Submit
    tokens: TokenBuffer
    """The prompt, then generated tokens."""
    prompt_len: int
    max_new_tokens: int
    """Capped to what context and pool can hold; counts resumed tokens."""
    arrived_ms: int

    seq_len: int = field(init=False)
    """Length of `tokens`: a plain number, because it is read many times a row."""
    placement: Placement | None = None
    handle: int = 0
    """Names the sequence towards the worker; a new one for each admission, 0 while waiting."""
    admitted_len: int = 0
    """Tokens there were at admission: prefill ends when they are sent."""
    sent_len: int = 0
    computed_len: int = 0
    num_rows_in_flight: int = 0
    num_samples_in_flight: int = 0
    dirty_from: int | None = None
    """The worker's view of the extents is out of date from this position on."""

    finish: FinishReason | None = None
    cached_tokens: int | None = None
    """Set at the first admission."""
    admitted_ms: int | None = None
    first_token_ms: int | None = None
    num_retractions: int = 0
    num_worker_deaths: int = 0
    behind: "SharedPrefix | None" = None
    """A running request computes a prefix of this waiting one."""
    match_len: int = 0
    """Cached prefix when last looked up at tree version `match_version`: an estimate for the waiting policy."""
    match_version: int = field(default=-1)

    def __post_init__(self) -> None:
        self.seq_len = len(self.tokens)

    @property
    def request_id(self) -> str:
        return self.submit.request_id

    @property
    def sampling(self) -> SamplingParams:
        return self.submit.sampling

    @property
    def num_generated(self) -> int:
        return self.seq_len - self.prompt_len

    @property
    def prefill_left(self) -> int:
        """Tokens of a running request's prefill that no step has been sent for."""
        return max(0, self.admitted_len - self.sent_len)

    @property
    def cacheable_limit(self) -> int:
        """How much of `tokens` a cached prefix may replace: the last token's logits are always needed."""
        limit = self.seq_len - 1
        start = self.sampling.prompt_logprobs_start
        if start is not None and self.num_generated == 0:
            # The logprob of a prompt token comes from the logits of its predecessor.
            limit = min(limit, max(0, start - 1))
        return limit

    def mark_dirty(self, start: int) -> None:
        """The slots of positions from `start` on have changed: the worker must hear of it before its next row."""
        self.dirty_from = start if self.dirty_from is None else min(self.dirty_from, start)

    def check_invariants(self) -> None:
        assert self.seq_len == len(self.tokens)
        if self.placement is None:
            assert self.handle == 0
            return
        assert self.handle > 0
        assert self.placement.tree_len <= self.computed_len <= self.sent_len
        assert self.computed_len < self.seq_len or self.max_new_tokens == 0
        assert self.sent_len <= self.placement.num_slots


@dataclass(frozen=True, slots=True)
class SharedPrefix:
    """`leader` is computing the first `length` tokens that a waiting request has in common with it."""

    leader: Request
    handle: int
    length: int

    @property
    def is_pending(self) -> bool:
        leader = self.leader
        return leader.handle == self.handle and leader.computed_len < min(self.length, leader.admitted_len)
