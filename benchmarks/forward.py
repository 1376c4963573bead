"""What a forward pass of a real model costs: tokens per second by batch, beside the time that reading its weights takes.

python -m benchmarks.forward [--model FOLDER] [--threads N] [--dtype float32] [--context 128 512]
"""

import argparse

import torch

from benchmarks.attention import GIGA, best_of, read_bandwidth
from benchmarks.machine import default_model, describe_machine
from services.worker.batch import BatchRow, build_batch
from services.worker.model import Model, ModelConfig, kv_bytes_per_slot, load_model

ROWS = (1, 8, 32)
PREFILL_TOKENS = 512


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", help="a model folder or GGUF file; the default model when left out")
    parser.add_argument("--threads", type=int, default=torch.get_num_threads())
    parser.add_argument("--dtype", choices=["float32", "bfloat16"], nargs="+", default=["float32", "bfloat16"])
    parser.add_argument("--context", type=int, nargs="+", default=[128, 512])
    args = parser.parse_args()
    args.model = args.model or default_model()
    torch.set_num_threads(args.threads)
    bandwidth = read_bandwidth()
    print(f"{describe_machine()}, {args.threads} threads, torch {torch.__version__}")
    print(f"memory read {bandwidth / GIGA:.1f} GB/s; bound: weights and KV read once at that rate; best of 8")
    for name in args.dtype:
        dtype: torch.dtype = getattr(torch, name)
        num_slots = max(PREFILL_TOKENS, max(ROWS) * max(args.context))
        model = load_model(args.model, dtype=dtype, device="cpu", num_slots=num_slots, attention="cpu")
        print(f"\n{name:28}{'ms':>9}{'bound':>9}{'ratio':>7}{'tokens/s':>10}")
        for context in args.context:
            for rows in ROWS:
                print_decode(model, rows, context, dtype, bandwidth)
        seconds = forward_seconds(model, [BatchRow([7] * PREFILL_TOKENS, 0, [(0, PREFILL_TOKENS)])])
        print(f"{f'prefill {PREFILL_TOKENS}':28}{seconds * 1e3:9.2f}{'':16}{PREFILL_TOKENS / seconds:10.0f}")


def print_decode(model: Model, rows: int, context: int, dtype: torch.dtype, bandwidth: float) -> None:
    seconds = forward_seconds(model, [BatchRow([7], context - 1, [(row * context, context)]) for row in range(rows)])
    read = num_parameters(model.config) * dtype.itemsize + rows * context * kv_bytes_per_slot(model.config, dtype)
    bound = read / bandwidth
    print(
        f"{f'decode {rows} x {context}':28}{seconds * 1e3:9.2f}{bound * 1e3:9.2f}"
        f"{seconds / bound:7.2f}{rows / seconds:10.0f}"
    )


def forward_seconds(model: Model, rows: list[BatchRow]) -> float:
    batch = build_batch(rows)
    model.forward(batch)
    return best_of(lambda: model.forward(batch), 8)


def num_parameters(config: ModelConfig) -> int:
    """Weights that a decode step reads: all matrices, of the embedding only what the output layer needs."""
    attention = config.hidden_size * (2 * config.q_size + 2 * config.kv_size)
    mlp = 3 * config.hidden_size * config.intermediate_size
    return config.num_layers * (attention + mlp) + config.vocab_size * config.hidden_size


if __name__ == "__main__":
    main()
