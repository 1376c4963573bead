"""Compiled kernels compute what plain torch computes, on any number of threads."""

import numpy as np
import pytest
import torch
from numba import njit

from services.worker.attention.cpu import CpuAttention
from services.worker.batch import BatchRow, build_batch
from services.worker.kernels.launch import Kernel
from services.worker.kernels.primitives import exp_f32
from services.worker.kv_pool import KvPool
from services.worker.model.cpu_ops import CpuOps
from services.worker.model.layer_ops import TorchOps
from services.worker.model.rotary import rotary_table

EPS = 1e-5
TABLE = rotary_table(16, 128, 10000.0, {})
OURS, THEIRS = CpuOps(TABLE, EPS), TorchOps(TABLE, EPS)

dtypes = pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
# One row runs on the calling thread, many on several.
row_counts = pytest.mark.parametrize("num_rows", [1, 3, 50])


def _close(ours: torch.Tensor, theirs: torch.Tensor) -> None:
    tolerance = 1e-5 if ours.dtype == torch.float32 else 1e-2  # bfloat16: the last of 8 bits may be rounded either way
    torch.testing.assert_close(ours, theirs, atol=tolerance, rtol=tolerance)


@dtypes
@row_counts
@pytest.mark.parametrize("has_update", [True, False])
def test_add_and_norm(dtype: torch.dtype, num_rows: int, has_update: bool) -> None:
    residual = torch.randn(num_rows, 48)
    update = torch.randn(num_rows, 48).to(dtype) if has_update else None
    weight = torch.rand(48).to(dtype)
    ours, theirs = residual.clone(), residual.clone()
    _close(OURS.add_and_norm(ours, update, weight), THEIRS.add_and_norm(theirs, update, weight))
    assert torch.equal(ours, theirs)


@dtypes
@row_counts
@pytest.mark.parametrize("has_norms", [True, False])
def test_rotate(dtype: torch.dtype, num_rows: int, has_norms: bool) -> None:
    qkv = torch.randn(num_rows, 8, 16).to(dtype)
    positions = torch.randint(128, (num_rows,))
    norms = (torch.rand(16).to(dtype), torch.rand(16).to(dtype)) if has_norms else None
    ours, theirs = qkv.clone(), qkv.clone()
    OURS.rotate_(ours[:, :6], 4, positions, norms)
    THEIRS.rotate_(theirs[:, :6], 4, positions, norms)
    _close(ours, theirs)
    assert torch.equal(ours[:, 6:], qkv[:, 6:]), "values are not rotated"


@dtypes
@row_counts
def test_silu_and_mul(dtype: torch.dtype, num_rows: int) -> None:
    gate_up = (torch.randn(num_rows, 2 * 40) * 20).to(dtype)
    _close(OURS.silu_and_mul(gate_up), THEIRS.silu_and_mul(gate_up))


def test_exp_is_exact_to_float32() -> None:
    @njit
    def many(x: np.ndarray, out: np.ndarray) -> None:  # type: ignore[type-arg]
        for index in range(len(x)):
            out[index] = exp_f32(x[index])

    x = np.linspace(-87, 87, 100_001, dtype=np.float32)
    out = np.empty_like(x)
    many(x, out)
    exact = np.exp(x.astype(np.float64))
    assert (np.abs(out - exact) / exact).max() < 2e-7


def test_kernels_run_on_threads_of_their_own_where_torch_has_another_openmp(monkeypatch: pytest.MonkeyPatch) -> None:
    pool = KvPool(
        num_layers=1, num_kv_heads=2, num_slots=512, head_dim=16, dtype=torch.float32, device=torch.device("cpu")
    )
    attention = CpuAttention(pool, 4, None)
    q, k, v = torch.randn(301, 8, 16).tensor_split((4, 6), dim=1)
    attention.plan(build_batch([BatchRow([0] * 300, 0, [(0, 300)]), BatchRow([0], 99, [(300, 100)])]))
    expected = attention.run(0, q, k, v)
    monkeypatch.setattr(Kernel, "_gomp_parallel", None)
    assert torch.equal(attention.run(0, q, k, v), expected)
