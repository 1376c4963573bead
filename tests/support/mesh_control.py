"""Fault injection for black-box suites: a mesh in one process, one action a call from others.

python -m tests.support.mesh_control serve --port 8000     # a whole mesh with the default model, until Ctrl-C
python -m tests.support.mesh_control kill-worker           # one action; exit 0 done, 1 failed, 2 not offered
"""

import argparse
import contextlib
import os
import signal
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from multiprocessing.connection import Client, Listener
from pathlib import Path
from typing import Any

from tests.support.controlled_mesh import ControlledMesh, Setup

SOCKET = Path(os.environ.get("RADIXMESH_MESH_CONTROL", Path(tempfile.gettempdir()) / "radixmesh-mesh-control.sock"))

DONE, FAILED, NOT_OFFERED = 0, 1, 2

PLAIN: dict[str, Callable[[ControlledMesh], None]] = {
    "fail-worker": ControlledMesh.fail_worker,
    "kill-worker": ControlledMesh.kill_worker,
    "term-worker": ControlledMesh.term_worker,
    "restart-worker": ControlledMesh.restart_worker,
    "pause-worker": ControlledMesh.pause_worker,
    "resume-worker": ControlledMesh.resume_worker,
    "stop-bus": ControlledMesh.stop_bus,
    "start-bus": ControlledMesh.start_bus,
    "restart-gateway": ControlledMesh.restart_gateway,
    "stop-gateway": ControlledMesh.stop_gateway,
    "duplicate-messages": ControlledMesh.duplicate_messages,
    "deliver-once": ControlledMesh.deliver_once,
}

SETUPS: dict[str, dict[str, Any]] = {
    "small-pool": {"num_slots": 1024},
    "default-pool": {"num_slots": Setup.num_slots},
    "single-slot": {"max_running_reqs": 1},
    "default-slots": {"max_running_reqs": Setup.max_running_reqs},
    "short-deadlines": {"gateway_flags": ("--request-timeout-s", "2", "--queue-timeout-s", "1")},
    "default-deadlines": {"gateway_flags": Setup.gateway_flags},
    "migration-on": {"max_worker_deaths": Setup.max_worker_deaths},
    "migration-off": {"max_worker_deaths": 1},
}


def act(mesh: ControlledMesh, action: str) -> int:
    """Carry out one action by name; DONE or NOT_OFFERED. Raises what goes wrong."""
    name, _, argument = action.partition(":")
    if name == "start-order" and sorted(argument.split(",")) == ["bus", "gateway", "worker"]:
        mesh.start_order(argument.split(","))
    elif name in SETUPS and not argument:
        mesh.set_up(**SETUPS[name])
    elif name in PLAIN and not argument:
        PLAIN[name](mesh)
    else:
        return NOT_OFFERED
    return DONE


def serve(mesh: ControlledMesh) -> None:
    """Run the mesh and carry out one action after the other, until a signal raises."""
    with mesh.running(), Listener(str(SOCKET), "AF_UNIX") as listener:
        print(f"listening on {mesh.stack.base_url}, actions at {SOCKET}", flush=True)
        while True:
            with listener.accept() as connection:
                action = connection.recv()
                started = time.monotonic()
                try:
                    outcome = (act(mesh, action), "")
                except Exception as error:  # what went wrong is the caller's to know; the mesh stays for a look at it
                    outcome = (FAILED, f"{type(error).__name__}: {error}")
                print(f"{action}: {outcome} after {time.monotonic() - started:.1f} s", flush=True)
                connection.send(outcome)


def main(arguments: Sequence[str]) -> int:
    parser = argparse.ArgumentParser(prog="mesh_control", description=__doc__)
    parser.add_argument("action", help="serve, or one action")
    parser.add_argument("--port", type=int, default=8000)
    parser.add_argument("--workers", type=int, default=2)
    parser.add_argument("--schedulers", type=int, default=1)
    parser.add_argument("--start-gap-s", type=float, default=2.0)
    options = parser.parse_args(arguments)
    if options.action == "serve":
        signal.signal(signal.SIGTERM, signal.default_int_handler)
        with contextlib.suppress(KeyboardInterrupt):
            serve(
                ControlledMesh(
                    options.port,
                    num_workers=options.workers,
                    num_schedulers=options.schedulers,
                    start_gap_s=options.start_gap_s,
                )
            )
        return DONE
    with Client(str(SOCKET), "AF_UNIX") as connection:
        connection.send(options.action)
        status, problem = connection.recv()
    if problem:
        print(f"{options.action}: {problem}", file=sys.stderr)
    return int(status)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
