"""The attention backends agree, and a row's result depends on that row alone."""

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from services.worker.attention.cpu import CpuAttention
from services.worker.attention.interface import AttentionBackend
from services.worker.attention.reference import ReferenceAttention, attend
from services.worker.batch import BatchRow, build_batch
from services.worker.kv_pool import KvPool

HEADS, KV_HEADS, HEAD_DIM, NUM_SLOTS = 4, 2, 16, 2048


def _pool(dtype: torch.dtype, seed: int = 0) -> KvPool:
    pool = KvPool(
        num_layers=1,
        num_kv_heads=KV_HEADS,
        num_slots=NUM_SLOTS,
        head_dim=HEAD_DIM,
        dtype=dtype,
        device=torch.device("cpu"),
    )
    generator = torch.Generator().manual_seed(seed)
    for tensor in (pool.keys, pool.values):
        tensor.copy_(torch.randn(tensor.shape, generator=generator))
    return pool


def _qkv(num_tokens: int, dtype: torch.dtype, seed: int = 1) -> tuple[Tensor, Tensor, Tensor]:
    """q, k and v as views of one tensor, as a fused projection leaves them."""
    generator = torch.Generator().manual_seed(seed)
    qkv = torch.randn(num_tokens, HEADS + 2 * KV_HEADS, HEAD_DIM, generator=generator).to(dtype)
    q, k, v = qkv.split([HEADS, KV_HEADS, KV_HEADS], dim=1)
    return q, k, v


def _run(backend: AttentionBackend, rows: list[BatchRow], qkv: tuple[Tensor, Tensor, Tensor]) -> Tensor:
    backend.plan(build_batch(rows))
    return backend.run(0, *qkv)


def _cpu(dtype: torch.dtype, window: int | None = None) -> CpuAttention:
    return CpuAttention(_pool(dtype), HEADS, window)


@st.composite
def _layouts(draw: st.DrawFn) -> list[BatchRow]:
    """Rows over scattered pieces of the pool; some share a prefix."""
    free = draw(st.permutations(range(NUM_SLOTS // 32)))
    pieces = iter([(piece * 32 + draw(st.integers(0, 3)), 28) for piece in free])
    shared = [next(pieces) for _ in range(draw(st.integers(0, 5)))]
    rows = []
    for _ in range(draw(st.integers(1, 6))):
        prefix = shared if draw(st.booleans()) else []
        extents = [*prefix, *(next(pieces) for _ in range(draw(st.integers(1, 6))))]
        room = sum(length for _, length in extents)
        lowest = sum(length for _, length in prefix)
        extend_len = draw(st.one_of(st.just(1), st.integers(1, room - lowest)))
        start = draw(st.integers(lowest, room - extend_len))
        rows.append(BatchRow([0] * extend_len, start, extents))
    return rows


@pytest.mark.parametrize(("dtype", "tolerance"), [(torch.float32, 2e-6), (torch.bfloat16, 2e-2)])
@given(rows=_layouts(), window=st.sampled_from([None, 1, 7, 64, 100]))
@settings(deadline=None)
def test_cpu_equals_reference(dtype: torch.dtype, tolerance: float, rows: list[BatchRow], window: int | None) -> None:
    qkv = _qkv(sum(len(row.token_ids) for row in rows), dtype)
    reference = ReferenceAttention(_pool(dtype), window)
    torch.testing.assert_close(
        _run(_cpu(dtype, window), rows, qkv), _run(reference, rows, qkv), atol=tolerance, rtol=tolerance
    )


@given(rows=_layouts(), window=st.sampled_from([None, 7, 100]))
@settings(deadline=None)
def test_neighbours_change_no_bit_of_a_row(rows: list[BatchRow], window: int | None) -> None:
    q, k, v = _qkv(sum(len(row.token_ids) for row in rows), torch.float32)
    together = _run(_cpu(torch.float32, window), rows, (q, k, v))
    begin = 0
    for row in rows:
        end = begin + len(row.token_ids)
        alone = _run(_cpu(torch.float32, window), [row], (q[begin:end], k[begin:end], v[begin:end]))
        assert torch.equal(together[begin:end], alone)
        begin = end


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("window", [None, 50])
def test_places_of_slots_change_no_bit_of_a_row(dtype: torch.dtype, window: int | None) -> None:
    results = []
    for extents in ([(0, 300)], [(1000, 77), (400, 1), (5, 222)]):
        attention = _cpu(dtype, window)
        q, k, v = _qkv(300, dtype)
        prefill = _run(attention, [BatchRow([0] * 299, 0, extents)], (q[:299], k[:299], v[:299]))
        decode = _run(attention, [BatchRow([0], 299, extents)], (q[299:], k[299:], v[299:]))
        results.append(torch.cat((prefill, decode)))
    assert torch.equal(*results)


@pytest.mark.parametrize("window", [None, 50])
def test_chunks_change_no_bit_of_a_prompt(window: int | None) -> None:
    q, k, v = _qkv(300, torch.float32)
    whole = _run(_cpu(torch.float32, window), [BatchRow([0] * 300, 0, [(0, 300)])], (q, k, v))
    chunked = _cpu(torch.float32, window)
    parts = []
    for begin, end in ((0, 2), (2, 130), (130, 257), (257, 300)):
        row = BatchRow([0] * (end - begin), begin, [(0, 300)])
        parts.append(_run(chunked, [row], (q[begin:end], k[begin:end], v[begin:end])))
    assert torch.equal(whole, torch.cat(parts))


def test_a_shared_prefix_is_read_as_one_block() -> None:
    attention = _cpu(torch.float32)
    attention.plan(build_batch([BatchRow([0], 130, [(0, 128), (200 + 8 * row, 8)]) for row in range(4)]))
    assert attention.plan_of_step.num_partials == 4 * 3
    assert len(attention.plan_of_step.blocks) == 2 + 4


def test_stale_values_behind_a_row_do_not_leak_into_it() -> None:
    attention = _cpu(torch.float32)
    attention.pool.values[:, :, 100:] = float("nan")
    attention.pool.keys[:, :, 100:] = float("nan")
    q, k, v = _qkv(13, torch.float32)
    poisoned = _run(attention, [BatchRow([0] * 3, 97, [(100, 100)])], (q[:3], k[:3], v[:3]))
    assert poisoned.isnan().all()
    rows = [BatchRow([0], 90, [(0, 91)]), BatchRow([0] * 9, 0, [(91, 9)])]
    assert _run(attention, rows, (q[3:], k[3:], v[3:])).isfinite().all()


def test_reference_is_softmax_over_what_a_token_may_see() -> None:
    q, k, v = _qkv(5, torch.float32)
    keys, values = k.transpose(0, 1), v.transpose(0, 1)
    expected = torch.nn.functional.scaled_dot_product_attention(
        q.transpose(0, 1), keys, values, is_causal=True, enable_gqa=True
    )
    torch.testing.assert_close(attend(q, keys, values, None), expected.transpose(0, 1))
    one = attend(q, keys, values, window=1)  # each token sees itself
    torch.testing.assert_close(one, v.repeat_interleave(HEADS // KV_HEADS, dim=1))


def test_a_long_row_spreads_over_several_blocks() -> None:
    rows = [BatchRow([0], 1999, [(0, 2000)])]
    qkv = _qkv(1, torch.float32)
    attention = _cpu(torch.float32)
    result = _run(attention, rows, qkv)
    assert len(attention.plan_of_step.blocks) == int(np.ceil(2000 / 64))
    torch.testing.assert_close(result, _run(ReferenceAttention(_pool(torch.float32), None), rows, qkv))


def test_a_head_dimension_that_the_kernels_cannot_take_is_refused() -> None:
    pool = KvPool(
        num_layers=1, num_kv_heads=1, num_slots=8, head_dim=12, dtype=torch.float32, device=torch.device("cpu")
    )
    with pytest.raises(ValueError, match="multiple of 16, got 12"):
        CpuAttention(pool, 1, None)
