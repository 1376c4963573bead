"""The KV pool: keys and values of every token slot, of all layers."""

import torch
from torch import Tensor

from services.worker.model.config import ModelConfig


class KvPool:
    """K and V of `num_slots` tokens, zero at first.

    Within a layer each head's slots are neighbours, so that a run of slots is one contiguous read per head.

    keys, values   [layers, kv_heads, slots, head_dim], equal strides
    """

    def __init__(self, config: ModelConfig, num_slots: int, dtype: torch.dtype, device: torch.device) -> None:
        assert num_slots > 0
        shape = (2, config.num_layers, config.num_kv_heads, num_slots, config.head_dim)
        self.keys, self.values = torch.zeros(shape, dtype=dtype, device=device).unbind(0)
        self.num_slots = num_slots

    def write(self, layer: int, slots: Tensor, k: Tensor, v: Tensor) -> None:
        """Store k and v [T, kv_heads, head_dim] at slots int64 [T]."""
        self.keys[layer].index_copy_(1, slots, k.transpose(0, 1))
        self.values[layer].index_copy_(1, slots, v.transpose(0, 1))


def kv_bytes_per_slot(config: ModelConfig, dtype: torch.dtype) -> int:
    """Memory that one token slot takes."""
    return 2 * config.num_layers * config.num_kv_heads * config.head_dim * dtype.itemsize
