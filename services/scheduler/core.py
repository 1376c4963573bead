"""The scheduler of one replica as a state machine: events in, effects out, no I/O and no clock of its own.

Two steps may be under way at a time. Step N+1 is sent while N runs, without knowing N's tokens: a decode row means "the last
token of that sequence", which the worker holds. Results are taken in step order; whatever they change (tokens, cached
prefixes, freed slots) shows in the next step that is planned.
"""

from collections.abc import Sequence
from typing import assert_never

from services.scheduler import events as ev
from services.scheduler.history import Ended, History
from services.scheduler.kv_cache import KvCache
from services.scheduler.kv_feed import KvFeed
from services.scheduler.outbox import Outbox
from services.scheduler.planner import Planner, Row
from services.scheduler.refusal import refusal
from services.scheduler.reports import load_report, max_total_tokens, usage_record
from services.scheduler.request import Request
from services.scheduler.settings import Settings
from services.scheduler.step_window import StepWindow
from services.scheduler.token_buffer import TokenBuffer
from services.scheduler.waiting import WaitingQueue
from shared.messages.cluster import KvSnapshot, Load
from shared.messages.execution import Lease, Resend, RowEnd, StepResult
from shared.messages.generation import (
    UNKNOWN_REQUEST,
    Abort,
    Accepted,
    CacheFlushed,
    Drain,
    Emission,
    Finish,
    FinishReason,
    RejectCode,
    Rejected,
    Resync,
    Submit,
)
from shared.messages.packing import INT32_BYTES, num_int32, unpack_int32

RUNNING = int(RowEnd.RUNNING)
"""Compared once per row: a plain number is compared faster than a member of an enum."""


class SchedulerCore:
    """Owns the requests of a replica. Invariant: each is waiting, running or forgotten, and no slot is ever lost."""

    def __init__(self, settings: Settings) -> None:
        self.settings = settings
        self.requests: dict[str, Request] = {}
        self.waiting = WaitingQueue(settings.order_key)
        self.planner = Planner(settings.limits, self.waiting)
        self.window = StepWindow(settings.window, settings.min_step_deadline_ms)
        self.cache: KvCache | None = None
        self.lease: Lease | None = None
        self.is_draining = False
        self._worker_lost_ms = 0
        self._history = History()
        self._kv_feed = KvFeed(settings.replica_id)
        self._next_load_ms = 0
        self._outbox = Outbox(settings.replica_id)

    # ---------------------------------------------------------------- the one entry

    def step(self, now_ms: int, events: Sequence[ev.Event]) -> list[ev.Effect]:
        """Take in what happened, then decide what runs next and who must be told. `now_ms` is Unix time."""
        for event in events:
            match event:
                case ev.StepDone(result=result):
                    self._take_result(result, now_ms)
                case ev.Submitted(submit=submit, reply_to=reply_to):
                    self._submit(submit, reply_to, now_ms)
                case Abort(request_id=request_id):
                    self._end_early(request_id, FinishReason.ABORT, now_ms)
                case Finish(request_id=request_id, num_tokens=num_tokens):
                    self._end_early(request_id, FinishReason.STOP, now_ms, num_tokens)
                case Resync():
                    self._resync(event)
                case Drain():
                    self.is_draining = True
                case ev.FlushRequested(reply_to=reply_to):
                    self._flush(reply_to)
                case ev.WorkerJoined(lease=lease):
                    self._worker_joined(lease, now_ms)
                case ev.WorkerLost(is_death=is_death):
                    self._worker_lost(now_ms, is_death=is_death)
                case ev.GatewayLost(gateway_id=gateway_id):
                    for request in [r for r in self.requests.values() if r.submit.gateway_id == gateway_id]:
                        self._finish(request, FinishReason.ABORT, now_ms)
                case ev.Reconnected():
                    self._reconnected(now_ms)
                case ev.Tick():
                    self._check_deadlines(now_ms)
                case _:
                    assert_never(event)
        self._send_steps(now_ms)
        self._publish(now_ms)
        if self.cache is not None:
            self.cache.check_balance()
        return self._outbox.take(self.epoch, self.window.last_seq)

    @property
    def epoch(self) -> int:
        """Of the current lease; 0 without a worker."""
        return self.lease.epoch if self.lease else 0

    @property
    def is_idle(self) -> bool:
        """No request is left, and no step is under way."""
        return not self.requests and not len(self.window)

    def load(self) -> Load:
        accepting = self.lease is not None and not self.is_draining
        return load_report(self.settings.replica_id, self.lease, self.planner, self.cache, self.window, accepting)

    def kv_snapshot(self) -> KvSnapshot:
        """What is cached, as of the last KvEvents."""
        return self._kv_feed.snapshot(self.epoch, self.cache.tree.all_hashes() if self.cache else [])

    # ---------------------------------------------------------------- requests come and go

    def _submit(self, submit: Submit, reply_to: str, now_ms: int) -> None:
        # The same Submit may come twice: its tokens are on their way, or can be had by a Resync.
        is_known = submit.request_id in self.requests or self._history.get(submit.request_id) is not None
        reply = None if is_known else self._rejection(submit, now_ms)
        if reply is None and not is_known:
            prompt_len = num_int32(submit.prompt)
            request = Request(
                submit=submit,
                tokens=TokenBuffer(submit.prompt + submit.resumed),
                prompt_len=prompt_len,
                max_new_tokens=min(submit.max_new_tokens, max_total_tokens(self.lease) - prompt_len),
                arrived_ms=now_ms,
                num_worker_deaths=submit.num_worker_deaths,
            )
            self.requests[submit.request_id] = request
            self.waiting.add(request)
            self._next_load_ms = now_ms
        if reply_to:
            accepted = Accepted(replica_id=self.settings.replica_id, epoch=self.epoch)
            self._outbox.add(ev.Reply(reply_to, reply or accepted))

    def _rejection(self, submit: Submit, now_ms: int) -> Rejected | None:
        if self.lease is None:
            return Rejected(code=RejectCode.NO_REPLICA, message="the replica has no worker yet", retry_after_s=1.0)
        if self.is_draining:
            return Rejected(code=RejectCode.DRAINING, message="the replica is shutting down", retry_after_s=1.0)
        if len(self.waiting) >= self.settings.max_waiting_reqs:
            message = f"{len(self.waiting)} requests are waiting, the limit is {self.settings.max_waiting_reqs}"
            return Rejected(code=RejectCode.QUEUE_FULL, message=message, retry_after_s=1.0)
        limit_of = "context" if max_total_tokens(self.lease) == self.lease.context_len else "KV pool"
        return refusal(submit, max_total_tokens(self.lease), limit_of, now_ms)

    def _end_early(self, request_id: str, reason: FinishReason, now_ms: int, num_tokens: int | None = None) -> None:
        # An unknown request has ended by itself: the message trailed its finish.
        if (request := self.requests.get(request_id)) is not None:
            self._finish(request, reason, now_ms, num_counted=num_tokens)

    def _finish(
        self,
        request: Request,
        reason: FinishReason,
        now_ms: int,
        emission: Emission | None = None,
        error: str | None = None,
        num_counted: int | None = None,
    ) -> None:
        """End a request in whatever phase it is. Rows of it that are under way are ignored when they return.

        `num_counted` generated tokens count as used, when the gateway cut the rest; by default all.
        """
        assert request.finish is None
        request.finish = reason
        if request.placement is not None:
            assert self.cache is not None
            self.planner.detach(request, self.cache, self.window.num_steps)
        else:
            self.waiting.remove(request)
        del self.requests[request.request_id]
        emission = emission or Emission(
            request_id=request.request_id,
            position=request.num_generated,
            token_ids=b"",
            finish=reason,
            cached_tokens=request.cached_tokens or 0,
            error=error,
        )
        self._outbox.emit(request.submit.gateway_id, emission)
        self._history.add(Ended(request.tokens.pack(request.prompt_len), emission))
        self._outbox.add(usage_record(request, num_counted, now_ms, error))
        self._next_load_ms = now_ms

    def _resync(self, message: Resync) -> None:
        if (request := self.requests.get(message.request_id)) is not None:
            emission = Emission(
                request_id=request.request_id,
                position=message.position,
                token_ids=request.tokens.pack(request.prompt_len + message.position),
                cached_tokens=request.cached_tokens or 0,
            )
            self._outbox.emit(message.gateway_id, emission)
        elif (ended := self._history.get(message.request_id)) is not None:
            self._outbox.emit(message.gateway_id, ended.from_position(message.position))
        else:
            self._disown(message.request_id, message.position, message.gateway_id)

    def _disown(self, request_id: str, position: int, gateway_id: str, num_worker_deaths: int = 0) -> None:
        """Say that the request is not here: its gateway then looks for a replica that takes it."""
        emission = Emission(
            request_id=request_id,
            position=position,
            token_ids=b"",
            finish=FinishReason.ERROR,
            error=UNKNOWN_REQUEST,
            num_worker_deaths=num_worker_deaths,
        )
        self._outbox.emit(gateway_id, emission)

    def _hand_back_all(self) -> None:
        """Let others compute what waits here for a worker.

        No history is kept, for this replica may get its requests again. No usage either: whoever ends a request bills all.
        """
        for request in list(self.requests.values()):
            self.waiting.remove(request)
            del self.requests[request.request_id]
            gateway_id, num_deaths = request.submit.gateway_id, request.num_worker_deaths
            self._disown(request.request_id, request.num_generated, gateway_id, num_deaths)

    def _flush(self, reply_to: str) -> None:
        freed = self.cache.flush() if self.cache else 0
        kept = self.cache.tree.num_slots if self.cache else 0
        self._outbox.add(ev.Reply(reply_to, CacheFlushed(num_freed_tokens=freed, num_kept_tokens=kept)))

    def _reconnected(self, now_ms: int) -> None:
        if (seq := self.window.postpone(now_ms)) is not None:
            self._outbox.add(ev.AskResend(Resend(epoch=self.epoch, seq=seq)))

    def _check_deadlines(self, now_ms: int) -> None:
        for request in list(self.requests.values()):
            deadline_ms = request.submit.deadline_ms
            if deadline_ms is not None and deadline_ms <= now_ms:
                phase = "queued" if request.admitted_ms is None else "generating"
                self._finish(request, FinishReason.ERROR, now_ms, error=f"the deadline passed while {phase}")
        if self.lease is None and now_ms - self._worker_lost_ms >= self.settings.worker_wait_ms:
            self._hand_back_all()
        match self.window.overdue(now_ms):
            case None:
                pass
            case (seq, 1):
                self._outbox.add(ev.AskResend(Resend(epoch=self.epoch, seq=seq)))
            case (seq, _):
                reason = f"step {seq} of epoch {self.epoch} was not answered in time"
                self._worker_lost(now_ms)
                self._outbox.add(ev.ReclaimWorker(reason))

    # ---------------------------------------------------------------- steps and results

    def _send_steps(self, now_ms: int) -> None:
        while self.cache is not None and not self.window.is_full:
            planned = self.planner.plan(self.cache, now_ms, self.window.num_steps + 1)
            if planned is None:
                return
            seq = self.window.send(planned, now_ms)
            self._outbox.add(ev.SendStep(self.planner.message(planned, self.epoch, seq)))

    def _take_result(self, result: StepResult, now_ms: int) -> None:
        if result.epoch != self.epoch:
            return  # of a lease that is over
        planned = self.window.take(result, now_ms)
        if planned is None:
            if (seq := self.window.missed(result)) is not None:
                self._outbox.add(ev.AskResend(Resend(epoch=self.epoch, seq=seq)))
            return
        start = 0
        for row, num_new, end in zip(planned.rows, unpack_int32(result.counts), result.ends, strict=True):
            stop = start + num_new * INT32_BYTES
            self._row_done(row, result.token_ids[start:stop], end, result, now_ms)
            start = stop
        assert start == len(result.token_ids)

    def _row_done(self, row: Row, new_ids: bytes, end: int, result: StepResult, now_ms: int) -> None:
        """Take one row's tokens (int32) in; `end` is a RowEnd. Runs once per row and step, so it avoids all that it can."""
        request = row.request
        request.num_rows_in_flight -= 1
        request.num_samples_in_flight -= row.samples
        if request.finish is not None:
            return  # ended while the row was under way
        finish = None
        if end != RUNNING:
            if end == RowEnd.FAILED:
                error = dict(result.failures).get(row.handle, "the worker gave no reason")
                self._finish(request, FinishReason.ERROR, now_ms, error=error)
                return
            assert end != RowEnd.DROPPED, "the worker drops rows of ended sequences only"
            finish = FinishReason.STOP if end == RowEnd.STOP else FinishReason.LENGTH
        # A request that was retracted meanwhile keeps its new tokens: they are true, only their KV is gone.
        position = request.seq_len - request.prompt_len
        if new_ids:
            request.seq_len = request.tokens.append(new_ids)
            if request.first_token_ms is None:
                request.first_token_ms = now_ms
        if request.handle == row.handle:
            self._confirm(request, row, result.without_kv.get(row.handle, 0))
            if request.max_new_tokens == 0 and row.end == request.admitted_len:
                finish = FinishReason.LENGTH
        prompt_logprobs = result.prompt_logprobs.get(row.handle) if position == 0 else None
        if not (new_ids or finish or prompt_logprobs):
            return
        emission = Emission(
            request_id=request.submit.request_id,
            position=position,
            token_ids=new_ids,
            finish=finish,
            cached_tokens=request.cached_tokens or 0,
            stop_token=request.tokens.last if finish is FinishReason.STOP else None,
            logprobs=result.logprobs.get(row.handle),
            prompt_logprobs=prompt_logprobs,
        )
        if finish is None:
            self._outbox.emit(request.submit.gateway_id, emission)
        else:
            self._finish(request, finish, now_ms, emission)

    def _confirm(self, request: Request, row: Row, num_without_kv: int) -> None:
        """The row's KV is there: of a row that samples all but the last token, however many tokens it brought.

        Of a request that ends with it `num_without_kv` more tokens lack theirs.
        """
        if row.samples:
            request.computed_len = request.seq_len - 1 - num_without_kv
            # A forced token takes the worker further than planned, a mask that is not ready yet holds it back.
            reached = request.computed_len + request.num_samples_in_flight
            request.sent_len = reached if reached > request.admitted_len else request.admitted_len
        else:
            request.computed_len = row.end
        if row.end <= request.admitted_len:
            assert request.placement is not None and self.cache is not None
            computed = request.tokens.view(0, request.computed_len)
            changed_from = self.cache.commit(request.placement, computed, self.window.num_steps)
            if changed_from is not None:
                request.mark_dirty(changed_from)

    # ---------------------------------------------------------------- workers come and go

    def _worker_joined(self, lease: Lease, now_ms: int) -> None:
        if self.lease is not None:
            self._worker_lost(now_ms)
        self.lease = lease
        self.cache = KvCache(lease.num_slots, self.settings.new_tree)
        self.window.restart()
        self._outbox.add(ev.PublishKv(self._kv_feed.cleared(self.epoch)))
        for request in list(self.waiting):
            if request.seq_len >= max_total_tokens(self.lease):
                error = (
                    f"{request.seq_len} tokens do not fit the new worker, which holds {max_total_tokens(self.lease)}"
                )
                self._finish(request, FinishReason.ERROR, now_ms, error=error)
            else:
                request.max_new_tokens = min(request.max_new_tokens, max_total_tokens(self.lease) - request.prompt_len)
        self._next_load_ms = now_ms

    def _worker_lost(self, now_ms: int, *, is_death: bool = True) -> None:
        """Its KV is gone: whoever ran waits again as prompt and emitted tokens, in the old order."""
        if self.lease is None:
            return
        self.lease = None
        self._worker_lost_ms = now_ms
        self.cache = None
        self.window.restart()
        displaced = list(self.planner.running.values())
        self.planner.forget_worker()
        for request in self.requests.values():
            request.num_worker_deaths += is_death and request.num_rows_in_flight > 0
            request.num_rows_in_flight = request.num_samples_in_flight = 0
            request.placement = None
            request.handle = 0
            request.dirty_from = None
            request.match_len, request.match_version = 0, -1
        for request in reversed(displaced):
            self.waiting.add_first(request)
        for request in displaced:
            if request.num_worker_deaths >= self.settings.max_worker_deaths:
                error = f"poison: under way when its worker died, {request.num_worker_deaths} times"
                self._finish(request, FinishReason.ERROR, now_ms, error=error)
        self._outbox.add(ev.PublishKv(self._kv_feed.cleared(self.epoch)))
        self._next_load_ms = now_ms

    # ---------------------------------------------------------------- what others hear

    def _publish(self, now_ms: int) -> None:
        if self.cache is not None and (kv_events := self._kv_feed.changes(self.epoch, self.cache.tree.take_events())):
            self._outbox.add(ev.PublishKv(kv_events))
        if now_ms >= self._next_load_ms:
            self._next_load_ms = now_ms + self.settings.load_interval_ms
            self._outbox.add(ev.PublishLoad(self.load()))
