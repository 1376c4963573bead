"""What a decoder computes, read from `config.json` and `generation_config.json` of a Hugging Face model."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

_ARCHITECTURES = ("LlamaForCausalLM", "MistralForCausalLM", "Qwen2ForCausalLM", "Qwen3ForCausalLM")
_ROPE_TYPES = ("default", "linear", "llama3")


class UnsupportedModel(ValueError):
    """An architecture, option or weight that this decoder does not compute; the message names the field."""


@dataclass(frozen=True, slots=True)
class ModelConfig:
    """Shape and options of a decoder of the Llama family.

    sliding_window  a token sees this many tokens, itself included; None: all before it
    rope_scaling    "rope_type" and its numbers; empty for plain rotary embedding
    dtype           the checkpoint's own, such as "bfloat16"
    """

    architecture: str
    vocab_size: int
    hidden_size: int
    intermediate_size: int
    num_layers: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    context_len: int
    rms_norm_eps: float
    rope_theta: float
    rope_scaling: Mapping[str, Any]
    sliding_window: int | None
    qk_norm: bool
    tie_embeddings: bool
    end_token_ids: tuple[int, ...]
    dtype: str

    @property
    def q_size(self) -> int:
        return self.num_heads * self.head_dim

    @property
    def kv_size(self) -> int:
        return self.num_kv_heads * self.head_dim

    @staticmethod
    def from_hf(config: Mapping[str, Any], generation_config: Mapping[str, Any] | None = None) -> "ModelConfig":
        """Read the two files' contents. Raises UnsupportedModel, naming the field, rather than compute something else."""
        architecture = next(iter(config.get("architectures") or ["(none named)"]))
        if architecture not in _ARCHITECTURES:
            raise UnsupportedModel(f"architectures names {architecture!r}, supported are {', '.join(_ARCHITECTURES)}")
        _require(config, "hidden_act", "silu", default="silu")
        _require(config, "partial_rotary_factor", 1.0, default=1.0)
        _require(config, "quantization_config", None)
        num_heads = _positive(config, "num_attention_heads")
        num_kv_heads = _positive(config, "num_key_value_heads", num_heads)
        if num_heads % num_kv_heads:
            raise UnsupportedModel(
                f"num_attention_heads {num_heads} is no multiple of num_key_value_heads {num_kv_heads}"
            )
        rope_theta, rope_scaling = _rope(config)
        return ModelConfig(
            architecture=architecture,
            vocab_size=_positive(config, "vocab_size"),
            hidden_size=_positive(config, "hidden_size"),
            intermediate_size=_positive(config, "intermediate_size"),
            num_layers=_positive(config, "num_hidden_layers"),
            num_heads=num_heads,
            num_kv_heads=num_kv_heads,
            head_dim=_positive(config, "head_dim", _positive(config, "hidden_size") // num_heads),
            context_len=_positive(config, "max_position_embeddings"),
            rms_norm_eps=float(config.get("rms_norm_eps", 1e-6)),
            rope_theta=rope_theta,
            rope_scaling=rope_scaling,
            sliding_window=_sliding_window(config, architecture),
            qk_norm=architecture == "Qwen3ForCausalLM",
            tie_embeddings=bool(config.get("tie_word_embeddings", False)),
            end_token_ids=_end_token_ids(config, generation_config or {}),
            dtype=str(config.get("dtype") or config.get("torch_dtype") or "float32"),
        )


def _require(config: Mapping[str, Any], field: str, supported: object, default: object = None) -> None:
    value = config.get(field)
    if value is None:
        value = default
    if value != supported:
        raise UnsupportedModel(f"{field} is {value!r}, supported is {supported!r}")


def _positive(config: Mapping[str, Any], field: str, default: int | None = None) -> int:
    value = config.get(field)
    if value is None:
        value = default
    if not isinstance(value, int) or value < 1:
        raise UnsupportedModel(f"{field} is {value!r}, needed is a positive integer")
    return value


def _rope(config: Mapping[str, Any]) -> tuple[float, Mapping[str, Any]]:
    """Theta and scaling, from `rope_parameters` (newer files) or `rope_theta` and `rope_scaling`."""
    parameters = dict(config.get("rope_parameters") or config.get("rope_scaling") or {})
    theta = float(parameters.pop("rope_theta", None) or config.get("rope_theta") or 10000.0)
    kind = parameters.setdefault("rope_type", parameters.pop("type", "default"))
    if kind not in _ROPE_TYPES:
        raise UnsupportedModel(f"rope_type is {kind!r}, supported are {', '.join(_ROPE_TYPES)}")
    if parameters.get("partial_rotary_factor") not in (None, 1.0):
        raise UnsupportedModel(f"partial_rotary_factor is {parameters['partial_rotary_factor']!r}, supported is 1.0")
    return theta, {} if kind == "default" else parameters


def _sliding_window(config: Mapping[str, Any], architecture: str) -> int | None:
    """One window for all layers or none: layers that differ are refused."""
    window = config.get("sliding_window")
    if architecture.startswith("Qwen") and not config.get("use_sliding_window", False):
        window = None  # these configs state a window that is switched off
    kinds = set(config.get("layer_types") or ())
    uniform = {"sliding_attention"} if window else {"full_attention"}
    if kinds and kinds != uniform:
        raise UnsupportedModel(f"layer_types are {sorted(kinds)} with sliding_window {window}, supported is one kind")
    if window and architecture.startswith("Qwen") and config.get("max_window_layers", 0) > 0:
        raise UnsupportedModel(
            f"max_window_layers is {config['max_window_layers']} with use_sliding_window, supported is 0"
        )
    return None if window is None else int(window)


def _end_token_ids(config: Mapping[str, Any], generation_config: Mapping[str, Any]) -> tuple[int, ...]:
    ids = generation_config.get("eos_token_id")
    if ids is None:
        ids = config.get("eos_token_id")
    return tuple(ids) if isinstance(ids, list) else () if ids is None else (int(ids),)
