"""Which texts a compiled grammar takes, asked of llguidance with the tokenizer of the vetting."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

from llguidance import LLMatcher
from tokenizers import Tokenizer, decoders, models, pre_tokenizers

from services.grammar.vetting import Vetter
from shared.messages.constraints import Compile, Compiled, Constraint, ConstraintRefused
from shared.messages.packing import pack

Accepts = Callable[[str], bool]

SPECIAL_TOKENS = ["<|endoftext|>", "<|im_end|>", "[TOOL_CALLS]", "<|python_tag|>"]


def write_byte_level_model(folder: Path) -> None:
    """The files that vetting needs of a model; one token a byte, so that every text has tokens and loading takes no time."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    tokenizer = Tokenizer(models.BPE(vocab={char: i for i, char in enumerate(alphabet)}, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens(SPECIAL_TOKENS)
    tokenizer.save(str(folder / "tokenizer.json"))
    end = tokenizer.token_to_id("<|im_end|>")
    (folder / "config.json").write_text(json.dumps({"vocab_size": tokenizer.get_vocab_size(), "eos_token_id": end}))


def answer(vetter: Vetter, constraint: Constraint) -> Compiled | ConstraintRefused:
    return vetter.answer(pack(Compile(constraint=constraint)))


def refusal(vetter: Vetter, constraint: Constraint) -> str:
    """The message of the refusal that is expected."""
    reply = answer(vetter, constraint)
    assert isinstance(reply, ConstraintRefused), f"compiled instead of refused: {reply}"
    return reply.message


def language(vetter: Vetter, constraint: Constraint) -> Accepts:
    """Whether a whole text is in the language of a constraint that compiles."""
    reply = answer(vetter, constraint)
    assert isinstance(reply, Compiled), f"refused: {reply}"
    return language_of(vetter.tokenizer, reply.grammar)


def language_of(tokenizer: Any, grammar: str) -> Accepts:
    prototype = LLMatcher(tokenizer, grammar, log_level=0)
    assert not prototype.is_error(), prototype.get_error()

    def accepts(text: str) -> bool:
        matcher = prototype.deep_copy()
        tokens = tokenizer.tokenize_str(text, parse_special=True)
        return matcher.try_consume_tokens(tokens) == len(tokens) and matcher.is_accepting()

    return accepts
