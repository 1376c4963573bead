"""What choosing tokens costs: milliseconds per step, by kind of control and number of rows.

    python -m benchmarks.sampling [--threads 1] [--vocab 49152] [--model FOLDER]

Logits are those of the model at the ends of different texts where a folder is given (flat distributions need more work than
peaked ones), else normal with a standard deviation of 3, which is flatter than a language model's.
"""

import argparse
import platform
import time
from collections.abc import Callable

import numpy as np
import torch
from torch import Tensor

from services.worker.sampling.controls import SamplingControls
from services.worker.sampling.logprobs import score_tokens
from services.worker.sampling.sampler import SampleRow, choose_tokens
from shared.messages.sampling import SamplingParams

KINDS = {
    "greedy": SamplingParams(temperature=0),
    "temperature 1": SamplingParams(),
    "top-k 50": SamplingParams(top_k=50),
    "top-p 0.9": SamplingParams(top_p=0.9),
    "min-p 0.05": SamplingParams(min_p=0.05),
    "temperature 2, top-p 0.95": SamplingParams(temperature=2, top_p=0.95),
    "greedy, all penalties": SamplingParams(
        temperature=0, presence_penalty=0.5, frequency_penalty=0.5, repetition_penalty=1.1
    ),
}
ROWS = (1, 16, 64, 256)
PROMPT = np.arange(500, dtype=np.int32)
GENERATED = np.arange(200, 400, dtype=np.int32)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--vocab", type=int, default=49152)
    parser.add_argument("--model", help="folder of a model whose logits are used")
    args = parser.parse_args()
    torch.set_num_threads(args.threads)
    logits = model_logits(args.model) if args.model else torch.randn(max(ROWS), args.vocab) * 3
    source = args.model or "normal, sigma 3"
    print(f"{platform.processor() or platform.machine()}, {args.threads} threads, torch {torch.__version__}")
    print(f"logits: {source}, vocabulary {logits.shape[1]}; ms per step, best of 20")
    print(f"{'':28}" + "".join(f"{f'{rows} rows':>12}" for rows in ROWS))
    for name, params in KINDS.items():
        print(f"{name:28}" + "".join(f"{cost_ms(logits[:rows], params):12.3f}" for rows in ROWS))
    scored = [best_ms(lambda rows=rows: score_tokens(logits[:rows], torch.zeros(rows).long(), 5)) for rows in ROWS]
    print(f"{'logprobs, 5 alternatives':28}" + "".join(f"{ms:12.3f}" for ms in scored))


def cost_ms(logits: Tensor, params: SamplingParams) -> float:
    """The pass works in place: the copy it gets is not part of its cost."""
    vocab = logits.shape[1]
    rows = [
        SampleRow(SamplingControls(params, PROMPT, GENERATED, (2,), vocab), position) for position in range(len(logits))
    ]
    return best_ms(lambda scratch: choose_tokens(scratch, rows), logits.clone)


def best_ms(run: Callable[..., object], prepare: Callable[[], Tensor] | None = None, repeats: int = 20) -> float:
    best = float("inf")
    with torch.inference_mode():
        for _ in range(repeats):
            args = () if prepare is None else (prepare(),)
            started = time.perf_counter()
            run(*args)
            best = min(best, time.perf_counter() - started)
    return best * 1e3


def model_logits(folder: str) -> Tensor:
    """Next-token logits after each of 256 short prompts of random words of the vocabulary."""
    from services.worker.batch import BatchRow, build_batch
    from services.worker.model import load_model

    model = load_model(folder, dtype=torch.float32, device="cpu", num_slots=8192, attention="cpu")
    random = np.random.default_rng(0)
    prompts = random.integers(1000, model.config.vocab_size, (max(ROWS), 24))
    batch = build_batch([BatchRow(prompt, 0, [(24 * index, 24)]) for index, prompt in enumerate(prompts)])
    return model.forward(batch).clone()


if __name__ == "__main__":
    main()
