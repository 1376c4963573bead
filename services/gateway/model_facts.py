"""What the gateway must know about the model it speaks for, read once from the model's folder."""

from pathlib import Path
from typing import Any

import msgspec

from services.gateway.text.vocabulary import Vocabulary
from shared.config import StartupError


class SamplingDefaults(msgspec.Struct, frozen=True, kw_only=True):
    """For fields that a request leaves out; the values of the OpenAI API unless the model's generation_config differs."""

    temperature: float = 1.0
    top_k: int = 0
    top_p: float = 1.0
    min_p: float = 0.0
    repetition_penalty: float = 1.0


class ModelFacts(msgspec.Struct, frozen=True, kw_only=True):
    """`family` is the model_type of config.json ("llama", "qwen2"); `created` a Unix time."""

    id: str
    family: str
    context_len: int
    vocab_size: int
    """Width of the embedding: every id below is safe to compute."""
    created: int
    defaults: SamplingDefaults
    vocabulary: Vocabulary
    details: dict[str, Any] = {}
    """For `GET /model_info`."""


def load_model_facts(model: str, model_path: str, *, use_generation_config: bool) -> ModelFacts:
    """Read config.json, generation_config.json (optional) and tokenizer.json. Raises StartupError naming what is missing."""
    folder = Path(model_path)
    if not model_path or not folder.is_dir():
        raise StartupError(f"model_path: {model_path!r} is not a folder; it must hold the model's config and tokenizer")
    config = _read_json(folder / "config.json")
    text_config = config.get("text_config") or config
    generation = _read_json(folder / "generation_config.json") if (folder / "generation_config.json").exists() else {}
    try:
        vocabulary = Vocabulary.load(folder)
        facts = ModelFacts(
            id=model,
            family=str(config.get("model_type", "")),
            context_len=int(text_config["max_position_embeddings"]),
            vocab_size=int(text_config["vocab_size"]),
            created=int((folder / "config.json").stat().st_mtime),
            defaults=_defaults(generation) if use_generation_config else SamplingDefaults(),
            vocabulary=vocabulary,
            details={"architectures": config.get("architectures") or [], "dtype": config.get("torch_dtype")},
        )
    except (OSError, KeyError, TypeError, ValueError) as error:
        raise StartupError(f"model_path: {folder} cannot be used: {error!r}") from error
    return facts


def _defaults(generation: dict[str, Any]) -> SamplingDefaults:
    """`generation_config` values of the fields that have one; null counts as absent."""
    names = SamplingDefaults.__struct_fields__
    given = {name: generation[name] for name in names if generation.get(name) is not None}
    return msgspec.convert(given, SamplingDefaults, strict=False)


def _read_json(path: Path) -> dict[str, Any]:
    try:
        return msgspec.json.decode(path.read_bytes(), type=dict[str, Any])
    except (OSError, msgspec.DecodeError) as error:
        raise StartupError(f"{path} cannot be read: {error}") from error
