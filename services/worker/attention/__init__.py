"""Attention backends: one interface, several ways to compute it."""

from services.worker.attention.interface import AttentionBackend
from services.worker.attention.reference import ReferenceAttention
from services.worker.kv_pool import KvPool
from services.worker.model.layer_ops import LayerOps, TorchOps


def make_attention(name: str, pool: KvPool, sliding_window: int | None) -> tuple[AttentionBackend, LayerOps]:
    """The backend of that name over `pool`, and the layer operations that suit it.

    Raises ValueError for a name that is unknown, or a backend that does not run on the pool's device.
    """
    match name:
        case "reference":
            return ReferenceAttention(pool, sliding_window), TorchOps()
        case _:
            raise ValueError(f"attention backend is {name!r}, known are 'cpu' and 'reference'")
