"""A few vetting processes; one that takes too long is killed and replaced, and costs only the request it worked on."""

import asyncio
import contextlib
import os
import sys
from asyncio.subprocess import Process

import msgspec

from services.grammar.vetting import FRAME, Task
from shared.config import StartupError
from shared.telemetry import get_logger

START_TIMEOUT_S = 60.0
RESTART_PAUSE_S = 1.0
MAX_REPLY_BYTES = 16 * 1024 * 1024

log = get_logger(__name__)


class VettingFailed(Exception):
    """The process was killed at its deadline, or died."""


class PoolBusy(Exception):
    """No process became free in time."""


class VettingProcess:
    """One child that answers one request at a time."""

    def __init__(self, process: Process) -> None:
        self._process = process

    @classmethod
    async def start(cls, task: Task) -> "VettingProcess":
        """Return when it is ready. Raises StartupError with what it said last."""
        process = await asyncio.create_subprocess_exec(
            sys.executable,
            "-m",
            "services.grammar.vetting",
            msgspec.json.encode(task).decode(),
            stdin=asyncio.subprocess.PIPE,
            stdout=asyncio.subprocess.PIPE,
            env={
                **os.environ,
                "PYTHONPATH": os.pathsep.join(path for path in sys.path if path),
                "RUST_BACKTRACE": "0",  # a process out of memory should end, not hang over its own report
            },
            start_new_session=True,  # Ctrl-C is for the service, which then ends its children itself
        )
        child = cls(process)
        try:
            async with asyncio.timeout(START_TIMEOUT_S):
                await child._read()
        except (TimeoutError, VettingFailed):
            await child.kill()
            raise StartupError(f"the vetting process did not start: exit code {process.returncode}") from None
        except asyncio.CancelledError:
            await child.kill()
            raise
        return child

    async def vet(self, payload: bytes, timeout_s: float) -> bytes:
        """The packed reply to a packed request. Raises VettingFailed; then the process is of no more use."""
        assert self._process.stdin is not None
        try:
            async with asyncio.timeout(timeout_s):
                self._process.stdin.write(FRAME.pack(len(payload)) + payload)
                await self._process.stdin.drain()
                return await self._read()
        except TimeoutError:
            raise VettingFailed(f"no answer within {timeout_s} s") from None
        except ConnectionError as error:
            raise VettingFailed(str(error)) from None

    async def kill(self) -> None:
        with contextlib.suppress(ProcessLookupError):
            self._process.kill()
        await self._process.wait()

    async def _read(self) -> bytes:
        assert self._process.stdout is not None
        try:
            (size,) = FRAME.unpack(await self._process.stdout.readexactly(FRAME.size))
            assert size <= MAX_REPLY_BYTES, f"a reply of {size} bytes, the limit is {MAX_REPLY_BYTES}"
            return await self._process.stdout.readexactly(size)
        except asyncio.IncompleteReadError:
            raise VettingFailed("the process ended") from None


class VettingPool:
    """Lends each request a process of its own."""

    def __init__(self, task: Task, num_processes: int, vet_timeout_s: float, answer_timeout_s: float) -> None:
        assert num_processes > 0
        self._task = task
        self._num_processes = num_processes
        self._vet_timeout_s = vet_timeout_s
        self._answer_timeout_s = answer_timeout_s
        self._idle: asyncio.LifoQueue[VettingProcess] = asyncio.LifoQueue()
        self._all: set[VettingProcess] = set()
        self._replacing: set[asyncio.Task[None]] = set()
        self.num_vetted = 0
        self.num_killed = 0

    async def start(self) -> None:
        """Raises StartupError when the model's files cannot be used."""
        async with asyncio.TaskGroup() as tasks:
            for _ in range(self._num_processes):
                tasks.create_task(self._add())

    async def vet(self, payload: bytes) -> bytes:
        """The packed reply. Raises PoolBusy when no process was free in time, VettingFailed when the request cost one."""
        deadline_s = asyncio.get_running_loop().time() + self._answer_timeout_s
        try:
            async with asyncio.timeout_at(deadline_s):
                process = await self._idle.get()
        except TimeoutError:
            raise PoolBusy(f"no vetting process was free within {self._answer_timeout_s} s") from None
        left_s = deadline_s - asyncio.get_running_loop().time()
        try:
            reply = await process.vet(payload, min(self._vet_timeout_s, left_s))
        except BaseException as error:
            # Also when cancelled: half a reply in the pipe would be taken for the next one.
            self._replace(process)
            if isinstance(error, VettingFailed) and left_s < self._vet_timeout_s:
                raise PoolBusy("it waited too long for a vetting process") from None
            raise
        self._idle.put_nowait(process)
        self.num_vetted += 1
        return reply

    async def close(self) -> None:
        for task in self._replacing:
            task.cancel()
        await asyncio.gather(*self._replacing, return_exceptions=True)
        await asyncio.gather(*(process.kill() for process in self._all))
        self._all.clear()

    def _replace(self, process: VettingProcess) -> None:
        self.num_killed += 1
        task = asyncio.create_task(self._kill_and_add(process), name="replace a vetting process")
        self._replacing.add(task)
        task.add_done_callback(self._replacing.discard)

    async def _kill_and_add(self, process: VettingProcess) -> None:
        await process.kill()
        self._all.discard(process)
        while True:
            try:
                await self._add()
                return
            except StartupError as error:
                log.error("cannot replace a vetting process", error=str(error), retry_in_s=RESTART_PAUSE_S)
                await asyncio.sleep(RESTART_PAUSE_S)

    async def _add(self) -> None:
        process = await VettingProcess.start(self._task)
        self._all.add(process)
        self._idle.put_nowait(process)
