"""Bodies that are no requests: each refusal names the field, its value and the limit."""

import pytest

from services.gateway.api.chat_types import ChatRequest
from services.gateway.api.completion_types import CompletionRequest
from services.gateway.decoding import BodyDecoder
from services.gateway.errors import ApiError

decode_chat = BodyDecoder(ChatRequest).decode
decode_completion = BodyDecoder(CompletionRequest).decode


def refusal(body: bytes, decode=decode_chat) -> tuple[str | None, str]:
    with pytest.raises(ApiError) as caught:
        decode(body)
    assert caught.value.status == 400
    error = caught.value.body.error
    assert error.type == "invalid_request_error"
    return error.param, error.message


@pytest.mark.parametrize(
    ("body", "mention"),
    [
        (b"", "empty"),
        (b"  \n", "empty"),
        (b"42", "`object`, got `int`"),
        (b"null", "`object`, got `null`"),
        (b'["x"]', "`object`, got `array`"),
        (b'{"model": "m"', "not valid JSON"),
        (b'{"model": NaN}', "not valid JSON"),
        (b'\xef\xbb\xbf{"model": "m"}', "byte order mark"),
        (b'{"ignored": "\xf8\x80\x80"}', "UTF-8"),
        (b'{"ignored": "\xc0\x80"}', "UTF-8"),
        (b'{"model": "\xed\xa0\x80"}', "UTF-8"),
        (b'{"model": "a\\ud83db"}', "surrogate"),
        (b'{"ignored": "\\udc97"}', "surrogate"),
        (b'{"ignored": ' + b"[" * 100_000 + b"]" * 100_000 + b"}", "nested too deeply"),
    ],
)
def test_what_is_no_json_object_is_refused(body, mention):
    param, message = refusal(body)
    assert param is None
    assert mention in message


@pytest.mark.parametrize(
    ("fields", "param", "mention"),
    [
        ('"max_tokens": 1.5', "max_tokens", "1.5"),
        ('"max_tokens": "10"', "max_tokens", '"10"'),
        ('"max_tokens": true', "max_tokens", "true"),
        ('"max_tokens": 0', "max_tokens", ">= 1 (the value is 0)"),
        ('"max_tokens": -1', "max_tokens", "-1"),
        ('"temperature": -0.1', "temperature", "-0.1"),
        ('"temperature": 1e999', "temperature", "out of range"),
        ('"top_p": 1.01', "top_p", "<= 1.0 (the value is 1.01)"),
        ('"top_p": 0', "top_p", "> 0"),
        ('"top_k": -2', "top_k", "-2"),
        ('"min_p": 2', "min_p", "2"),
        ('"presence_penalty": 5', "presence_penalty", "5"),
        ('"frequency_penalty": -5', "frequency_penalty", "-5"),
        ('"repetition_penalty": 0', "repetition_penalty", "0"),
        ('"n": 129', "n", "<= 128 (the value is 129)"),
        ('"seed": 9223372036854775808', "seed", "9223372036854775808"),
        ('"stream": "yes"', "stream", '"yes"'),
        ('"stop": 5', "stop", "5"),
        ('"stop": [1]', "stop[0]", "1"),
        ('"cache_salt": ""', "cache_salt", ">= 1"),
        ('"rid": "a b"', "rid", "a b"),
        ('"top_logprobs": 21', "top_logprobs", "21"),
        ('"logit_bias": {"x": 1}', "logit_bias", "int"),
        ('"response_format": {"type": "xml"}', "response_format.type", "xml"),
        ('"tools": [{"type": "function", "function": {"name": "a b"}}]', "tools[0].function.name", "a b"),
        ('"timeout": 0', "timeout", "> 0"),
    ],
)
def test_a_field_outside_its_limits_is_named_with_its_value(fields, param, mention):
    body = f'{{"model": "m", "messages": [{{"role": "user", "content": "hi"}}], {fields}}}'
    got, message = refusal(body.encode())
    assert got == param
    assert mention in message
    assert param in message


@pytest.mark.parametrize(
    ("messages", "param"),
    [
        ('"string"', "messages"),
        ("null", "messages"),
        ("[]", "messages"),
        ("[123]", "messages[0]"),
        ("[{}]", "messages[0].role"),
        ('[{"role": 123}]', "messages[0].role"),
        ('[{"role": "robot", "content": "x"}]', "messages[0].role"),
        ('[{"role": "system", "content": 123}]', "messages[0].content"),
        ('[{"role": "user"}]', "messages[0].content"),
        ('[{"role": "user", "content": null}]', "messages[0].content"),
        ('[{"content": "hello"}]', "messages[0].role"),
        ('[{"role": "user", "content": "a"}, {}]', "messages[1].role"),
        ('[{"role": "user", "content": [{"text": "x"}]}]', "messages[0].content[0].type"),
        ('[{"role": "user", "content": [{"type": "text"}]}]', "messages[0].content[0].text"),
        ('[{"role": "user", "content": [{"type": "image_url"}]}]', "messages[0].content[0].type"),
        ('[{"role": "user", "content": ["x"]}]', "messages[0].content[0]"),
        ('[{"role": "tool", "content": "x"}]', "messages[0].tool_call_id"),
    ],
)
def test_a_malformed_message_is_named_by_its_path(messages, param):
    assert refusal(f'{{"model": "m", "messages": {messages}}}'.encode())[0] == param


@pytest.mark.parametrize("missing", ['{"messages": []}', '{"model": null}', '{"model": ""}', '{"model": 5}'])
def test_the_model_is_needed(missing):
    assert refusal(missing.encode())[0] in ("model", "messages")


@pytest.mark.parametrize("prompt", ["[1.5]", "[true]", "[null]", "null", "{}", "5"])
def test_a_prompt_is_text_or_ids(prompt):
    param, _ = refusal(f'{{"model": "m", "prompt": {prompt}}}'.encode(), decode_completion)
    assert param in ("prompt", "prompt[0]")


def test_unknown_fields_are_ignored_and_nulls_are_absent():
    body = (
        b'{"model": "m", "messages": [{"role": "user", "content": "hi"}], "foo": {"bar": 1}, "metadata": {"k": "v"},'
        b' "store": false, "service_tier": "auto", "max_tokens": null, "temperature": null, "stop": null}'
    )
    request = decode_chat(body)
    assert (request.max_tokens, request.temperature, request.stop) == (None, None, None)


def test_a_valid_surrogate_pair_is_one_character():
    body = b'{"model": "m", "messages": [{"role": "user", "content": "\\ud83d\\ude00"}]}'
    assert decode_chat(body).messages[0].content == "😀"
