"""operator -> any service, over `control.<instance>`."""

from typing import Any

import msgspec


class Control(msgspec.Struct, frozen=True, kw_only=True, tag="control"):
    action: str
    """drain, resume, info or stats"""


class ControlReply(msgspec.Struct, frozen=True, kw_only=True, tag="control_reply"):
    ok: bool
    detail: dict[str, Any] = {}


unpack_control = msgspec.msgpack.Decoder(Control).decode
unpack_control_reply = msgspec.msgpack.Decoder(ControlReply).decode
