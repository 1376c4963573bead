"""A mesh that breaks on demand: workers die or freeze, the bus goes away, the gateway is gone, the pool is small."""

import contextlib
import signal
import subprocess
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import httpx

from tests.support.default_model import default_model_folder
from tests.support.duplicating_bus import DuplicatingBus
from tests.support.stack import STOP_TIMEOUT_S, ServiceProcess, Stack

READY_TIMEOUT_S = 120.0
FAILOVER_TIMEOUT_S = 20.0
POLL_S = 0.05
LIGHT = ("tokenizer", "grammar", "router")


@dataclass(frozen=True)
class Setup:
    """What the actions change. The defaults are those of the services, but for a pool that fits small machines."""

    num_slots: int = 24000
    max_running_reqs: int = 256
    max_worker_deaths: int = 2
    gateway_flags: tuple[str, ...] = ()


class ControlledMesh:
    """Workers and schedulers in numbers, the light services in one process, a gateway; everything can be taken away.

    "The worker" of an action is the one that is paused, else the one that serves the busiest replica.
    """

    def __init__(
        self,
        port: int = 0,
        *,
        num_workers: int = 2,
        num_schedulers: int = 1,
        worker_flags: Sequence[str] = ("--dtype", "float32"),
        start_gap_s: float = 2.0,
    ) -> None:
        """Port 0 takes a free one; `start_gap_s` is how long `start-order` waits between two starts."""
        self.stack = Stack(model_path=str(default_model_folder()))
        self.stack.port = port or self.stack.port
        self.workers = [f"worker-{number}" for number in range(1, num_workers + 1)]
        self.schedulers = [f"scheduler-{number}" for number in range(1, num_schedulers + 1)]
        self.setup = Setup()
        self._worker_flags = worker_flags
        self._start_gap_s = start_gap_s
        self._paused = ""
        self._leaving: set[str] = set()
        """Told to go; a second signal would end them at once, with their lease and whatever they compute."""
        self._duplicating: DuplicatingBus | None = None
        self._is_bus_up = True

    @contextlib.contextmanager
    def running(self) -> Iterator["ControlledMesh"]:
        with self.stack:
            for part in (self.start_workers, self.start_schedulers, self.start_front):
                part()
            self.wait_ready()
            try:
                yield self
            finally:
                if self._duplicating is not None:
                    self._duplicating.stop()
                if self._paused:
                    self.resume_worker()

    # ---------------------------------------------------------------- parts

    def start_workers(self) -> None:
        """Those that are not running."""
        for name in self._missing(self.workers):
            flags = ("--instance", name, "--num-slots", str(self.setup.num_slots), *self._worker_flags)
            self.stack.start(name, *flags, module="services.worker")

    def start_schedulers(self) -> None:
        for name in self._missing(self.schedulers):
            limits = ("--max-running-reqs", str(self.setup.max_running_reqs))
            deaths = ("--max-worker-deaths", str(self.setup.max_worker_deaths))
            self.stack.start(name, "--instance", name, *limits, *deaths, module="services.scheduler")

    def start_front(self) -> None:
        """Gateway, tokenizer, grammar service, router."""
        if self._missing(["front"]):
            self.stack.start("front", *LIGHT, module="services")
        self.start_gateway()

    def start_gateway(self) -> None:
        if self._missing(["gateway"]):
            address = ("--host", "127.0.0.1", "--port", str(self.stack.port))
            self.stack.start("gateway", *address, *self.setup.gateway_flags)

    def _missing(self, names: Sequence[str]) -> list[str]:
        return [name for name in names if name not in self.stack.services]

    def stop(self, *names: str, kill: bool = False) -> None:
        """Take services out for good: SIGTERM to all of them, then SIGKILL to those that do not go."""
        going: list[ServiceProcess] = []
        for name in names:
            if (service := self.stack.services.pop(name, None)) is not None:
                going.append(service)
                if kill or name == self._paused:
                    service.kill()
                elif name not in self._leaving:
                    service.process.terminate()
                self._leaving.discard(name)
            if name == self._paused:
                self._paused = ""
        for service in going:
            with contextlib.suppress(subprocess.TimeoutExpired):
                service.process.wait(STOP_TIMEOUT_S)
            if service.is_running:
                service.kill()

    def wait_ready(self) -> None:
        """Until requests are routed and every worker has loaded its model."""
        self.stack.wait_ready(READY_TIMEOUT_S)
        workers = [self.stack.services[name] for name in self.workers if name in self.stack.services]
        # Not from heartbeats: the gateway may still have those of a process that is gone.
        self.wait_for(lambda: all(map(_has_loaded, workers)), "all workers have loaded", READY_TIMEOUT_S)

    def wait_for(self, holds: Callable[[], Any], what: str, timeout_s: float) -> None:
        """Poll; raises TimeoutError."""
        deadline = time.monotonic() + timeout_s
        while not holds():
            if time.monotonic() > deadline:
                raise TimeoutError(f"not within {timeout_s:g} s: {what}")
            time.sleep(POLL_S)

    # ---------------------------------------------------------------- what the gateway sees

    def server_info(self) -> dict[str, Any]:
        answer: dict[str, Any] = httpx.get(f"{self.stack.base_url}/server_info", timeout=5, trust_env=False).json()
        return answer

    def num_steps(self) -> int:
        """Of all replicas, since their start."""
        return _num_steps(self.server_info()["replicas"])

    def _leased(self) -> set[str]:
        """Workers that some scheduler leads, as of its last heartbeat."""
        members = self.server_info()["members"]
        return {member["info"]["group"] for member in members if member["role"] == "scheduler"} - {""}

    def is_free(self, worker: str) -> bool:
        """Whether it says that a scheduler may claim it."""
        members = self.server_info()["members"]
        return any(member["instance"] == worker and member["info"].get("free") for member in members)

    def serving_worker(self) -> str:
        """The worker of the busiest replica that has one. Raises LookupError."""
        info = self.server_info()
        running = {each["load"]["replica_id"]: each["load"]["num_running_reqs"] for each in info["replicas"]}
        leads = [
            (running.get(member["instance"], 0), str(member["info"]["group"]))
            for member in info["members"]
            if member["role"] == "scheduler" and member["info"]["group"] in self.stack.services
        ]
        if not leads:
            raise LookupError("no scheduler has a worker")
        return max(leads)[1]

    def the_worker(self) -> str:
        return self._paused or self.serving_worker()

    # ---------------------------------------------------------------- actions

    def kill_worker(self) -> None:
        self.stop(self.the_worker(), kill=True)

    def term_worker(self) -> None:
        """Tell it to go; it goes when its work is done (and not at all while it is paused)."""
        name = self.the_worker()
        self.stack.services[name].process.terminate()
        self._leaving.add(name)

    def fail_worker(self) -> None:
        """Whatever runs now is under way at the death of two workers: it fails, and both workers come back."""
        for _ in range(self.setup.max_worker_deaths):
            self.wait_for(lambda: self._leased() and self._is_computing(), "a request runs", FAILOVER_TIMEOUT_S)
            victim = self.serving_worker()
            self.stop(victim, kill=True)
            self.wait_for(partial(self._is_given_up, victim), "its death is noticed", FAILOVER_TIMEOUT_S)
        self.restart_worker()

    def _is_given_up(self, worker: str) -> bool:
        return worker not in self._leased()

    def _is_computing(self) -> bool:
        before = self.server_info()["replicas"]
        time.sleep(POLL_S)
        return any(each["load"]["num_running_reqs"] for each in before) and self.num_steps() > _num_steps(before)

    def restart_worker(self) -> None:
        """All workers that have died, are paused, or are on their way out."""
        names = [name for name in self.workers if name in self.stack.services]
        leaving = [name for name in names if name == self._paused or not self._stays(name)]
        self.stop(*leaving)
        self.start_workers()
        self.wait_ready()

    def _stays(self, name: str) -> bool:
        if not self.stack.services[name].is_running:
            return False
        members = self.server_info()["members"]
        states = [member["state"] for member in members if (member["role"], member["instance"]) == ("worker", name)]
        return "draining" not in states

    def pause_worker(self) -> None:
        self._paused = self.serving_worker()
        self.stack.services[self._paused].process.send_signal(signal.SIGSTOP)

    def resume_worker(self) -> None:
        name, self._paused = self._paused, ""
        self.stack.services[name].process.send_signal(signal.SIGCONT)

    def stop_bus(self) -> None:
        self.stack.nats.kill()
        self._is_bus_up = False

    def start_bus(self) -> None:
        if not self._is_bus_up:
            self.stack.nats.start()
        self._is_bus_up = True

    def restart_gateway(self) -> None:
        self.stop("gateway")
        self.start_gateway()
        self.wait_ready()

    def stop_gateway(self) -> None:
        self.stop("gateway")

    def duplicate_messages(self) -> None:
        self.deliver_once()
        self._duplicating = DuplicatingBus(self.stack.nats.url, self.stack.model)
        self._duplicating.start()

    def deliver_once(self) -> None:
        duplicating, self._duplicating = self._duplicating, None
        if duplicating is not None:
            duplicating.stop()
            print(f"duplicated {duplicating.num_duplicated} messages", flush=True)

    def start_order(self, parts: Sequence[str]) -> None:
        """Stop everything, then start these parts one after the other."""
        self.stop(*list(self.stack.services))
        if self._is_bus_up:
            self.stop_bus()
        starts = {
            "bus": (self.start_bus,),
            "worker": (self.start_workers, self.start_schedulers),
            "gateway": (self.start_front,),
        }
        for number, part in enumerate(parts):
            if number:
                time.sleep(self._start_gap_s)
            for start in starts[part]:
                start()
        self.wait_ready()

    def set_up(self, **changes: Any) -> None:
        """Restart what the changed settings concern."""
        wanted = replace(self.setup, **changes)
        changed = {name for name in changes if getattr(wanted, name) != getattr(self.setup, name)}
        self.setup = wanted
        old_epochs: set[int] = set()
        if changed & {"num_slots", "max_running_reqs", "max_worker_deaths"}:
            old_epochs = self._epochs()
            self.stop(*self.schedulers, *(self.workers if "num_slots" in changed else ()))
        if "gateway_flags" in changed:
            self.stop("gateway")
        self.start_workers()
        self.start_schedulers()
        self.start_gateway()
        self.wait_ready()
        # The gateway may still speak of those that were stopped.
        self.wait_for(lambda: self._num_leases(old_epochs) == self._max_leases, "new leases", READY_TIMEOUT_S)

    @property
    def _max_leases(self) -> int:
        return min(len(self.workers), len(self.schedulers))

    def _num_leases(self, old_epochs: set[int]) -> int:
        return len(self._epochs() - old_epochs - {0})

    def _epochs(self) -> set[int]:
        """Of the leases; 0 stands for a replica without one."""
        return {replica["load"]["epoch"] for replica in self.server_info()["replicas"]}


def _has_loaded(worker: ServiceProcess) -> bool:
    return b"model ready" in worker.log.read_bytes()


def _num_steps(replicas: Sequence[dict[str, Any]]) -> int:
    return sum(replica["load"]["num_steps"] for replica in replicas)
