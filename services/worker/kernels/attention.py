# mypy: disable-error-code="untyped-decorator,no-any-return,no-untyped-def"
"""Attention over KV slots, for rows that decode and rows that prefill, in one launch.

Both read keys and values through a table of slots, so runs of slots may lie anywhere, and both work in blocks of BLOCK
positions counted from the start of the sequence, so a row's sums run in the same order wherever it lies, whatever its chunks
and neighbours are.

*Tiles* are some new tokens of a prefilling row against all positions before them; their vector lanes are the tile's queries,
so no sum ever runs across lanes. *Blocks* are one block of positions for all decoding rows that hold it in the same slots: a
shared prefix is read once. They leave partial results (maximum, sum, weighted values), which are merged at the end.
"""

import functools

from numba import cfunc, float32, njit, types

from services.worker.kernels.blocks import (
    BLOCK,
    HIDDEN,
    LANES,
    SEEN,
    gather,
    rank_8_update,
    scores_of,
    softmax_terms,
    weighted_values,
)
from services.worker.kernels.launch import Kernel
from services.worker.kernels.primitives import (
    address_of,
    copy_16,
    exp_f32,
    fetch_add,
    load,
    load_f32,
    load_i32,
    load_i64,
    store,
    store_f32,
    wait_until,
)

_TOKENS_PER_ITEM = 8


def queries_per_tile(group_size: int) -> int:
    """New tokens in one tile, so that its queries (tokens x heads of a KV head) fill about six vectors."""
    return max(1, 6 * LANES // group_size)


def _tile_lanes(group_size: int) -> int:
    return -(-queries_per_tile(group_size) * group_size // LANES) * LANES


def scratch_floats(head_dim: int, group_size: int) -> int:
    """float32 of working memory that each thread needs."""
    lanes = _tile_lanes(group_size)
    for_block = head_dim + BLOCK + LANES
    for_tile = 2 * head_dim * lanes + BLOCK * lanes + 4 * lanes
    return 2 * BLOCK * head_dim + max(for_block, for_tile)


@njit(inline="always")
def _store_new(first, end, k, v, stride, new_slots, keys, values, pool_stride, num_kv_heads, head_dim, is_bf16):
    """Keys and values of tokens `first` to `end` go to their slots."""
    for token in range(first, end):
        slot = load_i64(new_slots, token) * head_dim
        for head in range(num_kv_heads):
            source = token * stride + head * head_dim
            for d in range(0, head_dim, 16):
                copy_16(k, source + d, keys + head * pool_stride, slot + d, is_bf16)
                copy_16(v, source + d, values + head * pool_stride, slot + d, is_bf16)


@njit(inline="always")
def _load_queries(q, first, stride, count, head, group_size, head_dim, scale, lanes, queries, is_bf16):
    """Scaled queries of a tile as columns: queries [head_dim, lanes], lane = token * group_size + head of the group."""
    for i in range(head_dim * lanes):
        store_f32(queries, i, float32(0.0))
    for t in range(count):
        for g in range(group_size):
            source = (first + t) * stride + (head * group_size + g) * head_dim
            for d in range(head_dim):
                store_f32(queries, d * lanes + t * group_size + g, load(q, source + d, is_bf16) * scale)


@njit(inline="always")
def _hide(scores, rows, lanes, used, first_position, lane_positions, window):
    """Hide keys after a lane's position and, with a window, those too far before it."""
    reach = float32(window) if window > 0 else float32(1e9)
    for j in range(rows):
        key_position = float32(first_position + j)
        for lane in range(used):
            distance = load_f32(lane_positions, lane) - key_position
            score = load_f32(scores, j * lanes + lane)
            score = score if distance >= float32(0.0) else HIDDEN
            score = score if distance < reach else HIDDEN
            store_f32(scores, j * lanes + lane, score)


@njit(inline="always")
def _online_softmax(scores, rows, lanes, used, maxima, totals, alphas):
    """Scores become exp(score - maximum); maxima and totals move on, alphas are what earlier sums must be scaled by."""
    for lane in range(used):
        store_f32(alphas, lane, load_f32(maxima, lane))
    for j in range(rows):
        for lane in range(used):
            x, y = load_f32(maxima, lane), load_f32(scores, j * lanes + lane)
            store_f32(maxima, lane, x if x > y else y)
    for lane in range(used):
        alpha = exp_f32(load_f32(alphas, lane) - load_f32(maxima, lane))
        store_f32(alphas, lane, alpha)
        store_f32(totals, lane, load_f32(totals, lane) * alpha)
    for j in range(rows):
        for lane in range(used):
            score = load_f32(scores, j * lanes + lane)
            term = exp_f32(score - load_f32(maxima, lane))
            term = term if score > SEEN else float32(0.0)
            store_f32(scores, j * lanes + lane, term)
            store_f32(totals, lane, load_f32(totals, lane) + term)


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
    partial_size = head_dim + 2
    element = 2 if is_bf16 else 4

    @cfunc(types.void(types.voidptr), cache=True, error_model="numpy", fastmath={"contract"})
    def kernel(data):
        a = address_of(data)
        claim_tokens, done_tokens, claim_tile, claim_block, done_blocks, claim_row, claim_scratch = 0, 1, 2, 3, 4, 5, 6
        q, k, v, q_stride, kv_stride = load_i64(a, 7), load_i64(a, 8), load_i64(a, 9), load_i64(a, 10), load_i64(a, 11)
        out, keys, values = load_i64(a, 12), load_i64(a, 13), load_i64(a, 14)
        num_kv_heads, num_slots, new_slots, num_tokens = (
            load_i64(a, 15),
            load_i64(a, 16),
            load_i64(a, 17),
            load_i64(a, 18),
        )
        table, num_tiles, tiles = load_i64(a, 19), load_i64(a, 20), load_i64(a, 21)
        num_blocks, blocks, members = load_i64(a, 22), load_i64(a, 23), load_i64(a, 24)
        num_decode, decode_rows, partials, window = load_i64(a, 25), load_i64(a, 26), load_i64(a, 27), load_i64(a, 28)
        block_keys = load_i64(a, 29) + 4 * load_i64(a, 30) * fetch_add(a, claim_scratch, 1)
        scale = load_f32(load_i64(a, 31), 0)
        block_values = block_keys + 4 * BLOCK * head_dim
        rest = block_values + 4 * BLOCK * head_dim
        pool_stride = num_slots * head_dim * element
        out_stride = num_kv_heads * group_size * head_dim

        num_items = (num_tokens + _TOKENS_PER_ITEM - 1) // _TOKENS_PER_ITEM
        item = fetch_add(a, claim_tokens, 1)
        while item < num_items:
            first = item * _TOKENS_PER_ITEM
            end = min(first + _TOKENS_PER_ITEM, num_tokens)
            _store_new(
                first, end, k, v, kv_stride, new_slots, keys, values, pool_stride, num_kv_heads, head_dim, is_bf16
            )
            fetch_add(a, done_tokens, 1)
            item = fetch_add(a, claim_tokens, 1)
        wait_until(a, done_tokens, num_items)

        queries = rest
        scores = queries + 4 * head_dim * lanes
        sums = scores + 4 * BLOCK * lanes
        maxima = sums + 4 * head_dim * lanes
        totals, alphas, lane_positions = maxima + 4 * lanes, maxima + 8 * lanes, maxima + 12 * lanes
        num_items = num_tiles * num_kv_heads
        item = fetch_add(a, claim_tile, 1)
        while item < num_items:
            head = item % num_kv_heads
            entry = item // num_kv_heads * 4
            first, count = load_i32(tiles, entry), load_i32(tiles, entry + 1)
            position, row = load_i32(tiles, entry + 2), load_i32(tiles, entry + 3)
            used = (count * group_size + LANES - 1) // LANES * LANES
            _load_queries(q, first, q_stride, count, head, group_size, head_dim, scale, lanes, queries, is_bf16)
            for i in range(head_dim * lanes):
                store_f32(sums, i, float32(0.0))
            for lane in range(used):
                store_f32(maxima, lane, HIDDEN)
                store_f32(totals, lane, float32(0.0))
                store_f32(lane_positions, lane, float32(position + lane // group_size))  # exact below 2 ** 24
            begin = max(0, position - window + 1) // BLOCK * BLOCK if window > 0 else 0
            for block in range(begin, position + count, BLOCK):
                n = min(BLOCK, position + count - block)
                padded = (n + 7) // 8 * 8
                gather(keys + head * pool_stride, table, row + block, n, padded, head_dim, block_keys, is_bf16)
                gather(values + head * pool_stride, table, row + block, n, padded, head_dim, block_values, is_bf16)
                for i in range(padded * lanes):
                    store_f32(scores, i, float32(0.0))
                rank_8_update(scores, lanes, padded, block_keys, (head_dim, 1), queries, lanes, head_dim, used)
                if window > 0 or block + padded - 1 > position:
                    _hide(scores, padded, lanes, used, block, lane_positions, window)
                _online_softmax(scores, padded, lanes, used, maxima, totals, alphas)
                for d in range(head_dim):
                    for lane in range(used):
                        store_f32(sums, d * lanes + lane, load_f32(sums, d * lanes + lane) * load_f32(alphas, lane))
                rank_8_update(sums, lanes, head_dim, block_values, (1, head_dim), scores, lanes, padded, used)
            for t in range(count):
                for g in range(group_size):
                    lane = t * group_size + g
                    inverse = float32(1.0) / load_f32(totals, lane)
                    target = (first + t) * out_stride + (head * group_size + g) * head_dim
                    for d in range(head_dim):
                        store(out, target + d, load_f32(sums, d * lanes + lane) * inverse, is_bf16)
            item = fetch_add(a, claim_tile, 1)

        query = rest
        scores = query + 4 * head_dim
        room = scores + 4 * BLOCK
        num_items = num_blocks * num_kv_heads
        item = fetch_add(a, claim_block, 1)
        while item < num_items:
            following = fetch_add(a, claim_block, 1)
            head, entry = item % num_kv_heads, item // num_kv_heads * 4
            member, members_end = load_i32(blocks, entry), load_i32(blocks, entry + 1)
            first, n = load_i32(blocks, entry + 2), load_i32(blocks, entry + 3)
            padded = (n + 7) // 8 * 8
            ahead_head, ahead_first, ahead_n = 0, 0, 0
            if following < num_items:
                ahead_head, entry = following % num_kv_heads, following // num_kv_heads * 4
                ahead_first, ahead_n = load_i32(blocks, entry + 2), load_i32(blocks, entry + 3)
            ahead_keys, ahead_values = keys + ahead_head * pool_stride, values + ahead_head * pool_stride
            gather(keys + head * pool_stride, table, first, n, padded, head_dim, block_keys, is_bf16)
            gather(values + head * pool_stride, table, first, n, padded, head_dim, block_values, is_bf16)
            for m in range(member, members_end):
                token, partial = load_i32(members, 2 * m), load_i32(members, 2 * m + 1)
                for g in range(group_size):
                    source = token * q_stride + (head * group_size + g) * head_dim
                    for d in range(head_dim):
                        store_f32(query, d, load(q, source + d, is_bf16) * scale)
                    ahead = ahead_keys if g == 0 else ahead_values
                    num_ahead = ahead_n if m == member and g < 2 else 0
                    scores_of(query, block_keys, n, head_dim, scores, ahead, table, ahead_first, num_ahead, element)
                    maximum, total = softmax_terms(scores, room)
                    result = partials + 4 * ((partial * num_kv_heads + head) * group_size + g) * partial_size
                    weighted_values(scores, block_values, padded, head_dim, result + 8)
                    store_f32(result, 0, maximum)
                    store_f32(result, 1, total)
            fetch_add(a, done_blocks, 1)
            item = following
        wait_until(a, done_blocks, num_items)

        num_items = num_decode * num_kv_heads * group_size
        item = fetch_add(a, claim_row, 1)
        while item < num_items:
            head, entry = item % (num_kv_heads * group_size), item // (num_kv_heads * group_size) * 3
            token, begin, end = (
                load_i32(decode_rows, entry),
                load_i32(decode_rows, entry + 1),
                load_i32(decode_rows, entry + 2),
            )
            maximum = HIDDEN
            for partial in range(begin, end):
                other = load_f32(partials + 4 * (partial * num_kv_heads * group_size + head) * partial_size, 0)
                maximum = other if other > maximum else maximum
            for d in range(head_dim):
                store_f32(rest, d, float32(0.0))
            total = float32(0.0)
            for partial in range(begin, end):
                result = partials + 4 * (partial * num_kv_heads * group_size + head) * partial_size
                weight = exp_f32(load_f32(result, 0) - maximum)
                total += weight * load_f32(result, 1)
                for d in range(head_dim):
                    store_f32(rest, d, load_f32(rest, d) + weight * load_f32(result, 2 + d))
            inverse = float32(1.0) / total
            for d in range(head_dim):
                store(out, token * out_stride + head * head_dim + d, load_f32(rest, d) * inverse, is_bf16)
            item = fetch_add(a, claim_row, 1)

    return Kernel(kernel, num_counters=7, num_arguments=25)
