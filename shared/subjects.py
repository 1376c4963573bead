"""Every subject of the mesh, in one place. `model` is the model's id; each function says who speaks to whom, in which messages."""

import re

_UNSAFE = re.compile(r"[.*>\s]")


def _part(name: str) -> str:
    """One token of a subject: no dots, wildcards or spaces."""
    assert name, "a subject part is never empty"
    return _UNSAFE.sub("_", name)


def _of(model: str, *parts: str) -> str:
    return ".".join(("rm", _part(model), *(_part(part) for part in parts)))


def tokenizer_encode(model: str) -> str:
    """gateway -> tokenizer · EncodeRequest / EncodeReply · queue group, idempotent."""
    return _of(model, "tokenizer", "encode")


def grammar_compile(model: str) -> str:
    """gateway -> grammar · Compile / CompileReply · queue group, idempotent."""
    return _of(model, "grammar", "compile")


def router_submit(model: str) -> str:
    """gateway -> router · Submit / SubmitReply · queue group; the scheduler itself answers to the gateway's reply subject."""
    return _of(model, "router", "submit")


def replica_requests(model: str, replica_id: str) -> str:
    """router, gateway -> scheduler · ReplicaInbox · one ordered subject."""
    return _of(model, "replica", replica_id, "requests")


def replica_steps(model: str, replica_id: str) -> str:
    """scheduler -> all ranks of its worker · WorkerInbox."""
    return _of(model, "replica", replica_id, "steps")


def replica_results(model: str, replica_id: str) -> str:
    """rank 0 -> scheduler · WorkerOutbox."""
    return _of(model, "replica", replica_id, "results")


def gateway_frames(model: str, gateway_id: str) -> str:
    """scheduler -> gateway · Frame, one per step."""
    return _of(model, "gateway", gateway_id, "frames")


def replica_kv(model: str, replica_id: str = "*") -> str:
    """scheduler -> routers · KvEvents. Without a replica: the subscription to all."""
    return _any(model, "replica", replica_id, "kv")


def replica_kv_snapshot(model: str, replica_id: str) -> str:
    """router -> scheduler · KvSnapshotRequest / KvSnapshot."""
    return _of(model, "replica", replica_id, "kv", "snapshot")


def replica_load(model: str, replica_id: str = "*") -> str:
    """scheduler -> routers, gateways · Load. Without a replica: the subscription to all."""
    return _any(model, "replica", replica_id, "load")


def router_peers(model: str) -> str:
    """router <-> router · what each has booked."""
    return _of(model, "router", "peers")


def worker_claim(model: str, group: str) -> str:
    """scheduler -> worker group · Claim / ClaimReply."""
    return _of(model, "worker", group, "claim")


def heartbeat(model: str, role: str = "*", instance: str = "*") -> str:
    """all -> all · Heartbeat. Without role or instance: the subscription to all of them."""
    return _any(model, "heartbeat", role, instance)


def control(model: str, instance: str) -> str:
    """operator -> any · Control / ControlReply."""
    return _of(model, "control", instance)


def _any(model: str, *parts: str) -> str:
    return ".".join(("rm", _part(model), *(part if part == "*" else _part(part) for part in parts)))
