"""`radixmesh serve` from the first check to the last process gone."""

import asyncio
import contextlib
import dataclasses
import json
import signal
import tempfile
import time
from collections.abc import Coroutine, Mapping
from pathlib import Path
from typing import Any, cast

import click
import httpx
import msgspec
import structlog
from rich.console import Console
from rich.text import Text

from radixmesh.errors import CommandError
from radixmesh.models.progress import Display
from radixmesh.models.resolve import ResolvedModel, resolve_model
from radixmesh.models.store import ModelStore, cache_root
from radixmesh.serve import nats
from radixmesh.serve.mesh import NATS_STAGE, service_processes
from radixmesh.serve.preflight import check_port_free
from radixmesh.serve.process import ProcessSpec
from radixmesh.serve.settings import Settings
from radixmesh.serve.supervisor import Supervisor
from services.gateway.config import GatewayConfig

_INTERRUPT_LIMIT_S = 4.0
"""After Ctrl-C everything is gone within 5 s, the killing and reaping of the unwilling included."""
_POLL_S = 0.1
_COLOURS = ("cyan", "magenta", "green", "yellow", "blue")
_LOCAL_NAMES = {"127.0.0.1": "localhost", "0.0.0.0": "localhost", "::": "localhost"}


def serve(settings: Settings, environ: Mapping[str, str]) -> int:
    """Run the mesh until it is told to stop; the exit code. Raises CommandError where it cannot run."""
    # What the bus tries and retries is for the services' logs; here its final word is an error of its own.
    structlog.configure(wrapper_class=structlog.make_filtering_bound_logger("error"))
    console = Console(stderr=True)
    settings = _for_terminal(_with_known_port(settings), console)
    gateway = _gateway(settings)
    check_port_free(gateway.host, gateway.port)
    if settings.serve.nats_url:
        asyncio.run(nats.check_reachable(settings.serve.nats_url))
    store = ModelStore(cache_root(), on_wait=lambda key: console.print(f"Waiting: another process prepares {key}"))
    model = resolve_model(settings.serve.model, store, Display(console))
    if settings.serve.served_model_name:
        model = dataclasses.replace(model, name=settings.serve.served_model_name)
    with tempfile.TemporaryDirectory(prefix="radixmesh-") as scratch:
        return asyncio.run(_Session(settings, model, environ, Path(scratch), console).run())


def _gateway(settings: Settings) -> GatewayConfig:
    return cast(GatewayConfig, settings.services["gateway"])


def _with_known_port(settings: Settings) -> Settings:
    """Port 0 means any free one; we choose it, because we must say which."""
    gateway = _gateway(settings)
    if gateway.port != 0:
        return settings
    gateway = msgspec.structs.replace(gateway, port=nats.free_port())
    return Settings(settings.serve, {**settings.services, "gateway": gateway})


def _for_terminal(settings: Settings, console: Console) -> Settings:
    """Children write into pipes and cannot see the terminal behind us."""
    if not console.is_terminal:
        return settings
    pretty = {
        role: msgspec.structs.replace(config, log_format="pretty") if config.log_format == "auto" else config
        for role, config in settings.services.items()
    }
    return Settings(settings.serve, pretty)


class _Session:
    """One run of the mesh."""

    def __init__(
        self, settings: Settings, model: ResolvedModel, environ: Mapping[str, str], scratch: Path, console: Console
    ) -> None:
        self._settings = settings
        self._model = model
        self._environ = environ
        self._scratch = scratch
        self._console = console
        self._supervisor = Supervisor(output=self._show, report=self._report)
        self._names: list[str] = []
        self._stop = asyncio.Event()
        self._stop_limit_s = _INTERRUPT_LIMIT_S
        self._killed = False

    async def run(self) -> int:
        started_s = time.monotonic()
        nats_url, processes = self._processes()
        self._names = [process.name for process in processes]
        for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
            asyncio.get_running_loop().add_signal_handler(number, self._on_signal, number)
        try:
            with self._console.status(f"Starting {self._model.name} ..."):
                await self._supervisor.start(processes)
                ready = await self._unless_ended(self._until_ready(started_s))
            if ready:
                self._supervisor.mesh_ready()
                self._announce(time.monotonic() - started_s, nats_url)
                await self._unless_ended(asyncio.Event().wait())
        finally:
            await self._supervisor.stop(self._stop_limit_s)
        return 130 if self._killed else 0

    def _processes(self) -> tuple[str, list[ProcessSpec]]:
        serve = self._settings.serve
        if serve.nats_url:
            return serve.nats_url, service_processes(self._settings, self._model, serve.nats_url, self._environ)
        port = serve.nats_port or nats.free_port()
        url = nats.embedded_url(port)
        server = nats.embedded_nats(port, self._scratch, NATS_STAGE)
        return url, [server, *service_processes(self._settings, self._model, url, self._environ)]

    async def _unless_ended(self, work: Coroutine[Any, Any, object]) -> bool:
        """Wait for `work`; False when we were told to stop before. Raises CommandError when a process is given up."""
        working = asyncio.create_task(work)
        failing = asyncio.create_task(self._supervisor.wait())
        stopping = asyncio.create_task(self._stop.wait())
        tasks = (working, failing, stopping)
        try:
            await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
            if stopping.done():
                return False
            if failing.done():
                failing.result()
            working.result()
            return True
        finally:
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)

    async def _until_ready(self, started_s: float) -> None:
        url, limit_s = f"{self._base_url()}/ready", self._settings.serve.start_timeout_s
        async with httpx.AsyncClient(timeout=1.0, trust_env=False) as client:
            while True:
                with contextlib.suppress(httpx.TransportError):  # the gateway does not listen yet
                    if (await client.get(url)).is_success:
                        return
                if time.monotonic() - started_s > limit_s:
                    raise CommandError(f"not ready after {limit_s:g} s (--start-timeout-s); see the output above")
                await asyncio.sleep(_POLL_S)

    def _base_url(self) -> str:
        gateway = _gateway(self._settings)
        host = _LOCAL_NAMES.get(gateway.host, gateway.host)
        return f"http://{f'[{host}]' if ':' in host else host}:{gateway.port}"

    def _announce(self, took_s: float, nats_url: str) -> None:
        body = {
            "model": self._model.name,
            "messages": [{"role": "user", "content": "What is the capital of France?"}],
            "temperature": 0,
        }
        key = " -H 'Authorization: Bearer YOUR_KEY'" if _gateway(self._settings).api_keys else ""
        url = self._base_url()
        click.echo(
            f"\nReady after {took_s:.1f} s: {self._model.name} at {url} (NATS at {nats_url}). Ctrl-C stops it. Try:\n\n"
            f"  curl {url}/v1/chat/completions -H 'Content-Type: application/json'{key} -d '{json.dumps(body)}'\n"
        )

    def _on_signal(self, number: signal.Signals) -> None:
        if self._stop.is_set():
            self._killed = True
            self._supervisor.kill()
            return
        if number == signal.SIGTERM:  # an orderly shutdown: running requests may take as long as they were promised
            self._stop_limit_s = self._settings.serve.drain_timeout_s + _INTERRUPT_LIMIT_S
        self._report("stopping; once more kills" if number == signal.SIGINT else "stopping")
        self._stop.set()

    def _report(self, text: str) -> None:
        self._console.print(f"radixmesh: {text}", style="bold", markup=False, highlight=False, soft_wrap=True)

    def _show(self, name: str, line: str) -> None:
        width = max(map(len, self._names))
        prefix = Text(f"{name:<{width}} | ", style=_COLOURS[self._names.index(name) % len(_COLOURS)])
        self._console.print(prefix + Text.from_ansi(line), soft_wrap=True)
