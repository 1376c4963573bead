"""One child process: started so that it cannot outlive us, its output passed on line by line."""

import asyncio
import ctypes
import os
import signal
import sys
from collections import deque
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field

_PR_SET_PDEATHSIG = 1
_MAX_LINE_BYTES = 64 * 1024
_NUM_LAST_LINES = 20

Output = Callable[[str, str], None]
"""Called with a process's name and one line of its output."""


@dataclass(frozen=True, slots=True)
class ProcessSpec:
    """What to start, and when to stop it.

    stop_stage     processes of a lower stage are stopped first: a stream ends before what feeds it
    quiet          lines that contain this text stay off the terminal
    """

    name: str
    command: tuple[str, ...]
    environ: Mapping[str, str] = field(default_factory=dict)
    stop_stage: int = 0
    quiet: str | None = None


def _linux_prctl() -> Callable[[int, int], int] | None:
    if sys.platform != "linux":
        return None
    prctl: Callable[[int, int], int] = ctypes.CDLL(None, use_errno=True).prctl  # looked up before any fork
    return prctl


_prctl = _linux_prctl()


class Process:
    """A running child in a process group of its own, so that a terminal's Ctrl-C reaches the parent alone."""

    def __init__(
        self,
        spec: ProcessSpec,
        child: asyncio.subprocess.Process,
        stream: asyncio.StreamReader,
        pipe: asyncio.BaseTransport,
        output: Output,
    ) -> None:
        self.spec = spec
        self.last_lines: deque[str] = deque(maxlen=_NUM_LAST_LINES)
        self._child = child
        self._output = output
        self._pipe = pipe
        self._pump = asyncio.create_task(self._pass_on_output(stream), name=f"output of {spec.name}")

    @classmethod
    async def start(cls, spec: ProcessSpec, output: Output) -> "Process":
        """Raises OSError when the command cannot be started."""
        parent = os.getpid()

        def die_with_parent() -> None:
            # Without this a parent that is killed outright leaves the services serving.
            if _prctl is not None:
                _prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
                if os.getppid() != parent:  # it died before the request
                    os._exit(1)

        # A pipe of our own: asyncio's would report the exit only once every helper of the child has closed it too.
        read_end, write_end = os.pipe()
        stream = asyncio.StreamReader()
        with os.fdopen(write_end, "wb") as writing:
            pipe, _ = await asyncio.get_running_loop().connect_read_pipe(
                lambda: asyncio.StreamReaderProtocol(stream), os.fdopen(read_end, "rb")
            )
            child = await asyncio.create_subprocess_exec(
                *spec.command,
                env=dict(spec.environ),
                stdin=asyncio.subprocess.DEVNULL,
                stdout=writing,
                stderr=asyncio.subprocess.STDOUT,
                start_new_session=True,
                preexec_fn=die_with_parent,
            )
        return cls(spec, child, stream, pipe, output)

    @property
    def pid(self) -> int:
        return self._child.pid

    @property
    def running(self) -> bool:
        return self._child.returncode is None

    async def wait(self) -> int:
        """The exit code (negative: the signal), once it has ended and its output is passed on."""
        try:
            code = await self._child.wait()
            self._signal_group(signal.SIGKILL)  # helpers that a crashed child left behind would hold its output open
            await self._pump
            return code
        finally:
            self._pump.cancel()
            self._pipe.close()

    def terminate(self) -> None:
        if self.running:
            self._child.terminate()

    def kill(self) -> None:
        """The child and whatever it started."""
        self._signal_group(signal.SIGKILL)

    def _signal_group(self, number: signal.Signals) -> None:
        try:
            os.killpg(self._child.pid, number)  # its own session, so its pid is the group's id
        except ProcessLookupError:
            return

    async def _pass_on_output(self, stream: asyncio.StreamReader) -> None:
        pending = b""
        while data := await stream.read(_MAX_LINE_BYTES):
            *lines, pending = (pending + data).split(b"\n")
            if len(pending) > _MAX_LINE_BYTES:
                lines, pending = [*lines, pending], b""
            for line in lines:
                self._pass_on(line)
        if pending:
            self._pass_on(pending)

    def _pass_on(self, raw: bytes) -> None:
        line = raw.decode(errors="replace").rstrip()
        if not line:
            return
        self.last_lines.append(line)
        if self.spec.quiet is None or self.spec.quiet not in line:
            self._output(self.spec.name, line)


def describe_exit(code: int) -> str:
    """In words: `ended with code 1`, `was killed by SIGKILL`."""
    if code >= 0:
        return f"ended with code {code}"
    return f"was killed by {signal.Signals(-code).name}"
