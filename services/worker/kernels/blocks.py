# mypy: disable-error-code="untyped-decorator,no-any-return,no-untyped-def"
"""The loops of attention over one block of positions, on float32 copies of its keys and values."""

import numpy as np
from numba import float32, njit

from services.worker.kernels.primitives import exp_f32, load_f32, load_i32, prefetch, store_f32, sum_of, widen_16

BLOCK = 64
LANES = 16  # float32 lanes of the widest vectors; loops are padded to it, narrower machines run them in several parts
CACHE_LINE = 64
HIDDEN = np.float32(-1e30)  # the score of a key that may not be seen; finite, for differences of two of them
SEEN = np.float32(-1e29)


@njit(inline="always")
def gather(pool, table, first, n, padded, head_dim, out, is_bf16):
    """Rows `table[first : first + n]` of the pool as float32, then zeros up to `padded` rows."""
    for j in range(n):
        source = load_i32(table, first + j) * head_dim
        for d in range(0, head_dim, 16):
            widen_16(pool, source + d, out, j * head_dim + d, is_bf16)
    for i in range(n * head_dim, padded * head_dim):
        store_f32(out, i, float32(0.0))


@njit(inline="always")
def scores_of(q, keys, n, head_dim, scores, ahead_pool, ahead_table, ahead_first, ahead_n, element):
    """Products of one query with n keys, hidden scores behind them up to BLOCK.

    Meanwhile, rows `ahead_table[ahead_first : ahead_first + ahead_n]` of a pool are asked for, one a key: the next block's
    memory arrives while this one is computed.
    """
    for j in range(n):
        if j < ahead_n:
            line = ahead_pool + load_i32(ahead_table, ahead_first + j) * head_dim * element
            for offset in range(0, head_dim * element, CACHE_LINE):
                prefetch(line + offset)
        total = float32(0.0)
        for d in range(head_dim):
            total = sum_of(total, load_f32(q, d) * load_f32(keys, j * head_dim + d))
        store_f32(scores, j, total)
    for j in range(n, BLOCK):
        store_f32(scores, j, HIDDEN)


@njit(inline="always")
def softmax_terms(scores, lanes):
    """Turn BLOCK scores into exp(score - maximum), 0 where hidden; (maximum, sum). `lanes` is room for LANES floats."""
    for i in range(LANES):
        store_f32(lanes, i, load_f32(scores, i))
    for j in range(LANES, BLOCK, LANES):
        for i in range(LANES):
            a, b = load_f32(lanes, i), load_f32(scores, j + i)
            store_f32(lanes, i, a if a > b else b)
    maximum = load_f32(lanes, 0)
    for i in range(1, LANES):
        b = load_f32(lanes, i)
        maximum = maximum if maximum > b else b
    total = float32(0.0)
    for j in range(BLOCK):
        score = load_f32(scores, j)
        term = exp_f32(score - maximum)
        term = term if score > SEEN else float32(0.0)
        store_f32(scores, j, term)
        total = sum_of(total, term)
    return maximum, total


@njit(inline="always")
def weighted_values(weights, values, padded, head_dim, out):
    """Sum of weights[j] * values[j] over `padded` (a multiple of 8) rows into out [head_dim]."""
    for d in range(head_dim):
        store_f32(out, d, float32(0.0))
    for j in range(0, padded, 8):
        w0, w1, w2, w3 = (
            load_f32(weights, j),
            load_f32(weights, j + 1),
            load_f32(weights, j + 2),
            load_f32(weights, j + 3),
        )
        w4, w5, w6, w7 = (
            load_f32(weights, j + 4),
            load_f32(weights, j + 5),
            load_f32(weights, j + 6),
            load_f32(weights, j + 7),
        )
        v = j * head_dim
        for d in range(head_dim):
            total = load_f32(out, d)
            total += w0 * load_f32(values, v + d)
            total += w1 * load_f32(values, v + head_dim + d)
            total += w2 * load_f32(values, v + 2 * head_dim + d)
            total += w3 * load_f32(values, v + 3 * head_dim + d)
            total += w4 * load_f32(values, v + 4 * head_dim + d)
            total += w5 * load_f32(values, v + 5 * head_dim + d)
            total += w6 * load_f32(values, v + 6 * head_dim + d)
            total += w7 * load_f32(values, v + 7 * head_dim + d)
            store_f32(out, d, total)


@njit(inline="always")
def rank_8_update(out, stride_out, rows, left, stride_left, right, stride_right, depth, lanes):
    """out[r, lane] += sum over k < depth of left(r, k) * right[k, lane], two rows r and eight k at a time.

    left(r, k) lies at left + r * stride_left[0] + k * stride_left[1]. `rows` is even, `depth` a multiple of eight.
    """
    step_r, step_k = stride_left
    for r in range(0, rows, 2):
        for k in range(0, depth, 8):
            a = r * step_r + k * step_k
            a0, a1 = load_f32(left, a), load_f32(left, a + step_k)
            a2, a3 = load_f32(left, a + 2 * step_k), load_f32(left, a + 3 * step_k)
            a4, a5 = load_f32(left, a + 4 * step_k), load_f32(left, a + 5 * step_k)
            a6, a7 = load_f32(left, a + 6 * step_k), load_f32(left, a + 7 * step_k)
            a += step_r
            b0, b1 = load_f32(left, a), load_f32(left, a + step_k)
            b2, b3 = load_f32(left, a + 2 * step_k), load_f32(left, a + 3 * step_k)
            b4, b5 = load_f32(left, a + 4 * step_k), load_f32(left, a + 5 * step_k)
            b6, b7 = load_f32(left, a + 6 * step_k), load_f32(left, a + 7 * step_k)
            x = k * stride_right
            o, p = r * stride_out, (r + 1) * stride_out
            for lane in range(lanes):
                s, t = load_f32(out, o + lane), load_f32(out, p + lane)
                x0, x1 = load_f32(right, x + lane), load_f32(right, x + stride_right + lane)
                s += a0 * x0
                t += b0 * x0
                s += a1 * x1
                t += b1 * x1
                x2, x3 = load_f32(right, x + 2 * stride_right + lane), load_f32(right, x + 3 * stride_right + lane)
                s += a2 * x2
                t += b2 * x2
                s += a3 * x3
                t += b3 * x3
                x4, x5 = load_f32(right, x + 4 * stride_right + lane), load_f32(right, x + 5 * stride_right + lane)
                s += a4 * x4
                t += b4 * x4
                s += a5 * x5
                t += b5 * x5
                x6, x7 = load_f32(right, x + 6 * stride_right + lane), load_f32(right, x + 7 * stride_right + lane)
                s += a6 * x6
                t += b6 * x6
                s += a7 * x7
                t += b7 * x7
                store_f32(out, o + lane, s)
                store_f32(out, p + lane, t)
