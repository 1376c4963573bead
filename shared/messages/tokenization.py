"""gateway -> tokenizer: text to token ids, and back for whole texts."""

from typing import Any

import msgspec


class EncodeText(msgspec.Struct, frozen=True, kw_only=True, tag="text"):
    """Encode plain texts. Text that spells a control token stays text unless `allow_special`."""

    texts: tuple[str, ...]
    add_special_tokens: bool = True
    allow_special: bool = False


class EncodeChat(msgspec.Struct, frozen=True, kw_only=True, tag="chat"):
    """Render messages with the model's chat template and encode the result; control tokens come from the template alone."""

    messages: tuple[dict[str, Any], ...]
    """Validated by the gateway: role, content (string), name, tool_calls, tool_call_id."""
    tools: tuple[dict[str, Any], ...] = ()
    add_generation_prompt: bool = True
    template_args: dict[str, Any] = {}


class Detokenize(msgspec.Struct, frozen=True, kw_only=True, tag="detokenize"):
    token_ids: bytes
    skip_special_tokens: bool = False


EncodeRequest = EncodeText | EncodeChat | Detokenize
unpack_encode_request = msgspec.msgpack.Decoder(EncodeRequest).decode


class Encoded(msgspec.Struct, frozen=True, kw_only=True, tag="encoded"):
    prompts: tuple[bytes, ...]
    """int32 token ids, one entry a text; one for a chat."""


class Detokenized(msgspec.Struct, frozen=True, kw_only=True, tag="detokenized"):
    text: str


class EncodeFailed(msgspec.Struct, frozen=True, kw_only=True, tag="encode_failed"):
    """The client's mistake (a template error, a text that cannot be encoded): HTTP 400."""

    message: str
    param: str | None = None


class EncodeRefused(msgspec.Struct, frozen=True, kw_only=True, tag="encode_refused"):
    """This tokenizer has too much to do: HTTP 503. Another member, or the same one later, will answer."""

    message: str
    retry_after_s: float = 1.0


EncodeReply = Encoded | Detokenized | EncodeFailed | EncodeRefused
unpack_encode_reply = msgspec.msgpack.Decoder(EncodeReply).decode
