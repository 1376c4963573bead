"""A tokenizer whose control tokens have private names: text that spells a control token's public name is only text.

Chat templates and clients share one string, in which `<|im_end|>` is a control token for Hugging Face's tokenizers wherever
it stands. Here the name is private to the process: what the template wrote is renamed after rendering, what a client
wrote is not and so takes the ordinary path through pre-tokenizer and merges. One string is encoded in one pass,
so tokens at the borders are the ones that the unmodified tokenizer makes of the same text.
"""

import json
import re
from collections.abc import Sequence
from typing import Any

from tokenizers import Tokenizer


class GuardedTokenizer:
    """Encodes text in which control tokens were renamed by `reveal`; decodes as the unmodified tokenizer does.

    control_texts  public spellings of the control tokens: added tokens that tokenizer.json calls special
    """

    def __init__(self, tokenizer_json: str, nonce: str) -> None:
        """`nonce`: letters or digits that no client can guess. Raises ValueError for a tokenizer.json it cannot rename."""
        assert nonce.isalnum(), "a nonce is letters and digits"
        description = json.loads(tokenizer_json)
        control_ids = {token["content"]: token["id"] for token in description["added_tokens"] if token["special"]}
        self.control_texts = frozenset(control_ids)
        self._names = {text: f"\ufdd0{nonce}.{token_id}\ufdd1" for text, token_id in control_ids.items()}
        # Longest first, as the tokenizer itself chooses among tokens that begin at one place.
        spellings = sorted(self._names, key=len, reverse=True)
        self._spelled = re.compile("|".join(map(re.escape, spellings)) or r"(?!)")
        self._public = _tokenizer(description)
        self._guarded = _tokenizer(_renamed(description, self._names))
        for text, token_id in control_ids.items():
            if self._guarded.token_to_id(self._names[text]) != token_id:
                raise ValueError(f"tokenizer.json: control token {text!r} is not the token {token_id}")

    @property
    def size(self) -> int:
        """Number of token ids, added ones included."""
        return self._public.get_vocab_size(with_added_tokens=True)

    def reveal(self, text: str) -> str:
        """`text` with every spelling of a control token made that token. For text that our side wrote."""
        return self._spelled.sub(lambda match: self._names[match[0]], text)

    def encode(self, texts: Sequence[str], *, add_special_tokens: bool) -> list[list[int]]:
        """Token ids of each text. Only revealed control tokens, and those the tokenizer itself adds, become control tokens."""
        encodings = self._guarded.encode_batch_fast(list(texts), add_special_tokens=add_special_tokens)
        return [encoding.ids for encoding in encodings]

    def decode(self, token_ids: Sequence[int], *, skip_special_tokens: bool) -> str:
        return self._public.decode(list(token_ids), skip_special_tokens=skip_special_tokens)


def _tokenizer(description: dict[str, Any]) -> Tokenizer:
    try:
        tokenizer = Tokenizer.from_str(json.dumps(description))
    except Exception as error:  # the Rust side raises plain Exception
        raise ValueError(f"tokenizer.json: {error}") from error
    tokenizer.no_padding()  # a file may carry the padding and truncation of its training
    tokenizer.no_truncation()
    return tokenizer


def _renamed(description: dict[str, Any], names: dict[str, str]) -> dict[str, Any]:
    """tokenizer.json with private names for control tokens, and without the ways to spell one of them.

    The model's own vocabulary is renamed too: a Unigram model finds its pieces by their text, and merges may lead there.
    """
    model = dict(description["model"])
    match model["vocab"]:
        case dict(vocab):
            model["vocab"] = {names.get(piece, piece): token_id for piece, token_id in vocab.items()}
        case list(vocab):
            model["vocab"] = [[names.get(piece, piece), score] for piece, score in vocab]
    if "merges" in model:
        model["merges"] = [merge for merge in model["merges"] if not _mentions(_pair(merge), names)]
    if model.get("unk_token") is not None:
        model["unk_token"] = names.get(model["unk_token"], model["unk_token"])
    added = [
        token | {"content": names.get(token["content"], token["content"])} for token in description["added_tokens"]
    ]
    return description | {"model": model, "added_tokens": added}


def _pair(merge: str | list[str]) -> tuple[str, str]:
    left, right = merge.split(" ") if isinstance(merge, str) else merge
    return left, right


def _mentions(pair: tuple[str, str], names: dict[str, str]) -> bool:
    return pair[0] in names or pair[1] in names or "".join(pair) in names
