"""Real services in real processes around a real nats-server: what end-to-end tests and benchmarks start."""

import os
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from contextlib import ExitStack
from pathlib import Path
from types import TracebackType

import httpx

from tests.support.nats import NatsServer

REPO = Path(__file__).resolve().parents[2]
START_TIMEOUT_S = 120.0
STOP_TIMEOUT_S = 15.0


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port: int = probe.getsockname()[1]
        return port


class ServiceProcess:
    """One `python -m services...` process; its log goes to a file that failures print."""

    def __init__(self, arguments: Sequence[str], log: Path, environ: dict[str, str]) -> None:
        self.arguments = list(arguments)
        self.log = log
        with log.open("wb") as output:
            self.process = subprocess.Popen(
                [sys.executable, "-m", *arguments],
                stdout=output,
                stderr=subprocess.STDOUT,
                stdin=subprocess.DEVNULL,
                cwd=REPO,
                env=os.environ | environ,
            )

    def kill(self) -> None:
        self.process.kill()
        self.process.wait()

    def stop(self) -> int:
        """SIGTERM, then the exit code."""
        self.process.terminate()
        return self.process.wait(STOP_TIMEOUT_S)

    @property
    def is_running(self) -> bool:
        return self.process.poll() is None


class Stack:
    """A nats-server and services on the loopback, under one model id; stopped at the end whatever happens."""

    def __init__(self, model: str = "smollm2-135m-instruct", model_path: str = "") -> None:
        self.model = model
        self.model_path = model_path
        self.services: dict[str, ServiceProcess] = {}
        self.port = free_port()
        self._cleanup = ExitStack()
        self._folder = Path(self._cleanup.enter_context(tempfile.TemporaryDirectory(prefix="stack-")))
        self.nats = NatsServer()

    def __enter__(self) -> "Stack":
        self._cleanup.callback(self.nats.close)
        self._cleanup.callback(self._stop_services)  # first, while there is a bus to say goodbye on
        self.nats.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if error is not None:
            print(self.logs())
        self._cleanup.close()

    @property
    def base_url(self) -> str:
        return f"http://127.0.0.1:{self.port}"

    def start(self, name: str, *flags: str, module: str = "") -> ServiceProcess:
        """Start service `name` (as in `services.<name>`; `module` where the name is only a label) with flags."""
        environ = {
            "RADIXMESH_NATS_URL": self.nats.url,
            "RADIXMESH_MODEL": self.model,
            "RADIXMESH_MODEL_PATH": self.model_path,
            "RADIXMESH_LOG_FORMAT": "json",
        }
        service = ServiceProcess([module or f"services.{name}", *flags], self._folder / f"{name}.log", environ)
        self.services[name] = service
        return service

    def start_all(
        self, *worker_flags: str, scheduler_flags: Sequence[str] = (), gateway_flags: Sequence[str] = ()
    ) -> None:
        """A whole replica behind a gateway, ready to answer."""
        self.start("worker", *worker_flags)
        self.start("scheduler", *scheduler_flags)
        for name in ("tokenizer", "grammar", "router"):
            self.start(name)
        self.start("gateway", "--host", "127.0.0.1", "--port", str(self.port), *gateway_flags)
        self.wait_ready()

    def wait_ready(self, timeout_s: float = START_TIMEOUT_S) -> None:
        """Until the gateway says that a request would be routed. Raises RuntimeError when a service has died."""
        deadline = time.monotonic() + timeout_s
        while time.monotonic() < deadline:
            for name, service in self.services.items():
                if not service.is_running:
                    raise RuntimeError(f"{name} ended with {service.process.returncode}:\n{service.log.read_text()}")
            try:
                if httpx.get(f"{self.base_url}/ready", timeout=5, trust_env=False).status_code == 200:
                    return
            except httpx.TransportError:
                pass  # not listening yet
            time.sleep(0.1)
        raise RuntimeError(f"not ready after {timeout_s} s:\n{self.logs()}")

    def logs(self) -> str:
        return "\n".join(f"--- {name}\n{service.log.read_text()[-4000:]}" for name, service in self.services.items())

    def _stop_services(self) -> None:
        running = [service for service in self.services.values() if service.is_running]
        for service in running:
            service.process.terminate()
        for service in running:
            try:
                service.process.wait(STOP_TIMEOUT_S)
            except subprocess.TimeoutExpired:
                service.kill()
