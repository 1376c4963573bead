"""Tiny random models of every supported family, made and checked by transformers."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from transformers import (
    LlamaConfig,
    LlamaForCausalLM,
    MistralConfig,
    MistralForCausalLM,
    PreTrainedModel,
    Qwen2Config,
    Qwen2ForCausalLM,
    Qwen3Config,
    Qwen3ForCausalLM,
)

VOCAB_SIZE = 211
# Two query heads share a KV head and heads have 16 dimensions in all of them: the CPU kernels are compiled once.
_SHAPE: dict[str, Any] = {
    "vocab_size": VOCAB_SIZE,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "max_position_embeddings": 256,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "pad_token_id": 2,
    "attn_implementation": "eager",
}
_LLAMA3_ROPE = {
    "rope_type": "llama3",
    "rope_theta": 500.0,
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 64,
}

TINY_MODELS: dict[str, Callable[[dict[str, Any]], PreTrainedModel]] = {
    "llama": lambda shape: LlamaForCausalLM(LlamaConfig(**shape)),
    "llama-tied": lambda shape: LlamaForCausalLM(LlamaConfig(**shape, tie_word_embeddings=True)),
    "llama-biased": lambda shape: LlamaForCausalLM(LlamaConfig(**shape, attention_bias=True, mlp_bias=True)),
    "llama3-rope": lambda shape: LlamaForCausalLM(LlamaConfig(**shape, rope_parameters=dict(_LLAMA3_ROPE))),
    "linear-rope": lambda shape: LlamaForCausalLM(
        LlamaConfig(**shape, rope_parameters={"rope_type": "linear", "rope_theta": 10000.0, "factor": 2.0})
    ),
    "mistral": lambda shape: MistralForCausalLM(MistralConfig(**shape, sliding_window=None)),
    "mistral-window": lambda shape: MistralForCausalLM(MistralConfig(**shape, sliding_window=21)),
    "qwen2": lambda shape: Qwen2ForCausalLM(Qwen2Config(**shape)),
    "qwen3": lambda shape: Qwen3ForCausalLM(Qwen3Config(**shape)),
}


def tiny_model(name: str, **shape: Any) -> PreTrainedModel:
    """A model of that name in float32, the same each time; every weight is random, norms and biases too.

    `shape` overrides the usual numbers.
    """
    torch.manual_seed(sum(map(ord, name)))
    model = TINY_MODELS[name](_SHAPE | shape).eval()
    with torch.no_grad():
        for parameter_name, parameter in model.named_parameters():
            if "norm" in parameter_name:
                parameter.uniform_(0.5, 1.5)
            elif parameter_name.endswith("bias"):
                parameter.uniform_(-0.5, 0.5)
            else:
                parameter.normal_(0.0, 0.15)
    return model


def save_tiny_model(name: str, folder: Path, **options: Any) -> PreTrainedModel:
    """Write the model into `folder`; options as in save_pretrained."""
    model = tiny_model(name)
    model.save_pretrained(folder, **options)
    return model


@torch.inference_mode()
def expected_logits(model: PreTrainedModel, token_ids: list[int]) -> torch.Tensor:
    """float32 [n, vocab]: transformers' logits at every token."""
    logits: torch.Tensor = model(torch.tensor([token_ids])).logits[0].float()
    return logits
