"""Events and errors of the HTTP interface as the client understands them."""

import json

import pytest

from radixmesh.client.protocol import (
    Answer,
    ApiError,
    Chunk,
    ClientError,
    Usage,
    answer_of,
    prompt_call,
    read_chunk,
    read_error,
)

USAGE = {"prompt_tokens": 9, "completion_tokens": 2, "total_tokens": 11, "prompt_tokens_details": {"cached_tokens": 8}}


def event(**fields: object) -> str:
    return "data: " + json.dumps(fields)


def test_text_is_continued_and_messages_are_answered():
    path, body = prompt_call("Once", "tiny", {"max_tokens": 3})
    assert (path, body["prompt"], body["max_tokens"]) == ("/v1/completions", "Once", 3)
    path, body = prompt_call([{"role": "user", "content": "Hi"}], "tiny", {})
    assert (path, body["messages"][0]["content"]) == ("/v1/chat/completions", "Hi")
    assert body["stream"] is True


def test_the_pieces_of_a_chat_stream_add_up_to_its_answer():
    lines = [
        event(choices=[{"index": 0, "delta": {"role": "assistant", "content": ""}, "finish_reason": None}], usage=None),
        ": still here",
        "",
        event(choices=[{"index": 0, "delta": {"content": "Par"}, "finish_reason": None}], usage=None),
        event(choices=[{"index": 0, "delta": {"content": "is"}, "finish_reason": None}]),
        event(choices=[{"index": 0, "delta": {}, "finish_reason": "stop"}]),
        event(choices=[], usage=USAGE),
        "data: [DONE]",
    ]
    chunks = [chunk for line in lines if (chunk := read_chunk(line))]
    assert answer_of(chunks) == Answer("Paris", "stop", Usage(9, 2, 8))


def test_text_completions_carry_their_text_directly():
    assert read_chunk(event(choices=[{"index": 0, "text": "x", "finish_reason": "length"}])) == Chunk("x", "length")


def test_an_error_inside_a_stream_is_raised_with_its_message():
    line = event(
        error={"message": "the replica is gone", "type": "server_error", "param": None, "code": "replica_lost"}
    )
    with pytest.raises(ApiError, match="the replica is gone") as caught:
        read_chunk(line)
    assert (caught.value.status, caught.value.code) == (None, "replica_lost")


@pytest.mark.parametrize("line", ["data: {", "data: []", "data: {}", 'data: {"choices": [{}]}', 'data: {"choices": 3}'])
def test_what_no_such_server_sends_is_refused(line):
    with pytest.raises(ClientError, match="not an answer of a chat or completion server"):
        read_chunk(line)


def test_a_stream_that_ends_early_is_no_answer():
    with pytest.raises(ClientError, match="ended before the answer did"):
        answer_of([Chunk("Par")])


def test_errors_keep_the_servers_words():
    body = {"error": {"message": "temperature is -1, must be >= 0", "type": "x", "param": "temperature", "code": None}}
    error = read_error(400, json.dumps(body).encode())
    assert (str(error), error.status, error.param) == ("temperature is -1, must be >= 0", 400, "temperature")


@pytest.mark.parametrize("body", [b"<html>Bad Gateway</html>", b"[]", b'{"error": "plain"}', b'{"detail": 1}'])
def test_an_answer_that_is_not_ours_still_becomes_an_error(body):
    error = read_error(502, body)
    assert str(error).startswith("HTTP 502: ")
    assert error.status == 502
