"""Attention row by row in plain float32 torch: slow, and right at a glance. The other backends are compared with it."""

import torch
from torch import Tensor

from services.worker.batch import ForwardBatch
from services.worker.kv_pool import KvPool


class ReferenceAttention:
    def __init__(self, pool: KvPool, sliding_window: int | None) -> None:
        self._pool = pool
        self._window = sliding_window
        self._batch: ForwardBatch | None = None

    def plan(self, batch: ForwardBatch) -> None:
        device = self._pool.keys.device
        slots, indptr = batch.kv_slots()
        self._batch = batch
        self._new_slots = torch.from_numpy(batch.slots).to(device)
        self._row_slots = torch.from_numpy(slots).to(device, torch.int64).tensor_split(torch.from_numpy(indptr[1:-1]))

    def run(self, layer: int, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        assert self._batch is not None, "plan comes first"
        self._pool.write(layer, self._new_slots, k, v)
        out = torch.empty_like(q, memory_format=torch.contiguous_format)
        for row, slots in enumerate(self._row_slots):
            begin, end = self._batch.qo_indptr[row : row + 2].tolist()
            keys, values = (pool[layer][:, slots] for pool in (self._pool.keys, self._pool.values))
            out[begin:end] = attend(q[begin:end], keys, values, self._window)
        return out.flatten(1)


def attend(q: Tensor, keys: Tensor, values: Tensor, window: int | None) -> Tensor:
    """The last n of m tokens look at all m of their sequence.

    q [n, heads, head_dim], keys and values [kv_heads, m, head_dim] -> [n, heads, head_dim] in q's dtype.
    """
    num_new, num_heads, head_dim = q.shape
    num_kv_heads, seq_len, _ = keys.shape
    keys, values = (x.float().repeat_interleave(num_heads // num_kv_heads, dim=0) for x in (keys, values))
    scores = q.float().transpose(0, 1) @ keys.transpose(1, 2) / head_dim**0.5
    distance = torch.arange(seq_len - num_new, seq_len)[:, None] - torch.arange(seq_len)[None, :]
    hidden = distance < 0 if window is None else (distance < 0) | (distance >= window)
    weights = scores.masked_fill(hidden.to(q.device), float("-inf")).softmax(dim=-1)
    attended: Tensor = weights @ values
    return attended.transpose(0, 1).to(q.dtype)
