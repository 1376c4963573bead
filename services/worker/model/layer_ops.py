"""The small operations between the linear layers, in plain torch. Sums run in float32 whatever the dtype."""

from typing import Protocol

import torch
import torch.nn.functional as F
from torch import Tensor


class LayerOps(Protocol):
    """Row by row: what a row becomes depends on that row alone."""

    def rms_norm(self, x: Tensor, weight: Tensor, eps: float) -> Tensor:
        """x [T, n] over its root mean square, times weight [n]."""
        ...

    def rotate_(self, heads: Tensor, rotary: Tensor, norm: Tensor | None, eps: float) -> None:
        """Rotate heads [T, n, head_dim] in place by rotary float32 [T, head_dim] (cosines, then sines).

        With `norm` [head_dim], each head goes through that RMS norm first.
        """
        ...

    def silu_and_mul(self, gate_up: Tensor) -> Tensor:
        """gate_up [T, 2 n] -> silu(first half) * second half, [T, n]."""
        ...


class TorchOps:
    """Every device and dtype; on the CPU `attention.cpu` has faster ones."""

    def rms_norm(self, x: Tensor, weight: Tensor, eps: float) -> Tensor:
        return F.rms_norm(x.float(), (x.shape[-1],), weight.float(), eps).to(x.dtype)

    def rotate_(self, heads: Tensor, rotary: Tensor, norm: Tensor | None, eps: float) -> None:
        x = heads.float() if norm is None else self.rms_norm(heads, norm, eps).float()
        cos, sin = rotary[:, None].chunk(2, dim=-1)
        first, second = x.chunk(2, dim=-1)
        heads.copy_(torch.cat((first * cos - second * sin, second * cos + first * sin), dim=-1))

    def silu_and_mul(self, gate_up: Tensor) -> Tensor:
        gate, up = gate_up.float().chunk(2, dim=-1)
        return (F.silu(gate) * up).to(gate_up.dtype)
