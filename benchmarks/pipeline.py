"""How much of the worker's time the rest of the mesh costs: `python -m benchmarks.pipeline`.

Scheduler and worker run as real processes over a real NATS; the worker's model is simulated, a step takes exactly so long. A
driver plays the gateway for 64 requests. While the executor waits, a GPU would idle: the share of waiting time is what
scheduling costs. It is printed for a window of two steps (N+1 is decided while N runs) beside a window of one.
"""

import argparse
import asyncio
import secrets
import time
from dataclasses import dataclass

from benchmarks.machine import describe_machine
from shared import subjects
from shared.bus import BusError, Delivery
from shared.messages.cluster import Heartbeat, Load, ServiceState, unpack_load
from shared.messages.generation import Accepted, Submit, unpack_frame, unpack_submit_reply
from shared.messages.packing import num_int32, pack, pack_int32
from shared.messages.sampling import SamplingParams
from shared.nats_bus import BusConfig, NatsBus
from tests.support.stack import Stack

MODEL = "simulated"
REPLICA = "bench"
TARGET_SHARE = 0.01


@dataclass
class Measured:
    window: int
    wait_share: float
    steps_per_s: float
    tokens_per_s: float


class Driver:
    """Plays a gateway: keeps `width` requests running, counts tokens, hears the scheduler's load."""

    def __init__(self, bus: NatsBus, width: int) -> None:
        self.bus = bus
        self.width = width
        self.gateway_id = secrets.token_hex(4)
        self.num_tokens = 0
        self.load: Load | None = None
        self._load_came = asyncio.Event()

    async def start(self) -> None:
        await self.bus.subscribe(subjects.gateway_frames(MODEL, self.gateway_id), self._on_frame)
        await self.bus.subscribe(subjects.replica_load(MODEL), self._on_load)

    async def beat(self) -> None:
        subject = subjects.heartbeat(MODEL, "gateway", self.gateway_id)
        heartbeat = Heartbeat(role="gateway", instance=self.gateway_id, state=ServiceState.READY)
        while True:
            await self.bus.publish(subject, pack(heartbeat))
            await asyncio.sleep(0.5)

    def _on_frame(self, delivery: Delivery) -> None:
        self.num_tokens += sum(num_int32(emission.token_ids) for emission in unpack_frame(delivery.payload).emissions)

    def _on_load(self, delivery: Delivery) -> None:
        self.load = unpack_load(delivery.payload)
        self._load_came.set()

    async def next_load(self) -> Load:
        self._load_came.clear()
        await self._load_came.wait()
        assert self.load is not None
        return self.load

    async def submit_all(self) -> None:
        for number in range(self.width):
            submit = Submit(
                request_id=f"{self.gateway_id}-{number}",
                gateway_id=self.gateway_id,
                prompt=pack_int32(range(100 + number, 164 + number)),
                max_new_tokens=100_000,
                sampling=SamplingParams(ignore_eos=True, seed=number),
            )
            reply = await self._request(pack(submit))
            assert isinstance(reply, Accepted), reply

    async def _request(self, payload: bytes) -> object:
        deadline = time.monotonic() + 30
        while True:
            try:
                subject = subjects.replica_requests(MODEL, REPLICA)
                reply = unpack_submit_reply(await self.bus.request(subject, payload, timeout_s=2))
            except BusError:
                reply = None  # the scheduler is still starting
            if isinstance(reply, Accepted) or time.monotonic() > deadline:
                return reply
            await asyncio.sleep(0.1)


async def measure(nats_url: str, window: int, width: int, seconds: float) -> Measured:
    bus = await NatsBus.connect(BusConfig(url=nats_url), name="benchmark")
    driver = Driver(bus, width)
    await driver.start()
    beating = asyncio.create_task(driver.beat())
    try:
        await driver.submit_all()
        while (await driver.next_load()).num_running_reqs < width:
            pass
        await asyncio.sleep(1)
        before, tokens, started = await driver.next_load(), driver.num_tokens, time.perf_counter()
        await asyncio.sleep(seconds)
        after, elapsed = await driver.next_load(), time.perf_counter() - started
        wait_us = after.executor_wait_us - before.executor_wait_us
        run_us = after.executor_run_us - before.executor_run_us
        return Measured(
            window,
            wait_us / (wait_us + run_us),
            (after.num_steps - before.num_steps) / elapsed,
            (driver.num_tokens - tokens) / elapsed,
        )
    finally:
        beating.cancel()
        await bus.close()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--step-ms", type=float, default=5.0)
    parser.add_argument("--width", type=int, default=64, help="requests that run at the same time")
    parser.add_argument("--seconds", type=float, default=10.0, help="measured time per window")
    parser.add_argument("--rounds", type=int, default=1)
    args = parser.parse_args()
    print(describe_machine())
    print(f"{args.width} running requests, {args.step_ms} ms a step; bound: {1000 / args.step_ms:.0f} steps/s")
    for window in [1, 2] * args.rounds:
        with Stack(model=MODEL) as stack:
            stack.start("worker", "--model-kind", "simulated", "--simulated-step-ms", str(args.step_ms))
            stack.start("scheduler", "--replica-id", REPLICA, "--overlap" if window == 2 else "--no-overlap")
            measured = asyncio.run(measure(stack.nats.url, window, args.width, args.seconds))
        share = measured.steps_per_s * args.step_ms / 1000
        print(
            f"window {window}: executor waits {measured.wait_share:6.2%} of the time   {measured.steps_per_s:6.1f} steps/s"
            f" ({share:.1%} of the bound)   {measured.tokens_per_s:8.0f} tokens/s"
            + (f"   target < {TARGET_SHARE:.0%}" if window == 2 else "")
        )


if __name__ == "__main__":
    main()
