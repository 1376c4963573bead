# mypy: disable-error-code="untyped-decorator,no-any-return,no-untyped-def"
"""Kernels between the linear layers: residual sum with RMS norm, rotary embedding, SwiGLU. Numbers are float32 inside."""

import functools
import math

from numba import cfunc, float32, njit, types

from services.worker.kernels.launch import Kernel
from services.worker.kernels.primitives import (
    address_of,
    exp_f32,
    fetch_add,
    load,
    load_f32,
    load_i64,
    store,
    store_f32,
)

_SUM = {"reassoc", "contract"}  # let sums run in vector lanes; the order is fixed at compile time
_ROWS_PER_ITEM = 4


@njit(fastmath=_SUM, error_model="numpy")
def _inverse_rms(address: int, start: int, n: int, eps: float, is_bf16: bool) -> float:
    total = float32(0.0)
    for i in range(n):
        value = load(address, start + i, is_bf16)
        total += value * value
    return float32(1.0) / float32(math.sqrt(total / float32(n) + eps))


@functools.cache
def add_and_norm_kernel(width: int, is_bf16: bool, has_update: bool) -> Kernel:
    """Arguments: residual float32 [T, width], update, weight [width], out, T, address of eps (float32)."""

    @cfunc(types.void(types.voidptr), cache=True, error_model="numpy")
    def kernel(data):
        a = address_of(data)
        residual, update, weight, out, num_rows = (
            load_i64(a, 1),
            load_i64(a, 2),
            load_i64(a, 3),
            load_i64(a, 4),
            load_i64(a, 5),
        )
        eps = load_f32(load_i64(a, 6), 0)
        while True:
            first = fetch_add(a, 0, 1) * _ROWS_PER_ITEM
            if first >= num_rows:
                break
            for row in range(first, min(first + _ROWS_PER_ITEM, num_rows)):
                start = row * width
                if has_update:
                    for i in range(width):
                        store_f32(residual, start + i, load_f32(residual, start + i) + load(update, start + i, is_bf16))
                scale = _inverse_rms(residual, start, width, eps, False)
                for i in range(width):
                    value = load_f32(residual, start + i) * scale * load(weight, i, is_bf16)
                    store(out, start + i, value, is_bf16)

    return Kernel(kernel, num_counters=1, num_arguments=6)


@functools.cache
def rotate_kernel(head_dim: int, is_bf16: bool, has_norm: bool) -> Kernel:
    """Rotates the first `num_heads` heads of each token in place; heads from `num_q_heads` on use the second norm weight.

    Arguments: qkv, its row stride, T, num_heads, num_q_heads, rotary table float32 [positions, head_dim], positions
    int64 [T], q norm, k norm [head_dim], address of eps (float32).
    """
    half = head_dim // 2

    @cfunc(types.void(types.voidptr), cache=True, error_model="numpy")
    def kernel(data):
        a = address_of(data)
        qkv, stride, num_tokens, num_heads, num_q_heads = (
            load_i64(a, 1),
            load_i64(a, 2),
            load_i64(a, 3),
            load_i64(a, 4),
            load_i64(a, 5),
        )
        table, positions, q_norm, k_norm = load_i64(a, 6), load_i64(a, 7), load_i64(a, 8), load_i64(a, 9)
        eps = load_f32(load_i64(a, 10), 0)
        while True:
            first = fetch_add(a, 0, 1) * _ROWS_PER_ITEM
            if first >= num_tokens:
                break
            for token in range(first, min(first + _ROWS_PER_ITEM, num_tokens)):
                cos = load_i64(positions, token) * head_dim
                sin = cos + half
                for head in range(num_heads):
                    start = token * stride + head * head_dim
                    norm = q_norm if head < num_q_heads else k_norm
                    scale = _inverse_rms(qkv, start, head_dim, eps, is_bf16) if has_norm else float32(1.0)
                    for i in range(half):
                        x, y = load(qkv, start + i, is_bf16), load(qkv, start + half + i, is_bf16)
                        if has_norm:
                            x *= scale * load(norm, i, is_bf16)
                            y *= scale * load(norm, half + i, is_bf16)
                        c, s = load_f32(table, cos + i), load_f32(table, sin + i)
                        store(qkv, start + i, x * c - y * s, is_bf16)
                        store(qkv, start + half + i, y * c + x * s, is_bf16)

    return Kernel(kernel, num_counters=1, num_arguments=10)


@functools.cache
def silu_and_mul_kernel(is_bf16: bool) -> Kernel:
    """Arguments: gate_up [T, 2 width], out [T, width], T, width."""

    @cfunc(types.void(types.voidptr), cache=True, error_model="numpy")
    def kernel(data):
        a = address_of(data)
        gate_up, out, num_rows, width = load_i64(a, 1), load_i64(a, 2), load_i64(a, 3), load_i64(a, 4)
        while True:
            row = fetch_add(a, 0, 1)
            if row >= num_rows:
                break
            gate = row * 2 * width
            for i in range(width):
                g, u = load(gate_up, gate + i, is_bf16), load(gate_up, gate + width + i, is_bf16)
                store(out, row * width + i, g / (float32(1.0) + exp_f32(-g)) * u, is_bf16)

    return Kernel(kernel, num_counters=1, num_arguments=4)
