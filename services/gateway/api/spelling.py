"""How a token is written in logprobs: as its text, or as bytes where it is only a part of a character."""

from services.gateway.text.vocabulary import Vocabulary


def spell(token_id: int, vocabulary: Vocabulary, *, bytes_prefix: str = "") -> tuple[str, bytes]:
    """(text, bytes) of a token. Text completions mark bytes with the prefix "bytes:", chat completions do not."""
    raw = vocabulary.token_bytes(token_id)
    try:
        return raw.decode(), raw
    except UnicodeDecodeError:
        return bytes_prefix + "".join(f"\\x{byte:02x}" for byte in raw), raw
