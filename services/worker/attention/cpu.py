"""Attention on the CPU: our kernels over slots, planned once a step."""

from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from services.worker.batch import ForwardBatch, Int32, Int64
from services.worker.kernels.attention import attention_kernel, queries_per_tile, scratch_floats
from services.worker.kernels.blocks import BLOCK
from services.worker.kv_pool import KvPool


@dataclass(frozen=True, slots=True)
class Plan:
    """Items of work of one step; the columns are those of `kernels.attention.attention_kernel`.

    table        int32 [sum of seq_lens]  slots, row after row
    tiles        int32 [., 4]  of rows with several new tokens, the longest first
    blocks       int32 [., 4]  of rows with one; `members` int32 [., 2] lie in them
    decode_rows  int32 [., 3]
    """

    new_slots: Int64
    table: Int32
    tiles: Int32
    blocks: Int32
    members: Int32
    decode_rows: Int32
    num_partials: int


def plan_step(batch: ForwardBatch, tile_tokens: int, window: int | None) -> Plan:
    table, row_starts = batch.kv_slots()
    extend_lens = np.diff(batch.qo_indptr)
    decode = np.flatnonzero(extend_lens == 1)
    blocks, members, decode_rows = _plan_decode(batch, decode, table, row_starts, window)
    return Plan(
        new_slots=batch.slots,
        table=table,
        tiles=_plan_tiles(batch, np.flatnonzero(extend_lens > 1), row_starts, tile_tokens),
        blocks=blocks,
        members=members,
        decode_rows=decode_rows,
        num_partials=len(members),
    )


def _plan_tiles(batch: ForwardBatch, rows: NDArray[np.intp], row_starts: Int64, tile_tokens: int) -> Int32:
    tiles = []
    for row in rows.tolist():
        begin, end = batch.qo_indptr[row : row + 2].tolist()
        firsts = np.arange(begin, end, tile_tokens)
        counts = np.minimum(tile_tokens, end - firsts)
        starts = np.full_like(firsts, row_starts[row])
        tiles.append(np.stack([firsts, counts, batch.positions[firsts], starts], axis=1))
    if not tiles:
        return np.empty((0, 4), dtype=np.int32)
    joined = np.concatenate(tiles)
    return joined[np.argsort(-joined[:, 2], kind="stable")].astype(np.int32)


def _plan_decode(
    batch: ForwardBatch, rows: NDArray[np.intp], table: Int32, row_starts: Int64, window: int | None
) -> tuple[Int32, Int32, Int32]:
    """Blocks, members and rows: each row's positions in blocks of BLOCK, equal blocks of several rows joined."""
    ends = batch.seq_lens[rows].astype(np.int64)
    begins = np.zeros_like(ends) if window is None else np.maximum(ends - window, 0)
    num_blocks = (ends - 1) // BLOCK - begins // BLOCK + 1
    partials_end = np.cumsum(num_blocks)
    partials_begin = partials_end - num_blocks
    owner = np.repeat(np.arange(len(rows)), num_blocks)
    block = np.arange(len(owner)) - partials_begin[owner] + begins[owner] // BLOCK
    first = np.maximum(begins[owner], block * BLOCK)
    length = np.minimum(ends[owner], (block + 1) * BLOCK) - first
    first += row_starts[rows][owner]
    tokens = batch.qo_indptr[:-1][rows]
    members = np.stack([tokens[owner], np.arange(len(owner))], axis=1)
    group = _same_slots(table, first, length)
    order = np.argsort(group, kind="stable")
    heads = np.flatnonzero(np.diff(group[order], prepend=-1))
    bounds = np.append(heads, len(order))
    leader = order[heads]
    blocks = np.stack([bounds[:-1], bounds[1:], first[leader], length[leader]], axis=1)
    decode_rows = np.stack([tokens, partials_begin, partials_end], axis=1)
    return blocks.astype(np.int32), members[order].astype(np.int32), decode_rows.astype(np.int32)


def _same_slots(table: Int32, first: Int64, length: Int64) -> Int64:
    """A number for each block, the same for blocks of equal slots: they are the same tokens of a shared prefix."""
    group = np.arange(len(first))
    if len(first) == 0:
        return group
    key = (table[first].astype(np.int64) << 32) | (table[first + length - 1].astype(np.int64) << 7) | length
    _, inverse, counts = np.unique(key, return_inverse=True, return_counts=True)
    leaders: dict[bytes, int] = {}
    for index in np.flatnonzero(counts[inverse] > 1).tolist():  # only blocks that start and end like another one
        slots = table[first[index] : first[index] + length[index]].tobytes()
        group[index] = leaders.setdefault(slots, index)
    return group


class CpuAttention:
    """Needs float32 or bfloat16 on the CPU and a head dimension that is a multiple of 16."""

    def __init__(self, pool: KvPool, num_heads: int, sliding_window: int | None) -> None:
        _, self._num_kv_heads, _, self._head_dim = pool.keys.shape
        if pool.keys.device.type != "cpu":
            raise ValueError(f"attention backend 'cpu' needs device cpu, got {pool.keys.device.type}")
        if self._head_dim % 16:
            raise ValueError(
                f"attention backend 'cpu' needs a head dimension that is a multiple of 16, got {self._head_dim}"
            )
        self.pool = pool
        self._window = sliding_window
        group_size = num_heads // self._num_kv_heads
        self._tile_tokens = queries_per_tile(group_size)
        self._kernel = attention_kernel(self._head_dim, group_size, pool.keys.dtype == torch.bfloat16)
        self._num_threads = torch.get_num_threads()
        self._scratch = torch.zeros(self._num_threads, scratch_floats(self._head_dim, group_size))
        self._partial_floats = num_heads * (self._head_dim + 2)
        self._partials = torch.empty(0)
        self._scale = torch.tensor([self._head_dim**-0.5])
        self._layer_keys = [layer.data_ptr() for layer in pool.keys]
        self._layer_values = [layer.data_ptr() for layer in pool.values]
        self._plan: Plan | None = None  # keeps the arrays alive whose addresses are below
        self._planned: tuple[int, ...] = ()

    def plan(self, batch: ForwardBatch) -> None:
        plan = self._plan = plan_step(batch, self._tile_tokens, self._window)
        # The kernels write where they are told.
        assert plan.table.min() >= 0, f"slot {plan.table.min()} is none"
        assert plan.table.max() < self.pool.num_slots, f"slot {plan.table.max()}, the pool has {self.pool.num_slots}"
        if self._partials.numel() < plan.num_partials * self._partial_floats:
            self._partials = torch.empty(plan.num_partials * self._partial_floats)
        self._planned = (
            self._num_kv_heads,
            self.pool.num_slots,
            plan.new_slots.ctypes.data,
            len(plan.new_slots),
            plan.table.ctypes.data,
            len(plan.tiles),
            plan.tiles.ctypes.data,
            len(plan.blocks),
            plan.blocks.ctypes.data,
            plan.members.ctypes.data,
            len(plan.decode_rows),
            plan.decode_rows.ctypes.data,
            self._partials.data_ptr(),
            self._window or 0,
            self._scratch.data_ptr(),
            self._scratch.shape[1],
            self._scale.data_ptr(),
        )

    @property
    def plan_of_step(self) -> Plan:
        assert self._plan is not None, "plan comes first"
        return self._plan

    def run(self, layer: int, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        assert self._plan is not None, "plan comes first"
        assert k.stride(0) == v.stride(0), "k and v are views of one tensor"
        out = q.new_empty(q.shape[0], q.shape[1] * q.shape[2])
        self._kernel.run(
            self._num_threads,
            q.data_ptr(),
            k.data_ptr(),
            v.data_ptr(),
            q.stride(0),
            k.stride(0),
            out.data_ptr(),
            self._layer_keys[layer],
            self._layer_values[layer],
            *self._planned,
        )
        return out
