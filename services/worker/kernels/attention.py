# mypy: disable-error-code="untyped-decorator,no-any-return,no-untyped-def"
"""Attention over KV slots, for rows that decode and rows that prefill, in one launch.

Both read keys and values through a table of slots, so runs of slots may lie anywhere, and both work in blocks of BLOCK
positions counted from the start of the sequence, so a row's sums run in the same order wherever it lies, whatever its chunks
and neighbours are.

*Decode* items are one block of positions for all rows that hold it in the same slots: a shared prefix is read once. They leave
partial results (maximum, sum, weighted values), which are merged at the end. *Extend* items are a tile of new tokens against
all positions before; their vector lanes are the tile's queries, so no sum ever runs across lanes.
"""

import functools

import numpy as np
from numba import cfunc, float32, njit, types

from services.worker.kernels.launch import Kernel
from services.worker.kernels.primitives import (
    address_of,
    exp_f32,
    fetch_add,
    load,
    load_f32,
    load_i32,
    load_i64,
    store,
    store_f32,
    sum_of,
    wait_until,
)

BLOCK = 64
_LANES = 16  # float32 lanes of the widest vectors; loops are padded to it, narrower machines run them in several parts
_TOKENS_PER_ITEM = 8
_HIDDEN = np.float32(-1e30)  # the score of a key that may not be seen; finite, for differences of two of them
_SEEN = np.float32(-1e29)


def queries_per_tile(group_size: int) -> int:
    """New tokens in one extend item, so that its queries (tokens x heads of a KV head) fill about six vectors."""
    return max(1, 6 * _LANES // group_size)


def _tile_lanes(group_size: int) -> int:
    return -(-queries_per_tile(group_size) * group_size // _LANES) * _LANES


def scratch_floats(head_dim: int, group_size: int) -> int:
    """float32 of working memory that each thread needs."""
    lanes = _tile_lanes(group_size)
    decode = 2 * BLOCK * head_dim + group_size * head_dim + BLOCK + 2 * _LANES + head_dim
    extend = 2 * BLOCK * head_dim + 2 * head_dim * lanes + BLOCK * lanes + 4 * lanes
    return max(decode, extend)


@njit(inline="always")
def _gather(pool, table, first, n, padded, head_dim, out, is_bf16):
    """Rows `table[first : first + n]` of the pool as float32, then zeros up to `padded` rows."""
    for j in range(n):
        source = load_i32(table, first + j) * head_dim
        for d in range(head_dim):
            store_f32(out, j * head_dim + d, load(pool, source + d, is_bf16))
    for i in range(n * head_dim, padded * head_dim):
        store_f32(out, i, float32(0.0))


@njit(inline="always")
def _scores(q, keys, n, head_dim, scores):
    """Products of one query with n keys, hidden scores behind them up to BLOCK."""
    for j in range(n):
        total = float32(0.0)
        for d in range(head_dim):
            total = sum_of(total, load_f32(q, d) * load_f32(keys, j * head_dim + d))
        store_f32(scores, j, total)
    for j in range(n, BLOCK):
        store_f32(scores, j, _HIDDEN)


@njit(inline="always")
def _softmax_terms(scores, lanes):
    """Turn BLOCK scores into exp(score - maximum), 0 where hidden; (maximum, sum). `lanes` is room for _LANES floats."""
    for i in range(_LANES):
        store_f32(lanes, i, load_f32(scores, i))
    for j in range(_LANES, BLOCK, _LANES):
        for i in range(_LANES):
            a, b = load_f32(lanes, i), load_f32(scores, j + i)
            store_f32(lanes, i, a if a > b else b)
    maximum = load_f32(lanes, 0)
    for i in range(1, _LANES):
        b = load_f32(lanes, i)
        maximum = maximum if maximum > b else b
    total = float32(0.0)
    for j in range(BLOCK):
        score = load_f32(scores, j)
        term = exp_f32(score - maximum)
        term = term if score > _SEEN else float32(0.0)
        store_f32(scores, j, term)
        total = sum_of(total, term)
    return maximum, total


@njit(inline="always")
def _weighted_values(weights, values, padded, head_dim, out):
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
def _rank_8_update(out, stride_out, rows, left, stride_left, right, stride_right, depth, lanes):
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


@functools.cache
def attention_kernel(head_dim: int, group_size: int, is_bf16: bool) -> Kernel:
    """`group_size` query heads share a KV head. Arguments, in this order (arrays of int32 unless stated):

    q, k, v            [T, ..., head_dim]
    q stride, kv stride   elements between tokens
    out                [T, heads * head_dim]
    keys, values       [kv_heads, slots, head_dim], the layer's pool
    num_kv_heads, num_slots
    new slots int64 [T], T
    table              slots of all rows, one row after another
    num_tiles, tiles [., 4]       first token, number of tokens, position of the first, start of its row in the table
    num_blocks, blocks [., 4]     first member, end of members, start in the table, number of positions
    members [., 2]                token, index of its partial result
    num_decode, decode rows [., 3]   token, first partial result, end of them
    partials float32 [., kv_heads, group_size, head_dim + 2]
    window             0 for none
    scratch float32, floats of scratch per thread
    address of the scale float32
    """
    lanes = _tile_lanes(group_size)
    partial_size = group_size * (head_dim + 2)

    @cfunc(types.void(types.voidptr), cache=True, error_model="numpy", fastmath={"contract"})
    def kernel(data):
        a = address_of(data)
        q, k, v, q_stride, kv_stride = load_i64(a, 6), load_i64(a, 7), load_i64(a, 8), load_i64(a, 9), load_i64(a, 10)
        out, keys, values = load_i64(a, 11), load_i64(a, 12), load_i64(a, 13)
        num_kv_heads, num_slots, new_slots, num_tokens = (
            load_i64(a, 14),
            load_i64(a, 15),
            load_i64(a, 16),
            load_i64(a, 17),
        )
        table, num_tiles, tiles, num_blocks, blocks = (
            load_i64(a, 18),
            load_i64(a, 19),
            load_i64(a, 20),
            load_i64(a, 21),
            load_i64(a, 22),
        )
        members, num_decode, decode_rows, partials, window = (
            load_i64(a, 23),
            load_i64(a, 24),
            load_i64(a, 25),
            load_i64(a, 26),
            load_i64(a, 27),
        )
        my_scratch = load_i64(a, 28) + 4 * load_i64(a, 29) * fetch_add(a, 5, 1)
        scale = load_f32(load_i64(a, 30), 0)
        element = 2 if is_bf16 else 4
        pool_stride = num_slots * head_dim * element
        out_stride = num_kv_heads * group_size * head_dim
        block_keys = my_scratch
        block_values = block_keys + 4 * BLOCK * head_dim
        rest = block_values + 4 * BLOCK * head_dim

        # 1. New keys and values go to their slots.
        num_items = (num_tokens + _TOKENS_PER_ITEM - 1) // _TOKENS_PER_ITEM
        while True:
            item = fetch_add(a, 0, 1)
            if item >= num_items:
                break
            first = item * _TOKENS_PER_ITEM
            for token in range(first, min(first + _TOKENS_PER_ITEM, num_tokens)):
                slot = load_i64(new_slots, token) * head_dim
                for head in range(num_kv_heads):
                    source = token * kv_stride + head * head_dim
                    for d in range(head_dim):
                        store(keys + head * pool_stride, slot + d, load(k, source + d, is_bf16), is_bf16)
                        store(values + head * pool_stride, slot + d, load(v, source + d, is_bf16), is_bf16)
            fetch_add(a, 1, 1)
        wait_until(a, 1, num_items)

        # 2. Tiles of new tokens first, as they take longest, then blocks of decoding rows.
        num_tile_items = num_tiles * num_kv_heads
        num_items = num_tile_items + num_blocks * num_kv_heads
        while True:
            item = fetch_add(a, 2, 1)
            if item >= num_items:
                break
            if item < num_tile_items:
                head = item % num_kv_heads
                entry = item // num_kv_heads * 4
                first, count = load_i32(tiles, entry), load_i32(tiles, entry + 1)
                position, row = load_i32(tiles, entry + 2), load_i32(tiles, entry + 3)
                used = (count * group_size + _LANES - 1) // _LANES * _LANES
                queries = rest
                scores = queries + 4 * head_dim * lanes
                sums = scores + 4 * BLOCK * lanes
                maxima = sums + 4 * head_dim * lanes
                totals = maxima + 4 * lanes
                alphas = totals + 4 * lanes
                lane_positions = alphas + 4 * lanes  # as float32: exact below 2 ** 24
                for i in range(head_dim * lanes):
                    store_f32(queries, i, float32(0.0))
                    store_f32(sums, i, float32(0.0))
                for lane in range(used):
                    store_f32(maxima, lane, _HIDDEN)
                    store_f32(totals, lane, float32(0.0))
                    store_f32(lane_positions, lane, float32(position + lane // group_size))
                for t in range(count):
                    for g in range(group_size):
                        source = (first + t) * q_stride + (head * group_size + g) * head_dim
                        for d in range(head_dim):
                            store_f32(queries, d * lanes + t * group_size + g, load(q, source + d, is_bf16) * scale)
                begin = 0
                if window > 0:
                    begin = max(0, position - window + 1) // BLOCK * BLOCK
                end = position + count
                for block in range(begin, end, BLOCK):
                    n = min(BLOCK, end - block)
                    padded = (n + 7) // 8 * 8
                    _gather(keys + head * pool_stride, table, row + block, n, padded, head_dim, block_keys, is_bf16)
                    _gather(values + head * pool_stride, table, row + block, n, padded, head_dim, block_values, is_bf16)
                    for j in range(padded):
                        for lane in range(used):
                            store_f32(scores, j * lanes + lane, float32(0.0))
                    _rank_8_update(scores, lanes, padded, block_keys, (head_dim, 1), queries, lanes, head_dim, used)
                    if block + padded - 1 > position or window > 0:
                        reach = float32(window) if window > 0 else float32(1e9)
                        for j in range(padded):
                            key_position = float32(block + j)
                            for lane in range(used):
                                distance = load_f32(lane_positions, lane) - key_position
                                score = load_f32(scores, j * lanes + lane)
                                score = score if distance >= float32(0.0) else _HIDDEN
                                score = score if distance < reach else _HIDDEN
                                store_f32(scores, j * lanes + lane, score)
                    for lane in range(used):
                        store_f32(alphas, lane, load_f32(maxima, lane))
                    for j in range(padded):
                        for lane in range(used):
                            x, y = load_f32(maxima, lane), load_f32(scores, j * lanes + lane)
                            store_f32(maxima, lane, x if x > y else y)
                    for lane in range(used):
                        alpha = exp_f32(load_f32(alphas, lane) - load_f32(maxima, lane))
                        store_f32(alphas, lane, alpha)
                        store_f32(totals, lane, load_f32(totals, lane) * alpha)
                    for j in range(padded):
                        for lane in range(used):
                            score = load_f32(scores, j * lanes + lane)
                            term = exp_f32(score - load_f32(maxima, lane))
                            term = term if score > _SEEN else float32(0.0)
                            store_f32(scores, j * lanes + lane, term)
                            store_f32(totals, lane, load_f32(totals, lane) + term)
                    for d in range(head_dim):
                        for lane in range(used):
                            store_f32(sums, d * lanes + lane, load_f32(sums, d * lanes + lane) * load_f32(alphas, lane))
                    _rank_8_update(sums, lanes, head_dim, block_values, (1, head_dim), scores, lanes, padded, used)
                for lane in range(used):
                    store_f32(totals, lane, float32(1.0) / load_f32(totals, lane))
                for t in range(count):
                    for g in range(group_size):
                        lane = t * group_size + g
                        target = (first + t) * out_stride + (head * group_size + g) * head_dim
                        inverse = load_f32(totals, lane)
                        for d in range(head_dim):
                            store(out, target + d, load_f32(sums, d * lanes + lane) * inverse, is_bf16)
            else:
                item -= num_tile_items
                head = item % num_kv_heads
                entry = item // num_kv_heads * 4
                member, members_end = load_i32(blocks, entry), load_i32(blocks, entry + 1)
                first, n = load_i32(blocks, entry + 2), load_i32(blocks, entry + 3)
                padded = (n + 7) // 8 * 8
                query = rest
                scores = query + 4 * head_dim
                room = scores + 4 * BLOCK
                _gather(keys + head * pool_stride, table, first, n, padded, head_dim, block_keys, is_bf16)
                _gather(values + head * pool_stride, table, first, n, padded, head_dim, block_values, is_bf16)
                for m in range(member, members_end):
                    token, partial = load_i32(members, 2 * m), load_i32(members, 2 * m + 1)
                    result = partials + 4 * (partial * num_kv_heads + head) * partial_size
                    for g in range(group_size):
                        source = token * q_stride + (head * group_size + g) * head_dim
                        for d in range(head_dim):
                            store_f32(query, d, load(q, source + d, is_bf16) * scale)
                        _scores(query, block_keys, n, head_dim, scores)
                        maximum, total = _softmax_terms(scores, room)
                        _weighted_values(scores, block_values, padded, head_dim, result + 8)
                        store_f32(result, 0, maximum)
                        store_f32(result, 1, total)
                        result += 4 * (head_dim + 2)
            fetch_add(a, 3, 1)
        wait_until(a, 3, num_items)

        # 3. Partial results of decoding rows become one, in the order of their positions.
        num_items = num_decode * num_kv_heads
        while True:
            item = fetch_add(a, 4, 1)
            if item >= num_items:
                break
            head = item % num_kv_heads
            entry = item // num_kv_heads * 3
            token, begin, end = (
                load_i32(decode_rows, entry),
                load_i32(decode_rows, entry + 1),
                load_i32(decode_rows, entry + 2),
            )
            for g in range(group_size):
                maximum = _HIDDEN
                for partial in range(begin, end):
                    result = partials + 4 * ((partial * num_kv_heads + head) * partial_size + g * (head_dim + 2))
                    m = load_f32(result, 0)
                    maximum = m if m > maximum else maximum
                for d in range(head_dim):
                    store_f32(rest, d, float32(0.0))
                total = float32(0.0)
                for partial in range(begin, end):
                    result = partials + 4 * ((partial * num_kv_heads + head) * partial_size + g * (head_dim + 2))
                    weight = exp_f32(load_f32(result, 0) - maximum)
                    total += weight * load_f32(result, 1)
                    for d in range(head_dim):
                        store_f32(rest, d, load_f32(rest, d) + weight * load_f32(result, 2 + d))
                inverse = float32(1.0) / total
                target = token * out_stride + (head * group_size + g) * head_dim
                for d in range(head_dim):
                    store(out, target + d, load_f32(rest, d) * inverse, is_bf16)

    return Kernel(kernel, num_counters=6, num_arguments=25)
