"""The model's vocabulary as the gateway needs it: the bytes of each token, and which tokens are control tokens."""

import json
from collections.abc import Iterable
from enum import StrEnum
from pathlib import Path
from typing import Any

from tokenizers import Tokenizer

METASPACE = "▁"
"""Stands for a space in the pieces of SentencePiece vocabularies."""


class DecoderKind(StrEnum):
    """How the pieces of a vocabulary become text; the three ways that decoder-only language models use."""

    BYTE_LEVEL = "byte_level"
    """Each character of a piece is one byte (GPT-2, Llama 3, Qwen, SmolLM2)."""
    BYTE_FALLBACK = "byte_fallback"
    """`▁` is a space, `<0x0A>` is a byte (Llama 2, Mistral, Gemma)."""
    METASPACE = "metaspace"
    """`▁` is a space, there are no bytes."""


class Vocabulary:
    """Token ids of one tokenizer.json; immutable, shared by all streams.

    kind                  how pieces become text
    strips_leading_space  a text loses the space its first word is encoded with
    """

    def __init__(self, tokenizer_json: str) -> None:
        """Raises ValueError for a tokenizer whose decoder is none of the known kinds."""
        description = json.loads(tokenizer_json)
        self.kind, self.strips_leading_space = _decoder_of(description["decoder"])
        added = description["added_tokens"]
        self.special_ids: frozenset[int] = frozenset(token["id"] for token in added if token["special"])
        self._ids = Tokenizer.from_str(tokenizer_json).get_vocab(with_added_tokens=True)
        self._pieces: list[str | None] = [None] * (max(self._ids.values()) + 1)
        for piece, token_id in self._ids.items():
            self._pieces[token_id] = piece
        for token in added:  # an added token's own spelling goes before that of the model's piece with its id
            self._pieces[token["id"]] = token["content"]
        self._bytes = [self._bytes_of(piece) for piece in self._pieces]

    @classmethod
    def load(cls, path: str | Path) -> "Vocabulary":
        """Read a tokenizer.json, or the one in a model's folder."""
        path = Path(path)
        return cls((path / "tokenizer.json" if path.is_dir() else path).read_text(encoding="utf-8"))

    @property
    def size(self) -> int:
        """One more than the largest id; a model's logits may be wider."""
        return len(self._pieces)

    def piece(self, token_id: int) -> str | None:
        """The token as tokenizer.json spells it; None for an id that it does not know."""
        return self._pieces[token_id] if 0 <= token_id < len(self._pieces) else None

    def token_bytes(self, token_id: int) -> bytes:
        """What the token adds to a text, seen alone; empty for an unknown id. It need not be valid UTF-8."""
        return self._bytes[token_id] if 0 <= token_id < len(self._bytes) else b""

    def token_text(self, token_id: int) -> str:
        """`token_bytes` for people and for logprobs: an incomplete character reads as U+FFFD."""
        return self.token_bytes(token_id).decode("utf-8", "replace")

    def is_special(self, token_id: int) -> bool:
        return token_id in self.special_ids

    def ids_of(self, texts: Iterable[str]) -> frozenset[int]:
        """Ids of the tokens spelled exactly like `texts`; spellings that the vocabulary lacks are left out."""
        return frozenset(self._ids[text] for text in texts if text in self._ids)

    def _bytes_of(self, piece: str | None) -> bytes:
        if piece is None:
            return b""
        if self.kind is DecoderKind.BYTE_LEVEL:
            return bytes_of_byte_level(piece)
        if self.kind is DecoderKind.BYTE_FALLBACK and (byte := fallback_byte(piece)) is not None:
            return bytes((byte,))
        return piece.replace(METASPACE, " ").encode()


def bytes_of_byte_level(piece: str) -> bytes:
    """The bytes that a byte-level piece spells; a piece with any other character stands for its own UTF-8."""
    try:
        return bytes(map(_BYTE_OF_CHARACTER.__getitem__, piece))
    except KeyError:
        return piece.encode()


def fallback_byte(piece: str) -> int | None:
    """The byte of a piece like `<0x0A>`; None for any other piece."""
    if len(piece) != len("<0x00>") or not piece.startswith("<0x") or not piece.endswith(">"):
        return None
    try:
        return int(piece[3:5], 16)
    except ValueError:
        return None


def _byte_level_alphabet() -> dict[str, int]:
    """GPT-2's alphabet: printable Latin-1 stands for itself, the other bytes for the characters from U+0100 on."""
    printable = [*range(ord("!"), ord("~") + 1), *range(ord("¡"), ord("¬") + 1), *range(ord("®"), ord("ÿ") + 1)]
    others = [byte for byte in range(256) if byte not in set(printable)]
    return {chr(byte): byte for byte in printable} | {chr(256 + i): byte for i, byte in enumerate(others)}


_BYTE_OF_CHARACTER = _byte_level_alphabet()


def _decoder_of(decoder: dict[str, Any] | None) -> tuple[DecoderKind, bool]:
    """The kind of a tokenizer.json's `decoder`, and whether it strips a leading space."""
    parts: list[dict[str, Any]] = []
    if decoder is not None:
        parts = decoder["decoders"] if decoder["type"] == "Sequence" else [decoder]
    match [part["type"] for part in parts]:
        case ["ByteLevel"]:
            return DecoderKind.BYTE_LEVEL, False
        case ["Metaspace"] if parts[0]["replacement"] == METASPACE:
            return DecoderKind.METASPACE, parts[0].get("prepend_scheme", "always") != "never"
        case ["Replace", "ByteFallback", "Fuse"] if _is_metaspace(parts[0]):
            return DecoderKind.BYTE_FALLBACK, False
        case ["Replace", "ByteFallback", "Fuse", "Strip"] if _is_metaspace(parts[0]) and _strips_one_space(parts[3]):
            return DecoderKind.BYTE_FALLBACK, True
    raise ValueError(f"tokenizer.json has a decoder that cannot be streamed: {json.dumps(decoder)[:500]}")


def _is_metaspace(replace: dict[str, Any]) -> bool:
    return bool(replace["pattern"] == {"String": METASPACE} and replace["content"] == " ")


def _strips_one_space(strip: dict[str, Any]) -> bool:
    return (strip["content"], strip["start"], strip["stop"]) == (" ", 1, 0)
