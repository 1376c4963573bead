"""One decoder for the Llama family: Llama 2 and 3, Mistral, Qwen2, Qwen3. The config says which parts are there."""

from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

from services.worker.attention.interface import AttentionBackend
from services.worker.batch import ForwardBatch, Int64
from services.worker.model.config import ModelConfig
from services.worker.model.layer_ops import LayerOps
from services.worker.model.linear import Linear, make_linear
from services.worker.model.weights import Weights


@dataclass(frozen=True, slots=True)
class Layer:
    """Weights of one layer; q, k and v are one matrix, so are gate and up: fewer, larger reads."""

    attention_norm: Tensor
    qkv: Linear
    qk_norms: tuple[Tensor, Tensor] | None
    o: Linear
    mlp_norm: Tensor
    gate_up: Linear
    down: Linear


class Decoder:
    """A causal language model over a KV pool. Not thread-safe: one step at a time."""

    def __init__(
        self,
        config: ModelConfig,
        weights: Weights,
        attention: AttentionBackend,
        ops: LayerOps,
        *,
        dtype: torch.dtype,
        device: torch.device,
    ) -> None:
        """Takes every weight. Raises UnsupportedModel when one is missing or left over."""
        self.config = config
        self._attention = attention
        self._ops = ops
        self._device = device
        load = _Loader(weights, dtype, device)
        self._embedding = load.tensor("model.embed_tokens.weight")
        self._layers = [load.layer(f"model.layers.{index}", config.qk_norm) for index in range(config.num_layers)]
        self._norm = load.tensor("model.norm.weight")
        # Tied checkpoints may hold the same matrix a second time.
        if not config.tie_embeddings:
            self._lm_head = load.linear("lm_head")
        else:
            if "lm_head.weight" in weights:
                weights.take("lm_head.weight")
            self._lm_head = make_linear(self._embedding, None)
        weights.check_all_taken()

    @torch.inference_mode()
    def forward(self, batch: ForwardBatch) -> Tensor:
        """Logits float32 [S, vocab] of the tokens at `logit_index`; the KV of all new tokens is in the pool afterwards."""
        config, ops = self.config, self._ops
        assert batch.seq_lens.max() <= config.context_len, f"a row of {batch.seq_lens.max()} tokens exceeds the context"
        self._attention.plan(batch)
        positions, wanted = self._to_device(batch.positions), self._to_device(batch.logit_index)
        residual = F.embedding(self._to_device(batch.token_ids), self._embedding).float()
        update: Tensor | None = None
        for index, layer in enumerate(self._layers):
            qkv = layer.qkv(ops.add_and_norm(residual, update, layer.attention_norm))
            heads = qkv.view(len(qkv), -1, config.head_dim)
            ops.rotate_(heads[:, : -config.num_kv_heads], config.num_heads, positions, layer.qk_norms)
            q, k, v = heads.tensor_split((config.num_heads, config.num_heads + config.num_kv_heads), dim=1)
            attended = self._attention.run(index, q, k, v)
            if index == config.num_layers - 1:  # nothing looks at the other tokens any more
                residual, attended = residual[wanted], attended[wanted]
            hidden = layer.gate_up(ops.add_and_norm(residual, layer.o(attended), layer.mlp_norm))
            update = layer.down(ops.silu_and_mul(hidden))
        return self._lm_head(ops.add_and_norm(residual, update, self._norm)).float()

    def _to_device(self, array: Int64) -> Tensor:
        return torch.from_numpy(array).to(self._device, non_blocking=True)


class _Loader:
    """Takes weights into their final dtype, place and layout."""

    def __init__(self, weights: Weights, dtype: torch.dtype, device: torch.device) -> None:
        self._weights, self._dtype, self._device = weights, dtype, device

    def tensor(self, name: str) -> Tensor:
        return self._weights.take(name).to(self._device, self._dtype)

    def linear(self, *names: str) -> Linear:
        """One layer of the named ones side by side; biases are taken where the model has them."""
        weight = torch.cat([self.tensor(f"{name}.weight") for name in names])
        biased = [name for name in names if f"{name}.bias" in self._weights]
        assert biased in ([], list(names)), f"of {names} only {biased} have a bias"
        return make_linear(weight, torch.cat([self.tensor(f"{name}.bias") for name in names]) if biased else None)

    def layer(self, prefix: str, qk_norm: bool) -> Layer:
        attention, mlp = f"{prefix}.self_attn", f"{prefix}.mlp"
        return Layer(
            attention_norm=self.tensor(f"{prefix}.input_layernorm.weight"),
            qkv=self.linear(f"{attention}.q_proj", f"{attention}.k_proj", f"{attention}.v_proj"),
            qk_norms=self._qk_norms(attention) if qk_norm else None,
            o=self.linear(f"{attention}.o_proj"),
            mlp_norm=self.tensor(f"{prefix}.post_attention_layernorm.weight"),
            gate_up=self.linear(f"{mlp}.gate_proj", f"{mlp}.up_proj"),
            down=self.linear(f"{mlp}.down_proj"),
        )

    def _qk_norms(self, attention: str) -> tuple[Tensor, Tensor]:
        return self.tensor(f"{attention}.q_norm.weight"), self.tensor(f"{attention}.k_norm.weight")
