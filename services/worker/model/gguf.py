"""GGUF files read as Hugging Face models: the config as `config.json` would have it, weights under their names there.

Quantised tensors are dequantised to float32; the file itself is memory-mapped.
"""

from pathlib import Path
from typing import Any

import numpy as np
import torch
from gguf import GGUFReader
from gguf.quants import dequantize
from torch import Tensor

from services.worker.model.config import UnsupportedModel
from services.worker.model.rotary import llama3_frequency_factors

_ARCHITECTURES = {"llama": "LlamaForCausalLM", "qwen2": "Qwen2ForCausalLM", "qwen3": "Qwen3ForCausalLM"}

_TOP_LEVEL = {
    "token_embd.weight": "model.embed_tokens.weight",
    "output_norm.weight": "model.norm.weight",
    "output.weight": "lm_head.weight",
}
_IN_LAYER = {
    "attn_norm": "input_layernorm",
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_output": "self_attn.o_proj",
    "attn_q_norm": "self_attn.q_norm",
    "attn_k_norm": "self_attn.k_norm",
    "ffn_norm": "post_attention_layernorm",
    "ffn_gate": "mlp.gate_proj",
    "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj",
}
_ROPE_FREQS = "rope_freqs.weight"
# Llama 3.1 and later: the file holds the factor of each frequency, not the four numbers they were made from. Three of them
# are the same in every release; the fourth, the greatest factor, is read off, and the result is compared with the file.
_LLAMA3_ROPE = {"rope_type": "llama3", "low_freq_factor": 1.0, "high_freq_factor": 4.0}
_LLAMA3_ORIGINAL_CONTEXT = 8192


class GgufModel:
    """One GGUF file of a supported architecture. Raises UnsupportedModel for any other."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self._reader = GGUFReader(path)
        self._tensors = {tensor.name: tensor for tensor in self._reader.tensors}
        self.architecture = str(self.metadata("general.architecture"))
        if self.architecture not in _ARCHITECTURES:
            raise UnsupportedModel(
                f"general.architecture is {self.architecture!r}, supported are {list(_ARCHITECTURES)}"
            )
        # The factors of rope_freqs are stated in the config, see _rope_scaling.
        self._stored_name = {_hf_name(name): name for name in self._tensors if name != _ROPE_FREQS}
        self.num_heads = int(self._of_arch("attention.head_count"))
        self.num_kv_heads = int(self._of_arch("attention.head_count_kv", self.num_heads))

    def metadata(self, key: str, default: Any = None) -> Any:
        """The value of a metadata key, `default` where the file lacks it."""
        field = self._reader.fields.get(key)
        return default if field is None else field.contents()

    def _of_arch(self, key: str, default: Any = None) -> Any:
        value = self.metadata(f"{self.architecture}.{key}", default)
        if value is None:
            raise UnsupportedModel(f"{self.path.name} lacks {self.architecture}.{key}")
        return value

    def hf_config(self) -> dict[str, Any]:
        """What `config.json` of this model would hold."""
        hidden_size = int(self._of_arch("embedding_length"))
        head_dim = int(self._of_arch("attention.key_length", hidden_size // self.num_heads))
        if int(self._of_arch("attention.value_length", head_dim)) != head_dim:
            raise UnsupportedModel(f"{self.architecture}.attention.value_length differs from key_length {head_dim}")
        rope_dims = int(self._of_arch("rope.dimension_count", head_dim))
        if rope_dims != head_dim:
            raise UnsupportedModel(f"rope.dimension_count is {rope_dims}, supported is the head dimension {head_dim}")
        config: dict[str, Any] = {
            "architectures": [_ARCHITECTURES[self.architecture]],
            "model_type": self.architecture,
            "vocab_size": self._tensors["token_embd.weight"].shape[1].item(),
            "hidden_size": hidden_size,
            "intermediate_size": int(self._of_arch("feed_forward_length")),
            "num_hidden_layers": int(self._of_arch("block_count")),
            "num_attention_heads": self.num_heads,
            "num_key_value_heads": self.num_kv_heads,
            "head_dim": head_dim,
            "hidden_act": "silu",
            "max_position_embeddings": int(self._of_arch("context_length")),
            "rms_norm_eps": _shortest_float(self._of_arch("attention.layer_norm_rms_epsilon")),
            "rope_theta": _shortest_float(self._of_arch("rope.freq_base", 10000.0)),
            "attention_bias": "blk.0.attn_q.bias" in self._tensors,
            "mlp_bias": "blk.0.ffn_gate.bias" in self._tensors,
            "tie_word_embeddings": "output.weight" not in self._tensors,
            "torch_dtype": "float32",
        }
        if self.metadata(f"{self.architecture}.attention.sliding_window"):
            raise UnsupportedModel(
                f"{self.architecture}.attention.sliding_window is set; convert from safetensors instead"
            )
        if (scaling := self._rope_scaling(head_dim, config["rope_theta"])) is not None:
            config["rope_scaling"] = scaling
        for name in ("bos", "eos", "padding"):
            if (token := self.metadata(f"tokenizer.ggml.{name}_token_id")) is not None:
                config[f"{name.replace('padding', 'pad')}_token_id"] = int(token)
        return config

    def _rope_scaling(self, head_dim: int, theta: float) -> dict[str, Any] | None:
        kind = self.metadata(f"{self.architecture}.rope.scaling.type", "none")
        if kind == "linear":
            return {"rope_type": "linear", "factor": float(self._of_arch("rope.scaling.factor"))}
        if kind != "none":
            raise UnsupportedModel(
                f"{self.architecture}.rope.scaling.type is {kind!r}, supported are 'none' and 'linear'"
            )
        if _ROPE_FREQS not in self._tensors:
            return None
        factors = self._dequantized(_ROPE_FREQS)
        scaling = {
            **_LLAMA3_ROPE,
            "factor": float(factors.max()),
            "original_max_position_embeddings": _LLAMA3_ORIGINAL_CONTEXT,
        }
        if not torch.allclose(factors, llama3_frequency_factors(head_dim, theta, scaling).float(), rtol=1e-4):
            raise UnsupportedModel(f"{_ROPE_FREQS} holds other factors than Llama 3's")
        return scaling

    def end_token_ids(self) -> tuple[int, ...]:
        """The ids that end an answer: end of sequence, and end of turn where the file names one."""
        names = ("eos", "eot", "eom")
        ids = [self.metadata(f"tokenizer.ggml.{name}_token_id") for name in names]
        return tuple(dict.fromkeys(int(token) for token in ids if token is not None))

    def names(self) -> list[str]:
        """The weights, by their Hugging Face names, in the order of the file."""
        return list(self._stored_name)

    def read(self, name: str) -> Tensor:
        """One weight in float32."""
        return self._weight(self._stored_name[name])

    def _weight(self, name: str) -> Tensor:
        tensor = self._dequantized(name)
        # GGUF's llama rotates neighbouring pairs, Hugging Face's the two halves: undo the reordering of q and k for it.
        if self.architecture == "llama" and ".attn_q." in name:
            return _halves_from_pairs(tensor, self.num_heads)
        if self.architecture == "llama" and ".attn_k." in name:
            return _halves_from_pairs(tensor, self.num_kv_heads)
        return tensor

    def _dequantized(self, name: str) -> Tensor:
        tensor = self._tensors[name]
        values = np.array(dequantize(tensor.data, tensor.tensor_type), dtype=np.float32)
        return torch.from_numpy(values.reshape([int(size) for size in tensor.shape[::-1]]))


def _halves_from_pairs(weight: Tensor, num_heads: int) -> Tensor:
    """Rows [heads, half, 2, ...] -> [heads, 2, half, ...], the shape unchanged."""
    head_dim = weight.shape[0] // num_heads
    pairs = weight.reshape(num_heads, head_dim // 2, 2, *weight.shape[1:])
    return pairs.transpose(1, 2).reshape(weight.shape).contiguous()


def _hf_name(name: str) -> str:
    if name in _TOP_LEVEL:
        return _TOP_LEVEL[name]
    part, _, rest = name.partition(".")
    layer, _, tail = rest.partition(".")
    module, _, kind = tail.rpartition(".")
    if part != "blk" or not layer.isdigit() or module not in _IN_LAYER:
        raise UnsupportedModel(f"tensor {name!r} has no place in a supported decoder")
    return f"model.layers.{layer}.{_IN_LAYER[module]}.{kind}"


def _shortest_float(value: float) -> float:
    """Metadata floats are float32: 9.999999747e-06 was written as 1e-05."""
    return float(str(np.float32(value)))
