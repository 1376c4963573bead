"""Small tokenizers of every family, trained in a moment, as tokenizer.json texts."""

import json
from collections.abc import Callable
from functools import cache
from typing import Any

from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, normalizers, pre_tokenizers, processors, trainers

CORPUS = [
    "The quick brown fox jumps over the lazy dog. The user is a person who asks questions, and the assistant answers.",
    "def add(a, b):\n    return a + b\n\nprint(add(1, 22))  # 23\n",
    '{"name": "get_weather", "arguments": {"city": "Zürich", "days": [1, 2, 3]}}',
    "Grüße aus Köln, déjà vu, naïve café, œuvre, Ελληνικά, русский текст, עברית, العربية, 日本語のテキスト, 한국어, 🙂🚀👩‍👩‍👧.",
    "<tag> </tag> <|not a token|> im_start im_end |> <| s> </ < > unk",
]
CONTROL_TOKENS = ["<|end|>", "<|im_start|>", "<|im_end|>", "<｜begin▁of▁text｜>"]
PLAIN_ADDED_TOKENS = ["<think>", "</think>", "    "]


def _train(tokenizer: Tokenizer, trainer: Any) -> Tokenizer:
    tokenizer.train_from_iterator(CORPUS * 3, trainer)
    return tokenizer


def _byte_level() -> Tokenizer:
    """GPT-2's kind, with control tokens inside the model's vocabulary (SmolLM2)."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [pre_tokenizers.Digits(individual_digits=True), pre_tokenizers.ByteLevel(add_prefix_space=False)]
    )
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=600,
        special_tokens=CONTROL_TOKENS,
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    _train(tokenizer, trainer).add_tokens([AddedToken(text, normalized=False) for text in PLAIN_ADDED_TOKENS])
    return tokenizer


def _byte_level_ignoring_merges() -> Tokenizer:
    """Llama 3's kind: whole words are looked up, control tokens lie outside of the model's vocabulary, a text begins with one."""
    tokenizer = Tokenizer(models.BPE(ignore_merges=True))
    pattern = Regex(r"(?i:'s|'t)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s+")
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Split(pattern, behavior="isolated"),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
        ]
    )
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=600, initial_alphabet=pre_tokenizers.ByteLevel.alphabet(), show_progress=False
    )
    _train(tokenizer, trainer).add_special_tokens([AddedToken(text, normalized=False) for text in CONTROL_TOKENS])
    first = CONTROL_TOKENS[0]
    tokenizer.post_processor = processors.TemplateProcessing(
        single=f"{first} $A", special_tokens=[(first, tokenizer.token_to_id(first))]
    )
    return tokenizer


def _sentencepiece(*, prepends: bool) -> Tokenizer:
    """Llama 2's kind (`prepends`) or Gemma's: spaces are ▁, unknown characters fall back to bytes."""
    trained = Tokenizer(models.BPE(unk_token="<unk>", fuse_unk=True))
    trained.normalizer = normalizers.Replace(" ", "▁")
    trained.pre_tokenizer = pre_tokenizers.Split("▁", "merged_with_next")
    special = ["<unk>", "<s>", "</s>"]
    _train(trained, trainers.BpeTrainer(vocab_size=400, special_tokens=special, limit_alphabet=70, show_progress=False))
    description = json.loads(trained.to_str())
    vocab = description["model"]["vocab"]
    for byte in range(256):
        vocab[f"<0x{byte:02X}>"] = len(vocab)
    description["model"]["byte_fallback"] = True
    tokenizer = Tokenizer.from_str(json.dumps(description))
    steps = [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse()]
    if prepends:
        tokenizer.normalizer = normalizers.Sequence([normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")])
        steps.append(decoders.Strip(" ", 1, 0))
    tokenizer.pre_tokenizer = None
    tokenizer.decoder = decoders.Sequence(steps)
    tokenizer.post_processor = processors.TemplateProcessing(single="<s> $A", special_tokens=[("<s>", 1)])
    return tokenizer


def _metaspace_unigram() -> Tokenizer:
    """T5's kind, whose model finds pieces by their text: control tokens too, unless they are renamed."""
    tokenizer = Tokenizer(models.Unigram())
    tokenizer.pre_tokenizer = pre_tokenizers.Metaspace()
    tokenizer.decoder = decoders.Metaspace()
    trainer = trainers.UnigramTrainer(
        vocab_size=300, special_tokens=["<unk>", "<s>", "</s>"], unk_token="<unk>", show_progress=False
    )
    return _train(tokenizer, trainer)


FAMILIES: dict[str, Callable[[], Tokenizer]] = {
    "byte_level": _byte_level,
    "byte_level_ignoring_merges": _byte_level_ignoring_merges,
    "sentencepiece_prepending": lambda: _sentencepiece(prepends=True),
    "sentencepiece": lambda: _sentencepiece(prepends=False),
    "metaspace_unigram": _metaspace_unigram,
}


@cache
def tokenizer_json(family: str) -> str:
    """tokenizer.json of one of `FAMILIES`."""
    return FAMILIES[family]().to_str()
