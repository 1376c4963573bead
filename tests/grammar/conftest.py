"""A model folder with a byte-level tokenizer: every text has tokens, and a vetting process starts in a blink."""

import json
from pathlib import Path

import pytest
from tokenizers import Tokenizer, decoders, models, pre_tokenizers

from services.grammar.config import GrammarConfig
from services.grammar.vetting import Task, Vetter, make_vetter

SPECIAL_TOKENS = ["<|endoftext|>", "<|im_end|>", "[TOOL_CALLS]", "<|python_tag|>"]


@pytest.fixture(scope="session")
def model_path(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("model")
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    tokenizer = Tokenizer(models.BPE(vocab={char: i for i, char in enumerate(alphabet)}, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens(SPECIAL_TOKENS)
    tokenizer.save(str(folder / "tokenizer.json"))
    end = tokenizer.token_to_id("<|im_end|>")
    (folder / "config.json").write_text(json.dumps({"vocab_size": tokenizer.get_vocab_size(), "eos_token_id": end}))
    return folder


@pytest.fixture(scope="session")
def vetter(model_path: Path) -> Vetter:
    return make_vetter(Task(model_path=str(model_path), tool_format="hermes", limits=GrammarConfig().limits))
