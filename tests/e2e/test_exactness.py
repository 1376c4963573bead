"""Tokens of the whole engine against transformers' `generate`: float32, greedy, whatever the schedule does to a request."""

import asyncio
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from tokenizers import Tokenizer
from transformers import AutoModelForCausalLM

from tests.support.bus_client import BusClient
from tests.support.default_model import default_model_folder
from tests.support.prompts import prompts_of_lengths
from tests.support.stack import Stack

pytestmark = pytest.mark.slow

NEW_TOKENS = 48
LENGTHS = [int(length) for length in np.geomspace(5, 3000, 24)]
MODEL = "exact"


@pytest.fixture(scope="module")
def folder() -> Path:
    return default_model_folder()


@pytest.fixture(scope="module")
def prompts(folder: Path) -> list[list[int]]:
    return prompts_of_lengths(Tokenizer.from_file(str(folder / "tokenizer.json")), LENGTHS)


@pytest.fixture(scope="module")
def expected(folder: Path, prompts: list[list[int]]) -> list[list[int]]:
    """What transformers generates."""
    model: Any = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    outputs = []
    with torch.inference_mode():
        for prompt in prompts:
            output = model.generate(
                torch.tensor([prompt]),
                attention_mask=torch.ones(1, len(prompt), dtype=torch.long),
                max_new_tokens=NEW_TOKENS,
                min_new_tokens=NEW_TOKENS,
                do_sample=False,
                eos_token_id=None,
                pad_token_id=0,
            )
            outputs.append(output[0, len(prompt) :].tolist())
    return outputs


@contextmanager
def started(folder: Path, num_slots: int, *scheduler_flags: str) -> Iterator[Stack]:
    with Stack(model=MODEL, model_path=str(folder)) as stack:
        stack.start_all("--dtype", "float32", "--num-slots", str(num_slots), scheduler_flags=scheduler_flags)
        yield stack


@pytest.fixture(scope="module")
def stack(folder: Path, expected: list[list[int]]) -> Iterator[Stack]:
    """Room for everything at once; started after the reference has left the processor."""
    with started(folder, num_slots=20_000) as stack:
        yield stack


async def test_each_prompt_alone_cold_warm_and_with_half_its_prefix_cached(
    stack: Stack, prompts: list[list[int]], expected: list[list[int]]
) -> None:
    async with BusClient(stack.nats.url, MODEL) as client:
        await client.next_load()
        for prompt, tokens in zip(prompts, expected, strict=True):
            await client.flush()
            cold = await client.generate(prompt, NEW_TOKENS)
            assert (cold.token_ids, cold.cached_tokens) == (tokens, 0), f"cold, {len(prompt)} tokens"
            half = len(prompt) // 2
            await client.generate(prompt[:half], 0, namespace="half")
            warm, partly = await asyncio.gather(
                client.generate(prompt, NEW_TOKENS), client.generate(prompt, NEW_TOKENS, namespace="half")
            )
            assert (warm.token_ids, warm.cached_tokens) == (tokens, len(prompt) - 1), f"warm, {len(prompt)} tokens"
            assert (partly.token_ids, partly.cached_tokens) == (tokens, half), f"half cached, {len(prompt)} tokens"


async def test_all_prompts_in_one_batch(stack: Stack, prompts: list[list[int]], expected: list[list[int]]) -> None:
    async with BusClient(stack.nats.url, MODEL) as client:
        await client.next_load()
        await client.flush()
        together = await asyncio.gather(*(client.generate(prompt, NEW_TOKENS) for prompt in prompts))
        assert [generated.token_ids for generated in together] == expected


async def test_retraction_and_eviction_do_not_show(
    folder: Path, prompts: list[list[int]], expected: list[list[int]]
) -> None:
    """A pool that holds hardly more than the longest prompt: requests are retracted, and what they had cached evicted."""
    chosen = [index for index, length in enumerate(LENGTHS) if length < 300]
    num_slots = max(LENGTHS[index] for index in chosen) + 200
    # Without a reserve of slots each request is admitted on a guess of its length, and the guess is too low.
    with started(folder, num_slots, "--reserve-slots", "2") as stack:
        async with BusClient(stack.nats.url, MODEL) as client:
            for _ in range(2):
                runs = await asyncio.gather(*(client.generate(prompts[index], NEW_TOKENS) for index in chosen))
                assert [run.token_ids for run in runs] == [expected[index] for index in chosen]
            load = await client.next_load()
            assert load.num_retracted_reqs > 0
            assert load.num_used_slots == 0 and load.num_running_reqs == 0
