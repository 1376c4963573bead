"""The KV pool: keys and values of every token slot, of all layers."""

import math

import numpy as np
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
        self.keys, self.values = _zeros(shape, dtype, device).unbind(0)
        self.num_slots = num_slots

    def write(self, layer: int, slots: Tensor, k: Tensor, v: Tensor) -> None:
        """Store k and v [T, kv_heads, head_dim] at slots int64 [T]."""
        self.keys[layer].index_copy_(1, slots, k.transpose(0, 1))
        self.values[layer].index_copy_(1, slots, v.transpose(0, 1))


def _zeros(shape: tuple[int, ...], dtype: torch.dtype, device: torch.device) -> Tensor:
    """Zeros that, in main memory, take no page before it is written: a large pool costs what is used of it."""
    if device.type != "cpu":
        return torch.zeros(shape, dtype=dtype, device=device)
    return torch.from_numpy(np.zeros(math.prod(shape) * dtype.itemsize, np.uint8)).view(dtype).view(shape)
