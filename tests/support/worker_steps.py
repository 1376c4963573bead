"""Steps as a scheduler would send them, written briefly; and their results, unpacked."""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from shared.messages.execution import ExtentUpdate, NewSequence, RowEnd, Step, StepResult
from shared.messages.packing import pack_int32, unpack_int32
from shared.messages.sampling import SamplingParams

Extents = Sequence[tuple[int, int]]


def pack_extents(extents: Extents) -> bytes:
    return pack_int32(number for extent in extents for number in extent)


def new_sequence(
    handle: int,
    tokens: Sequence[int],
    *,
    extents: Extents | None = None,
    prompt_len: int | None = None,
    prefix_len: int = 0,
    max_new_tokens: int = 100,
    sampling: SamplingParams | None = None,
    grammar: str | None = None,
) -> NewSequence:
    """Without extents: 200 slots of its own, from 200 * handle on."""
    return NewSequence(
        handle=handle,
        token_ids=pack_int32(tokens),
        prompt_len=len(tokens) if prompt_len is None else prompt_len,
        prefix_len=prefix_len,
        extents=pack_extents([(200 * handle, 200)] if extents is None else extents),
        max_new_tokens=max_new_tokens,
        sampling=sampling or SamplingParams(),
        grammar=grammar,
    )


def step(
    seq: int = 1,
    *,
    decode: Iterable[int] = (),
    extend: Iterable[tuple[int, int]] = (),
    admit: Iterable[NewSequence] = (),
    update: Iterable[tuple[int, int, Extents]] = (),
    release: Iterable[int] = (),
    epoch: int = 1,
) -> Step:
    return Step(
        epoch=epoch,
        seq=seq,
        decode=pack_int32(decode),
        extend=pack_int32(number for pair in extend for number in pair),
        admit=tuple(admit),
        update=tuple(
            ExtentUpdate(handle=handle, start=start, extents=pack_extents(extents)) for handle, start, extents in update
        ),
        release=pack_int32(release),
    )


@dataclass(frozen=True)
class Row:
    tokens: list[int]
    end: RowEnd


def rows(result: StepResult) -> list[Row]:
    tokens, unpacked = unpack_int32(result.token_ids), []
    for count, end in zip(unpack_int32(result.counts), result.ends, strict=True):
        unpacked.append(Row(tokens[:count], RowEnd(end)))
        tokens = tokens[count:]
    assert not tokens
    return unpacked
