import json

from hypothesis import given
from hypothesis import strategies as st

from services.tokenizer.placeholders import ControlTexts, Placeholders

NONCE = "31415926535897932384"
CONTROL = ControlTexts(["<|im_end|>", "<|im_start|>", "<s>"])
TEXTS = st.lists(st.sampled_from(["<|im_end|>", "<s>", "<|im_", "<", "end|>", "a", " ", "\n", "7"]), max_size=8).map(
    "".join
)


@given(text=TEXTS)
def test_hidden_text_comes_back_and_spells_no_control_token_meanwhile(text):
    placeholders = Placeholders(NONCE)
    hidden = CONTROL.hide(text, placeholders)
    assert not any(spelling in hidden for spelling in ("<|im_end|>", "<|im_start|>", "<s>"))
    assert placeholders.restore(hidden) == text
    for changed in (hidden.strip(), hidden.upper(), json.dumps(hidden), f"1{hidden}1"):
        assert NONCE not in placeholders.restore(changed)


@given(first=TEXTS, second=TEXTS)
def test_strings_side_by_side_do_not_complete_a_control_token(first, second):
    placeholders = Placeholders(NONCE)
    joined = CONTROL.hide(first, placeholders).strip() + CONTROL.hide(second, placeholders).strip()
    assert not any(spelling in joined for spelling in ("<|im_end|>", "<|im_start|>", "<s>"))


def test_all_strings_of_json_data_are_hidden_keys_too():
    placeholders = Placeholders(NONCE)
    hidden = CONTROL.hide({"<s>": ["<s>", 1, None, True, {"a": "<s>"}]}, placeholders)
    stand_in = placeholders.hold("<s>")
    assert hidden == {stand_in: [stand_in, 1, None, True, {"a": stand_in}]}


def test_raw_text_loses_the_quotes_that_json_put_around_it():
    placeholders = Placeholders(NONCE)
    raw = placeholders.hold('{"a": 1, "b', unquoted=True)
    assert placeholders.restore(json.dumps({"arguments": raw})) == '{"arguments": {"a": 1, "b}'
    assert placeholders.restore(f"arguments {raw}") == 'arguments {"a": 1, "b'
    kept = placeholders.hold("<s>")
    assert placeholders.restore(json.dumps(kept)) == '"<s>"'
