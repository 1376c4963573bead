"""Keeps the mesh's processes alive: starts them together, restarts what dies, stops all in order."""

import asyncio
import time
from collections.abc import Callable, Sequence

from radixmesh.errors import CommandError
from radixmesh.serve.process import Output, Process, ProcessSpec, describe_exit

_STAGE_RESERVE_S = 0.5
"""Time to stop that each later stage keeps when an earlier one takes too long."""
_REAP_S = 1.0
"""A killed process is gone at once, unless the kernel itself is stuck."""


class RestartPolicy:
    """How long to wait before a restart: doubling delays, and no more after too many deaths in a short time."""

    def __init__(
        self, *, max_deaths: int = 5, window_s: float = 120.0, first_delay_s: float = 0.5, max_delay_s: float = 8.0
    ) -> None:
        self._max_deaths = max_deaths
        self._window_s = window_s
        self._first_delay_s = first_delay_s
        self._max_delay_s = max_delay_s
        self._deaths: list[float] = []

    def delay_after_death(self, now_s: float) -> float | None:
        """Seconds until the restart; None when it has died too often to try again."""
        self._deaths = [died_s for died_s in self._deaths if now_s - died_s < self._window_s] + [now_s]
        if len(self._deaths) > self._max_deaths:
            return None
        return float(min(self._max_delay_s, self._first_delay_s * 2 ** (len(self._deaths) - 1)))


class Supervisor:
    """The children of one `radixmesh serve`.

    Until `mesh_ready` is called a death means that the mesh cannot start: `wait` then fails at once. Later deaths are
    reported and answered with a restart, until one process dies too often.
    """

    def __init__(self, *, output: Output, report: Callable[[str], None]) -> None:
        self._output = output
        self._report = report
        self._processes: dict[str, Process] = {}
        self._keepers: dict[str, asyncio.Task[None]] = {}
        self._ready = False
        self._stopping = False

    async def start(self, specs: Sequence[ProcessSpec]) -> None:
        """Start all at once. Raises CommandError for a command that cannot be run."""
        for process in await asyncio.gather(*(self._launch(spec) for spec in specs)):
            name = process.spec.name
            self._keepers[name] = asyncio.create_task(self._keep(process), name=f"keeper of {name}")

    def mesh_ready(self) -> None:
        self._ready = True

    async def wait(self) -> None:
        """Until a process is given up. Raises CommandError with what it said last."""
        assert self._keepers, "nothing started"
        done, _ = await asyncio.wait(self._keepers.values(), return_when=asyncio.FIRST_COMPLETED)
        for keeper in done:
            keeper.result()

    async def stop(self, limit_s: float) -> None:
        """Stop all within `limit_s`, stage by stage; the unwilling are killed. Never raises for a child's death."""
        self._stopping = True
        deadline = time.monotonic() + limit_s
        stages = sorted({process.spec.stop_stage for process in self._processes.values()})
        for num_later, stage in zip(range(len(stages) - 1, -1, -1), stages, strict=True):
            members = [p for p in self._processes.values() if p.spec.stop_stage == stage and p.running]
            for process in members:
                process.terminate()
            await self._ended(members, deadline - time.monotonic() - num_later * _STAGE_RESERVE_S)
        unwilling = [process for process in self._processes.values() if process.running]
        self.kill()
        await self._ended(unwilling, _REAP_S)
        for keeper in self._keepers.values():
            keeper.cancel()  # those that sleep before a restart
        await asyncio.gather(*self._keepers.values(), return_exceptions=True)

    async def _ended(self, processes: Sequence[Process], timeout_s: float) -> None:
        """Until all have ended and their output is passed on, or the time is over."""
        if processes:
            await asyncio.wait([self._keepers[p.spec.name] for p in processes], timeout=max(0.0, timeout_s))

    def kill(self) -> None:
        """At once, without any grace."""
        self._stopping = True
        for process in self._processes.values():
            process.kill()

    async def _launch(self, spec: ProcessSpec) -> Process:
        try:
            process = await Process.start(spec, self._output)
        except OSError as error:
            raise CommandError(f"cannot start {spec.name} ({spec.command[0]}): {error.strerror}") from error
        self._processes[spec.name] = process
        return process

    async def _keep(self, process: Process) -> None:
        spec, policy = process.spec, RestartPolicy()
        while True:
            code = await process.wait()
            if self._stopping:
                return
            fate = f"{spec.name} {describe_exit(code)}"
            delay_s = policy.delay_after_death(time.monotonic()) if self._ready else None
            if delay_s is None:
                when = "too often" if self._ready else "before the mesh was ready"
                said = f": {process.last_lines[-1].removeprefix('error: ')}" if process.last_lines else ""
                raise CommandError(f"{fate} {when}{said}")
            self._report(f"{fate}; restarting it in {delay_s:g} s")
            await asyncio.sleep(delay_s)
            process = await self._launch(spec)
            if self._stopping:  # asked for while it was being started
                process.kill()
