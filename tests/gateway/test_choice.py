"""One choice: whatever way its tokens arrive, the client reads the same."""

import itertools
from collections.abc import Sequence

import pytest
from hypothesis import given
from hypothesis import strategies as st

from services.gateway.generation.choice import ChoiceCore, ChoiceSpec, SendFinish, SendResync
from services.gateway.generation.generation import Collected
from services.gateway.generation.plan import Output
from services.gateway.text.vocabulary import Vocabulary
from shared.messages.generation import Emission, FinishReason
from shared.messages.packing import pack_float32, pack_int32, unpack_int32
from shared.messages.sampling import Logprobs
from tests.support.gateway_world import END, byte_tokenizer_json, ids

VOCABULARY = Vocabulary(byte_tokenizer_json())


def emission(tokens: Sequence[int], position: int = 0, finish: FinishReason | None = None, **more) -> Emission:
    stop = tokens[-1] if finish is FinishReason.STOP and tokens else None
    return Emission(
        request_id="r", position=position, token_ids=pack_int32(tokens), finish=finish, stop_token=stop, **more
    )


def choice(stops: Sequence[str] = (), min_new_tokens: int = 0, **output) -> ChoiceCore:
    spec = ChoiceSpec(stops=tuple(stops), min_new_tokens=min_new_tokens, output=Output(**output))
    return ChoiceCore(spec, VOCABULARY)


def run(core: ChoiceCore, emissions: Sequence[Emission]) -> tuple[Collected, list]:
    """Everything the emissions bring, put together, and the commands."""
    collected, commands = Collected(), []
    for each in emissions:
        advance = core.receive(each)
        if advance.delta is not None:
            collected.add(advance.delta)
        if advance.command is not None:
            commands.append(advance.command)
    return collected, commands


def in_pieces(tokens: Sequence[int], cuts: Sequence[int], finish: FinishReason) -> list[Emission]:
    """The tokens as consecutive emissions, cut at the given places."""
    edges = [0, *sorted({cut % len(tokens) for cut in cuts} - {0}), len(tokens)]
    spans = list(itertools.pairwise(edges))
    return [emission(tokens[start:end], start, finish if end == len(tokens) else None) for start, end in spans]


TEXTS = st.text(st.sampled_from("abc \n🔥é日"), min_size=1, max_size=30)
CUTS = st.lists(st.integers(0, 1000), max_size=10)


def test_the_text_is_what_the_tokens_spell_and_an_end_token_is_counted_but_not_shown():
    core = choice()
    collected, commands = run(core, [emission([*ids("hello"), END], finish=FinishReason.STOP, cached_tokens=3)])
    assert (collected.text, collected.finish, commands) == ("hello", FinishReason.STOP, [])
    assert (core.num_tokens, core.matched, core.cached_tokens) == (6, END, 3)


@given(TEXTS, CUTS)
def test_every_split_of_the_tokens_gives_the_same_text(text, cuts):
    tokens = [*ids(text), END]
    collected, _ = run(choice(), in_pieces(tokens, cuts, FinishReason.STOP))
    assert collected.text == text


@given(TEXTS, CUTS, st.lists(st.text(st.sampled_from("abc \n🔥"), min_size=1, max_size=4), min_size=1, max_size=4))
def test_every_split_stops_at_the_same_place_and_bills_the_same(text, cuts, stops):
    tokens = ids(text)
    ends = [(text.find(stop) + len(stop), -len(stop)) for stop in stops if stop in text]
    core = choice(stops)
    collected, commands = run(core, in_pieces(tokens, cuts, FinishReason.LENGTH))
    if not ends:
        assert (collected.text, collected.finish, core.num_tokens) == (text, FinishReason.LENGTH, len(tokens))
        return
    end, length = min(ends)  # completes first; of those, the longest
    assert collected.text == text[: end + length]
    assert collected.finish is FinishReason.STOP
    assert core.num_tokens == len(text[:end].encode())
    assert commands in ([], [SendFinish(core.num_tokens)])


@given(TEXTS, CUTS)
def test_no_delta_is_invalid_utf8_and_none_is_empty(text, cuts):
    core = choice()
    for each in in_pieces(ids(text), cuts, FinishReason.LENGTH):
        delta = core.receive(each).delta
        assert delta is None or delta.text or delta.finish is not None
        if delta is not None:
            delta.text.encode()


@given(TEXTS, CUTS, CUTS, st.randoms(use_true_random=False))
def test_repeated_and_overlapping_emissions_change_nothing(text, cuts, other_cuts, random):
    """A resync overlaps what came before; a duplicated frame repeats it."""
    tokens = ids(text)
    first = in_pieces(tokens, cuts, FinishReason.LENGTH)
    second = in_pieces(tokens, other_cuts, FinishReason.LENGTH)
    mixed = []
    for each in first:
        mixed += [each, *random.sample(second, random.randrange(len(second) + 1))]
    core = choice()
    collected, commands = run(core, mixed)
    while core.finish is None:  # as the scheduler does on request: everything from the position on
        position = core.num_received
        collected_more, _ = run(core, [emission(tokens[position:], position, FinishReason.LENGTH)])
        collected.text += collected_more.text
    assert collected.text == text
    assert all(isinstance(command, SendResync) for command in commands)


def test_a_gap_asks_once_for_what_is_missing():
    core = choice()
    core.receive(emission(ids("ab")))
    assert core.receive(emission(ids("d"), 3)).command == SendResync(2)
    assert core.receive(emission(ids("e"), 4)).command is None  # it is under way
    collected, _ = run(core, [emission(ids("cde"), 2), emission(ids("f"), 5, FinishReason.LENGTH)])
    assert collected.text == "cdef"


def test_a_second_gap_asks_again():
    core = choice()
    assert core.receive(emission(ids("c"), 2)).command == SendResync(0)
    core.receive(emission(ids("abc"), 0))
    assert core.receive(emission(ids("e"), 4)).command == SendResync(3)


def test_nothing_follows_a_finish():
    core = choice()
    core.receive(emission(ids("a"), 0, FinishReason.LENGTH))
    assert core.receive(emission(ids("b"), 1, FinishReason.STOP)) == (None, None, 0)


def test_an_unfinished_character_is_held_and_becomes_a_replacement_at_the_end():
    core = choice()
    flame = list("🔥".encode())
    assert core.receive(emission(flame[:2])).delta is None
    collected, _ = run(core, [emission(flame[2:3], 2, FinishReason.LENGTH)])
    assert collected.text == "🔥".encode()[:3].decode("utf-8", "replace")


def test_stop_strings_count_from_the_minimum_on():
    core = choice(["o"], min_new_tokens=5)
    collected, commands = run(core, [emission(ids("foo boo"))])
    assert (collected.text, core.num_tokens, commands) == ("foo b", 6, [SendFinish(6)])


def test_held_text_is_released_when_it_turns_out_harmless():
    core = choice(["stop"])
    assert core.receive(emission(ids("a sto"))).delta.text == "a "
    assert core.receive(emission(ids("rm"), 5)).delta.text == "storm"


def test_held_text_is_released_at_the_end():
    collected, _ = run(choice(["Observation:"]), [emission(ids("a Obs"), 0, FinishReason.LENGTH)])
    assert (collected.text, collected.finish) == ("a Obs", FinishReason.LENGTH)


@pytest.mark.parametrize("reason", [FinishReason.ABORT, FinishReason.ERROR])
def test_what_is_held_is_not_released_by_a_failure(reason):
    core = choice(["stop"])
    collected, _ = run(core, [emission(ids("a sto")), emission([], 5, reason, error="broken")])
    assert (collected.text, collected.finish) == ("a ", reason)
    assert core.error == "broken"


def test_special_tokens_are_shown_on_request_but_never_the_end():
    tokens = [*ids("a"), 257, *ids("b"), END]
    hidden, _ = run(choice(), [emission(tokens, 0, FinishReason.STOP)])
    shown, _ = run(choice(skip_special_tokens=False), [emission(tokens, 0, FinishReason.STOP)])
    assert (hidden.text, shown.text) == ("ab", "a<|start|>b")


def test_the_tokens_so_far_can_be_resumed_elsewhere():
    core = choice()
    core.receive(emission(ids("ab")))
    assert unpack_int32(core.resume()) == ids("ab")
    assert core.receive(emission(ids("c"), 2)).delta.text == "c"


def scored(tokens: Sequence[int], position: int = 0, finish: FinishReason | None = None) -> Emission:
    """Each token has minus its id / 1000 as logprob, and itself and the next id as the likeliest."""
    values = [-token / 1000 for token in tokens]
    logprobs = Logprobs(
        num_top=2,
        chosen=pack_float32(values),
        top_ids=pack_int32([each for token in tokens for each in (token, (token + 1) % 256)]),
        top=pack_float32([each for value in values for each in (value, float("-inf"))]),
    )
    return emission(tokens, position, finish, logprobs=logprobs)


@given(TEXTS, CUTS)
def test_scores_come_with_their_text_in_every_split(text, cuts):
    tokens = ids(text)
    edges = [0, *sorted({cut % len(tokens) for cut in cuts} - {0}), len(tokens)]
    spans = list(itertools.pairwise(edges))
    core = choice()
    collected, _ = run(
        core,
        [scored(tokens[a:b], a, FinishReason.LENGTH if b == len(tokens) else None) for a, b in spans],
    )
    assert [score.token_id for score in collected.scores] == tokens
    assert [score.offset for score in collected.scores] == [
        len(bytes(tokens[:i]).decode("utf-8", "ignore")) for i in range(len(tokens))
    ]


def test_minus_infinity_is_written_as_the_lowest_logprob():
    collected, _ = run(choice(), [scored(ids("a"), 0, FinishReason.LENGTH)])
    assert [top.logprob for top in collected.scores[0].top][1] == -9999.0


def test_scores_behind_a_stop_string_are_dropped():
    collected, _ = run(choice(["END"]), [scored(ids("ab")), scored(ids("ENDx"), 2)])
    assert [score.token_id for score in collected.scores] == ids("ab")
    assert collected.text == "ab"


def test_an_end_token_has_no_score():
    collected, _ = run(choice(), [scored([*ids("ab"), END], 0, FinishReason.STOP)])
    assert [score.token_id for score in collected.scores] == ids("ab")


def test_overlapping_scores_are_matched_to_their_tokens():
    core = choice()
    core.receive(scored(ids("ab")))
    collected, _ = run(core, [scored(ids("bc"), 1)])
    assert [score.token_id for score in collected.scores] == ids("c")


CALL = '<tool_call>\n{"name": "add", "arguments": {"a": 1}}\n</tool_call>'


@given(CUTS)
def test_tool_calls_are_the_same_for_every_split(cuts):
    tokens = ids(f"Well. {CALL}")
    collected, _ = run(choice(tool_parser="hermes"), in_pieces(tokens, cuts, FinishReason.LENGTH))
    assert collected.text.strip() == "Well."
    assert [(call.name, call.arguments) for call in collected.calls] == [("add", '{"a": 1}')]


@given(CUTS)
def test_thinking_is_separated_in_every_split(cuts):
    tokens = ids("<think>\nhm\n</think>\n\nyes")
    collected, _ = run(choice(reasoning_parser="think"), in_pieces(tokens, cuts, FinishReason.LENGTH))
    assert (collected.reasoning, collected.text) == ("hm", "yes")
