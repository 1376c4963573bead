"""A linear layer for inference: weights prepacked by oneDNN where the machine has it, plain torch elsewhere."""

from typing import Protocol

import torch
import torch.nn.functional as F
from torch import Tensor

# Rows that the packed layout is chosen for: small, as decode is where reading weights is the whole cost. Measured from 1 to
# 512 rows, other hints differ by less than the noise.
_ROWS_HINT = 16


class Linear(Protocol):
    def __call__(self, x: Tensor) -> Tensor:
        """x [T, in] -> x @ weight.T + bias, [T, out]."""
        ...


def make_linear(weight: Tensor, bias: Tensor | None) -> Linear:
    """The fastest layer for weight [out, in] on its device."""
    return PackedLinear(weight, bias) if _packs(weight) else PlainLinear(weight, bias)


def _packs(weight: Tensor) -> bool:
    if weight.device.type != "cpu" or not torch.backends.mkldnn.is_available():  # type: ignore[no-untyped-call]
        return False
    if weight.dtype == torch.bfloat16:
        return bool(torch.ops.mkldnn._is_mkldnn_bf16_supported())
    return weight.dtype == torch.float32


class PlainLinear:
    def __init__(self, weight: Tensor, bias: Tensor | None) -> None:
        self._weight, self._bias = weight, bias

    def __call__(self, x: Tensor) -> Tensor:
        return F.linear(x, self._weight, self._bias)


class PackedLinear:
    """oneDNN with the weight in its own layout: the read runs at memory bandwidth, in float32 about 3 times F.linear."""

    def __init__(self, weight: Tensor, bias: Tensor | None) -> None:
        self._weight = torch.ops.mkldnn._reorder_linear_weight(weight, _ROWS_HINT)
        self._bias = bias
        # For a single row oneDNN may sum in another order than for several. The same row must give the same numbers alone
        # and in a batch, so such layers never see a single row.
        probe = torch.linspace(-1, 1, weight.shape[1]).to(weight.dtype).expand(2, -1).contiguous()
        self._doubles_single_row = False
        self._doubles_single_row = not torch.equal(self(probe[:1]), self(probe)[:1])

    def __call__(self, x: Tensor) -> Tensor:
        if self._doubles_single_row and x.shape[0] == 1:
            return self(x.expand(2, -1).contiguous())[:1]
        out: Tensor = torch.ops.mkldnn._linear_pointwise(x, self._weight, self._bias, "none", [], "")
        return out
