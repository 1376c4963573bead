"""Children of the command: kept alive, stopped in order, and never left behind."""

import asyncio
import os
import signal
import subprocess
import sys
import textwrap
import time
from contextlib import asynccontextmanager
from pathlib import Path

import psutil
import pytest

from radixmesh.errors import CommandError
from radixmesh.serve.process import ProcessSpec
from radixmesh.serve.supervisor import RestartPolicy, Supervisor

LIMIT_S = 4.0
PAUSE = "import os, signal; print('pid', os.getpid(), flush=True); signal.pause()"
STUBBORN = "import os, signal; signal.signal(signal.SIGTERM, signal.SIG_IGN); " + PAUSE.removeprefix(
    "import os, signal; "
)


def child(name: str, script: str, stage: int = 0) -> ProcessSpec:
    return ProcessSpec(name, (sys.executable, "-c", textwrap.dedent(script)), os.environ, stop_stage=stage)


class Heard:
    """What a supervisor says; tests wait for a line of it."""

    def __init__(self) -> None:
        self.lines: list[str] = []
        self._changed = asyncio.Event()

    def output(self, name: str, line: str) -> None:
        self.report(f"{name}: {line}")

    def report(self, text: str) -> None:
        self.lines.append(text)
        self._changed.set()

    async def until(self, text: str, times: int = 1) -> None:
        async with asyncio.timeout(20):
            while sum(text in line for line in self.lines) < times:
                self._changed.clear()
                await self._changed.wait()


@asynccontextmanager
async def supervised(*specs: ProcessSpec):
    heard = Heard()
    supervisor = Supervisor(output=heard.output, report=heard.report)
    await supervisor.start(specs)
    try:
        yield supervisor, heard
    finally:
        await supervisor.stop(LIMIT_S)


def test_delays_double_up_to_a_limit_and_end_after_too_many_deaths():
    policy = RestartPolicy(max_deaths=5, window_s=100, first_delay_s=1, max_delay_s=4)
    assert [policy.delay_after_death(now_s) for now_s in range(6)] == [1, 2, 4, 4, 4, None]


def test_deaths_that_lie_far_apart_do_not_add_up():
    policy = RestartPolicy(max_deaths=1, window_s=100, first_delay_s=1)
    assert [policy.delay_after_death(now_s) for now_s in (0, 200, 400)] == [1, 1, 1]


async def test_a_death_before_the_mesh_is_ready_ends_it_with_the_childs_last_words():
    async with supervised(child("good", PAUSE), child("bad", "import sys; sys.exit('error: no such file')")) as (
        mesh,
        _,
    ):
        with pytest.raises(CommandError, match="bad ended with code 1 before the mesh was ready: no such file"):
            await mesh.wait()


async def test_a_death_afterwards_is_reported_and_answered_with_a_restart():
    async with supervised(child("worker", PAUSE)) as (mesh, heard):
        mesh.mesh_ready()
        await heard.until("worker: pid")
        os.kill(int(heard.lines[-1].split()[-1]), signal.SIGKILL)
        await heard.until("worker: pid", times=2)
    assert "worker was killed by SIGKILL; restarting it in 0.5 s" in heard.lines


async def test_stages_stop_one_after_the_other():
    script = """
        import signal, sys
        signal.signal(signal.SIGTERM, lambda *_: sys.exit(print('down', flush=True)))
        print('up', flush=True)
        signal.pause()
    """
    specs = [child(name, script, stage) for stage, name in enumerate(("gateway", "scheduler", "worker"))]
    async with supervised(*reversed(specs)) as (_, heard):
        await heard.until("up", times=3)
    assert heard.lines[3:] == ["gateway: down", "scheduler: down", "worker: down"]


async def test_who_does_not_stop_is_killed_within_the_limit():
    async with supervised(child("a", STUBBORN, 0), child("b", STUBBORN, 1)) as (_, heard):
        await heard.until("pid", times=2)
        started = time.monotonic()
    assert time.monotonic() - started < LIMIT_S + 1


async def test_helpers_of_a_dead_child_die_with_it():
    script = f"""
        import subprocess, sys
        helper = subprocess.Popen([sys.executable, '-c', {PAUSE!r}], stdout=subprocess.DEVNULL)
        print('helper', helper.pid, flush=True)
        sys.exit(3)
    """
    async with supervised(child("parent", script)) as (mesh, heard):
        with pytest.raises(CommandError, match="parent ended with code 3"):
            await mesh.wait()
        helper = int(heard.lines[0].split()[-1])
    assert _dies(helper)


async def test_long_and_broken_output_passes():
    script = "import sys; sys.stdout.buffer.write(b'x' * 300_000 + b'\\n\\xff\\nend'); sys.exit(0)"
    async with supervised(child("loud", script)) as (mesh, heard):
        with pytest.raises(CommandError):
            await mesh.wait()
    assert sum(line.count("x") for line in heard.lines) == 300_000
    assert heard.lines[-2:] == ["loud: \ufffd", "loud: end"]


@pytest.mark.skipif(sys.platform != "linux", reason="a parent's death is signalled on Linux only")
def test_children_die_when_the_parent_is_killed_outright():
    script = f"""
        import asyncio, os, sys
        from radixmesh.serve.process import ProcessSpec
        from radixmesh.serve.supervisor import Supervisor

        async def main():
            mesh = Supervisor(output=lambda name, line: print(line, flush=True), report=print)
            await mesh.start([ProcessSpec("child", (sys.executable, "-c", {PAUSE!r}), os.environ)])
            await mesh.wait()

        asyncio.run(main())
    """
    repository = Path(__file__).parents[2]
    with subprocess.Popen(
        [sys.executable, "-c", textwrap.dedent(script)], stdout=subprocess.PIPE, text=True, cwd=repository
    ) as parent:
        assert parent.stdout is not None
        pid = int(parent.stdout.readline().split()[-1])
        assert psutil.pid_exists(pid)
        parent.kill()
    assert _dies(pid)


def _dies(pid: int) -> bool:
    """Whether a process that is no child of ours ends within seconds: to be killed and to be gone are two moments."""
    try:
        psutil.Process(pid).wait(timeout=5)
    except psutil.NoSuchProcess:
        return True
    except psutil.TimeoutExpired:
        return False
    return True
