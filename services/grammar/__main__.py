"""`python -m services.grammar`: one grammar service, or one more."""

import sys
from pathlib import Path

from services.grammar.actor import GrammarActor
from services.grammar.config import GrammarConfig
from shared.bus import Bus
from shared.config import ConfigError
from shared.service import main

CONFIG = GrammarConfig


async def build(config: GrammarConfig, bus: Bus) -> GrammarActor:
    """Raises ConfigError without a model: grammars are vetted with its tokenizer."""
    if not config.model_path:
        raise ConfigError("model_path: the grammar service needs the model's folder")
    for name in ("config.json", "tokenizer.json"):
        if not (Path(config.model_path) / name).is_file():
            raise ConfigError(f"model_path: {config.model_path!r} has no {name}")
    return GrammarActor(config, bus)


if __name__ == "__main__":
    sys.exit(main(GrammarActor.role, CONFIG, build))
