"""Weights by their Hugging Face names, from safetensors (one file or an index) or GGUF; memory-mapped, read when asked for."""

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Protocol

from safetensors import safe_open
from torch import Tensor

from services.worker.model.config import ModelConfig, UnsupportedModel
from services.worker.model.gguf import GgufModel

# Buffers that old checkpoints hold and that follow from the config.
_DERIVED = ("rotary_emb.inv_freq",)


class WeightSource(Protocol):
    def names(self) -> list[str]: ...

    def read(self, name: str) -> Tensor: ...


class Weights:
    """Hands out each weight once and knows at the end whether one was left over.

    A weight without a place in the decoder means that the decoder would compute something else than the model.
    """

    def __init__(self, source: WeightSource) -> None:
        self._source = source
        self._left = {name for name in source.names() if not name.endswith(_DERIVED)}

    def __contains__(self, name: str) -> bool:
        return name in self._left

    def take(self, name: str) -> Tensor:
        """Raises UnsupportedModel when the model has no such weight."""
        if name not in self._left:
            raise UnsupportedModel(f"weight {name!r} is missing")
        self._left.remove(name)
        return self._source.read(name)

    def check_all_taken(self) -> None:
        if self._left:
            raise UnsupportedModel(
                f"{len(self._left)} weights have no place in this decoder, one is {min(self._left)!r}"
            )


class SafetensorsSource:
    """`model.safetensors`, or the files that `model.safetensors.index.json` names."""

    def __init__(self, folder: Path) -> None:
        index = folder / "model.safetensors.index.json"
        if index.is_file():
            names = sorted(set(json.loads(index.read_text(encoding="utf-8"))["weight_map"].values()))
        else:
            names = ["model.safetensors"]
        self._file_of: dict[str, Any] = {}
        for file_name in names:
            opened: Any = safe_open(folder / file_name, framework="pt")
            self._file_of.update(dict.fromkeys(opened.keys(), opened))

    def names(self) -> list[str]:
        return list(self._file_of)

    def read(self, name: str) -> Tensor:
        tensor: Tensor = self._file_of[name].get_tensor(name)
        return tensor


def open_model(path: Path) -> tuple[ModelConfig, Weights]:
    """Config and weights of a model folder or a GGUF file.

    Raises FileNotFoundError when a file is missing, UnsupportedModel for a model this decoder does not compute.
    """
    if path.is_file():
        gguf = GgufModel(path)
        config = ModelConfig.from_hf(gguf.hf_config(), {"eos_token_id": list(gguf.end_token_ids())})
        return config, Weights(gguf)
    generation = path / "generation_config.json"
    config = ModelConfig.from_hf(
        _read_json(path / "config.json"), _read_json(generation) if generation.is_file() else None
    )
    return config, Weights(SafetensorsSource(path))


def _read_json(path: Path) -> Mapping[str, Any]:
    content: Mapping[str, Any] = json.loads(path.read_text(encoding="utf-8"))
    return content
