"""Real texts as prompts, read from the data folder beside the repository."""

import json
from pathlib import Path

import pytest
from tokenizers import Tokenizer

DATA = Path(__file__).parents[2].parent / "shared" / "data" / "prompts"


def _lines(name: str) -> list[dict[str, object]]:
    file = DATA / name
    if not file.is_file():
        pytest.skip(f"no {name} beside the repository")
    return [json.loads(line) for line in file.read_text(encoding="utf-8").splitlines()]


def questions() -> list[str]:
    """80 first questions of different kinds."""
    return [str(line["turns"][0]) for line in _lines("mt_bench_questions.jsonl")]  # type: ignore[index]


def prompts_of_lengths(tokenizer: Tokenizer, lengths: list[int]) -> list[list[int]]:
    """Token ids of running text, one prompt of each length, no two of which start alike."""
    text = " ".join(str(line["question"]) for line in _lines("gsm8k_test.jsonl"))
    token_ids = tokenizer.encode(text, add_special_tokens=False).ids
    prompts, start = [], 0
    for length in lengths:
        prompts.append(token_ids[start : start + length])
        start += length
    assert start <= len(token_ids)
    return prompts
