"""Regular expressions, context-free grammars, choices and structural tags."""

import pytest

from shared.messages.constraints import Choice, Ebnf, Regex, StructuralTag
from tests.support.grammars import language, refusal


@pytest.mark.parametrize("pattern", ["[", "(", "*a", r"(a)\1", r"\bfoo\b", "a{2,1}", "(?=a)b", "(?<=a)b"])
def test_a_regex_that_cannot_be_enforced_is_refused(vetter, pattern):
    refusal(vetter, Regex(pattern=pattern))


def test_look_around_is_named(vetter):
    assert "look-around" in refusal(vetter, Regex(pattern="(?<=a)b"))


@pytest.mark.parametrize(
    ("pattern", "valid", "invalid"),
    [
        ("", [""], ["a"]),
        ("^(|.*)$", ["", "abc"], ["a\nb"]),
        ("(a|)", ["", "a"], ["aa"]),
        ("a/b", ["a/b"], ["ab"]),
        ("a\\nb Obs", ["a\nb Obs"], ["a\\nb Obs"]),
        ('a\\u{2028}\\\\"e', ['a\u2028\\"e'], ["a"]),
    ],
)
def test_a_regex_describes_the_whole_text(vetter, pattern, valid, invalid):
    accepts = language(vetter, Regex(pattern=pattern))
    assert [text for text in valid if not accepts(text)] == []
    assert [text for text in invalid if accepts(text)] == []


@pytest.mark.parametrize(
    "grammar", ["root ::= (", "start: foo", 'start: "a" "b', 'root ::= "\\ud800"', "", 'x ::= "a"']
)
def test_a_grammar_that_does_not_parse_is_refused(vetter, grammar):
    refusal(vetter, Ebnf(grammar=grammar))


@pytest.mark.parametrize(
    ("grammar", "text"),
    [
        ('start: "a"{5}', "aaaaa"),
        ('?start: "a" "b"?', "ab"),
        ('root ::= "a" "a"', "aa"),
        ("root ::= item+\nitem ::= [a-c] ws\nws ::= [ \\t]*", "a b\tc"),
        ('root ::= "\\u00e9" [\\u0041-\\u0043]', "éB"),
        ('# a comment\nroot ::= expr\nexpr ::= [0-9]+ | "(" expr ")"', "((12))"),
    ],
)
def test_gbnf_and_lark_are_told_apart(vetter, grammar, text):
    accepts = language(vetter, Ebnf(grammar=grammar))
    assert accepts(text)
    assert not accepts(text + "!")


def test_options_that_a_worker_would_ignore_are_refused(vetter):
    assert "`temperature`" in refusal(vetter, Ebnf(grammar='start[temperature=0.5]: "a"'))


def test_a_choice_is_one_of_its_options(vetter):
    options = ("positive", "pos", 'quo"te', "line\nbreak", "日本🔥", "<|im_end|>")
    accepts = language(vetter, Choice(options=options))
    assert [option for option in options[:-1] if not accepts(option)] == []
    assert not accepts("po")
    assert not accepts("")
    assert not accepts("<|im_end|>")  # as the control token


def test_choices_are_limited(vetter):
    assert "4096" in refusal(vetter, Choice(options=tuple(map(str, range(10_000)))))
    refusal(vetter, Choice(options=()))


LEGACY = {
    "type": "structural_tag",
    "structures": [
        {"begin": "<function=a>", "schema": {"type": "integer"}, "end": "</function>"},
        {"begin": "<function=b>", "schema": {"type": "object"}, "end": "</function>"},
    ],
    "triggers": ["<function="],
}


def test_a_structural_tag_leaves_text_free_up_to_a_trigger(vetter):
    accepts = language(vetter, StructuralTag(spec=LEGACY))
    assert accepts("just text")
    assert accepts("x<function=a>1</function>y<function=b>{}</function>")
    assert not accepts("<function=a>x</function>")
    assert not accepts("<function=c>1</function>")
    assert not accepts("ends in <function=")


@pytest.mark.parametrize(
    ("tag_format", "valid", "invalid"),
    [
        (
            {
                "type": "sequence",
                "elements": [
                    {"type": "const_string", "value": "A"},
                    {"type": "tag", "begin": "<t>", "content": {"type": "any_text"}, "end": "</t>"},
                    {
                        "type": "or",
                        "elements": [
                            {"type": "regex", "pattern": "a/b"},
                            {"type": "json_schema", "json_schema": {"const": 1}},
                        ],
                    },
                ],
            },
            ["A<t>xx</t>a/b", "A<t></t>1"],
            ["A<t>a/b", "<t></t>1"],
        ),
        (
            {
                "type": "triggered_tags",
                "triggers": ["<f"],
                "tags": [
                    {"begin": "<f>", "content": {"type": "json_schema", "json_schema": {"const": 1}}, "end": "</f>"}
                ],
                "at_least_one": True,
                "stop_after_first": True,
            },
            ["x<f>1</f>"],
            ["x", "x<f>1</f>y"],
        ),
        (
            {
                "type": "tags_with_separator",
                "separator": ",",
                "tags": [
                    {"begin": "<f>", "content": {"type": "json_schema", "json_schema": {"const": 1}}, "end": "</f>"}
                ],
            },
            ["", "<f>1</f>", "<f>1</f>,<f>1</f>"],
            ["<f>1</f><f>1</f>", ","],
        ),
    ],
)
def test_the_newer_form_of_structural_tags(vetter, tag_format, valid, invalid):
    accepts = language(vetter, StructuralTag(spec={"type": "structural_tag", "format": tag_format}))
    assert [text for text in valid if not accepts(text)] == []
    assert [text for text in invalid if accepts(text)] == []


@pytest.mark.parametrize(
    ("spec", "named"),
    [
        ({}, "structures"),
        ("text", "object"),
        (LEGACY | {"triggers": ["<tool"]}, "triggers"),
        (LEGACY | {"triggers": ["<function=", "<function"]}, "beginning of another"),
        (
            LEGACY | {"structures": [{"begin": "<function=a>", "schema": {"not": {}}, "end": ""}]},
            "structures[0].schema: `not`",
        ),
        ({"format": {"type": "qwen_xml"}}, "qwen_xml"),
    ],
)
def test_a_structural_tag_that_makes_no_sense_is_refused_with_its_place(vetter, spec, named):
    assert named in refusal(vetter, StructuralTag(spec=spec))
