"""Chooses the next token of many sequences in one vectorised pass over their logits.

The order is penalties, logit bias, grammar mask, temperature, top-k, top-p, min-p. Rows that use no control pay nothing for
those that do, and greedy rows without any cost one argmax. A row's token depends on that row alone: its logits, its seed and
its position.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from services.worker.sampling.controls import SamplingControls
from services.worker.sampling.counter_random import uniforms
from services.worker.sampling.truncation import thresholds

ROWS_AT_ONCE = 4
"""Rows drawn together on a CPU: as many as its caches hold while the pass goes over their logits several times."""

BLOCK = 256
"""Weights per block of the two-level inverse CDF."""

_BITS_OF_BYTE = np.unpackbits(np.arange(256, dtype=np.uint8)[:, None], axis=1, bitorder="little")
_BIAS_OF_BYTE = np.where(_BITS_OF_BYTE == 1, np.float32(0), np.float32(-np.inf))
"""float32 [256, 8]: the bits of a mask's byte, turned into what is added to eight logits."""

_MIN_TEMPERATURE = float(np.finfo(np.float32).tiny)
_MAX_TEMPERATURE = 1e30
"""At the ends of the range only ties remain, or all tokens are equal; beyond it float32 would make 0 / 0 of them."""


@dataclass(frozen=True, slots=True)
class SampleRow:
    """Whose next token is wanted, and at which position of the sequence it will stand.

    mask    int32 [at least vocab / 32]  one bit per token that the sequence's grammar allows, lowest first; None: all
    allows  in place of a mask, of a greedy row: whether the grammar allows a token
    """

    controls: SamplingControls
    position: int
    mask: NDArray[np.int32] | None = None
    allows: Callable[[int], bool] | None = None


@dataclass(slots=True)
class Chosen:
    token_ids: list[int]
    """Of a failed or refused row without meaning."""
    failures: dict[int, str] = field(default_factory=dict)
    """By row."""
    refused: list[int] = field(default_factory=list)
    """Greedy rows without a mask whose grammar does not allow the likeliest token: see `choose_allowed`."""


def choose_tokens(logits: Tensor, rows: Sequence[SampleRow]) -> Chosen:
    """Choose one token per row. `logits`, float32 [R, vocab], is scratch space afterwards."""
    assert logits.shape[0] == len(rows), f"{logits.shape[0]} rows of logits for {len(rows)} rows"
    adjusted = [index for index, row in enumerate(rows) if row.controls.adjusts]
    if adjusted:
        _adjust(logits, adjusted, rows)
    _apply_masks(logits, {index: row.mask for index, row in enumerate(rows) if row.mask is not None})
    token_ids = argmax(logits)
    largest = logits.gather(1, token_ids.unsqueeze(1))
    drawn = [index for index, row in enumerate(rows) if not row.controls.greedy]
    failures = _failures(largest)
    group = ROWS_AT_ONCE if logits.device.type == "cpu" else max(1, len(drawn))
    for start in range(0, len(drawn), group):
        part = drawn[start : start + group]
        token_ids[part] = _draw(logits[part], largest[part], [rows[index] for index in part])
    chosen = Chosen(token_ids.tolist(), failures)
    chosen.refused = [
        row
        for row, (token, of) in enumerate(zip(chosen.token_ids, rows, strict=True))
        if of.allows is not None and row not in failures and not of.allows(token)
    ]
    return chosen


def choose_allowed(logits: Tensor, chosen: Chosen, masks: Mapping[int, NDArray[np.int32]]) -> None:
    """Choose again for the refused rows that `masks` names, from the logits as `choose_tokens` has left them."""
    again = [row for row in chosen.refused if row in masks]
    if not again:
        return
    allowed = logits[again]
    _apply_masks(allowed, {index: masks[row] for index, row in enumerate(again)})
    token_ids = argmax(allowed)
    for row, token in zip(again, token_ids.tolist(), strict=True):
        chosen.token_ids[row] = token
    failures = _failures(allowed.gather(1, token_ids.unsqueeze(1)))
    chosen.failures |= {again[row]: message for row, message in failures.items()}
    chosen.refused = [row for row in chosen.refused if row not in masks]


def argmax(logits: Tensor) -> Tensor:
    """The likeliest token of each row, the lowest id of equals; of a row with a NaN the position of that. int64 [R]"""
    if logits.device.type == "cpu":
        # Six times faster than torch's.
        return torch.from_numpy(logits.numpy().argmax(axis=-1))
    return logits.argmax(dim=-1)


def _apply_masks(logits: Tensor, masks: Mapping[int, NDArray[np.int32]]) -> None:
    """Minus infinity for each token that its row's mask does not allow; `masks` go by row."""
    bias: NDArray[np.float32] | None = None
    for row, mask in masks.items():
        of_byte = mask.view(np.uint8)
        if bias is None:
            bias = np.empty((len(of_byte), 8), np.float32)
        # With `out` and "clip" six times faster than indexing, which checks each byte first.
        np.take(_BIAS_OF_BYTE, of_byte, axis=0, out=bias, mode="clip")
        logits[row] += torch.from_numpy(bias.reshape(-1)[: logits.shape[1]]).to(logits.device)


def _failures(largest: Tensor) -> dict[int, str]:
    """Rows from which no token can be chosen: the largest logit, which carries a NaN of its row, tells."""
    if largest.isfinite().all():
        return {}
    values = largest.squeeze(1).tolist()
    return {
        row: "no token is allowed" if value == -np.inf else f"the model's logits are not finite ({value})"
        for row, value in enumerate(values)
        if not np.isfinite(value)
    }


def _adjust(logits: Tensor, adjusted: Sequence[int], rows: Sequence[SampleRow]) -> None:
    """Apply penalties and bias in place; each touches only the logits of the tokens it names."""
    penalised = [row for row in adjusted if rows[row].controls.counts is not None]
    if penalised:
        _penalise(logits, penalised, rows)
    bias_rows: list[NDArray[np.int64]] = []
    bias_ids: list[NDArray[np.int32]] = []
    bias_values: list[NDArray[np.float32]] = []
    for row in adjusted:
        controls = rows[row].controls
        banned = controls.banned_ids
        for ids, values in (
            (controls.bias_ids, controls.bias_values),
            (banned, np.full(len(banned), -np.inf, np.float32)),
        ):
            bias_rows.append(np.full(len(ids), row))
            bias_ids.append(ids)
            bias_values.append(values)
    where = (_concatenate(bias_rows, logits).long(), _concatenate(bias_ids, logits).long())
    logits.index_put_(where, _concatenate(bias_values, logits), accumulate=True)


def _penalise(logits: Tensor, penalised: Sequence[int], rows: Sequence[SampleRow]) -> None:
    tables = [counts for row in penalised if (counts := rows[row].controls.counts) is not None]
    params = [rows[row].controls.params for row in penalised]
    sizes = [len(table.ids) for table in tables]

    def per_token(values: Sequence[float]) -> Tensor:
        return torch.from_numpy(np.repeat(np.array(values, np.float32), sizes)).to(logits.device)

    where = (
        torch.from_numpy(np.repeat(np.array(penalised), sizes)).to(logits.device),
        _concatenate([table.ids for table in tables], logits).long(),
    )
    num_times = _concatenate([table.counts for table in tables], logits).float()
    values = logits[where]
    repetition = per_token([p.repetition_penalty for p in params])
    values = torch.where(values > 0, values / repetition, values * repetition)
    values -= per_token([p.presence_penalty for p in params]) * (num_times > 0)
    values -= per_token([p.frequency_penalty for p in params]) * num_times
    logits[where] = values


def _draw(logits: Tensor, largest: Tensor, rows: Sequence[SampleRow]) -> Tensor:
    """Draw each row's token from its truncated distribution. Overwrites `logits`. int64 [R]"""
    device = logits.device
    params = [row.controls.params for row in rows]
    temperature = torch.tensor([p.temperature for p in params], dtype=torch.float64, device=device)
    temperature.clamp_(_MIN_TEMPERATURE, _MAX_TEMPERATURE)
    # Subtracting first keeps a tiny temperature from overflowing: the likeliest token stands at 0, all others below.
    weights = logits.sub_(largest).div_(temperature.float().unsqueeze(1)).exp_()
    if any(row.controls.truncates for row in rows):
        least = thresholds(weights, params)
        # Not masked_fill_: on a CPU it branches for each number.
        weights.mul_(weights >= least.unsqueeze(1))
    numbers = uniforms([row.controls.seed for row in rows], [row.position for row in rows])
    return inverse_cdf(weights, torch.from_numpy(numbers).to(device))


def inverse_cdf(weights: Tensor, numbers: Tensor) -> Tensor:
    """The token in whose share of its row's sum `number` falls, tokens in order of id. int64 [R]

    Two levels: running sums over the whole vocabulary would starve the tail in float32 and cost too much in float64.

    weights  float32 [R, vocab]  not negative, not all zero in a row
    numbers  float64 [R]         in [0, 1)
    """
    padding = -weights.shape[1] % BLOCK
    blocks = (torch.nn.functional.pad(weights, (0, padding)) if padding else weights).reshape(len(weights), -1, BLOCK)
    sums = blocks.sum(-1).double().cumsum(-1)
    target = numbers * sums[:, -1]
    block = (sums <= target.unsqueeze(1)).sum(-1).clamp(max=sums.shape[1] - 1)
    each_row = torch.arange(len(weights), device=weights.device)
    inner = blocks[each_row, block].double().cumsum(-1)
    # The block's sum was rounded to float32: stay below its exact one, so that a token of weight 0 is never hit.
    before = torch.where(block > 0, sums[each_row, block - 1], 0.0)
    below = torch.nextafter(inner[:, -1], torch.zeros((), dtype=torch.float64, device=weights.device))
    rest = torch.minimum(target - before, below)
    token: Tensor = block * BLOCK + (inner <= rest.unsqueeze(1)).sum(-1)
    return token.clamp(max=weights.shape[1] - 1)


def _concatenate(arrays: Sequence[NDArray[np.generic]], like: Tensor) -> Tensor:
    return torch.from_numpy(np.concatenate(arrays)).to(like.device)
