"""Models: a config-driven decoder with its weights, attention backend and KV pool."""

from pathlib import Path
from typing import Protocol

import torch
from torch import Tensor

from services.worker.attention import make_attention
from services.worker.batch import ForwardBatch
from services.worker.kv_pool import KvPool, kv_bytes_per_slot
from services.worker.model.config import ModelConfig, UnsupportedModel
from services.worker.model.decoder import Decoder
from services.worker.model.weights import open_model

__all__ = ["Model", "ModelConfig", "UnsupportedModel", "kv_bytes_per_slot", "load_config", "load_model"]


class Model(Protocol):
    """What the executor runs. Not thread-safe: one step at a time."""

    @property
    def config(self) -> ModelConfig: ...

    def forward(self, batch: ForwardBatch) -> Tensor:
        """Logits float32 [S, vocab] of the tokens at `batch.logit_index`; fills the KV slots of all new tokens."""
        ...


def load_config(path: Path | str) -> ModelConfig:
    """The config of a model folder or GGUF file; errors as load_model."""
    return open_model(Path(path))[0]


def load_model(path: Path | str, *, dtype: torch.dtype, device: torch.device | str, num_slots: int, attention: str) -> Model:
    """Load a model folder (safetensors) or a GGUF file, with an empty KV pool of `num_slots` tokens.

    attention   "cpu" or "reference"
    Raises FileNotFoundError when a file is missing, UnsupportedModel for a model this decoder does not compute, ValueError
    for an attention backend that is unknown or does not run on the device.
    """
    config, weights = open_model(Path(path))
    device = torch.device(device)
    pool = KvPool(config, num_slots, dtype, device)
    backend, ops = make_attention(attention, pool, config.sliding_window)
    return Decoder(config, weights, backend, ops, dtype=dtype, device=device)
