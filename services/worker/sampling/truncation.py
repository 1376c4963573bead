"""Top-k, top-p and min-p as one threshold per row: tokens at or above it stay.

Weights are probabilities relative to the likeliest token, `exp((logit - largest) / temperature)`. Top-p looks at the tokens
that top-k leaves, renormalised, and min-p compares with the likeliest. A threshold keeps all tokens that tie with the last one
kept, so the outcome does not depend on how a sort orders equal logits; bfloat16 models tie often.
"""

from collections.abc import Sequence

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from shared.messages.sampling import SamplingParams

BLOCK = 256
"""Weights that are summed up before they are looked at one by one."""


def thresholds(weights: Tensor, params: Sequence[SamplingParams]) -> Tensor:
    """The smallest weight that stays, row by row. float32 [R]

    weights  float32 [R, vocab]  the largest of each row is 1
    """
    if weights.device.type == "cpu":
        rows = weights.numpy()
        return torch.tensor([_threshold(row, p) for row, p in zip(rows, params, strict=True)])
    return sorted_thresholds(weights, params)


def _threshold(weights: NDArray[np.float32], params: SamplingParams) -> float:
    """Of one row, by numpy, whose selection and sort are vectorised, and without sorting what cannot stay."""
    num_left = len(weights)
    if 0 < params.top_k < num_left:
        weights = np.partition(weights, num_left - params.top_k)[num_left - params.top_k :]
        num_left = params.top_k
    least = float(weights.min()) if params.top_k > 0 else 0.0
    if params.top_p < 1:
        mass = float(weights.sum())
        # All weights below this one together are less than 1 - top_p: the boundary lies above it.
        cut = (1 - params.top_p) * mass / num_left
        descending = np.sort(np.compress(weights >= np.float32(cut), weights))[::-1]
        least = float(descending[_num_to_reach(descending, params.top_p * mass) - 1])
    return max(least, params.min_p)


def _num_to_reach(descending: NDArray[np.float32], mass: float) -> int:
    """How many of the first numbers add up to `mass`; at most all."""
    sums = np.add.reduceat(descending, np.arange(0, len(descending), BLOCK)).cumsum(dtype=np.float64)
    block = min(int(np.searchsorted(sums, mass)), len(sums) - 1)
    start = block * BLOCK
    before = float(sums[block - 1]) if block else 0.0
    inner = descending[start : start + BLOCK].cumsum(dtype=np.float64)
    return min(start + int(np.searchsorted(inner, mass - before)) + 1, start + len(inner))


def sorted_thresholds(weights: Tensor, params: Sequence[SamplingParams]) -> Tensor:
    """The same for all rows at once by sorting them whole, which suits a GPU. float32 [R]"""
    device, vocab = weights.device, weights.shape[1]
    top_k = torch.tensor([p.top_k if 0 < p.top_k < vocab else vocab for p in params], device=device).unsqueeze(1)
    top_p = torch.tensor([p.top_p for p in params], dtype=torch.float64, device=device).unsqueeze(1)
    min_p = torch.tensor([p.min_p for p in params], dtype=torch.float32, device=device)
    descending = weights.sort(dim=-1, descending=True).values
    sums = descending.cumsum(dim=-1, dtype=torch.float64)
    mass = top_p * sums.gather(1, top_k - 1)
    num_kept = torch.where(top_p < 1, torch.searchsorted(sums, mass) + 1, top_k).clamp(max=top_k)
    least = descending.gather(1, num_kept - 1).squeeze(1)
    return torch.maximum(least, min_p)
