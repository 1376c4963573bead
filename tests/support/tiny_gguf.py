"""Tiny GGUF files, laid out as llama.cpp's converter lays them out."""

from pathlib import Path
from typing import Any

import numpy as np
from gguf import GGMLQuantizationType, GGUFWriter, TokenType
from gguf.quants import quantize
from tokenizers.pre_tokenizers import ByteLevel
from transformers import PreTrainedModel

_NAMES = {
    "model.embed_tokens": "token_embd",
    "model.norm": "output_norm",
    "lm_head": "output",
    "input_layernorm": "attn_norm",
    "self_attn.q_proj": "attn_q",
    "self_attn.k_proj": "attn_k",
    "self_attn.v_proj": "attn_v",
    "self_attn.o_proj": "attn_output",
    "self_attn.q_norm": "attn_q_norm",
    "self_attn.k_norm": "attn_k_norm",
    "post_attention_layernorm": "ffn_norm",
    "mlp.gate_proj": "ffn_gate",
    "mlp.up_proj": "ffn_up",
    "mlp.down_proj": "ffn_down",
}
CONTROL_TOKENS = ("<|endoftext|>", "<|im_start|>", "<|im_end|>")
CHAT_TEMPLATE = "{% for message in messages %}<|im_start|>{{ message['content'] }}<|im_end|>{% endfor %}"


def byte_level_vocabulary(size: int) -> tuple[list[str], list[str], list[TokenType]]:
    """(tokens, merges, types): control tokens, the alphabet of bytes, two merges, and unused ones up to `size`."""
    letters = sorted(ByteLevel.alphabet())
    tokens = [*CONTROL_TOKENS, *letters, "Ġt", "ĠĠ"]
    tokens += [f"<unused{index}>" for index in range(size - len(tokens))]
    assert len(tokens) == size, f"a vocabulary of {size} is too small for {len(tokens)} tokens"
    types = [TokenType.CONTROL if token in CONTROL_TOKENS else TokenType.NORMAL for token in tokens]
    return tokens, ["Ġ t", "Ġ Ġ"], types


def write_tiny_gguf(
    model: PreTrainedModel,
    path: Path,
    quantization: GGMLQuantizationType = GGMLQuantizationType.F32,
    extra_tensors: dict[str, np.ndarray[Any, Any]] | None = None,
    **metadata: Any,
) -> None:
    """Write a transformers model as GGUF; matrices are quantised, norms and biases stay float32.

    `metadata` replaces or adds keys, dots written as double underscores; None leaves a key out.
    """
    config = model.config
    arch = config.model_type
    tokens, merges, types = byte_level_vocabulary(config.vocab_size)
    writer = GGUFWriter(path, arch)
    fields: dict[str, Any] = {
        f"{arch}.context_length": config.max_position_embeddings,
        f"{arch}.embedding_length": config.hidden_size,
        f"{arch}.block_count": config.num_hidden_layers,
        f"{arch}.feed_forward_length": config.intermediate_size,
        f"{arch}.attention.head_count": config.num_attention_heads,
        f"{arch}.attention.head_count_kv": config.num_key_value_heads,
        f"{arch}.attention.key_length": config.head_dim,
        f"{arch}.attention.value_length": config.head_dim,
        f"{arch}.attention.layer_norm_rms_epsilon": config.rms_norm_eps,
        f"{arch}.rope.freq_base": config.rope_parameters["rope_theta"],
        "tokenizer.ggml.model": "gpt2",
        "tokenizer.ggml.pre": "smollm",
        "tokenizer.ggml.tokens": tokens,
        "tokenizer.ggml.token_type": [int(kind) for kind in types],
        "tokenizer.ggml.merges": merges,
        "tokenizer.ggml.bos_token_id": 1,
        "tokenizer.ggml.eos_token_id": 2,
        "tokenizer.ggml.padding_token_id": 2,
        "tokenizer.ggml.unknown_token_id": 0,
        "tokenizer.ggml.add_bos_token": False,
        "tokenizer.chat_template": CHAT_TEMPLATE,
    }
    for key, value in (fields | {key.replace("__", "."): value for key, value in metadata.items()}).items():
        match value:
            case None:
                continue
            case bool():
                writer.add_bool(key, value)
            case int():
                writer.add_uint32(key, value)
            case float():
                writer.add_float32(key, value)
            case str():
                writer.add_string(key, value)
            case list():
                writer.add_array(key, value)
    for name, parameter in model.named_parameters():
        values = parameter.detach().numpy()
        if arch == "llama" and (".q_proj." in name or ".k_proj." in name):
            heads = config.num_attention_heads if ".q_proj." in name else config.num_key_value_heads
            shape = (heads, 2, len(values) // heads // 2, *values.shape[1:])
            values = values.reshape(shape).swapaxes(1, 2).reshape(values.shape)
        kind = quantization if values.ndim == 2 else GGMLQuantizationType.F32
        values = np.ascontiguousarray(values)
        writer.add_tensor(_gguf_name(name), quantize(values, kind), raw_dtype=kind)
    for name, values in (extra_tensors or {}).items():
        writer.add_tensor(name, values)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


def _gguf_name(name: str) -> str:
    module, _, kind = name.rpartition(".")
    if module.startswith("model.layers."):
        layer, _, inner = module.removeprefix("model.layers.").partition(".")
        return f"blk.{layer}.{_NAMES[inner]}.{kind}"
    return f"{_NAMES[module]}.{kind}"
