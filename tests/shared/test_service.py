"""The life of a service, in a process of its own where exit codes and signals matter."""

import asyncio
import json
import signal
import sys
from asyncio.subprocess import PIPE, Process
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import pytest

from shared import subjects
from shared.bus import Bus
from shared.messages.cluster import Heartbeat, ServiceState, unpack_heartbeat
from shared.messages.control import Control, ControlReply, unpack_control_reply
from shared.messages.packing import pack
from shared.nats_bus import BusConfig, NatsBus
from shared.service import Host, Hosted
from tests.support.collector import PATIENCE_S, Collector
from tests.support.memory_bus import MemoryBus
from tests.support.nats import NatsServer
from tests.support.sample_service import ROLE, SampleConfig, build

REPOSITORY = Path(__file__).parents[2]


class Heartbeats(Collector):
    """Collects heartbeats and waits for the one that fits."""

    async def until_state(self, state: ServiceState) -> Heartbeat:
        number = 0
        while True:
            number += 1
            heartbeat = unpack_heartbeat((await self.until(number))[number - 1].payload)
            if heartbeat.state is state:
                return heartbeat


@asynccontextmanager
async def process(server_url: str, *flags: str) -> AsyncIterator[Process]:
    """The sample service as a process; killed at the end if it still runs."""
    command = ("-m", "tests.support.sample_service", "--nats-url", server_url, "--log-format", "json", *flags)
    child = await asyncio.create_subprocess_exec(sys.executable, *command, cwd=REPOSITORY, stdout=PIPE, stderr=PIPE)
    try:
        yield child
    finally:
        if child.returncode is None:
            child.kill()
        await child.communicate()


async def outcome(child: Process) -> tuple[int | None, str]:
    """Exit code and stderr; nothing goes to stdout."""
    async with asyncio.timeout(PATIENCE_S):
        stdout, stderr = await child.communicate()
    assert stdout == b""
    return child.returncode, stderr.decode()


@asynccontextmanager
async def observed(server: NatsServer, *flags: str) -> AsyncIterator[tuple[Process, Heartbeats, NatsBus]]:
    """A running process and its heartbeats."""
    bus = await NatsBus.connect(BusConfig(url=server.url, reconnect_wait_s=0.02), name="observer")
    heartbeats = Heartbeats()
    instance = f"sample-{id(heartbeats)}"
    await bus.subscribe(subjects.heartbeat("m", ROLE, instance), heartbeats)
    async with process(server.url, "--model", "m", "--instance", instance, *flags) as child:
        yield child, heartbeats, bus
    await bus.close()


@pytest.mark.parametrize("signum", [signal.SIGTERM, signal.SIGINT])
async def test_a_signal_drains_says_so_and_ends_with_0(nats_server: NatsServer, signum: signal.Signals) -> None:
    async with observed(nats_server, "--drain-timeout-s", "5") as (child, heartbeats, bus):
        drained = Collector()
        await bus.subscribe("sample.drained", drained)
        ready = await heartbeats.until_state(ServiceState.READY)
        assert (ready.role, ready.epoch, ready.info) == (ROLE, 7, {"kind": "sample"})
        child.send_signal(signum)
        code, log = await outcome(child)
        assert (code, drained.payloads) == (0, [b"5.0"])
        assert unpack_heartbeat(heartbeats.payloads[-1]).state is ServiceState.DRAINING
        assert [json.loads(line)["event"] for line in log.splitlines()] == ["started", "draining", "stopped"]
        assert {json.loads(line)["role"] for line in log.splitlines()} == {ROLE}


async def test_a_second_signal_ends_the_process_at_once(nats_server: NatsServer) -> None:
    async with observed(nats_server, "--drain", "never", "--drain-timeout-s", "1000") as (child, heartbeats, _):
        await heartbeats.until_state(ServiceState.READY)
        child.send_signal(signal.SIGTERM)
        await heartbeats.until_state(ServiceState.DRAINING)
        child.send_signal(signal.SIGTERM)
        assert (await outcome(child))[0] == 128 + signal.SIGTERM


async def test_a_drain_that_does_not_end_is_cut_off(nats_server: NatsServer) -> None:
    async with observed(nats_server, "--drain", "never", "--drain-timeout-s", "0") as (child, heartbeats, _):
        await heartbeats.until_state(ServiceState.READY)
        child.send_signal(signal.SIGTERM)
        code, log = await outcome(child)
        assert code == 0
        assert "drain cut off" in log


async def test_a_signal_while_it_waits_for_nats_ends_the_start() -> None:
    async with process("nats://127.0.0.1:1", "--connect-timeout-s", "1000", "--log-level", "debug") as child:
        assert child.stderr is not None
        while b"NATS error" not in await child.stderr.readline():
            pass
        child.send_signal(signal.SIGTERM)
        assert (await outcome(child))[0] == 0


async def test_a_signal_while_starting_ends_the_start(nats_server: NatsServer) -> None:
    async with observed(nats_server, "--start", "never") as (child, heartbeats, _):
        await heartbeats.until_state(ServiceState.STARTING)
        child.send_signal(signal.SIGTERM)
        assert (await outcome(child))[0] == 0


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        (("--work", "crash"), "ValueError: the work is broken"),
        (("--start", "crash"), "ValueError: the start is broken"),
        (("--work", "return"), "RuntimeError: the sample stopped by itself"),
    ],
)
async def test_a_crash_is_logged_and_ends_with_1(nats_server: NatsServer, flags: tuple[str, ...], message: str) -> None:
    async with process(nats_server.url, *flags) as child:
        code, log = await outcome(child)
    assert code == 1
    crash = json.loads(log.splitlines()[-1])
    assert crash["event"] == "crashed"
    assert message in crash["exception"]


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        (("--start", "refuse"), "error: port 80 is taken: choose another with --port"),
        (("--start", "badly"), "error: --start: 'badly' is not one of crash, fine, never, refuse"),
        (
            ("--nats-url", "nats://127.0.0.1:1", "--connect-timeout-s", "0.2"),
            "error: NATS at nats://127.0.0.1:1 is not reach",
        ),
    ],
)
async def test_what_keeps_it_from_starting_is_one_line_and_1(
    nats_server: NatsServer, flags: tuple[str, ...], message: str
) -> None:
    async with process(nats_server.url, *flags) as child:
        code, log = await outcome(child)
    assert code == 1
    assert log.startswith(message)
    assert log.count("\n") == 1


async def test_the_process_outlives_its_nats(own_nats_server: NatsServer) -> None:
    async with observed(own_nats_server) as (child, heartbeats, bus):
        await heartbeats.until_state(ServiceState.READY)
        back = asyncio.Event()
        bus.on_connection_change(lambda connected: back.set() if connected else None)
        own_nats_server.kill()
        own_nats_server.start()
        async with asyncio.timeout(PATIENCE_S):
            await back.wait()
        heartbeats.deliveries.clear()
        await heartbeats.until_state(ServiceState.READY)
        child.send_signal(signal.SIGTERM)
        assert (await outcome(child))[0] == 0


@asynccontextmanager
async def hosted(bus: Bus, **settings: Any) -> AsyncIterator[None]:
    """The sample service inside this process."""
    stop = asyncio.Event()
    config = SampleConfig(model="m", instance="s1", **settings)
    async with asyncio.TaskGroup() as tasks:
        tasks.create_task(Host(Hosted(ROLE, config, build), bus).live(stop))
        yield
        stop.set()


async def ask(bus: Bus, payload: bytes) -> ControlReply:
    return unpack_control_reply(await bus.request(subjects.control("m", "s1"), payload, timeout_s=PATIENCE_S))


async def test_an_operator_can_ask_and_drain_and_resume() -> None:
    bus, heartbeats = MemoryBus(), Heartbeats()
    await bus.subscribe(subjects.heartbeat("m"), heartbeats)
    async with hosted(bus):
        await heartbeats.until_state(ServiceState.READY)
        info = await ask(bus, pack(Control(action="info")))
        assert info.ok
        assert (info.detail["role"], info.detail["state"], info.detail["info"]) == (ROLE, "ready", {"kind": "sample"})
        assert (await ask(bus, pack(Control(action="stats")))).detail == {"num_requests": 3}
        assert (await ask(bus, pack(Control(action="drain")))).detail == {"accepting": False}
        assert (await ask(bus, pack(Control(action="info")))).detail["state"] == "draining"
        assert (await ask(bus, pack(Control(action="resume")))).detail == {"accepting": True}


async def test_control_answers_what_it_cannot_do_with_the_reason() -> None:
    bus, heartbeats = MemoryBus(), Heartbeats()
    await bus.subscribe(subjects.heartbeat("m"), heartbeats)
    async with hosted(bus):
        await heartbeats.until_state(ServiceState.READY)
        unknown = await ask(bus, pack(Control(action="explode")))
        assert not unknown.ok
        assert "'explode'" in unknown.detail["error"]
        assert "not a control message" in (await ask(bus, b"\xc1")).detail["error"]


async def test_control_is_answered_while_the_service_still_starts() -> None:
    bus, heartbeats = MemoryBus(), Heartbeats()
    await bus.subscribe(subjects.heartbeat("m"), heartbeats)
    async with hosted(bus, start="never"):
        await heartbeats.until_state(ServiceState.STARTING)
        assert "still starting" in (await ask(bus, pack(Control(action="info")))).detail["error"]
