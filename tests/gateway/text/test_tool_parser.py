"""Tool calls in generated text: the same for every way the text is cut, and nothing of it lost."""

import json
from itertools import count, pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from services.gateway.text.tool_calls import CallArguments, CallStart, Content, Delta, merge
from services.gateway.text.tool_parser import FORMAT_NAMES, ToolParser, parser_for

FAMILIES = ["hermes", "llama3", "mistral"]


def parser(family: str) -> ToolParser:
    numbers = count()
    return parser_for(family, make_id=lambda: f"id{next(numbers)}")


def parsed(family: str, *pieces: str) -> list[Delta]:
    """All deltas, neighbours joined, when `pieces` arrive one by one."""
    parsing = parser(family)
    deltas = [delta for piece in pieces for delta in parsing.push(piece)]
    return merge([*deltas, *parsing.finish()])


def call(index: int, name: str, arguments: str) -> list[Delta]:
    return [CallStart(index, f"id{index}", name), CallArguments(index, arguments)]


@pytest.mark.parametrize(
    ("family", "text", "deltas"),
    [
        ("hermes", "Hello", [Content("Hello")]),
        (
            "hermes",
            '<tool_call>\n{"name": "f", "arguments": {"a": [1, "}"]}}\n</tool_call>',
            call(0, "f", '{"a": [1, "}"]}'),
        ),
        (
            "hermes",
            'One\n<tool_call>{"name": "f", "arguments": {}}</tool_call>\n<tool_call>{"name": "g", "arguments": {"b": -1.5e3}}',
            [Content("One\n"), *call(0, "f", "{}"), *call(1, "g", '{"b": -1.5e3}')],
        ),
        (
            "hermes",
            '\n\n<tool_call>{"name": "f", "arguments": {}}</tool_call>\n Done.',
            [*call(0, "f", "{}"), Content("\n Done.")],
        ),
        ("hermes", '<tool_call>{"arguments": {"a": 1}, "name": "f"}</tool_call>', call(0, "f", '{"a": 1}')),
        ("hermes", '<tool_call>{"name": "f"}</tool_call>', call(0, "f", "{}")),
        ("hermes", '<tool_call>{"id": 7, "type": "function", "name": "f"}</tool_call>', call(0, "f", "{}")),
        (
            "hermes",
            '<tool_call>{"name": "f", "arguments": {"code": "a\n\tb"}}</tool_call>',
            call(0, "f", '{"code": "a\\n\\tb"}'),
        ),
        ("llama3", '{"name": "f", "parameters": {"a": 1}}', call(0, "f", '{"a": 1}')),
        ("llama3", '<|python_tag|>{"name": "f", "parameters": {"a": 1}}', call(0, "f", '{"a": 1}')),
        (
            "llama3",
            ' {"name": "f", "parameters": {}}; {"name": "g", "parameters": {}}',
            [*call(0, "f", "{}"), *call(1, "g", "{}")],
        ),
        (
            "mistral",
            '[TOOL_CALLS] [{"name": "f", "arguments": {"a": []}}, {"name": "g", "arguments": {}}]',
            [*call(0, "f", '{"a": []}'), *call(1, "g", "{}")],
        ),
        ("mistral", '[TOOL_CALLS]{"name": "f", "arguments": {}}', call(0, "f", "{}")),
    ],
)
def test_each_format_is_read_whole_and_character_by_character(family, text, deltas):
    assert parsed(family, text) == deltas
    assert parsed(family, *text) == deltas


@pytest.mark.parametrize(
    ("family", "text"),
    [
        ("hermes", '{"name": "f", "arguments": {}}'),
        ("hermes", "<tool_call>not JSON</tool_call> and on"),
        ("hermes", '<tool_call>{"name": "f", "arguments": [1]}</tool_call>'),
        ("hermes", '<tool_call>{"name": 1, "arguments": {}}</tool_call>'),
        ("hermes", '<tool_call>{"name": "", "arguments": {}}</tool_call>'),
        ("hermes", '<tool_call>{"name": "f", "name": "g", "arguments": {}}</tool_call>'),
        ("hermes", "<tool_call>{'name': 'f'}</tool_call>"),
        ("hermes", '<tool_call>{"name": "f", "argum'),
        ("hermes", "a <tool_"),
        ("hermes", "  \n"),
        ("llama3", '{"answer": 42, "name": "Bob"}'),
        ("llama3", '{"name": "Bob"}'),
        ("llama3", 'As JSON: {"name": "f", "parameters": {}}'),
        ("llama3", '<|python_tag|>brave_search.call(query="x")'),
        ("mistral", "[TOOL_CALLS] soon"),
        ("mistral", "[1, 2]"),
        ("mistral", "[TOOL_CALLS] [[]]"),
    ],
)
def test_what_is_no_call_stays_content_as_it_stands(family, text):
    assert parsed(family, text) == [Content(text)]
    assert parsed(family, *text) == [Content(text)]


def test_arguments_stream_in_pieces_once_the_name_is_known():
    parsing = parser("hermes")
    assert parsing.push('<tool_call>{"name": "f"') == []
    assert parsing.push(', "arguments": {"a"') == [CallStart(0, "id0", "f"), CallArguments(0, '{"a"')]
    assert parsing.push(": 1") == [CallArguments(0, ": 1")]
    assert parsing.push("}} </tool") == [CallArguments(0, "}")]
    assert parsing.push("_call>") == parsing.finish() == []


def test_content_is_held_only_while_it_could_open_a_call():
    parsing = parser("hermes")
    assert parsing.push("a <") == [Content("a ")]
    assert parsing.push("b") == [Content("<b")]
    assert parsing.push("<<tool") == [Content("<")]
    assert parsing.finish() == [Content("<tool")]


def test_a_json_answer_is_not_held_back_to_its_end():
    parsing = parser("llama3")
    assert parsing.push('{"answer"') == [Content('{"answer"')]
    assert parsing.push(": 1}") == [Content(": 1}")]


def test_a_cut_call_is_known_to_be_open():
    parsing = parser("hermes")
    assert parsing.push('<tool_call>{"name": "f", "arguments": {"a": "x')[-1] == CallArguments(0, '{"a": "x')
    assert parsing.finish() == []
    assert (parsing.num_calls, parsing.is_call_open) == (1, True)


def test_arguments_that_go_wrong_end_their_call_and_the_rest_is_content():
    parsing = parser("hermes")
    deltas = parsing.push('<tool_call>{"name": "f", "arguments": {"a": 1,}}</tool_call>')
    assert deltas == [*call(0, "f", '{"a": 1,'), Content("}}</tool_call>")]
    assert parsing.is_call_open


def test_ids_are_distinct_without_being_told_how():
    parsing = parser_for("hermes")
    starts = [d for d in parsing.push('<tool_call>{"name": "f"}</tool_call>' * 50) if isinstance(d, CallStart)]
    assert len({start.id for start in starts}) == 50
    assert [start.index for start in starts] == list(range(50))


def test_an_unknown_format_is_refused_by_name():
    with pytest.raises(ValueError, match=r"'gpt'.*hermes"):
        parser_for("gpt")
    assert set(FAMILIES) <= set(FORMAT_NAMES)


JSON = st.recursive(
    st.none()
    | st.booleans()
    | st.integers(-999, 10**6)
    | st.floats(allow_nan=False, allow_infinity=False)
    | st.text(max_size=6),
    lambda children: st.lists(children, max_size=3) | st.dictionaries(st.text(max_size=4), children, max_size=3),
    max_leaves=6,
)
CALLS = st.lists(
    st.tuples(st.from_regex(r"[a-z_]{1,8}", fullmatch=True), st.dictionaries(st.text(max_size=4), JSON, max_size=3)),
    min_size=1,
    max_size=3,
)


def written(family: str, calls: list[tuple[str, dict]], **how: object) -> str:
    """`calls` as a model of the family writes them."""
    key = "parameters" if family == "llama3" else "arguments"
    texts = [json.dumps({"name": name, key: arguments}, **how) for name, arguments in calls]
    match family:
        case "hermes":
            return "\n".join(f"<tool_call>\n{text}\n</tool_call>" for text in texts)
        case "llama3":
            return "; ".join(texts)
        case _:
            return f"[TOOL_CALLS] [{', '.join(texts)}]"


@pytest.mark.parametrize("family", FAMILIES)
@given(calls=CALLS, ascii_only=st.booleans(), indent=st.none() | st.integers(0, 2))
def test_written_calls_are_read_back(family, calls, ascii_only, indent):
    deltas = parsed(family, written(family, calls, ensure_ascii=ascii_only, indent=indent))
    assert [d.name for d in deltas if isinstance(d, CallStart)] == [name for name, _ in calls]
    assert [json.loads(d.text) for d in deltas if isinstance(d, CallArguments)] == [arguments for _, arguments in calls]
    assert not any(isinstance(d, Content) for d in deltas)


WORDS = r"""
<tool_call> </tool_call> <|python_tag|> [TOOL_CALLS] [ ] { } ; , < \ " : text "name" -1.0 tru e
{"name":"f","arguments":{"a":1}} {"name":"g" ,"parameters":{ "x":"y
"""
PARTS = st.sampled_from([*WORDS.split(), " ", "\n"])


@pytest.mark.parametrize("family", FAMILIES)
@given(parts=st.lists(PARTS, max_size=12), cuts=st.lists(st.integers(0, 120), max_size=20))
def test_the_pieces_do_not_matter(family, parts, cuts):
    text = "".join(parts)
    bounds = [0, *sorted(min(cut, len(text)) for cut in cuts), len(text)]
    assert parsed(family, *(text[a:b] for a, b in pairwise(bounds))) == parsed(family, text)


@pytest.mark.parametrize("family", FAMILIES)
@given(parts=st.lists(PARTS, max_size=12))
def test_every_call_is_announced_once_and_without_calls_nothing_changes(family, parts):
    text = "".join(parts)
    deltas = parsed(family, text)
    starts = [delta.index for delta in deltas if isinstance(delta, CallStart)]
    assert starts == list(range(len(starts)))
    if not starts:
        assert deltas == ([Content(text)] if text else [])
