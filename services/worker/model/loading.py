"""From a path to a model that computes: config, weights, KV pool, attention backend and layer operations put together."""

from pathlib import Path
from typing import Protocol

import torch
from torch import Tensor

from services.worker.attention.cpu import CpuAttention
from services.worker.attention.interface import AttentionBackend
from services.worker.attention.reference import ReferenceAttention
from services.worker.batch import BatchRow, ForwardBatch, build_batch
from services.worker.kv_pool import KvPool
from services.worker.model.config import ModelConfig
from services.worker.model.cpu_ops import CpuOps
from services.worker.model.decoder import Decoder
from services.worker.model.layer_ops import LayerOps, TorchOps
from services.worker.model.rotary import rotary_table
from services.worker.model.weights import open_model

_DTYPES = (torch.float32, torch.bfloat16)


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


def load_model(
    path: Path | str, *, dtype: torch.dtype, device: torch.device | str, num_slots: int, attention: str
) -> Model:
    """Load a model folder (safetensors) or a GGUF file, with an empty KV pool of `num_slots` tokens.

    dtype       float32 or bfloat16, of weights, KV and what flows between layers
    attention   "cpu", or "reference": slow, any device
    Raises FileNotFoundError when a file is missing, UnsupportedModel for a model this decoder does not compute, ValueError
    for an attention backend or dtype that is unknown or does not run on the device.
    """
    if dtype not in _DTYPES:
        raise ValueError(f"dtype is {dtype}, supported are {', '.join(map(str, _DTYPES))}")
    config, weights = open_model(Path(path))
    device = torch.device(device)
    pool = KvPool(
        num_layers=config.num_layers,
        num_kv_heads=config.num_kv_heads,
        num_slots=num_slots,
        head_dim=config.head_dim,
        dtype=dtype,
        device=device,
    )
    table = rotary_table(config.head_dim, config.context_len, config.rope_theta, config.rope_scaling).to(device)
    backend: AttentionBackend
    ops: LayerOps
    match attention:
        case "cpu":
            backend, ops = (
                CpuAttention(pool, config.num_heads, config.sliding_window),
                CpuOps(table, config.rms_norm_eps),
            )
        case "reference":
            backend, ops = ReferenceAttention(pool, config.sliding_window), TorchOps(table, config.rms_norm_eps)
        case _:
            raise ValueError(f"attention backend is {attention!r}, known are 'cpu' and 'reference'")
    model = Decoder(config, weights, backend, ops, dtype=dtype, device=device)
    # Kernels are compiled, or read from their cache, at first use: now rather than while a request waits.
    model.forward(build_batch([BatchRow([0], 0, [(0, 1)])]))
    return model


def kv_bytes_per_slot(config: ModelConfig, dtype: torch.dtype) -> int:
    """Memory that one token slot of the KV pool takes."""
    return 2 * config.num_layers * config.num_kv_heads * config.head_dim * dtype.itemsize
