"""Token ids to text, piece by piece: what is emitted always concatenates to the text of decoding all ids at once.

Only what a later token could still change is held back: the bytes of an unfinished character, and in byte-fallback
vocabularies a whole run of byte tokens, because one bad byte turns every byte of its run into U+FFFD.
"""

import codecs
from abc import ABC, abstractmethod
from collections.abc import Collection, Iterable, Sequence

from services.gateway.text.vocabulary import METASPACE, DecoderKind, Vocabulary, fallback_byte

REPLACEMENT = "\ufffd"


class Detokenizer:
    """The text of one stream of token ids.

    Equal, over all pushes, to `tokenizer.decode(ids, skip_special_tokens=…)` without clean-up of spaces. `keep` names
    special ids that are shown although the others are skipped: a tool parser needs the model's own markers.
    """

    def __init__(
        self, vocabulary: Vocabulary, skip_special_tokens: bool = True, *, keep: Collection[int] = frozenset()
    ) -> None:
        self._hidden = vocabulary.special_ids.difference(keep) if skip_special_tokens else frozenset[int]()
        self._decoder = _DECODERS[vocabulary.kind](vocabulary)

    def push(self, ids: Sequence[int]) -> str:
        """The text that `ids` complete; empty while a character is unfinished."""
        return self._decoder.push(token_id for token_id in ids if token_id not in self._hidden)

    def finish(self) -> str:
        """What was held back, with U+FFFD for what stayed unfinished. Nothing may be pushed afterwards."""
        return self._decoder.finish()


class _Decoder(ABC):
    def __init__(self, vocabulary: Vocabulary) -> None:
        self._vocabulary = vocabulary

    @abstractmethod
    def push(self, ids: Iterable[int]) -> str: ...

    @abstractmethod
    def finish(self) -> str: ...


class _ByteLevel(_Decoder):
    """All tokens together are one stream of UTF-8."""

    def __init__(self, vocabulary: Vocabulary) -> None:
        super().__init__(vocabulary)
        self._utf8 = codecs.getincrementaldecoder("utf-8")("replace")

    def push(self, ids: Iterable[int]) -> str:
        return self._utf8.decode(b"".join(map(self._vocabulary.token_bytes, ids)))

    def finish(self) -> str:
        return self._utf8.decode(b"", final=True)


class _ByteFallback(_Decoder):
    """Tokens are text, except for runs of byte tokens that are valid UTF-8 as a whole or not at all."""

    def __init__(self, vocabulary: Vocabulary) -> None:
        super().__init__(vocabulary)
        self._run = bytearray()
        self._strip_next = vocabulary.strips_leading_space

    def push(self, ids: Iterable[int]) -> str:
        parts: list[str] = []
        for token_id in ids:
            piece = self._vocabulary.piece(token_id)
            if piece is None:
                continue
            piece = piece.replace(METASPACE, " ")
            if (byte := fallback_byte(piece)) is not None:
                self._run.append(byte)
            else:
                parts += self._end_run(), piece
        return self._strip("".join(parts))

    def finish(self) -> str:
        return self._strip(self._end_run())

    def _end_run(self) -> str:
        run, self._run = self._run, bytearray()
        try:
            return run.decode()
        except UnicodeDecodeError:
            return REPLACEMENT * len(run)

    def _strip(self, text: str) -> str:
        if not (text and self._strip_next):
            return text
        self._strip_next = False
        return text.removeprefix(" ")


class _Metaspace(_Decoder):
    """Tokens are text; the first one has no spaces where the tokenizer put them in front of the text itself."""

    def __init__(self, vocabulary: Vocabulary) -> None:
        super().__init__(vocabulary)
        self._strip_next = vocabulary.strips_leading_space

    def push(self, ids: Iterable[int]) -> str:
        parts = []
        for token_id in ids:
            piece = self._vocabulary.piece(token_id)
            if piece is None:
                continue
            parts.append(piece.replace(METASPACE, "" if self._strip_next else " "))
            self._strip_next = False
        return "".join(parts)

    def finish(self) -> str:
        return ""


_DECODERS: dict[DecoderKind, type[_Decoder]] = {
    DecoderKind.BYTE_LEVEL: _ByteLevel,
    DecoderKind.BYTE_FALLBACK: _ByteFallback,
    DecoderKind.METASPACE: _Metaspace,
}
