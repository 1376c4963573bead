"""Arrays of numbers as bytes: little-endian int32 for ids and counts, little-endian float32 for logprobs.

Plain `array` objects keep services free of numpy; where numpy is at hand, `numpy.frombuffer(data, "<i4")` reads the same bytes.
"""

import sys
from array import array
from collections.abc import Iterable
from typing import TypeVar

import msgspec

Number = TypeVar("Number", int, float)

INT32_BYTES = 4

pack = msgspec.msgpack.Encoder().encode
"""Any message to bytes; each inbox module has the decoder for its union."""


def pack_int32(values: Iterable[int]) -> bytes:
    """Pack integers. Raises OverflowError for one that needs more than 32 bits."""
    return _little_endian(array("i", values)).tobytes()


def unpack_int32(data: bytes) -> list[int]:
    """The integers of `pack_int32`. Raises ValueError when the length is no multiple of four."""
    numbers = array("i")
    numbers.frombytes(data)
    return _little_endian(numbers).tolist()


def pack_float32(values: Iterable[float]) -> bytes:
    return _little_endian(array("f", values)).tobytes()


def unpack_float32(data: bytes) -> list[float]:
    """The numbers of `pack_float32`. Raises ValueError when the length is no multiple of four."""
    numbers = array("f")
    numbers.frombytes(data)
    return _little_endian(numbers).tolist()


def _little_endian(numbers: "array[Number]") -> "array[Number]":
    if sys.byteorder == "big":
        numbers.byteswap()
    return numbers


def num_int32(data: bytes) -> int:
    """How many integers `data` holds, without unpacking it."""
    return len(data) // INT32_BYTES
