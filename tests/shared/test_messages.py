"""The wire: every message survives it, newer senders are understood, and the hot path's bytes change only on purpose."""

import importlib
import pkgutil
import types
import typing
from collections.abc import Callable, Iterator
from typing import Any

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import shared.messages
from shared.messages import execution, generation, sampling
from shared.messages.packing import num_int32, pack, pack_float32, pack_int32, unpack_float32, unpack_int32

MODULES = [
    importlib.import_module(f"shared.messages.{info.name}") for info in pkgutil.iter_modules(shared.messages.__path__)
]

Message = type[msgspec.Struct]


def own(kind: object, module: types.ModuleType) -> bool:
    return isinstance(kind, type) and issubclass(kind, msgspec.Struct) and kind.__module__ == module.__name__


MESSAGES: list[Message] = [kind for module in MODULES for kind in vars(module).values() if own(kind, module)]
UNIONS: dict[str, tuple[Message, ...]] = {
    name: typing.get_args(union)
    for module in MODULES
    for name, union in vars(module).items()
    if isinstance(union, types.UnionType) and all(issubclass(kind, msgspec.Struct) for kind in typing.get_args(union))
}
ANYTHING = st.recursive(
    st.none() | st.booleans() | st.integers(-(2**63), 2**63 - 1) | st.text(max_size=5),
    lambda inner: st.lists(inner, max_size=2) | st.dictionaries(st.text(max_size=3), inner, max_size=2),
    max_leaves=4,
)


def values(kind: Any) -> st.SearchStrategy[Any]:
    """Values of an annotated type; JSON-like ones where the annotation says Any."""
    if kind is Any:
        return ANYTHING
    if kind is int:
        return st.integers(-(2**31), 2**31 - 1)
    if kind is float:
        return st.floats(allow_nan=False)
    if kind is bytes:
        return st.binary(max_size=12)
    if isinstance(kind, type) and issubclass(kind, msgspec.Struct):
        return messages(kind)
    origin, args = typing.get_origin(kind), typing.get_args(kind)
    if origin is typing.Annotated:
        return values(args[0]).filter(lambda value: fits(value, kind))
    if origin in (types.UnionType, typing.Union):
        return st.one_of(*map(values, args))
    if origin is tuple and args[-1] is Ellipsis:
        return st.lists(values(args[0]), max_size=3).map(tuple)
    if origin is tuple:
        return st.tuples(*map(values, args))
    if origin is list:
        return st.lists(values(args[0]), max_size=3)
    if origin is dict:
        return st.dictionaries(values(args[0]), values(args[1]), max_size=3)
    return st.from_type(kind)


def fits(value: Any, kind: Any) -> bool:
    try:
        msgspec.convert(value, kind)
    except msgspec.ValidationError:
        return False
    return True


def messages(kind: Message) -> st.SearchStrategy[msgspec.Struct]:
    fields = msgspec.structs.fields(kind)
    required = {field.name: values(field.type) for field in fields if field.required}
    optional = {field.name: values(field.type) for field in fields if not field.required}
    return st.fixed_dictionaries(required, optional=optional).map(lambda given: kind(**given))


def decoders() -> Iterator[tuple[str, Callable[[bytes], Any], tuple[Message, ...]]]:
    """Each `unpack_...` with the messages it takes: what receivers really use."""
    for module in MODULES:
        for name, decode in vars(module).items():
            decoder = getattr(decode, "__self__", None)
            if isinstance(decoder, msgspec.msgpack.Decoder):
                kind = decoder.type
                yield name, decode, typing.get_args(kind) or (kind,)


DECODERS = list(decoders())


def name_of(value: Any) -> str:
    return getattr(value, "__name__", str(value))


@pytest.mark.parametrize("kind", MESSAGES, ids=name_of)
@settings(max_examples=25)
@given(data=st.data())
def test_a_message_survives_the_wire(kind: Message, data: st.DataObject) -> None:
    message = data.draw(messages(kind))
    assert msgspec.msgpack.decode(pack(message), type=kind) == message


@pytest.mark.parametrize(("decode", "kinds"), [pytest.param(*rest, id=name) for name, *rest in DECODERS])
@settings(max_examples=25)
@given(data=st.data())
def test_a_receiver_gets_back_what_was_sent_whichever_of_its_union(
    decode: Callable[[bytes], Any], kinds: tuple[Message, ...], data: st.DataObject
) -> None:
    message = data.draw(st.one_of(*map(messages, kinds)))
    received = decode(pack(message))
    assert type(received) is type(message)
    assert received == message


@pytest.mark.parametrize("kind", MESSAGES, ids=name_of)
@settings(max_examples=25)
@given(data=st.data())
def test_what_a_newer_sender_adds_is_ignored(kind: Message, data: st.DataObject) -> None:
    message = data.draw(messages(kind))
    raw = msgspec.msgpack.decode(pack(message), strict=False)
    newer = (
        [*raw, "added", {"later": 1}] if kind.__struct_config__.array_like else raw | {"added_later": [1, {"x": None}]}
    )
    assert msgspec.msgpack.decode(pack(newer), type=kind) == message


@pytest.mark.parametrize("kind", MESSAGES, ids=name_of)
@settings(max_examples=25)
@given(data=st.data())
def test_a_sender_that_does_not_know_the_optional_fields_yet_is_understood(kind: Message, data: st.DataObject) -> None:
    required = {field.name for field in msgspec.structs.fields(kind) if field.required}
    message = data.draw(st.fixed_dictionaries({name: values(types_of(kind)[name]) for name in sorted(required)}))
    older = kind(**message)
    raw = msgspec.msgpack.decode(pack(older))
    if kind.__struct_config__.array_like:
        tag = 1 if kind.__struct_config__.tag is not None else 0
        last = max((index for index, name in enumerate(kind.__struct_fields__) if name in required), default=-1)
        raw = raw[: tag + last + 1]
    else:
        raw = {
            name: value for name, value in raw.items() if name in required or name == kind.__struct_config__.tag_field
        }
    assert msgspec.msgpack.decode(pack(raw), type=kind) == older


def types_of(kind: Message) -> dict[str, Any]:
    return {field.name: field.type for field in msgspec.structs.fields(kind)}


@pytest.mark.parametrize("kind", [kind for kind in MESSAGES if kind.__struct_config__.array_like], ids=name_of)
def test_an_array_like_message_has_its_optional_fields_at_the_end(kind: Message) -> None:
    optional = [not field.required for field in msgspec.structs.fields(kind)]
    assert optional == sorted(optional)


@pytest.mark.parametrize(("union", "kinds"), UNIONS.items(), ids=UNIONS)
def test_the_messages_of_a_union_are_told_apart_by_their_tags(union: str, kinds: tuple[Message, ...]) -> None:
    tags = [kind.__struct_config__.tag for kind in kinds]
    assert None not in tags
    assert len(set(tags)) == len(tags)
    assert len({kind.__struct_config__.array_like for kind in kinds}) == 1, "a union has one shape on the wire"


@pytest.mark.parametrize(("decode", "kinds"), [pytest.param(*rest, id=name) for name, *rest in DECODERS])
@settings(max_examples=50)
@given(noise=st.binary(max_size=40))
def test_noise_is_refused_by_a_typed_error(
    decode: Callable[[bytes], Any], kinds: tuple[Message, ...], noise: bytes
) -> None:
    try:
        message = decode(noise)
    except (msgspec.DecodeError, msgspec.ValidationError):
        return
    assert isinstance(message, kinds)


SEQUENCE = execution.NewSequence(
    handle=7,
    token_ids=pack_int32([1, 2, 3]),
    prompt_len=3,
    prefix_len=2,
    extents=pack_int32([64, 128]),
    max_new_tokens=16,
    sampling=sampling.SamplingParams(temperature=0.0, seed=5),
)
STEP = execution.Step(
    epoch=1,
    seq=2,
    decode=pack_int32([3, 4]),
    extend=pack_int32([7, 1]),
    admit=(SEQUENCE,),
    update=(execution.ExtentUpdate(handle=3, start=64, extents=pack_int32([256, 64])),),
    release=pack_int32([5]),
)
RESULT = execution.StepResult(
    epoch=1,
    seq=2,
    counts=pack_int32([1, 1, 0]),
    token_ids=pack_int32([42, 43]),
    ends=bytes([0, 1, 0]),
    failures=((7, "out of room"),),
    wait_us=10,
    run_us=5000,
    without_kv={3: 2},
)
FRAME = generation.Frame(
    replica_id="r0",
    epoch=1,
    seq=2,
    emissions=(
        generation.Emission(request_id="a", position=0, token_ids=pack_int32([42])),
        generation.Emission(
            request_id="b",
            position=9,
            token_ids=pack_int32([2]),
            finish=generation.FinishReason.STOP,
            cached_tokens=4,
            stop_token=2,
        ),
    ),
)


STEP_BYTES = """
    98a473746570 01 02
    c408 03000000 04000000
    c408 07000000 01000000
    91 98 07 c40c 01000000 02000000 03000000 03 02 c408 40000000 80000000 10
    9e cb0000000000000000 00 cb3ff0000000000000 cb0000000000000000 cb0000000000000000
    cb0000000000000000 cb3ff0000000000000 05 90 00 90 c2 c0 c0
    c0
    91 93 03 40 c408 00010000 40000000
    c404 05000000
"""
"""epoch, seq · decode · extend · one new sequence with its sampling · its grammar · one extent update · release"""

RESULT_BYTES = """
    9c a6726573756c74 01 02
    c40c 01000000 01000000 00000000
    c408 2a000000 2b000000
    c403 000100
    91 92 07 ab6f7574206f6620726f6f6d
    80 80 0a cd1388 81 03 02
"""
"""epoch, seq · counts · token ids · ends · failures · logprobs and times · tokens without KV"""

FRAME_BYTES = """
    95 a56672616d65 a27230 01 02
    92
    9a a161 00 c404 2a000000 c0 00 c0 c0 c0 c0 00
    9a a162 09 c404 02000000 a473746f70 04 02 c0 c0 c0 00
"""
"""replica, epoch, seq · two emissions"""


@pytest.mark.parametrize(
    ("message", "wire"),
    [
        pytest.param(STEP, STEP_BYTES, id="step"),
        pytest.param(RESULT, RESULT_BYTES, id="result"),
        pytest.param(FRAME, FRAME_BYTES, id="frame"),
    ],
)
def test_the_bytes_of_the_hot_path_change_only_on_purpose(message: msgspec.Struct, wire: str) -> None:
    """Services of two versions run side by side during an update: fields may only be added, at the end."""
    assert pack(message) == bytes.fromhex(wire)


@given(st.lists(st.integers(-(2**31), 2**31 - 1), max_size=50))
def test_integers_are_packed_as_little_endian_int32(numbers: list[int]) -> None:
    data = pack_int32(numbers)
    assert data == b"".join(number.to_bytes(4, "little", signed=True) for number in numbers)
    assert list(unpack_int32(data)) == numbers
    assert num_int32(data) == len(numbers)


@given(st.lists(st.floats(width=32, allow_nan=False), max_size=50))
def test_floats_are_packed_as_float32(numbers: list[float]) -> None:
    assert list(unpack_float32(pack_float32(numbers))) == numbers


def test_what_does_not_fit_in_32_bits_is_refused() -> None:
    with pytest.raises(OverflowError):
        pack_int32([2**31])
    with pytest.raises(ValueError, match="multiple"):
        unpack_int32(b"\0\0\0")
