"""A scheduler that sends step N+1 before it has seen the result of N, and gives out slots as sparingly as it may."""

from collections import deque
from collections.abc import Mapping
from dataclasses import dataclass, field

from services.worker.engine import Engine
from shared.messages.execution import NewSequence, RowEnd, StepResult
from shared.messages.packing import num_int32, unpack_float32, unpack_int32
from tests.support.worker_steps import pack_extents, rows, step

SLOTS_APART = 4096


@dataclass
class Generated:
    """What became of one sequence."""

    token_ids: list[int] = field(default_factory=list)
    counts: list[int] = field(default_factory=list)
    """New tokens of each of its rows."""
    end: RowEnd = RowEnd.RUNNING
    failure: str = ""
    logprobs: list[float] = field(default_factory=list)
    without_kv: int = 0
    """Tokens before the last that were not computed."""


@dataclass
class _Running:
    new: NewSequence
    num_tokens: int
    """As far as results have told."""
    num_slots: int
    in_flight: int = 1
    generated: Generated = field(default_factory=Generated)


class LaggingScheduler:
    """Runs sequences to their ends. `reserve` slots are added when a sequence needs more; at least what is needed."""

    def __init__(self, engine: Engine, *, window: int = 2, reserve: int = 16) -> None:
        self.engine = engine
        self.window = window
        self.reserve = reserve
        self.num_steps = 0
        self._running: dict[int, _Running] = {}

    def run(self, news: Mapping[int, NewSequence], max_steps: int = 3000) -> dict[int, Generated]:
        """Each of `news`, by handle, from one prefill row to its end; their extents are given out here."""
        in_flight: deque[tuple[list[int], StepResult]] = deque()
        waiting = dict(news)
        finished: dict[int, Generated] = {}
        while waiting or self._running or in_flight:
            assert self.num_steps < max_steps, "still running: a livelock"
            sent = self._send(waiting)
            waiting = {}
            if sent is not None:
                in_flight.append(sent)
            if len(in_flight) == self.window or sent is None:
                self._take(*in_flight.popleft(), finished)
        return finished

    def _send(self, admit: Mapping[int, NewSequence]) -> tuple[list[int], StepResult] | None:
        update, decode = [], []
        for handle, request in self._running.items():
            if request.generated.end is not RowEnd.RUNNING:
                continue
            if len(request.generated.token_ids) + request.in_flight >= request.new.max_new_tokens:
                continue
            missing = request.num_tokens + request.in_flight - request.num_slots
            if missing > 0:
                grown = max(missing, self.reserve)
                update.append((handle, request.num_slots, [(handle * SLOTS_APART + request.num_slots, grown)]))
                request.num_slots += grown
            request.in_flight += 1
            decode.append(handle)
        extend, admitted = [], []
        for handle, new in admit.items():
            length = num_int32(new.token_ids)
            request = self._running[handle] = _Running(new, length, length + self.reserve)
            extents = pack_extents([(handle * SLOTS_APART, request.num_slots)])
            admitted.append(
                NewSequence(
                    handle=handle,
                    token_ids=new.token_ids,
                    prompt_len=new.prompt_len,
                    prefix_len=0,
                    extents=extents,
                    max_new_tokens=new.max_new_tokens,
                    sampling=new.sampling,
                    grammar=new.grammar,
                )
            )
            request.generated.token_ids = unpack_int32(new.token_ids)[new.prompt_len :]
            extend.append((handle, length))
        if not decode and not extend:
            return None
        self.num_steps += 1
        result = self.engine.run(step(self.num_steps, decode=decode, extend=extend, admit=admitted, update=update))
        assert isinstance(result, StepResult), result
        return decode + [handle for handle, _ in extend], result

    def _take(self, handles: list[int], result: StepResult, finished: dict[int, Generated]) -> None:
        for handle, row in zip(handles, rows(result), strict=True):
            request = self._running.get(handle)
            if request is None:
                assert row.end is RowEnd.DROPPED
                continue
            generated = request.generated
            request.in_flight -= 1
            request.num_tokens += len(row.tokens)
            generated.token_ids += row.tokens
            generated.counts.append(len(row.tokens))
            generated.end = row.end
            generated.without_kv = result.without_kv.get(handle, 0)
            generated.failure = dict(result.failures).get(handle, "")
            if logprobs := result.logprobs.get(handle):
                generated.logprobs += unpack_float32(logprobs.chosen)
                assert num_int32(logprobs.chosen) == len(row.tokens)
            if row.end is not RowEnd.RUNNING:
                finished[handle] = generated
                del self._running[handle]
