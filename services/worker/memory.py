"""How many tokens the KV pool can hold in the memory of this machine or container."""

from pathlib import Path

import psutil

from shared.config import StartupError

MIN_SLOTS = 512
"""A smaller pool serves nobody; whoever wants one for a test says so with num_slots."""

_CGROUP = Path("/sys/fs/cgroup")
_UNIT = 1 << 20


def available_memory_bytes(cgroup: Path = _CGROUP) -> int:
    """Main memory that can still be taken: of the machine, or up to the limit of this container (cgroup v2) if lower."""
    available = int(psutil.virtual_memory().available)
    try:
        limit = (cgroup / "memory.max").read_text().strip()
        used = int((cgroup / "memory.current").read_text())
    except OSError:  # no cgroup, or the root one, which has no limit
        return available
    return available if limit == "max" else min(available, max(0, int(limit) - used))


def pool_slots(
    *, num_slots: int, kv_memory_bytes: int, kv_memory_fraction: float, slot_bytes: int, available_bytes: int
) -> int:
    """Slots of the KV pool, from the first of the three settings that is given. Raises StartupError if memory is too small."""
    if num_slots:
        needed = num_slots * slot_bytes
        if needed > available_bytes:
            raise StartupError(
                f"num_slots {num_slots} needs {_mib(needed)} for the KV pool, {_mib(available_bytes)} are available"
            )
        return num_slots
    budget = kv_memory_bytes or int(available_bytes * kv_memory_fraction)
    if budget > available_bytes:
        raise StartupError(f"kv_memory_bytes is {_mib(budget)}, {_mib(available_bytes)} are available")
    slots = budget // slot_bytes
    if slots < MIN_SLOTS:
        raise StartupError(
            f"not enough memory: the KV pool would hold {slots} tokens in {_mib(budget)} ({slot_bytes} bytes each), "
            f"at least {MIN_SLOTS} are needed; {_mib(available_bytes)} are available"
        )
    return slots


def check_weights_fit(weight_bytes: int, available_bytes: int) -> None:
    """Raises StartupError."""
    if weight_bytes > available_bytes:
        raise StartupError(
            f"not enough memory: the model takes {_mib(weight_bytes)}, {_mib(available_bytes)} are available"
        )


def _mib(num_bytes: int) -> str:
    return f"{num_bytes / _UNIT:,.0f} MiB"
