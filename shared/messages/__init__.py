"""The messages that services exchange, one module per conversation.

Messages are the architecture: a service knows another only by what it may say to it. Rules that hold for all:

* frozen `msgspec.Struct`s in MessagePack; a field added later has a default, and unknown fields are ignored;
* hot-path messages are array-like: their fields travel by position, so new ones go to the end;
* token ids, handles and extents travel as packed little-endian int32 `bytes` (`shared.messages.packing`);
* each receiver has one inbox union and one decoder, built once: the border of trust.
"""
