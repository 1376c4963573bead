"""The KV pool: keys and values of every token slot, of all layers."""

import torch
from torch import Tensor


class KvPool:
    """K and V of `num_slots` tokens, zero at first.

    Within a layer each head's slots are neighbours, so that a run of slots is one contiguous read per head.

    keys, values   [layers, kv_heads, slots, head_dim], equal strides
    """

    def __init__(
        self,
        *,
        num_layers: int,
        num_kv_heads: int,
        num_slots: int,
        head_dim: int,
        dtype: torch.dtype,
        device: torch.device,
    ) -> None:
        assert num_slots > 0
        shape = (2, num_layers, num_kv_heads, num_slots, head_dim)
        self.keys, self.values = torch.zeros(shape, dtype=dtype, device=device).unbind(0)
        self.num_slots = num_slots

    def write(self, layer: int, slots: Tensor, k: Tensor, v: Tensor) -> None:
        """Store k and v [T, kv_heads, head_dim] at slots int64 [T]."""
        self.keys[layer].index_copy_(1, slots, k.transpose(0, 1))
        self.values[layer].index_copy_(1, slots, v.transpose(0, 1))
