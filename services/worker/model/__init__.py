"""Models: a config-driven decoder with its weights, attention backend and KV pool."""

from services.worker.model.config import ModelConfig, UnsupportedModel
from services.worker.model.loading import Model, kv_bytes_per_slot, load_config, load_model

__all__ = ["Model", "ModelConfig", "UnsupportedModel", "kv_bytes_per_slot", "load_config", "load_model"]
