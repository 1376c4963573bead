"""Which tool call format a model writes, read off its folder."""

import json
from pathlib import Path

_MARKERS = {"<tool_call>": "hermes", "[TOOL_CALLS]": "mistral", "<|python_tag|>": "llama3", "ipython": "llama3"}
_MODEL_TYPES = {"qwen2": "hermes", "qwen3": "hermes", "mistral": "mistral", "mixtral": "mistral"}
DEFAULT_FAMILY = "hermes"
"""Also the format that the tokenizer asks for in the system text of models whose chat template knows no tools."""


def detect_family(model_path: str | Path) -> str:
    """Name of the tool call format, by the markers of the chat template, else by the model's type."""
    folder = Path(model_path)
    template = _read(folder / "chat_template.jinja") or _read(folder / "tokenizer_config.json")
    for marker, family in _MARKERS.items():
        if marker in template:
            return family
    config = json.loads(_read(folder / "config.json") or "{}")
    return _MODEL_TYPES.get(config.get("model_type", ""), DEFAULT_FAMILY)


def _read(path: Path) -> str:
    return path.read_text(encoding="utf-8") if path.is_file() else ""
