"""`python -m services a b c`: several services in one process."""

import asyncio
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from shared import subjects
from shared.messages.cluster import unpack_heartbeat
from shared.nats_bus import BusConfig, NatsBus
from tests.support.collector import PATIENCE_S, Collector
from tests.support.nats import NatsServer

REPOSITORY = Path(__file__).parents[2]


async def test_they_share_a_process_and_end_together(nats_server: NatsServer) -> None:
    bus = await NatsBus.connect(BusConfig(url=nats_server.url), name="observer")
    heartbeats = Collector()
    await bus.subscribe(subjects.heartbeat("several"), heartbeats)
    flags = ("--nats-url", nats_server.url, "--model", "several", "--drain-timeout-s", "0")
    child = await asyncio.create_subprocess_exec(
        sys.executable, "-m", "services", "router", "scheduler", *flags, cwd=REPOSITORY, stderr=asyncio.subprocess.PIPE
    )
    try:
        roles: set[str] = set()
        while roles != {"router", "scheduler"}:
            roles = {unpack_heartbeat(payload).role for payload in heartbeats.payloads}
            await heartbeats.until(len(heartbeats.deliveries) + 1)
        child.send_signal(signal.SIGTERM)
        async with asyncio.timeout(PATIENCE_S):
            _, log = await child.communicate()
        assert child.returncode == 0, log.decode()
    finally:
        if child.returncode is None:
            child.kill()
            await child.communicate()
        await bus.close()


@pytest.mark.parametrize(
    ("argv", "message"),
    [
        ([], "name the services to run, of gateway, "),
        (["--help"], "name the services to run, of gateway, "),
        (["oracle"], "there is no service 'oracle', only gateway, "),
        (["router", "router"], "each service runs once in a process"),
        (["router", "scheduler", "--frobnicate"], "--frobnicate"),
        (["router", "scheduler", "--instance", "one"], "--instance names one service"),
    ],
)
def test_a_wrong_command_is_one_line_and_1(argv: list[str], message: str) -> None:
    done = subprocess.run([sys.executable, "-m", "services", *argv], cwd=REPOSITORY, capture_output=True, text=True)
    assert done.returncode == 1
    assert message in done.stderr
    assert done.stderr.startswith("error: ")
    assert done.stderr.count("\n") == 1


def test_help_lists_the_settings_of_the_named_services() -> None:
    command = [sys.executable, "-m", "services", "router", "scheduler", "--help"]
    done = subprocess.run(command, cwd=REPOSITORY, capture_output=True, text=True)
    assert done.returncode == 0
    assert "python -m services router scheduler" in done.stdout
    assert "settings of the scheduler" in done.stdout
