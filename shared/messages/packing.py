"""Arrays of numbers as bytes: little-endian int32 for ids and counts, little-endian float32 for logprobs.

Plain `array` objects keep services free of numpy; where numpy is at hand, `numpy.frombuffer(data, "<i4")` reads the same bytes.
"""

import sys
from array import array
from collections.abc import Iterable

INT32_BYTES = 4


def _packed(typecode: str, values: Iterable[float]) -> bytes:
    numbers = array(typecode, values)
    if sys.byteorder == "big":
        numbers.byteswap()
    return numbers.tobytes()


def _unpacked(typecode: str, data: bytes) -> list[float]:
    numbers = array(typecode)
    numbers.frombytes(data)
    if sys.byteorder == "big":
        numbers.byteswap()
    return numbers.tolist()


def pack_int32(values: Iterable[int]) -> bytes:
    """Pack integers. Raises OverflowError for one that needs more than 32 bits."""
    return _packed("i", values)


def unpack_int32(data: bytes) -> list[int]:
    """The integers of `pack_int32`. Raises ValueError when the length is no multiple of four."""
    return _unpacked("i", data)  # type: ignore[return-value]


def pack_float32(values: Iterable[float]) -> bytes:
    return _packed("f", values)


def unpack_float32(data: bytes) -> list[float]:
    """The numbers of `pack_float32`. Raises ValueError when the length is no multiple of four."""
    return _unpacked("f", data)


def num_int32(data: bytes) -> int:
    """How many integers `data` holds, without unpacking it."""
    return len(data) // INT32_BYTES
