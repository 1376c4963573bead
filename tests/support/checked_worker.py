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
    end: RowEnd = RowEnd.RUNNING


@dataclass
class CheckedWorker:
    """Executes steps in order; `num_slots` slots, each None or the hash of its prefix.

    With `forces`, rows behave as under a grammar: now and then one brings no token (its mask is not ready) or several
    (forced tokens, as far as the slots reach), and an end that is certain comes with the token before it, which then has no
    KV. The tokens themselves are the same.
    """

    num_slots: int
    forces: bool = False
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
        counts, tokens, ends, without_kv = [], [], [], {}
        extend = unpack_int32(step.extend)
        rows = [(handle, None) for handle in unpack_int32(step.decode)]
        rows += list(zip(extend[::2], extend[1::2], strict=True))
        for handle, extend_len in rows:
            new, end = self._row(self.sequences[handle], extend_len)
            counts.append(len(new))
            tokens += new
            ends.append(end)
            if end is RowEnd.STOP:
                sequence = self.sequences[handle]
                without_kv[handle] = len(sequence.token_ids) - 1 - sequence.computed_len
        self.extend_lens.append(self.num_computed_tokens - before)
        return StepResult(
            epoch=step.epoch,
            seq=step.seq,
            counts=pack_int32(counts),
            token_ids=pack_int32(tokens),
            ends=bytes(ends),
            run_us=5000,
            without_kv={handle: number for handle, number in without_kv.items() if number > 0},
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

    def _row(self, sequence: _Sequence, extend_len: int | None) -> tuple[list[int], RowEnd]:
        if sequence.end is not RowEnd.RUNNING:
            return [], RowEnd.DROPPED
        self._check_prefix(sequence)
        num_left = len(sequence.token_ids) - sequence.computed_len
        length = 1 if extend_len is None else extend_len
        assert 0 < length <= num_left, "a decode row before prefill is done, or a row beyond the tokens there are"
        reaches_end = length == num_left and sequence.max_new_tokens > 0
        choice = self._choice(sequence) if self.forces and reaches_end else 0
        new = []
        for _ in range(min(choice, len(sequence.slots) - len(sequence.token_ids) - 1)):
            new.append(self._append(sequence))
            length += 1
            if sequence.end is not RowEnd.RUNNING:
                break
        self._compute(sequence, length)
        if choice < 0:
            sequence.computed_len -= 1  # the last token is computed once more for its logits
        elif reaches_end and sequence.end is RowEnd.RUNNING:
            new.append(self._append(sequence))
            if self.forces and sequence.end is RowEnd.RUNNING and next_token(sequence.token_ids) == END_TOKEN:
                new.append(self._append(sequence))
        return new, sequence.end

    def _choice(self, sequence: _Sequence) -> int:
        """-1: no token; n >= 0: so many forced ones."""
        number = prefix_hashes([*sequence.token_ids, self.num_steps])[-1][0]
        return -1 if number < 60 else max(0, number - 240)

    def _compute(self, sequence: _Sequence, length: int) -> None:
        end = sequence.computed_len + length
        for position, prefix in enumerate(prefix_hashes(sequence.token_ids[:end])):
            if position >= sequence.computed_len:
                self.pool[sequence.slots[position]] = prefix
        self.num_computed_tokens += length
        sequence.computed_len = end

    @staticmethod
    def _append(sequence: _Sequence) -> int:
        token = next_token(sequence.token_ids)
        sequence.token_ids.append(token)
        if token == END_TOKEN:
            sequence.end = RowEnd.STOP
        elif len(sequence.token_ids) - sequence.prompt_len == sequence.max_new_tokens:
            sequence.end = RowEnd.LENGTH
        return token
