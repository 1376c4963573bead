"""The life of a service: start, ready, drain, stop.

`main` is the whole of a service's `__main__`. SIGTERM or SIGINT drains and ends with exit code 0; a second signal ends the
process at once; a crash is logged and ends with 1; what keeps a service from starting is one line and 1. A lost bus ends
nothing: services wait for it to come back.
"""

import asyncio
import contextlib
import os
import secrets
import signal
import sys
from abc import ABC, abstractmethod
from collections.abc import Awaitable, Callable, Sequence
from typing import ClassVar, NamedTuple, TypeVar

import msgspec

from shared import subjects, telemetry
from shared.bus import Bus, BusDisconnected, Delivery
from shared.config import ServiceConfig, StartupError, load_config
from shared.inbox import Inbox
from shared.messages.cluster import Heartbeat, ServiceState
from shared.messages.control import Control, ControlReply, unpack_control
from shared.messages.packing import pack
from shared.nats_bus import BusConfig, NatsBus

log = telemetry.get_logger(__name__)

HEARTBEAT_S = 0.5
_MAX_CONTROLS = 64
"""Control requests that may wait; an operator's command beyond that is refused by its timeout."""
_DRAIN_GRACE_S = 1.0
"""How much longer than its timeout a drain may take before it is cut off."""

C = TypeVar("C", bound=ServiceConfig)
T = TypeVar("T")
Info = dict[str, str | int | float]


class Service(ABC):
    """One actor. `build` makes it; then `run` works until it is cancelled, after `drain`."""

    role: ClassVar[str]
    instance: str

    @abstractmethod
    async def run(self) -> None:
        """Work until cancelled. To return or to raise is a crash of the process."""

    async def drain(self, timeout_s: float) -> None:  # noqa: B027  # a service that holds nothing has nothing to do
        """Take no new work and finish what is held; return when done, within `timeout_s`. `run` goes on meanwhile."""

    @property
    def state(self) -> ServiceState:
        """STARTING while the service cannot do its work yet; the host itself says DRAINING."""
        return ServiceState.READY

    @property
    def epoch(self) -> int:
        return 0

    @property
    def info(self) -> Info:
        """Capabilities and versions for the heartbeat."""
        return {}

    @property
    def stats(self) -> Info:
        """Counters for an operator who asks."""
        return {}

    def set_accepting(self, accepting: bool) -> bool:
        """An operator's drain (False) and resume (True) without a stop; False where the service has no such switch."""
        return False


class Hosted(NamedTuple):
    """A service to run: its settings and how it is made."""

    role: str
    config: ServiceConfig
    build: Callable[..., Awaitable[Service]]
    """async (config, bus) -> Service"""


def main(
    role: str,
    config_type: type[C],
    build: Callable[[C, Bus], Awaitable[Service]],
    argv: Sequence[str] | None = None,
) -> int:
    """Run one service until a signal; returns the exit code."""
    try:
        config = load_config(config_type, role, sys.argv[1:] if argv is None else argv, os.environ)
    except StartupError as error:
        return _refuse(error)
    return run_services([Hosted(role, named(config, role), build)])


def named(config: C, role: str) -> C:
    """The config with an instance name, made up if none is given."""
    if config.instance:
        return config
    return msgspec.structs.replace(config, instance=f"{role}-{secrets.token_hex(4)}")


def run_services(services: Sequence[Hosted]) -> int:
    """Run services over one bus connection until a signal; returns the exit code."""
    assert services, "at least one service"
    config = services[0].config
    role = "+".join(hosted.role for hosted in services)
    try:
        telemetry.setup(config, role, config.instance)
        with asyncio.Runner(loop_factory=_loop_factory()) as runner:
            runner.run(_run_services(services, name=f"{role} {config.instance}"))
    except Exception as error:
        causes = _causes(error)
        if all(isinstance(cause, StartupError) for cause in causes):
            return _refuse(*causes)
        log.error("crashed", role=role, exc_info=causes[0] if len(causes) == 1 else error)
        return 1
    finally:
        telemetry.shutdown()
    return 0


def _refuse(*errors: Exception) -> int:
    for error in errors:
        print(f"error: {error}", file=sys.stderr)
    return 1


def _causes(error: Exception) -> list[Exception]:
    """The errors inside nested task groups."""
    if isinstance(error, ExceptionGroup):
        return [cause for inner in error.exceptions for cause in _causes(inner)]
    return [error]


def _loop_factory() -> Callable[[], asyncio.AbstractEventLoop] | None:
    """uvloop where there is one (not on Windows): half the time per request on the bus, and HTTP gains more."""
    try:
        import uvloop
    except ImportError:
        return None
    return uvloop.new_event_loop


async def _run_services(services: Sequence[Hosted], name: str) -> None:
    stop = asyncio.Event()
    loop = asyncio.get_running_loop()
    for signum in (signal.SIGTERM, signal.SIGINT):
        loop.add_signal_handler(signum, _on_signal, signum, stop)
    try:
        bus = await _unless_stopped(stop, NatsBus.connect(bus_config(services[0].config), name=name))
    except BusDisconnected as error:
        raise StartupError(str(error)) from None
    if bus is None:
        return
    try:
        async with asyncio.TaskGroup() as tasks:
            for hosted in services:
                tasks.create_task(Host(hosted, bus).live(stop), name=hosted.role)
    finally:
        await bus.close()


def bus_config(config: ServiceConfig) -> BusConfig:
    """For a service that opens a connection of its own; vary with `msgspec.structs.replace`."""
    return BusConfig(url=config.nats_url, connect_timeout_s=config.connect_timeout_s)


async def _unless_stopped(stop: asyncio.Event, work: Awaitable[T]) -> T | None:
    """The result of `work`, or None when the signal came first: then the work is cancelled."""
    working = asyncio.ensure_future(work)
    stopping = asyncio.ensure_future(stop.wait())
    try:
        await asyncio.wait((working, stopping), return_when=asyncio.FIRST_COMPLETED)
        return working.result() if working.done() else None
    finally:
        for task in (working, stopping):
            task.cancel()
        await asyncio.gather(working, stopping, return_exceptions=True)


def _on_signal(signum: int, stop: asyncio.Event) -> None:
    if stop.is_set():
        os._exit(128 + signum)
    stop.set()


class Host:
    """One service from its start to its end: heartbeat, control, drain."""

    def __init__(self, hosted: Hosted, bus: Bus) -> None:
        self._hosted = hosted
        self._config = hosted.config
        self._bus = bus
        self._service: Service | None = None
        self._stopping = False
        self._controls: Inbox[Delivery] = Inbox(_MAX_CONTROLS)

    async def live(self, stop: asyncio.Event) -> None:
        """Return after a drain; raise what the service raises."""
        telemetry.bind_log_context(role=self._hosted.role, instance=self._config.instance)
        async with asyncio.TaskGroup() as tasks:
            helpers = [
                tasks.create_task(self._beat(), name="heartbeat"),
                tasks.create_task(self._control(), name="control"),
            ]
            service = self._service = await _unless_stopped(stop, self._hosted.build(self._config, self._bus))
            if service is not None:
                running = tasks.create_task(self._run(service), name="run")
                await stop.wait()
                await self._drain(service)
                running.cancel()
            for helper in helpers:
                helper.cancel()
        self._stopping = True
        await self._publish_heartbeat()
        log.info("stopped")

    async def _run(self, service: Service) -> None:
        log.info("started", state=service.state.value, info=service.info)
        await service.run()
        if not self._stopping:
            raise RuntimeError(f"the {self._hosted.role} stopped by itself")

    async def _drain(self, service: Service) -> None:
        self._stopping = True
        timeout_s = self._config.drain_timeout_s
        log.info("draining", timeout_s=timeout_s)
        await self._publish_heartbeat()
        try:
            async with asyncio.timeout(timeout_s + _DRAIN_GRACE_S):
                await service.drain(timeout_s)
        except TimeoutError:
            log.warning("drain cut off", timeout_s=timeout_s + _DRAIN_GRACE_S)

    async def _beat(self) -> None:
        while True:
            await self._publish_heartbeat()
            await asyncio.sleep(HEARTBEAT_S)

    async def _publish_heartbeat(self) -> None:
        subject = subjects.heartbeat(self._config.model, self._hosted.role, self._config.instance)
        # Silence is what a missing bus means to the others anyway.
        with contextlib.suppress(BusDisconnected):
            await self._bus.publish(subject, pack(self._heartbeat()))

    def _heartbeat(self) -> Heartbeat:
        service = self._service
        state = service.state if service is not None else ServiceState.STARTING
        return Heartbeat(
            role=self._hosted.role,
            instance=self._config.instance,
            state=ServiceState.DRAINING if self._stopping else state,
            epoch=service.epoch if service is not None else 0,
            info=service.info if service is not None else {},
        )

    async def _control(self) -> None:
        subject = subjects.control(self._config.model, self._config.instance)
        subscription = await self._bus.subscribe(subject, self._on_control)
        try:
            while True:
                for delivery in await self._controls.take_ready():
                    await self._answer(delivery)
        finally:
            await subscription.unsubscribe()

    def _on_control(self, delivery: Delivery) -> None:
        if not delivery.reply or not self._controls.append(delivery):
            log.warning("control ignored", reason="no reply subject" if not delivery.reply else "too many wait")

    async def _answer(self, delivery: Delivery) -> None:
        try:
            reply = self._carry_out(unpack_control(delivery.payload))
        except msgspec.DecodeError as error:
            reply = ControlReply(ok=False, detail={"error": f"not a control message: {error}"})
        with contextlib.suppress(BusDisconnected):
            await self._bus.publish(delivery.reply, pack(reply))

    def _carry_out(self, control: Control) -> ControlReply:
        log.info("control", action=control.action)
        service = self._service
        if service is None:
            return ControlReply(ok=False, detail={"error": f"the {self._hosted.role} is still starting"})
        match control.action:
            case "info":
                return ControlReply(ok=True, detail=msgspec.to_builtins(self._heartbeat()))
            case "stats":
                return ControlReply(ok=True, detail=dict(service.stats))
            case "drain" | "resume":
                if service.set_accepting(control.action == "resume"):
                    return ControlReply(ok=True, detail={"accepting": control.action == "resume"})
                return ControlReply(ok=False, detail={"error": f"the {self._hosted.role} cannot {control.action}"})
            case _:
                known = "drain, resume, info, stats"
                return ControlReply(ok=False, detail={"error": f"unknown action {control.action!r}, known: {known}"})
