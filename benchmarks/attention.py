"""What attention costs on the CPU: milliseconds per layer, beside what the machine allows and beside torch's own.

    python -m benchmarks.attention [--threads N] [--heads 9] [--kv-heads 3] [--head-dim 64]

Decode is bound by reading K and V once, prefill by multiplications; both bounds are measured in the same run. Layers are
taken in turn, so that K and V come from memory rather than from a cache, as in a model. The alternatives are
scaled_dot_product_attention over slots gathered into one padded tensor, the same without the gather (only possible where
rows lie side by side), and our reference.
"""

import argparse
import statistics
import time
from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor
from torch.nn.attention.bias import causal_lower_right

from benchmarks.machine import describe_machine
from services.worker.attention.cpu import CpuAttention
from services.worker.attention.interface import AttentionBackend
from services.worker.attention.reference import ReferenceAttention
from services.worker.batch import BatchRow, build_batch
from services.worker.kv_pool import KvPool
from services.worker.model.linear import make_linear

NUM_LAYERS = 8
NUM_SLOTS = 20_000
GIGA = 1e9


@dataclass(frozen=True)
class Case:
    name: str
    rows: list[BatchRow]

    @property
    def is_decode(self) -> bool:
        return all(len(row.token_ids) == 1 for row in self.rows)

    def distinct_slots(self) -> int:
        slots, _ = build_batch(self.rows).kv_slots()
        return len(np.unique(slots))

    def score_pairs(self) -> int:
        """(query, key) pairs that causality lets through."""
        return sum(len(row.token_ids) * row.start + sum(range(1, len(row.token_ids) + 1)) for row in self.rows)


def cases() -> list[Case]:
    return [
        Case("decode 1 x 512", [BatchRow([0], 511, [(0, 512)])]),
        Case("decode 1 x 8000", [BatchRow([0], 7999, [(0, 8000)])]),
        Case("decode 32 x 512", [BatchRow([0], 511, [(512 * i, 512)]) for i in range(32)]),
        Case("decode 16 x 1000 shared", [BatchRow([0], 1000, [(0, 1000), (2000 + 64 * i, 64)]) for i in range(16)]),
        Case("prefill 512", [BatchRow([0] * 512, 0, [(0, 512)])]),
        Case("prefill 512 after 3584", [BatchRow([0] * 512, 3584, [(0, 4096)])]),
    ]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--threads", type=int, default=torch.get_num_threads())
    parser.add_argument("--heads", type=int, default=9)
    parser.add_argument("--kv-heads", type=int, default=3)
    parser.add_argument("--head-dim", type=int, default=64)
    args = parser.parse_args()
    torch.set_num_threads(args.threads)
    bandwidth = read_bandwidth()
    print(f"{describe_machine()}, {args.threads} threads, torch {torch.__version__}")
    print(f"memory read {bandwidth / GIGA:.1f} GB/s; median ms per layer, K and V from memory")
    print(f"{args.heads} heads, {args.kv_heads} KV heads of {args.head_dim}")
    for dtype in (torch.float32, torch.bfloat16):
        flops = multiply_rate(dtype)
        print(f"\n{str(dtype).removeprefix('torch.')}: linear layers reach {flops / GIGA:.0f} GFLOP/s at 512 rows")
        print(f"{'':26}{'cpu ms':>9}{'bound':>9}{'share':>7}{'SDPA':>9}{'+gather':>9}{'reference':>11}{'plan us':>9}")
        for case in cases():
            print_case(case, Bench(args.heads, args.kv_heads, args.head_dim, dtype), bandwidth, flops)


def print_case(case: Case, bench: "Bench", bandwidth: float, flops: float) -> None:
    ours = bench.run_ms(CpuAttention(bench.pool, bench.heads, None), case)
    reference = bench.run_ms(ReferenceAttention(bench.pool, None), case)
    element = bench.pool.keys.element_size()
    if case.is_decode:
        bound = 2 * case.distinct_slots() * bench.kv_heads * bench.head_dim * element / bandwidth * 1e3
    else:
        bound = 4 * case.score_pairs() * bench.heads * bench.head_dim / flops * 1e3
    plain, gathered = bench.sdpa_ms(case, gather=False), bench.sdpa_ms(case, gather=True)
    plan = best_of(lambda: CpuAttention.plan(bench.planner, build_batch(case.rows)), 5) * 1e6
    print(
        f"{case.name:26}{ours:9.3f}{bound:9.3f}{bound / ours:7.0%}"
        f"{plain:9.3f}{gathered:9.3f}{reference:11.2f}{plan:9.0f}"
    )


class Bench:
    """A pool of random K and V, and the ways to attend to it."""

    def __init__(self, heads: int, kv_heads: int, head_dim: int, dtype: torch.dtype) -> None:
        self.heads, self.kv_heads, self.head_dim, self.dtype = heads, kv_heads, head_dim, dtype
        self.pool = KvPool(
            num_layers=NUM_LAYERS,
            num_kv_heads=kv_heads,
            num_slots=NUM_SLOTS,
            head_dim=head_dim,
            dtype=dtype,
            device=torch.device("cpu"),
        )
        self.pool.keys.normal_()
        self.pool.values.normal_()
        self.planner = CpuAttention(self.pool, heads, None)

    def run_ms(self, backend: AttentionBackend, case: Case) -> float:
        batch = build_batch(case.rows)
        qkv = torch.randn(batch.num_tokens, self.heads + 2 * self.kv_heads, self.head_dim).to(self.dtype)
        q, k, v = qkv.tensor_split((self.heads, self.heads + self.kv_heads), dim=1)
        backend.plan(batch)
        return median_ms(lambda layer: backend.run(layer, q, k, v))

    def sdpa_ms(self, case: Case, gather: bool) -> float:
        """Rows of one length: K and V as one [rows, kv_heads, length, head_dim]; shared prefixes are read for each row."""
        lengths = {row.start + len(row.token_ids) for row in case.rows}
        assert len(lengths) == 1, "padding would be counted against torch"
        length, num_rows, extend_len = lengths.pop(), len(case.rows), len(case.rows[0].token_ids)
        q = torch.randn(num_rows, self.heads, extend_len, self.head_dim).to(self.dtype)
        slots, _ = build_batch(case.rows).kv_slots()
        index = torch.from_numpy(slots).long()
        bias = causal_lower_right(extend_len, length) if extend_len > 1 else None

        def attend(layer: int) -> Tensor:
            keys, values = (
                pool[layer].index_select(1, index) if gather else pool[layer][:, : num_rows * length]
                for pool in (self.pool.keys, self.pool.values)
            )
            shape = (self.kv_heads, num_rows, length, self.head_dim)
            keys, values = keys.view(shape).transpose(0, 1), values.view(shape).transpose(0, 1)
            return F.scaled_dot_product_attention(q, keys, values, attn_mask=bias, enable_gqa=True)

        return median_ms(attend)


@torch.inference_mode()
def median_ms(run: Callable[[int], object]) -> float:
    """Over two rounds through all layers, after one that is not counted."""
    times = []
    for index in range(3 * NUM_LAYERS):
        begin = time.perf_counter()
        run(index % NUM_LAYERS)
        times.append(time.perf_counter() - begin)
    return statistics.median(times[NUM_LAYERS:]) * 1e3


def best_of(run: Callable[[], object], times: int) -> float:
    """Seconds."""
    best = float("inf")
    for _ in range(times):
        begin = time.perf_counter()
        run()
        best = min(best, time.perf_counter() - begin)
    return best


def read_bandwidth() -> float:
    """Bytes per second of a sum over 512 MB, far more than any cache holds."""
    data = torch.ones(1 << 27)
    return data.numel() * data.element_size() / best_of(data.sum, 5)


def multiply_rate(dtype: torch.dtype) -> float:
    """Operations per second of the model's linear layers where they are fastest."""
    linear = make_linear(torch.randn(1024, 1024).to(dtype), None)
    x = torch.randn(512, 1024).to(dtype)
    return 2 * 512 * 1024 * 1024 / best_of(lambda: linear(x), 10)


if __name__ == "__main__":
    main()
