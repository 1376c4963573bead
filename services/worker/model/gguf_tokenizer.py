"""The tokenizer inside a GGUF file as a Hugging Face one: `tokenizer.json` and `tokenizer_config.json`.

Byte-level BPE (`tokenizer.ggml.model` "gpt2") only; how text is split before merging depends on `tokenizer.ggml.pre`.
"""

from collections.abc import Callable
from typing import Any

from tokenizers import AddedToken, Regex, Tokenizer, decoders, pre_tokenizers, processors
from tokenizers.models import BPE
from tokenizers.normalizers import NFC

from services.worker.model.config import UnsupportedModel
from services.worker.model.gguf import GgufModel

_TOKEN_TYPE_CONTROL = 3
_TOKEN_TYPE_USER_DEFINED = 4

_LLAMA3_SPLIT = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}"
    r"| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
_QWEN2_SPLIT = _LLAMA3_SPLIT.replace(r"\p{N}{1,3}", r"\p{N}")


def _byte_level(split: str | None) -> pre_tokenizers.PreTokenizer:
    """Byte-level alphabet after a split by `split`, or by GPT-2's own pattern."""
    if split is None:
        return pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=True)
    return pre_tokenizers.Sequence(
        [
            pre_tokenizers.Split(Regex(split), "isolated"),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
        ]
    )


def _smollm() -> pre_tokenizers.PreTokenizer:
    # Digits first: "  12" keeps its two spaces together, as in training.
    return pre_tokenizers.Sequence([pre_tokenizers.Digits(individual_digits=True), _byte_level(None)])


_PRE_TOKENIZERS: dict[str, Callable[[], pre_tokenizers.PreTokenizer]] = {
    "gpt-2": lambda: _byte_level(None),
    "smollm": _smollm,
    "llama-bpe": lambda: _byte_level(_LLAMA3_SPLIT),
    "llama3": lambda: _byte_level(_LLAMA3_SPLIT),
    "qwen2": lambda: _byte_level(_QWEN2_SPLIT),
}


def build_tokenizer(model: GgufModel) -> Tokenizer:
    """The fast tokenizer. Raises UnsupportedModel for another kind than byte-level BPE or an unknown `pre`."""
    kind, pre = model.metadata("tokenizer.ggml.model"), model.metadata("tokenizer.ggml.pre", "gpt-2")
    if kind != "gpt2":
        raise UnsupportedModel(f"tokenizer.ggml.model is {kind!r}, supported is 'gpt2' (byte-level BPE)")
    if pre not in _PRE_TOKENIZERS:
        raise UnsupportedModel(f"tokenizer.ggml.pre is {pre!r}, supported are {list(_PRE_TOKENIZERS)}")
    tokens: list[str] = model.metadata("tokenizer.ggml.tokens")
    merges = [tuple(merge.split(" ")) for merge in model.metadata("tokenizer.ggml.merges")]
    # Llama 3's vocabulary holds words that its merges do not reach.
    bpe = BPE(
        {token: index for index, token in enumerate(tokens)}, merges, ignore_merges=pre in ("llama-bpe", "llama3")
    )
    tokenizer = Tokenizer(bpe)
    if pre == "qwen2":
        tokenizer.normalizer = NFC()
    tokenizer.pre_tokenizer = _PRE_TOKENIZERS[pre]()
    tokenizer.decoder = decoders.ByteLevel()
    kinds = model.metadata("tokenizer.ggml.token_type")
    for kind, is_special in ((_TOKEN_TYPE_CONTROL, True), (_TOKEN_TYPE_USER_DEFINED, False)):
        added = [
            AddedToken(t, special=is_special, normalized=False) for t, k in zip(tokens, kinds, strict=True) if k == kind
        ]
        tokenizer.add_special_tokens(added) if is_special else tokenizer.add_tokens(added)
    if (bos := _bos(model)) is not None:
        token, token_id = bos
        tokenizer.post_processor = processors.TemplateProcessing(
            single=f"{token} $A", pair=f"{token} $A {token} $B:1", special_tokens=[(token, token_id)]
        )
    return tokenizer


def tokenizer_config(model: GgufModel) -> dict[str, Any]:
    """What `tokenizer_config.json` holds: special tokens by role, and the chat template where the file has one."""
    tokens: list[str] = model.metadata("tokenizer.ggml.tokens")
    config: dict[str, Any] = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "clean_up_tokenization_spaces": False,
        "model_max_length": int(model.metadata(f"{model.architecture}.context_length")),
    }
    for role, key in (("bos", "bos"), ("eos", "eos"), ("pad", "padding"), ("unk", "unknown")):
        token_id = model.metadata(f"tokenizer.ggml.{key}_token_id")
        if token_id is not None:
            config[f"{role}_token"] = tokens[token_id]
    if (template := model.metadata("tokenizer.chat_template")) is not None:
        config["chat_template"] = template
    return config


def _bos(model: GgufModel) -> tuple[str, int] | None:
    """The token that starts every text, if the file asks for one. Llama 3 files rely on a default of true."""
    pre = model.metadata("tokenizer.ggml.pre")
    if not model.metadata("tokenizer.ggml.add_bos_token", pre in ("llama-bpe", "llama3")):
        return None
    token_id = int(model.metadata("tokenizer.ggml.bos_token_id"))
    return model.metadata("tokenizer.ggml.tokens")[token_id], token_id
