"""A worker without a model that believes nothing: it holds a KV pool and checks each slot that a row reads.

A slot holds the hash of all tokens up to and including its own. A row whose extents point at a wrong, freed or overwritten
slot therefore fails at once, and not as a wrong word many tokens later. The next token is a function of all tokens before it,
so a request's output is the same in whatever company, and however often it was retracted.
"""

from dataclasses import dataclass, field
from hashlib import blake2b

from shared.messages.execution import ExtentUpdate, NewSequence, RowEnd, Step, StepResult
from shared.messages.packing import pack_int32, unpack_int32

VOCABULARY = 1000
END_TOKEN = 0


def prefix_hashes(token_ids: list[int]) -> list[bytes]:
    """One hash for each position, of all tokens up to it."""
    chain, state = [], blake2b(digest_size=8)
    for token in token_ids:
        state.update(token.to_bytes(4, "little"))
        chain.append(state.copy().digest())
    return chain


def next_token(token_ids: list[int]) -> int:
    """About one token in 50 ends the sequence."""
    number = int.from_bytes(prefix_hashes(token_ids)[-1], "little")
    return END_TOKEN if number % 50 == 0 else 1 + number % (VOCABULARY - 1)


def expected_output(prompt: list[int], max_new_tokens: int) -> list[int]:
    """What any correct schedule produces."""
    token_ids = list(prompt)
    while len(token_ids) - len(prompt) < max_new_tokens:
        token_ids.append(next_token(token_ids))
        if token_ids[-1] == END_TOKEN:
            break
    return token_ids[len(prompt) :]


def _slots(extents: bytes) -> list[int]:
    numbers = unpack_int32(extents)
    return [
        slot for start, length in zip(numbers[::2], numbers[1::2], strict=True) for slot in range(start, start + length)
    ]


@dataclass
class _Sequence:
    token_ids: list[int]
    prompt_len: int
    max_new_tokens: int
    slots: list[int]
    computed_len: int
    ended: bool = False


@dataclass
class CheckedWorker:
    """Executes steps in order; `num_slots` slots, each None or the hash of its prefix."""

    num_slots: int
    sequences: dict[int, _Sequence] = field(default_factory=dict)
    num_steps: int = 0
    num_computed_tokens: int = 0
    extend_lens: list[int] = field(default_factory=list)
    """Tokens computed by each step."""

    def __post_init__(self) -> None:
        self.pool: list[bytes | None] = [None] * self.num_slots

    def execute(self, step: Step) -> StepResult:
        self.num_steps += 1
        assert step.seq == self.num_steps, f"step {step.seq} after {self.num_steps - 1}"
        for handle in unpack_int32(step.release):
            del self.sequences[handle]
        for new in step.admit:
            self._admit(new)
        for update in step.update:
            self._update(update)
        before = self.num_computed_tokens
        counts, tokens, ends = [], [], []
        extend = unpack_int32(step.extend)
        rows = [(handle, None) for handle in unpack_int32(step.decode)]
        rows += list(zip(extend[::2], extend[1::2], strict=True))
        for handle, extend_len in rows:
            token, end = self._row(self.sequences[handle], extend_len)
            counts.append(int(token is not None))
            tokens += [] if token is None else [token]
            ends.append(end)
        self.extend_lens.append(self.num_computed_tokens - before)
        return StepResult(
            epoch=step.epoch,
            seq=step.seq,
            counts=pack_int32(counts),
            token_ids=pack_int32(tokens),
            ends=bytes(ends),
            run_us=5000,
        )

    def _admit(self, new: NewSequence) -> None:
        assert new.handle not in self.sequences
        self.sequences[new.handle] = _Sequence(
            unpack_int32(new.token_ids), new.prompt_len, new.max_new_tokens, _slots(new.extents), new.prefix_len
        )
        self._check_prefix(self.sequences[new.handle])

    def _update(self, update: ExtentUpdate) -> None:
        sequence = self.sequences[update.handle]
        assert update.start <= len(sequence.slots), "a hole in the extents"
        sequence.slots[update.start :] = _slots(update.extents)

    def _check_prefix(self, sequence: _Sequence) -> None:
        chain = prefix_hashes(sequence.token_ids[: sequence.computed_len])
        held = [self.pool[slot] for slot in sequence.slots[: sequence.computed_len]]
        assert held == chain, "a slot does not hold what its sequence believes"
        assert len(set(sequence.slots)) == len(sequence.slots), "a slot stands for two positions"

    def _row(self, sequence: _Sequence, extend_len: int | None) -> tuple[int | None, RowEnd]:
        if sequence.ended:
            return None, RowEnd.DROPPED
        self._check_prefix(sequence)
        end = len(sequence.token_ids) if extend_len is None else sequence.computed_len + extend_len
        assert sequence.computed_len < end <= len(sequence.token_ids)
        assert extend_len is not None or end - sequence.computed_len == 1, "a decode row before prefill is done"
        for position, prefix in enumerate(prefix_hashes(sequence.token_ids[:end])):
            if position >= sequence.computed_len:
                self.pool[sequence.slots[position]] = prefix
        self.num_computed_tokens += end - sequence.computed_len
        sequence.computed_len = end
        if end < len(sequence.token_ids) or sequence.max_new_tokens == 0:
            return None, RowEnd.RUNNING
        token = next_token(sequence.token_ids)
        sequence.token_ids.append(token)
        if token == END_TOKEN:
            sequence.ended = True
            return token, RowEnd.STOP
        if len(sequence.token_ids) - sequence.prompt_len == sequence.max_new_tokens:
            sequence.ended = True
            return token, RowEnd.LENGTH
        return token, RowEnd.RUNNING
