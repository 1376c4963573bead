"""`python -m services.tokenizer`: one tokenizer, or one more."""

import secrets
import sys
from pathlib import Path

import jinja2

from services.tokenizer.actor import TokenizerActor
from services.tokenizer.chat_template import ChatTemplate
from services.tokenizer.config import TokenizerConfig
from services.tokenizer.control_tokens import GuardedTokenizer
from services.tokenizer.core import TokenizerCore
from shared.bus import Bus
from shared.config import StartupError
from shared.service import main

CONFIG = TokenizerConfig
_NONCE_DIGITS = 24


async def build(config: TokenizerConfig, bus: Bus) -> TokenizerActor:
    """Reads the tokenizer and the chat template of `config.model_path`. Raises StartupError where it cannot use them."""
    nonce = "".join(secrets.choice("0123456789") for _ in range(_NONCE_DIGITS))
    file = Path(config.model_path) / "tokenizer.json"
    try:
        tokenizer = GuardedTokenizer(file.read_text(encoding="utf-8"), nonce)
    except (OSError, ValueError) as error:
        raise StartupError(f"model_path: no usable tokenizer.json in {config.model_path!r}: {error}") from error
    try:
        template = ChatTemplate.load(config.model_path)
    except (OSError, ValueError, jinja2.TemplateSyntaxError) as error:
        raise StartupError(f"model_path: no usable chat template in {config.model_path!r}: {error}") from error
    return TokenizerActor(config, TokenizerCore(tokenizer, template, nonce), bus)


if __name__ == "__main__":
    sys.exit(main(TokenizerActor.role, CONFIG, build))
