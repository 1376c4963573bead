"""The small operations between the linear layers, in plain torch. Sums run in float32 whatever the dtype."""

from typing import Protocol

import torch
import torch.nn.functional as F
from torch import Tensor


class LayerOps(Protocol):
    """Row by row: what a row becomes depends on that row alone.

    The residual stream is float32 even where weights are bfloat16: it holds few numbers that are large and many that are
    small, and it is added to twice a layer.
    """

    def add_and_norm(self, residual: Tensor, update: Tensor | None, weight: Tensor) -> Tensor:
        """Add update [T, n] to residual float32 [T, n] in place; the sum over its root mean square, times weight [n]."""
        ...

    def rotate_(self, heads: Tensor, num_q_heads: int, positions: Tensor, norms: tuple[Tensor, Tensor] | None) -> None:
        """Rotate q and k, side by side in heads [T, q + kv heads, head_dim], in place to positions int64 [T].

        With `norms`, each head of q and of k goes through an RMS norm by the first or second weight [head_dim] before.
        """
        ...

    def silu_and_mul(self, gate_up: Tensor) -> Tensor:
        """gate_up [T, 2 n] -> silu(first half) * second half, [T, n]."""
        ...


class TorchOps:
    """For every device; on the CPU `CpuOps` is faster.

    rotary_table   float32 [context_len, head_dim], cosines then sines
    """

    def __init__(self, rotary_table: Tensor, rms_norm_eps: float) -> None:
        self._rotary_table = rotary_table
        self._eps = rms_norm_eps

    def add_and_norm(self, residual: Tensor, update: Tensor | None, weight: Tensor) -> Tensor:
        if update is not None:
            residual += update
        return self._norm(residual, weight).to(weight.dtype)

    def rotate_(self, heads: Tensor, num_q_heads: int, positions: Tensor, norms: tuple[Tensor, Tensor] | None) -> None:
        x = heads.float()
        if norms is not None:
            q, k = x[:, :num_q_heads], x[:, num_q_heads:]
            x = torch.cat((self._norm(q, norms[0]), self._norm(k, norms[1])), dim=1)
        cos, sin = self._rotary_table[positions][:, None].chunk(2, dim=-1)
        first, second = x.chunk(2, dim=-1)
        heads.copy_(torch.cat((first * cos - second * sin, second * cos + first * sin), dim=-1))

    def silu_and_mul(self, gate_up: Tensor) -> Tensor:
        gate, up = gate_up.float().chunk(2, dim=-1)
        return (F.silu(gate) * up).to(gate_up.dtype)

    def _norm(self, x: Tensor, weight: Tensor) -> Tensor:
        return F.rms_norm(x, (x.shape[-1],), weight.float(), self._eps)
