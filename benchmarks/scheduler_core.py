"""What the scheduler's core costs per step, with a worker that answers at once.

    python -m benchmarks.scheduler_core [--running 256] [--steps 2000]

Half of the requests keep decoding; the others end and are replaced by new ones that share a few-shot prefix, so that
admission, matching, insertion and eviction are all in the figure. The bound is the 0.5 ms that the scheduler may take while
a step of a few milliseconds runs.
"""

import argparse
import gc
import statistics
import time
from itertools import count
from random import Random

from benchmarks.machine import describe_machine
from services.scheduler import events as ev
from services.scheduler.actor import GC_THRESHOLD
from services.scheduler.core import SchedulerCore
from services.scheduler.planner import Limits
from services.scheduler.settings import Settings
from shared.messages.execution import Lease, RowEnd, Step, StepResult
from shared.messages.generation import Submit
from shared.messages.packing import pack, pack_int32, unpack_int32

BOUND_MS = 0.5


class InstantWorker:
    """One token for each row (prompts here fit one chunk each), ends at the length limit."""

    def __init__(self) -> None:
        self._left: dict[int, int] = {}

    def answer(self, step: Step) -> StepResult:
        for new in step.admit:
            self._left[new.handle] = new.max_new_tokens
        handles = unpack_int32(step.decode) + unpack_int32(step.extend)[::2]
        for handle in handles:
            self._left[handle] -= 1
        return StepResult(
            epoch=step.epoch,
            seq=step.seq,
            counts=pack_int32([1] * len(handles)),
            token_ids=pack_int32([17] * len(handles)),
            ends=bytes(RowEnd.RUNNING if self._left[handle] else RowEnd.LENGTH for handle in handles),
            run_us=5000,
        )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--running", type=int, default=256)
    parser.add_argument("--steps", type=int, default=2000)
    args = parser.parse_args()
    gc.freeze()
    gc.set_threshold(GC_THRESHOLD)
    random = Random(1)
    limits = Limits(max_running_reqs=args.running, max_prefill_tokens=8192)
    core = SchedulerCore(Settings(replica_id="r", limits=limits))
    lease = Lease(group="w", epoch=1, num_slots=1_000_000, context_len=8192, vocab_size=49152, end_token_ids=(2,))
    core.step(0, [ev.WorkerJoined(lease)])
    prefix = [random.randrange(49152) for _ in range(400)]
    numbers = count()
    worker = InstantWorker()

    def new_request() -> ev.Submitted:
        number = next(numbers)
        prompt = prefix + [random.randrange(49152) for _ in range(100)]
        limit = 100_000 if number < args.running // 2 else random.randrange(16, 256)
        return ev.Submitted(
            Submit(request_id=f"request-{number}", gateway_id="g", prompt=pack_int32(prompt), max_new_tokens=limit)
        )

    pending = [e.step for e in core.step(0, [new_request() for _ in range(args.running)]) if isinstance(e, ev.SendStep)]
    core_ms, message_ms, sizes, rows = [], [], [], []
    for now_ms in range(1, args.steps + 200):
        result = worker.answer(pending.pop(0))
        result_rows = len(result.ends)
        arrivals = [new_request() for _ in range(args.running - len(core.requests))]
        started = time.perf_counter()
        effects = core.step(now_ms * 5, [ev.StepDone(result), *arrivals])
        decided = time.perf_counter()
        packed = [pack(e.step) for e in effects if isinstance(e, ev.SendStep)]
        packed += [pack(e.frame) for e in effects if isinstance(e, ev.SendFrame)]
        sent = time.perf_counter()
        pending += [e.step for e in effects if isinstance(e, ev.SendStep)]
        if now_ms >= 200:
            core_ms.append((decided - started) * 1e3)
            message_ms.append((sent - decided) * 1e3)
            sizes.append(sum(map(len, packed)))
            rows.append(result_rows)
    core_ms.sort()
    print(describe_machine())
    print(
        f"{args.running} running requests, {args.steps} steps, {next(numbers)} requests, {statistics.mean(rows):.0f} rows a step"
    )
    median, p99 = statistics.median(core_ms), core_ms[int(len(core_ms) * 0.99)]
    print(
        f"core      {median:7.3f} ms a step median, {p99:7.3f} ms p99   (bound {BOUND_MS} ms: {median / BOUND_MS:.0%})"
    )
    print(
        f"encoding  {statistics.median(message_ms):7.3f} ms a step median, {statistics.median(sizes) / 1024:.1f} KiB of messages"
    )


if __name__ == "__main__":
    main()
