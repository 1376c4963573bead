"""The default model writes what transformers writes."""

from pathlib import Path

import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from services.worker.batch import BatchRow, build_batch
from services.worker.model import Model, load_model
from tests.support.default_model import default_model_folder

pytestmark = pytest.mark.slow

NUM_NEW = 48
PROMPTS = (
    "What is the capital of France?",
    "Write a short poem about the sea.",
    "List the first ten prime numbers and explain why each of them is prime.",
    "def fibonacci(n):\n    ",
)


@pytest.fixture(scope="module")
def folder() -> Path:
    return default_model_folder()


@pytest.fixture(scope="module")
def model(folder: Path) -> Model:
    return load_model(folder, dtype=torch.float32, device="cpu", num_slots=4096, attention="cpu")


@pytest.fixture(scope="module")
def prompts(folder: Path) -> list[list[int]]:
    tokenizer = AutoTokenizer.from_pretrained(folder)
    chats = [
        tokenizer.apply_chat_template([{"role": "user", "content": text}], add_generation_prompt=True)["input_ids"]
        for text in PROMPTS
    ]
    return [*chats, tokenizer("The quick brown fox jumps over the lazy dog. " * 30)["input_ids"]]


@pytest.fixture(scope="module")
def expected(folder: Path, prompts: list[list[int]]) -> list[list[int]]:
    transformers_model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    return [
        transformers_model.generate(torch.tensor([prompt]), max_new_tokens=NUM_NEW, do_sample=False)[
            0, len(prompt) :
        ].tolist()
        for prompt in prompts
    ]


def _greedy(model: Model, prompts: list[list[int]], chunk: int) -> list[list[int]]:
    """All prompts side by side, prefilled in chunks, then decoded together until each has ended."""
    room = max(map(len, prompts)) + NUM_NEW
    tokens = [list(prompt) for prompt in prompts]
    computed = [0] * len(prompts)
    while True:
        running = [
            index
            for index, prompt in enumerate(prompts)
            if len(tokens[index]) < len(prompt) + NUM_NEW and tokens[index][-1] not in model.config.end_token_ids
        ]
        if not running:
            return [own[len(prompt) :] for own, prompt in zip(tokens, prompts, strict=True)]
        ends = [min(len(tokens[index]), computed[index] + chunk) for index in running]
        rows = [
            BatchRow(tokens[index][computed[index] : end], computed[index], [(index * room, room)])
            for index, end in zip(running, ends, strict=True)
        ]
        chosen = model.forward(build_batch(rows)).argmax(dim=1).tolist()
        for index, end, token in zip(running, ends, chosen, strict=True):
            computed[index] = end
            if end == len(tokens[index]):
                tokens[index].append(token)


@pytest.mark.parametrize("chunk", [10_000, 64, 7])
def test_greedy_text_equals_transformers(
    model: Model, prompts: list[list[int]], expected: list[list[int]], chunk: int
) -> None:
    assert _greedy(model, prompts, chunk) == expected


def test_a_batch_writes_what_solo_runs_write(model: Model, prompts: list[list[int]], expected: list[list[int]]) -> None:
    assert [_greedy(model, [prompt], 10_000)[0] for prompt in prompts] == expected
