"""Rotary position embedding: frequencies with their scaling, and the table of cosines and sines."""

import math
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor


def llama3_frequency_factors(head_dim: int, theta: float, scaling: Mapping[str, Any]) -> Tensor:
    """By how much each frequency of Llama 3.1 and later is divided, float64 [head_dim / 2].

    Long waves are stretched by `factor`, short ones kept, those between blended smoothly.
    """
    factor, low, high = (float(scaling[key]) for key in ("factor", "low_freq_factor", "high_freq_factor"))
    original_context = float(scaling["original_max_position_embeddings"])
    turns = original_context * _inverse_frequencies(head_dim, theta) / (2 * math.pi)
    blend = ((turns - low) / (high - low)).clamp(0.0, 1.0)
    return 1.0 / ((1.0 - blend) / factor + blend)


def _inverse_frequencies(head_dim: int, theta: float) -> Tensor:
    return 1.0 / theta ** (torch.arange(0, head_dim, 2, dtype=torch.float64) / head_dim)


def rotary_table(head_dim: int, context_len: int, theta: float, scaling: Mapping[str, Any]) -> Tensor:
    """Cosines, then sines, of every position: float32 [context_len, head_dim]; `scaling` as in ModelConfig."""
    frequencies = _inverse_frequencies(head_dim, theta)
    match scaling.get("rope_type"):
        case "linear":
            frequencies /= float(scaling["factor"])
        case "llama3":
            frequencies /= llama3_frequency_factors(head_dim, theta, scaling)
        case other:
            assert other is None, f"ModelConfig lets no rope_type {other!r} through"
    # Angles in float32, as the models were trained; float64 here would differ from them at long contexts.
    angles = torch.outer(torch.arange(context_len, dtype=torch.float32), frequencies.float())
    return torch.cat((angles.cos(), angles.sin()), dim=1)
