"""Which processes make up the mesh, and with which settings each one runs."""

import os
import sys
from collections.abc import Mapping
from typing import cast

import msgspec

from radixmesh.models.resolve import ResolvedModel
from radixmesh.serve.process import ProcessSpec
from radixmesh.serve.settings import Settings, child_environ
from services.worker.config import WorkerConfig

_FRONT = ("gateway", "tokenizer", "grammar", "router")
"""The light services: one process, whose start costs one interpreter."""
_FRONT_STAGE, _ENGINE_STAGE, NATS_STAGE = range(3)
"""Stopped in this order: streams end while what feeds them still runs."""


def service_processes(
    settings: Settings, model: ResolvedModel, nats_url: str, environ: Mapping[str, str]
) -> list[ProcessSpec]:
    """Every service of the mesh. What they must agree on is decided here, all else by the user or by default."""
    decided = {
        "model": model.name,
        "model_path": str(model.folder),
        "nats_url": nats_url,
        "drain_timeout_s": settings.serve.drain_timeout_s,
    }
    configs = {role: msgspec.structs.replace(config, **decided) for role, config in settings.services.items()}
    configs["worker"] = _sharing_cores(cast(WorkerConfig, configs["worker"]), settings.serve.replicas)
    # Python buffers output to pipes; a crash must not take the last lines with it.
    environ = {**environ, "PYTHONUNBUFFERED": "1"}

    def process(name: str, stage: int, *roles: str) -> ProcessSpec:
        return ProcessSpec(
            name=name,
            command=(sys.executable, "-m", "services", *roles),
            environ=child_environ({role: configs[role] for role in roles}, environ),
            stop_stage=stage,
        )

    processes = [process("front", _FRONT_STAGE, *_FRONT)]
    for number in range(settings.serve.replicas):
        suffix = f"-{number}" if settings.serve.replicas > 1 else ""
        processes.append(process(f"scheduler{suffix}", _ENGINE_STAGE, "scheduler"))
        processes.append(process(f"worker{suffix}", _ENGINE_STAGE, "worker"))
    return processes


def _sharing_cores(worker: WorkerConfig, replicas: int) -> WorkerConfig:
    """Replicas on one machine divide its cores: threads of several workers on one core would only wait for each other."""
    if replicas == 1 or worker.num_threads:
        return worker
    return msgspec.structs.replace(worker, num_threads=max(1, (os.cpu_count() or 1) // replicas))
