"""GGUF files: computed as they are, or converted into a model folder first."""

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from gguf import GGMLQuantizationType
from tokenizers import Tokenizer
from transformers import AutoModelForCausalLM, AutoTokenizer, PreTrainedModel

from services.worker.batch import BatchRow, build_batch
from services.worker.convert import convert, main
from services.worker.model import UnsupportedModel, load_config, load_model
from services.worker.model.rotary import llama3_frequency_factors
from tests.support.tiny_gguf import CHAT_TEMPLATE, write_tiny_gguf
from tests.support.tiny_models import expected_logits, tiny_model

TOKENS = [5, 200, 17, 99, 3, 64, 250, 8]
VOCAB_SIZE = 272


def _model(name: str) -> PreTrainedModel:
    return tiny_model(name, vocab_size=VOCAB_SIZE)


def _logits(path: Path) -> torch.Tensor:
    model = load_model(path, dtype=torch.float32, device="cpu", num_slots=32, attention="reference")
    return model.forward(build_batch([BatchRow(TOKENS, 0, [(4, 8)], len(TOKENS))]))


@pytest.mark.parametrize("name", ["llama", "llama-tied", "llama-biased", "qwen2", "qwen3"])
def test_gguf_computes_what_the_original_computes(name: str, tmp_path: Path) -> None:
    model = _model(name)
    write_tiny_gguf(model, tmp_path / "model.gguf")
    torch.testing.assert_close(_logits(tmp_path / "model.gguf"), expected_logits(model, TOKENS), atol=1e-4, rtol=1e-4)


@pytest.mark.parametrize(
    ("quantization", "tolerance"),
    [(GGMLQuantizationType.F16, 0.002), (GGMLQuantizationType.BF16, 0.02), (GGMLQuantizationType.Q8_0, 0.03)],
)
def test_quantised_weights_are_dequantised(
    quantization: GGMLQuantizationType, tolerance: float, tmp_path: Path
) -> None:
    model = _model("llama")
    write_tiny_gguf(model, tmp_path / "model.gguf", quantization)
    expected = expected_logits(model, TOKENS)
    assert (_logits(tmp_path / "model.gguf") - expected).abs().max() < tolerance * expected.abs().max()


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    write_tiny_gguf(_model("llama"), tmp_path / "model.gguf")
    convert(tmp_path / "model.gguf", tmp_path / "models" / "tiny")
    return tmp_path / "models" / "tiny"


def test_folder_holds_what_every_service_needs(folder: Path) -> None:
    assert sorted(file.name for file in folder.iterdir()) == [
        "config.json",
        "generation_config.json",
        "model.safetensors",
        "tokenizer.json",
        "tokenizer_config.json",
    ]
    assert json.loads((folder / "generation_config.json").read_text())["eos_token_id"] == 2
    assert json.loads((folder / "tokenizer_config.json").read_text())["chat_template"] == CHAT_TEMPLATE
    assert load_config(folder).end_token_ids == (2,)
    assert not list(folder.parent.glob(".*")), "no temporary folder is left"


def test_folder_loads_in_transformers(folder: Path) -> None:
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    expected = expected_logits(_model("llama"), TOKENS)
    torch.testing.assert_close(expected_logits(model, TOKENS), expected, atol=1e-5, rtol=1e-5)
    tokenizer = AutoTokenizer.from_pretrained(folder)
    assert (tokenizer.bos_token_id, tokenizer.eos_token_id, tokenizer.pad_token_id) == (1, 2, 2)
    messages = [{"role": "user", "content": "hi"}]
    ids = tokenizer.apply_chat_template(messages)["input_ids"]
    assert (ids[0], ids[-1]) == (1, 2)


@pytest.mark.parametrize("text", ["Hello  world, it's\n\n 2024!", "naïve 你好 🙂", "\ttab", "", "   ", "a\x00b"])
def test_texts_round_trip(folder: Path, text: str) -> None:
    tokenizer = Tokenizer.from_file(str(folder / "tokenizer.json"))
    assert tokenizer.decode(tokenizer.encode(text).ids) == text


def test_digits_stand_alone_and_control_tokens_are_special(folder: Path) -> None:
    tokenizer = Tokenizer.from_file(str(folder / "tokenizer.json"))
    assert tokenizer.encode("a  12").tokens == ["a", "ĠĠ", "1", "2"]  # spaces merge as digits are split off first
    assert tokenizer.encode("t<|im_end|>").ids[-1] == 2
    assert tokenizer.decode([1, 2], skip_special_tokens=True) == ""


def test_a_start_token_is_added_where_the_file_asks_for_it(tmp_path: Path) -> None:
    write_tiny_gguf(_model("llama"), tmp_path / "model.gguf", tokenizer__ggml__add_bos_token=True)
    convert(tmp_path / "model.gguf", tmp_path / "tiny")
    tokenizer = Tokenizer.from_file(str(tmp_path / "tiny" / "tokenizer.json"))
    assert tokenizer.encode("a").ids[0] == 1
    assert 1 not in tokenizer.encode("a", add_special_tokens=False).ids


def test_every_end_token_is_known(tmp_path: Path) -> None:
    write_tiny_gguf(_model("llama"), tmp_path / "model.gguf", tokenizer__ggml__eot_token_id=0)
    convert(tmp_path / "model.gguf", tmp_path / "tiny")
    assert load_config(tmp_path / "tiny").end_token_ids == load_config(tmp_path / "model.gguf").end_token_ids == (2, 0)


def test_llama3_frequencies_are_recognised(tmp_path: Path) -> None:
    scaling = {
        "factor": 8.0,
        "low_freq_factor": 1.0,
        "high_freq_factor": 4.0,
        "original_max_position_embeddings": 8192,
    }
    factors = llama3_frequency_factors(16, 10000.0, scaling).float().numpy()
    write_tiny_gguf(_model("llama"), tmp_path / "model.gguf", extra_tensors={"rope_freqs.weight": factors})
    assert load_config(tmp_path / "model.gguf").rope_scaling == {"rope_type": "llama3", **scaling}
    other = np.linspace(1, 2, 8, dtype=np.float32)
    write_tiny_gguf(_model("llama"), tmp_path / "other.gguf", extra_tensors={"rope_freqs.weight": other})
    with pytest.raises(UnsupportedModel, match=r"rope_freqs\.weight holds other factors"):
        load_config(tmp_path / "other.gguf")


@pytest.mark.parametrize(
    ("metadata", "message"),
    [
        ({"tokenizer__ggml__model": "llama"}, r"tokenizer\.ggml\.model is 'llama', supported is 'gpt2'"),
        ({"tokenizer__ggml__pre": "tekken"}, r"tokenizer\.ggml\.pre is 'tekken', supported are"),
        ({"general__architecture": "mamba"}, r"general\.architecture is 'mamba', supported are"),
        ({"llama__rope__scaling__type": "yarn"}, r"llama\.rope\.scaling\.type is 'yarn'"),
        ({"llama__rope__dimension_count": 8}, r"rope\.dimension_count is 8"),
        ({"llama__block_count": None}, r"model\.gguf lacks llama\.block_count"),
        ({"llama__attention__sliding_window": 64}, r"llama\.attention\.sliding_window is set"),
    ],
)
def test_a_file_that_cannot_be_served_leaves_nothing_behind(
    metadata: dict[str, Any], message: str, tmp_path: Path
) -> None:
    write_tiny_gguf(_model("llama"), tmp_path / "model.gguf", **metadata)
    with pytest.raises(UnsupportedModel, match=message):
        convert(tmp_path / "model.gguf", tmp_path / "out" / "tiny")
    assert not (tmp_path / "out").exists() or not list((tmp_path / "out").iterdir())


def test_the_command_reports_progress_and_errors(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    write_tiny_gguf(_model("llama"), tmp_path / "model.gguf")
    arguments = [str(tmp_path / "model.gguf"), str(tmp_path / "tiny")]
    assert main(arguments) == 0
    assert "converting weights 100%" in capsys.readouterr().err
    assert main(arguments) == 1
    assert "tiny exists already" in capsys.readouterr().err
    assert main([str(tmp_path / "absent.gguf"), str(tmp_path / "other")]) == 1
    assert "absent.gguf" in capsys.readouterr().err
