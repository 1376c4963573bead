"""The decoder against transformers: tiny random models of every family, in float32."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor
from transformers import PreTrainedModel

from services.worker.batch import BatchRow, build_batch
from services.worker.model import Model, ModelConfig, UnsupportedModel, kv_bytes_per_slot, load_config, load_model
from tests.support.tiny_models import TINY_MODELS, VOCAB_SIZE, expected_logits, save_tiny_model

BACKENDS = ("reference", "cpu")
NUM_SLOTS = 512
TOLERANCE = 1e-4


class Sequence:
    """A token sequence in scattered slots; `logits` gathers what the model says at each token."""

    def __init__(self, token_ids: list[int], extents: list[tuple[int, int]]) -> None:
        self.token_ids, self.extents = token_ids, extents
        self.num_computed = 0
        self.logits: list[Tensor] = []

    def next_row(self, extend_len: int) -> BatchRow:
        start, self.num_computed = self.num_computed, self.num_computed + extend_len
        return BatchRow(self.token_ids[start : self.num_computed], start, self.extents, extend_len)


def _tokens(length: int, seed: int) -> list[int]:
    generator = torch.Generator().manual_seed(seed)
    return torch.randint(VOCAB_SIZE, (length,), generator=generator).tolist()


def _compute(model: Model, *step: tuple[Sequence, int]) -> None:
    """One step: the next tokens of each sequence."""
    logits = model.forward(build_batch([sequence.next_row(extend_len) for sequence, extend_len in step]))
    for (sequence, _), part in zip(step, logits.split([extend_len for _, extend_len in step]), strict=True):
        sequence.logits.append(part)


def _check(sequence: Sequence, transformers_model: PreTrainedModel) -> None:
    ours = torch.cat(sequence.logits)
    assert ours.dtype == torch.float32
    expected = expected_logits(transformers_model, sequence.token_ids)
    torch.testing.assert_close(ours, expected, atol=TOLERANCE, rtol=TOLERANCE)


def _load(folder: Path, backend: str, dtype: torch.dtype = torch.float32) -> Model:
    return load_model(folder, dtype=dtype, device="cpu", num_slots=NUM_SLOTS, attention=backend)


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("name", TINY_MODELS)
def test_logits_equal_transformers(name: str, backend: str, tmp_path: Path) -> None:
    """Whole and chunked prefill, decode, a shared prefix, mixed batches, scattered slots."""
    expected = save_tiny_model(name, tmp_path)
    model = _load(tmp_path, backend)
    whole = Sequence(_tokens(40, seed=1), [(300, 40)])
    chunked = Sequence(_tokens(75, seed=2), [(200, 11), (10, 30), (90, 60)])
    single = Sequence(_tokens(6, seed=3), [(250, 1), (40, 1), (41, 9)])
    _compute(model, (whole, 40))
    _compute(model, (single, 1), (chunked, 20))
    _compute(model, (single, 1), (chunked, 33))
    sharing = Sequence(chunked.token_ids[:41] + _tokens(20, seed=4), [(200, 11), (10, 30), (400, 30)])
    sharing.num_computed = 41  # a cached prefix
    _compute(model, (single, 1), (chunked, 1), (sharing, 15))
    _compute(model, (chunked, 1), (sharing, 1), (single, 2))
    _compute(model, (sharing, 4), (single, 1), (chunked, 20))
    for sequence in (whole, chunked, single):
        _check(sequence, expected)
    sharing.logits.insert(0, expected_logits(expected, sharing.token_ids)[:41])
    _check(sharing, expected)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_neighbours_change_no_bit_of_a_row(dtype: torch.dtype, tmp_path: Path) -> None:
    save_tiny_model("qwen3", tmp_path)
    model = _load(tmp_path, "cpu", dtype)
    alone = Sequence(_tokens(50, seed=1), [(0, 50)])
    for extend_len in (30, 1, 1, 18):
        _compute(model, (alone, extend_len))
    crowd = [Sequence(_tokens(50, seed=seed), [(50 * seed, 20), (50 * seed + 25, 30)]) for seed in range(1, 8)]
    for extend_len in (30, 1, 1, 18):
        _compute(model, *((sequence, extend_len) for sequence in crowd))
    assert torch.equal(torch.cat(crowd[0].logits), torch.cat(alone.logits))


@pytest.mark.parametrize("backend", BACKENDS)
def test_bfloat16_stays_near_float32(backend: str, tmp_path: Path) -> None:
    expected = save_tiny_model("llama", tmp_path)
    sequence = Sequence(_tokens(40, seed=1), [(0, 40)])
    model = _load(tmp_path, backend, torch.bfloat16)
    _compute(model, (sequence, 39))
    _compute(model, (sequence, 1))
    difference = (torch.cat(sequence.logits) - expected_logits(expected, sequence.token_ids)).abs()
    assert difference.max() < 0.03 * expected_logits(expected, sequence.token_ids).abs().max()


def test_only_wanted_logits_come_back(tmp_path: Path) -> None:
    expected = save_tiny_model("llama", tmp_path)
    model = _load(tmp_path, "cpu")
    first, second, third = (_tokens(9, seed) for seed in range(3))
    rows = [BatchRow(first, 0, [(0, 9)], 0), BatchRow(second, 0, [(10, 9)]), BatchRow(third, 0, [(20, 9)], 3)]
    logits = model.forward(build_batch(rows))
    wanted = torch.cat((expected_logits(expected, second)[-1:], expected_logits(expected, third)[-3:]))
    torch.testing.assert_close(logits, wanted, atol=TOLERANCE, rtol=TOLERANCE)
    assert model.forward(build_batch(rows[:1])).shape == (0, VOCAB_SIZE)


def test_weights_may_be_spread_over_several_files(tmp_path: Path) -> None:
    expected = save_tiny_model("llama", tmp_path, max_shard_size="100KB")
    assert (tmp_path / "model.safetensors.index.json").is_file()
    sequence = Sequence(_tokens(10, seed=1), [(0, 10)])
    _compute(_load(tmp_path, "cpu"), (sequence, 10))
    _check(sequence, expected)


def test_config_tells_what_the_scheduler_must_know(tmp_path: Path) -> None:
    save_tiny_model("qwen2", tmp_path)
    config = load_config(tmp_path)
    assert (config.vocab_size, config.context_len, config.end_token_ids) == (VOCAB_SIZE, 256, (2,))
    assert config.dtype == "float32"
    assert kv_bytes_per_slot(config, torch.bfloat16) == 2 * 3 * 2 * 16 * 2  # K and V, layers, KV heads, head_dim, bytes


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"architectures": ["GPT2LMHeadModel"]}, "architectures names 'GPT2LMHeadModel', supported are Llama"),
        ({"architectures": None}, "none named"),
        ({"hidden_act": "gelu"}, "hidden_act is 'gelu', supported is 'silu'"),
        ({"num_attention_heads": 5}, "num_attention_heads 5 is no multiple of num_key_value_heads 2"),
        ({"num_hidden_layers": "3"}, "num_hidden_layers is '3', needed is a positive integer"),
        ({"rope_parameters": {"rope_type": "yarn", "factor": 4.0}}, "rope_type is 'yarn', supported are default"),
        ({"rope_scaling": {"type": "longrope"}, "rope_parameters": None}, "rope_type is 'longrope'"),
        ({"partial_rotary_factor": 0.5}, "partial_rotary_factor is 0.5"),
        ({"quantization_config": {"quant_method": "awq"}}, "quantization_config is"),
        ({"layer_types": ["full_attention", "sliding_attention"]}, "layer_types are"),
        ({"architectures": ["Qwen2ForCausalLM"], "use_sliding_window": True, "sliding_window": 8, "max_window_layers": 2},
         "max_window_layers is 2"),
    ],
)  # fmt: skip
def test_an_option_that_is_not_computed_is_refused_by_name(
    change: dict[str, Any], message: str, tmp_path: Path
) -> None:
    save_tiny_model("llama", tmp_path)
    config = json.loads((tmp_path / "config.json").read_text()) | change
    with pytest.raises(UnsupportedModel, match=message):
        ModelConfig.from_hf(config)


def test_rope_settings_are_read_in_their_old_form_too() -> None:
    config = {
        "architectures": ["LlamaForCausalLM"], "vocab_size": 8, "hidden_size": 32, "intermediate_size": 8,
        "num_hidden_layers": 1, "num_attention_heads": 2, "max_position_embeddings": 16, "rope_theta": 500000.0,
        "rope_scaling": {"type": "linear", "factor": 2.0},
    }  # fmt: skip
    read = ModelConfig.from_hf(config, {"eos_token_id": [5, 7]})
    assert (read.rope_theta, dict(read.rope_scaling)) == (500000.0, {"rope_type": "linear", "factor": 2.0})
    assert (read.head_dim, read.num_kv_heads, read.end_token_ids) == (16, 2, (5, 7))


@pytest.mark.parametrize(
    ("added", "removed", "message"),
    [
        (
            "model.layers.0.mlp.experts.weight",
            None,
            "have no place in this decoder, one is 'model.layers.0.mlp.experts",
        ),
        (None, "model.norm.weight", "weight 'model.norm.weight' is missing"),
    ],
)
def test_weights_that_do_not_fit_are_refused_by_name(
    added: str | None, removed: str | None, message: str, tmp_path: Path
) -> None:
    save_tiny_model("llama", tmp_path)
    weights = load_file(tmp_path / "model.safetensors")
    if added:
        weights[added] = torch.zeros(1)
    if removed:
        del weights[removed]
    save_file(weights, tmp_path / "model.safetensors")
    with pytest.raises(UnsupportedModel, match=message):
        _load(tmp_path, "reference")


def test_a_missing_file_is_named(tmp_path: Path) -> None:
    with pytest.raises(FileNotFoundError, match=r"config\.json"):
        load_config(tmp_path)


def test_an_unknown_backend_or_dtype_is_refused(tmp_path: Path) -> None:
    save_tiny_model("llama", tmp_path)
    with pytest.raises(ValueError, match="attention backend is 'flash', known are"):
        _load(tmp_path, "flash")
    with pytest.raises(ValueError, match=r"dtype is torch\.float16, supported are"):
        _load(tmp_path, "cpu", torch.float16)
