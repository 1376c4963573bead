"""Random steps of a scheduler that keeps its own plain books: the core's tokens, positions and slots must agree with them."""

from dataclasses import dataclass, field

import numpy as np
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from services.worker.core import WorkerCore
from services.worker.matching.matchers import Matchers
from services.worker.runner import ModelLimits, Sampled
from shared.messages.execution import RowEnd
from shared.messages.sampling import SamplingParams
from tests.support.worker_engine import no_tokenizer
from tests.support.worker_steps import new_sequence, rows, step

END, STOP = 1, 4
LIMITS = ModelLimits(num_slots=10_000, context_len=60, vocab_size=50, end_token_ids=(END,))


@dataclass
class Book:
    """One sequence as its scheduler knows it."""

    tokens: list[int]
    limit: int
    computed: int
    ignore_eos: bool
    slots: list[int] = field(default_factory=list)
    ended: bool = False
    row: tuple[int, int] | None = None
    """Positions of its row in the step that is being put together."""


def as_extents(slots):
    return [(slot, 1) for slot in slots]


class CoreMachine(RuleBasedStateMachine):
    def __init__(self):
        super().__init__()
        self.matchers = Matchers(no_tokenizer, LIMITS.vocab_size)
        self.core = WorkerCore(LIMITS, self.matchers)
        self.books: dict[int, Book] = {}
        self.handles = self.next_slot = self.seq = 0
        self.clear_step()

    def teardown(self):
        self.matchers.close()

    def clear_step(self):
        self.admit, self.update, self.release, self.decode, self.extend = [], {}, [], [], []

    def take_slots(self, num, gap):
        self.next_slot += gap
        slots = [(self.next_slot + n) % LIMITS.num_slots for n in range(num)]
        self.next_slot += num
        return slots

    # ---------------------------------------------------------------- deltas of the next step

    @rule(
        tokens=st.lists(st.integers(5, 49), min_size=1, max_size=30),
        resumed=st.integers(0, 10),
        cached=st.integers(0, 29),
        max_new=st.integers(0, 20),
        spare=st.integers(0, 4),
        ignore_eos=st.booleans(),
    )
    def admit_one(self, tokens, resumed, cached, max_new, spare, ignore_eos):
        self.handles += 1
        prompt_len = max(1, len(tokens) - resumed)
        max_new = max(max_new, len(tokens) - prompt_len + (prompt_len < len(tokens)))
        book = Book(tokens, min(prompt_len + max_new, LIMITS.context_len), min(cached, len(tokens) - 1), ignore_eos)
        book.slots = self.take_slots(len(tokens) + spare, gap=1)
        self.books[self.handles] = book
        self.admit.append(
            new_sequence(
                self.handles,
                tokens,
                prompt_len=prompt_len,
                prefix_len=book.computed,
                max_new_tokens=max_new,
                extents=as_extents(book.slots),
                sampling=SamplingParams(ignore_eos=ignore_eos, stop_token_ids=(STOP,)),
            )
        )

    @precondition(lambda self: self.books)
    @rule(data=st.data(), num=st.integers(0, 6), gap=st.integers(0, 3))
    def move_or_grow(self, data, num, gap):
        """Replace a tail of the slots: remapped to a shared copy, grown, or both."""
        handle = data.draw(st.sampled_from(sorted(self.books)))
        if handle in self.update or any(new.handle == handle for new in self.admit):
            return
        book = self.books[handle]
        start = data.draw(st.integers(0, len(book.slots)))
        tail = self.take_slots(len(book.slots) - start + num, gap)
        book.slots[start:] = tail
        self.update[handle] = (start, as_extents(tail))

    @precondition(lambda self: self.books)
    @rule(data=st.data())
    def release_one(self, data):
        handle = data.draw(st.sampled_from(sorted(self.books)))
        if self.books[handle].row or handle in self.update or any(new.handle == handle for new in self.admit):
            return
        del self.books[handle]
        self.release.append(handle)

    @precondition(lambda self: self.books)
    @rule(data=st.data())
    def add_row(self, data):
        handle = data.draw(st.sampled_from(sorted(self.books)))
        book = self.books[handle]
        left = len(book.tokens) - book.computed
        if book.row or left == 0 or book.computed + 1 > len(book.slots):
            return
        if left == 1 and not book.ended and data.draw(st.booleans()):
            book.row = (book.computed, book.computed + 1)
            self.decode.append(handle)
        else:
            length = data.draw(st.integers(1, min(left, len(book.slots) - book.computed)))
            book.row = (book.computed, book.computed + length)
            self.extend.append((handle, length))

    # ---------------------------------------------------------------- run it

    @rule(data=st.data())
    def run(self, data):
        self.seq += 1
        message = step(
            self.seq,
            decode=self.decode,
            extend=self.extend,
            admit=self.admit,
            update=[(handle, start, extents) for handle, (start, extents) in self.update.items()],
            release=self.release,
        )
        plan = self.core.plan(message)
        handles = self.decode + [handle for handle, _ in self.extend]
        live = [handle for handle in handles if not self.books[handle].ended]
        assert [row.sequence.handle for row in plan.rows] == live
        tokens = {}
        for index, row in enumerate(plan.rows):
            book = self.books[row.sequence.handle]
            assert (row.start, row.end) == book.row
            assert row.sequence.tokens[: row.end].tolist() == book.tokens[: row.end]
            held = np.concatenate([np.arange(first, first + length) for first, length in row.sequence.extents])
            assert held.tolist() == book.slots
            assert row.samples == (row.end == len(book.tokens) < book.limit)
            if row.samples:
                tokens[index] = data.draw(st.sampled_from([END, STOP, 7, 8, 9]))
        result = rows(self.core.commit(Sampled({index: [token] for index, token in tokens.items()})))
        drawn = iter(tokens.values())
        for handle, got in zip(handles, result, strict=True):
            self.check_row(self.books[handle], got, drawn)
        self.clear_step()

    def check_row(self, book, got, drawn):
        (_, end), book.row = book.row, None
        if book.ended:
            assert (got.tokens, got.end) == ([], RowEnd.DROPPED)
            return
        book.computed, expected = end, RowEnd.RUNNING
        if end == len(book.tokens):
            if len(book.tokens) < book.limit:
                book.tokens.append(next(drawn))
                assert got.tokens == book.tokens[-1:]
                if book.tokens[-1] == STOP or (book.tokens[-1] == END and not book.ignore_eos):
                    expected = RowEnd.STOP
            if expected is RowEnd.RUNNING and len(book.tokens) == book.limit:
                expected = RowEnd.LENGTH
        assert got.end == expected
        book.ended = expected is not RowEnd.RUNNING

    @invariant()
    def books_agree(self):
        self.core.check_invariants()


TestCoreMachine = CoreMachine.TestCase
TestCoreMachine.settings = settings(max_examples=150, stateful_step_count=40, deadline=None)
