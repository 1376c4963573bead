"""What the scheduler pays for its data structures: `python -m benchmarks.radix_tree`.

A tree of a million tokens (conversations of several turns under a few system prompts) and a pool of which every other run is
free. Each line is the median and the 99th percentile of one call, to be held against the scheduler's budget of 500 us a step.
"""

import argparse
import gc
import platform
import random
from collections.abc import Callable
from pathlib import Path
from time import perf_counter_ns

import numpy as np

from services.scheduler.extents import Extent, Extents
from services.scheduler.radix_node import TokenIds
from services.scheduler.radix_tree import RadixTree
from services.scheduler.slot_pool import SlotPool

VOCAB = 49_152
PROMPT_LEN = 2_000
TURN_LEN = 400
SYSTEM_LEN = 600
NUM_TURNS = 5
FRAGMENT = 48


def cpu_name() -> str:
    info = Path("/proc/cpuinfo")
    names = [line.partition(":")[2].strip() for line in info.read_text().splitlines() if line.startswith("model name")]
    return f"{len(names)} x {names[0]}" if names else platform.processor()


def scattered(pool: SlotPool, num: int) -> Extents:
    """Slots as a busy pool gives them: in runs of `FRAGMENT`, no two of which touch."""
    extents: Extents = []
    for start in range(0, num, FRAGMENT):
        extents += pool.allocate(min(FRAGMENT, num - start))
        pool.allocate(1)
    return extents


class Bench:
    def __init__(self, num_tokens: int, seed: int) -> None:
        self.draw = np.random.default_rng(seed)
        self.tree = RadixTree()
        self.pool = SlotPool(3 * num_tokens)
        self.now_step = 0
        self.prompts: list[TokenIds] = []
        systems = [self.random_tokens(SYSTEM_LEN) for _ in range(8)]
        while self.tree.num_slots < num_tokens:
            tokens = systems[len(self.prompts) % len(systems)]
            for _ in range(NUM_TURNS):
                tokens = np.concatenate([tokens, self.random_tokens(TURN_LEN)])
                self.insert(tokens)
            self.prompts.append(tokens[:PROMPT_LEN])
        self.tree.take_events()

    def random_tokens(self, num: int) -> TokenIds:
        return self.draw.integers(0, VOCAB, num, dtype=np.int32)

    def insert(self, tokens: TokenIds) -> None:
        self.now_step += 1
        match = self.tree.match_prefix("", tokens, len(tokens), self.now_step)
        self.tree.insert("", tokens, match.extents + scattered(self.pool, len(tokens) - match.length), self.now_step)


def report(name: str, call: Callable[[int], object], rounds: int) -> None:
    times_us = []
    for index in range(rounds):
        begin = perf_counter_ns()
        call(index)
        times_us.append((perf_counter_ns() - begin) / 1000)
    print(f"{name:<66}{np.median(times_us):>9.1f}{np.percentile(times_us, 99):>9.1f}")


def bench_tree(num_tokens: int, rounds: int, seed: int) -> None:
    bench = Bench(num_tokens, seed)
    tree, prompts = bench.tree, bench.prompts
    num_nodes = sum(1 for _ in tree.nodes())
    print(f"tree: {tree.num_slots:,} tokens in {num_nodes:,} nodes, {len(prompts):,} conversations")
    print(f"{'call':<66}{'p50 us':>9}{'p99 us':>9}")
    order = random.Random(seed)
    asked = [order.choice(prompts) for _ in range(rounds)]
    diverging = [np.concatenate([prompt[: PROMPT_LEN - 150], bench.random_tokens(150)]) for prompt in asked]
    unknown = [bench.random_tokens(PROMPT_LEN) for _ in range(rounds)]

    report(f"match_len, {PROMPT_LEN} tokens, all cached", lambda i: tree.match_len("", asked[i]), rounds)
    report(f"match_len, {PROMPT_LEN} tokens, none cached", lambda i: tree.match_len("", unknown[i]), rounds)
    limit = PROMPT_LEN - 1
    report(
        f"match_prefix, {PROMPT_LEN} tokens, all cached, with the slots",
        lambda i: tree.match_prefix("", asked[i], limit, bench.now_step + i),
        rounds,
    )
    report(
        f"match_prefix, {PROMPT_LEN} tokens, {PROMPT_LEN - 150} cached, with a split",
        lambda i: tree.match_prefix("", diverging[i], limit, bench.now_step + i),
        rounds,
    )
    nodes = [tree.match_prefix("", prompt, limit, bench.now_step + rounds).node for prompt in asked]

    def lock_and_unlock(index: int) -> None:
        tree.lock(nodes[index])
        tree.unlock(nodes[index])

    report("lock and unlock", lock_and_unlock, rounds)
    extents = [bench.pool.allocate(PROMPT_LEN) for _ in range(rounds)]
    report(
        f"insert, {PROMPT_LEN} tokens, none cached, {PROMPT_LEN // 32} blocks hashed",
        lambda i: tree.insert("", unknown[i], extents[i], bench.now_step + rounds),
        rounds,
    )
    report(f"evict {PROMPT_LEN} tokens", lambda i: tree.evict(PROMPT_LEN), min(rounds, tree.num_slots // PROMPT_LEN))
    report("take_events after all of this", lambda i: tree.take_events(), 1)


def bench_pool(num_slots: int, rounds: int, seed: int) -> None:
    """Every other run of a few dozen slots is free: as bad as a pool gets."""
    order = random.Random(seed)
    pool = SlotPool(num_slots)
    pool.allocate(num_slots)
    for start in range(0, num_slots - 64, 96):
        pool.free([Extent(start, order.randrange(16, 80))])
    print(f"\npool: {num_slots:,} slots, {pool.num_free:,} free in {len(pool.free_extents()):,} runs")
    print(f"{'call':<66}{'p50 us':>9}{'p99 us':>9}")
    taken: list[Extents] = []
    report("allocate 64, best fit", lambda i: taken.append(pool.allocate(64)), rounds)
    report("free them", lambda i: pool.free(taken[i]), rounds)
    taken.clear()
    report(
        f"allocate {PROMPT_LEN}, split over some 26 runs",
        lambda i: taken.append(pool.allocate(PROMPT_LEN)),
        rounds // 10,
    )
    report("free them", lambda i: pool.free(taken[i]), rounds // 10)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--tokens", type=int, default=1_000_000)
    parser.add_argument("--rounds", type=int, default=500)
    parser.add_argument("--seed", type=int, default=17)
    options = parser.parse_args()
    print(f"{cpu_name()}, Python {platform.python_version()}, one thread")
    gc.disable()  # a service with a large tree freezes or tunes the collector; its pauses are not what is measured here
    bench_tree(options.tokens, options.rounds, options.seed)
    bench_pool(options.tokens, options.rounds, options.seed)


if __name__ == "__main__":
    main()
