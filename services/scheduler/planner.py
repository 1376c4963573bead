"""Decides what the next step computes: decode rows first, then prefill chunks up to the token budget.

Admission, growth and retraction happen here, because all three are about the same scarce thing: slots for the rows of the
step that is being put together.
"""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from itertools import count

import msgspec
import numpy as np

from services.scheduler.extents import pack_extents, slice_extents
from services.scheduler.kv_cache import KvCache
from services.scheduler.request import Request, SharedPrefix
from services.scheduler.token_buffer import TokenArray
from services.scheduler.waiting import WaitingQueue
from shared.messages.execution import ExtentUpdate, NewSequence, Step
from shared.messages.packing import pack_int32


@dataclass(frozen=True, slots=True)
class Limits:
    """What bounds a step and how slots are handed out."""

    max_running_reqs: int = 256
    max_prefill_tokens: int = 512
    """A step's token budget: it bounds how long running streams wait for their next token."""
    reserve_slots: int = 64
    """Slots added at a time to a growing sequence, so that its KV stays in long runs."""
    min_shared_prefix: int = 16
    """A request waits for another that computes at least this many of its uncached tokens."""


class Row(msgspec.Struct, frozen=True, gc=False):
    """One row of a step, kept until its result arrives. A Struct, because there are hundreds a step."""

    request: Request
    handle: int
    length: int
    """Tokens to compute; of a decode row 1, or more if the worker was forced to take more."""
    samples: bool
    end: int
    """Positions below it have KV once the row is done; of a decode row: at least."""


@dataclass(slots=True)
class PlannedStep:
    decode: list[Row] = field(default_factory=list)
    extend: list[Row] = field(default_factory=list)
    num_tokens: int = 0
    admitted: list[Request] = field(default_factory=list)
    has_retracted: bool = False

    @property
    def rows(self) -> list[Row]:
        """In the order of the step's rows and of its result."""
        return self.decode + self.extend


class OutputExpectation:
    """How much of their remaining length limit running requests are expected to use, as a share.

    The limit itself is a poor estimate (most requests end early), and being wrong costs a retraction. So the share falls
    while all goes well and jumps when a retraction shows that it was too low; the rule is SGLang's `new_token_ratio`.
    """

    INITIAL, LOWEST, DECAY, PENALTY = 0.5, 0.1, 0.001, 0.2

    def __init__(self) -> None:
        self.share = self.INITIAL

    def step_went_well(self) -> None:
        self.share = max(self.LOWEST, self.share - self.DECAY)

    def retracted(self) -> None:
        self.share = min(1.0, self.share + self.PENALTY)

    def slots(self, requests: Iterable[Request]) -> int:
        """Slots that the requests are expected to need beyond those they hold."""
        share, needed = self.share, 0
        for request in requests:
            held = request.placement.num_slots if request.placement else request.seq_len
            more = int((request.max_new_tokens - request.seq_len + request.prompt_len) * share) - held + request.seq_len
            if more > 0:
                needed += more
        return needed


class Planner:
    """Turns waiting and running requests into steps. Owns the running set; the core owns everything else."""

    def __init__(self, limits: Limits, waiting: WaitingQueue) -> None:
        self.limits = limits
        self.waiting = waiting
        self.running: dict[int, Request] = {}
        """By handle, in order of admission: the last one is the youngest."""
        self.expectation = OutputExpectation()
        self.num_retracted_reqs = 0
        self._handles = count(1)
        self._released: list[int] = []

    def forget_worker(self) -> None:
        """A new epoch: the worker knows no sequence."""
        self.running.clear()
        self._released.clear()

    def detach(self, request: Request, cache: KvCache, now_step: int) -> None:
        """Take a running request off the worker; what has been computed of it stays cached."""
        assert request.placement is not None
        cache.commit(request.placement, request.tokens.view(0, request.computed_len), now_step)
        cache.release(request.placement)
        del self.running[request.handle]
        self._released.append(request.handle)
        request.placement = None
        request.handle = 0
        request.dirty_from = None

    def plan(self, cache: KvCache, now_ms: int, now_step: int) -> PlannedStep | None:
        """The next step, or None when nothing can run."""
        planned = PlannedStep()
        self._decode(planned, cache, now_step)
        budget = max(1, self.limits.max_prefill_tokens - planned.num_tokens)
        for request in self.running.values():
            if budget == 0:
                break
            if request.prefill_left:
                budget -= self._extend(planned, request, budget)
        if planned.has_retracted:
            self.expectation.retracted()
        elif budget and self.waiting:
            self._admit(planned, cache, budget, now_ms, now_step)
        if not planned.num_tokens:
            return None
        self.expectation.step_went_well()
        return planned

    def message(self, planned: PlannedStep, epoch: int, seq: int) -> Step:
        """The step as the worker gets it, with everything that has changed since the last one."""
        update = []
        for request in self.running.values():
            if (start := request.dirty_from) is not None:
                placement = request.placement
                assert placement is not None
                extents = slice_extents(placement.extents, start, placement.num_slots)
                update.append(ExtentUpdate(handle=request.handle, start=start, extents=pack_extents(extents)))
                request.dirty_from = None
        released, self._released = self._released, []
        return Step(
            epoch=epoch,
            seq=seq,
            decode=pack_int32(row.handle for row in planned.decode),
            extend=pack_int32(number for row in planned.extend for number in (row.handle, row.length)),
            admit=tuple(_new_sequence(request) for request in planned.admitted),
            update=tuple(update),
            release=pack_int32(released),
        )

    # ---------------------------------------------------------------- decode

    def _decode(self, planned: PlannedStep, cache: KvCache, now_step: int) -> None:
        # Oldest first: a retraction takes the youngest, which has no row in this step yet.
        for request in list(self.running.values()):
            seq_len = request.seq_len + request.num_samples_in_flight
            if request.sent_len < request.admitted_len or seq_len - request.prompt_len >= request.max_new_tokens:
                continue  # prefill goes on, or what is under way reaches the length limit
            if request.placement is None:
                continue  # retracted a moment ago, for an older one's sake
            if seq_len <= request.placement.num_slots or self._make_room(planned, request, cache, now_step):
                self._add_row(planned.decode, planned, request, 1, True)

    def _make_room(self, planned: PlannedStep, request: Request, cache: KvCache, now_step: int) -> bool:
        """Slots up to the token that this decode row computes, retracting the youngest if need be."""
        while True:
            placement = request.placement
            assert placement is not None
            missing = request.seq_len + request.num_samples_in_flight - placement.num_slots
            wanted = max(missing, min(self.limits.reserve_slots, request.max_new_tokens - request.num_generated))
            start = placement.num_slots
            if cache.grow(placement, wanted, missing):
                request.mark_dirty(start)
                return True
            youngest = next(reversed(self.running.values()))
            self._retract(planned, youngest, cache, now_step)
            if youngest is request:
                return False

    def _retract(self, planned: PlannedStep, request: Request, cache: KvCache, now_step: int) -> None:
        assert len(self.running) > 1, "the pool holds any one request alone: its limit was capped at submission"
        self.detach(request, cache, now_step)
        request.num_retractions += 1
        request.match_version = -1
        self.waiting.add_first(request)
        self.num_retracted_reqs += 1
        planned.has_retracted = True

    # ---------------------------------------------------------------- prefill

    def _extend(self, planned: PlannedStep, request: Request, budget: int) -> int:
        """Add the request's next chunk; returns its length."""
        length = min(budget, request.prefill_left)
        reaches_end = length == request.prefill_left
        self._add_row(planned.extend, planned, request, length, samples=reaches_end and request.max_new_tokens > 0)
        return length

    def _admit(self, planned: PlannedStep, cache: KvCache, budget: int, now_ms: int, now_step: int) -> None:
        expected = self.expectation.slots(self.running.values())
        leaders = [request for request in self.running.values() if request.computed_len < request.admitted_len]
        for request in self.waiting.candidates(cache.tree, now_ms):
            if budget == 0 or len(self.running) >= self.limits.max_running_reqs:
                return
            if request.num_rows_in_flight or self._must_wait(request, leaders):
                continue
            expected += self.expectation.slots([request])
            # Alone, a request may use everything: nothing else could ever make more room.
            available = cache.num_available_slots - (expected if self.running else 0)
            if not self._place(request, cache, available, now_step):
                return
            self.waiting.remove(request)
            planned.admitted.append(request)
            leaders.append(request)
            if request.admitted_ms is None:
                request.admitted_ms = now_ms
            budget -= self._extend(planned, request, budget)

    def _place(self, request: Request, cache: KvCache, available: int, now_step: int) -> bool:
        tokens, limit = request.tokens.view(), request.cacheable_limit
        # A cached prefix in use by others takes no slots; an evictable one takes as many as it counts as available.
        match_len = cache.tree.match_len(request.submit.namespace, tokens, limit)
        if len(tokens) - match_len > available:
            return False
        spare = min(self.limits.reserve_slots, request.max_new_tokens - request.num_generated)
        placement = cache.place(request.submit.namespace, tokens, limit, spare, now_step) or (
            cache.place(request.submit.namespace, tokens, limit, 0, now_step) if spare else None
        )
        if placement is None:
            return False
        request.placement = placement
        request.handle = next(self._handles)
        request.admitted_len = len(tokens)
        request.sent_len = request.computed_len = placement.tree_len
        request.dirty_from = None
        request.behind = None
        if request.cached_tokens is None:
            request.cached_tokens = min(placement.tree_len, request.prompt_len)
        self.running[request.handle] = request
        return True

    def _must_wait(self, request: Request, leaders: Sequence[Request]) -> bool:
        """Whether another request is computing a prefix of this one that it can soon share."""
        if request.behind is not None and request.behind.is_pending:
            return True
        request.behind = self._shared_prefix(request, leaders)
        return request.behind is not None

    def _shared_prefix(self, request: Request, leaders: Sequence[Request]) -> SharedPrefix | None:
        tokens = request.tokens.view(0, request.cacheable_limit)
        for leader in leaders:
            if leader.submit.namespace != request.submit.namespace:
                continue
            own = leader.computed_len
            probe = own + self.limits.min_shared_prefix - 1
            if probe >= min(len(tokens), leader.admitted_len) or tokens[probe] != leader.tokens.view()[probe]:
                continue
            length = _common_prefix(tokens, leader.tokens.view(0, leader.admitted_len))
            # What is shared must not be in the tree already, and be worth the wait.
            if length - max(own, request.match_len) >= self.limits.min_shared_prefix:
                return SharedPrefix(leader, leader.handle, length)
        return None

    @staticmethod
    def _add_row(rows: list[Row], planned: PlannedStep, request: Request, length: int, samples: bool) -> None:
        request.sent_len += length
        request.num_rows_in_flight += 1
        request.num_samples_in_flight += samples
        assert request.placement is not None and request.sent_len <= request.placement.num_slots
        rows.append(Row(request, request.handle, length, samples, request.sent_len))
        planned.num_tokens += length


def _common_prefix(a: TokenArray, b: TokenArray) -> int:
    """How many tokens `a` and `b` have in common at the front."""
    length = min(len(a), len(b))
    differs = a[:length] != b[:length]
    first = int(np.argmax(differs)) if length else 0
    return first if length and differs[first] else length


def _new_sequence(request: Request) -> NewSequence:
    placement = request.placement
    assert placement is not None
    return NewSequence(
        handle=request.handle,
        token_ids=request.tokens.pack(),
        prompt_len=request.prompt_len,
        prefix_len=placement.tree_len,
        extents=pack_extents(placement.extents),
        max_new_tokens=request.max_new_tokens,
        sampling=request.sampling,
        grammar=request.submit.grammar,
    )
