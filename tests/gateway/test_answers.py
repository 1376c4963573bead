"""What clients read: chat, text completions and the native call, streamed and whole."""

import itertools
import json

import pytest

from shared.messages.constraints import ConstraintRefused
from shared.messages.generation import Abort, Emission, Finish, FinishReason, RejectCode, Rejected, Submit
from shared.messages.packing import pack_float32, pack_int32, unpack_int32
from shared.messages.sampling import Logprobs
from shared.messages.tokenization import EncodeFailed, EncodeRefused
from tests.support.default_model import naughty_strings
from tests.support.gateway_world import CONTEXT_LEN, END, MODEL, emissions, ids, says

TEXT = 'Hé "🔥"\u2028\n\\'


def text_of(events: list, index: int = 0) -> str:
    choices = [choice for event in events[:-1] for choice in event["choices"] if choice["index"] == index]
    return "".join((c["delta"].get("content") or "") if "delta" in c else c["text"] for c in choices)


async def test_a_completion_streamed_is_the_completion_whole(world):
    world.mesh.answer = says(TEXT)
    whole = (await world.complete()).json()
    events = await world.stream_completion()
    assert whole["choices"] == [{"index": 0, "text": TEXT, "logprobs": None, "finish_reason": "stop"}]
    assert text_of(events) == TEXT
    assert events[-1] == "[DONE]"
    assert {event["object"] for event in events[:-1]} == {"text_completion"}


async def test_a_chat_streamed_is_the_chat_whole(world):
    world.mesh.answer = says(TEXT)
    whole = (await world.chat()).json()
    events = await world.stream_chat()
    assert whole["choices"][0]["message"] == {"role": "assistant", "content": TEXT, "refusal": None}
    assert text_of(events) == TEXT
    assert whole["usage"] == {
        "prompt_tokens": 20,
        "completion_tokens": len(TEXT.encode()) + 1,
        "total_tokens": 21 + len(TEXT.encode()),
        "prompt_tokens_details": {"cached_tokens": 0},
    }


async def test_a_chat_stream_has_one_role_first_and_one_finish_last(world):
    events = (await world.stream_chat())[:-1]
    choices = [event["choices"][0] for event in events]
    assert [choice["delta"].get("role") for choice in choices] == ["assistant"] + [None] * (len(choices) - 1)
    assert [choice["finish_reason"] for choice in choices] == [None] * (len(choices) - 1) + ["stop"]
    for key in ("id", "created", "model", "object"):
        assert len({event[key] for event in events}) == 1
    assert not any("usage" in event for event in events)


async def test_usage_comes_last_and_only_when_asked_for(world):
    world.mesh.answer = says("abc", cached_tokens=2)
    events = await world.stream_completion(stream_options={"include_usage": True})
    assert all(event["usage"] is None for event in events[:-2])
    assert events[-2]["choices"] == []
    assert events[-2]["usage"]["prompt_tokens_details"] == {"cached_tokens": 2}
    assert events[-2]["usage"]["completion_tokens"] == 4


async def test_a_stop_string_ends_the_text_and_the_generation(world):
    def answer(submit: Submit) -> list[Emission]:
        return emissions(submit, ids("The quick brown fox"), finish=None)

    world.mesh.answer = answer
    reply = (await world.complete(stop=["own fox", "zzz"])).json()
    assert reply["choices"][0] == {"index": 0, "text": "The quick br", "logprobs": None, "finish_reason": "stop"}
    assert reply["usage"]["completion_tokens"] == len("The quick brown fox")
    finish = await world.mesh.until_told(Finish)
    assert (finish.request_id, finish.num_tokens) == (world.mesh.submits[0].request_id, 19)
    assert not any(isinstance(message, Abort) for message in world.mesh.told)


async def test_choices_have_their_own_index_seed_and_finish(world):
    def answer(submit: Submit) -> list[Emission]:
        return emissions(submit, ids(f"seed {submit.sampling.seed}"), finish=FinishReason.STOP, cached_tokens=1)

    world.mesh.answer = answer
    whole = (await world.chat(n=3, seed=42)).json()
    assert [c["message"]["content"] for c in whole["choices"]] == ["seed 42", "seed 43", "seed 44"]
    assert whole["usage"]["prompt_tokens"] == 20  # once
    assert whole["usage"]["completion_tokens"] == 3 * 8
    events = await world.stream_chat(n=3, seed=42)
    assert [text_of(events, i) for i in range(3)] == ["seed 42", "seed 43", "seed 44"]
    finished = [c["index"] for e in events[:-1] for c in e["choices"] if c["finish_reason"]]
    assert sorted(finished) == [0, 1, 2]


@pytest.mark.parametrize(
    ("prompt", "texts", "prompt_tokens"),
    [
        ("ab", ["ab"], 2),
        (["ab", "c"], ["ab", "c"], 3),
        (ids("ab"), ["ab"], 2),
        ([ids("ab"), ids("c")], ["ab", "c"], 3),
    ],
)
async def test_every_form_of_a_prompt_is_answered_in_order(world, prompt, texts, prompt_tokens):
    world.mesh.answer = lambda submit: emissions(submit, unpack_int32(submit.prompt), finish=FinishReason.STOP)
    reply = (await world.complete(prompt=prompt)).json()
    assert [choice["text"] for choice in reply["choices"]] == texts
    assert [choice["index"] for choice in reply["choices"]] == list(range(len(texts)))
    assert reply["usage"]["prompt_tokens"] == prompt_tokens


async def test_no_tokens_at_all_is_an_empty_text_that_ended_by_length(world):
    world.mesh.answer = says("abc", finish=FinishReason.LENGTH)
    reply = (await world.complete(max_tokens=0, echo=True)).json()
    assert reply["choices"][0] == {"index": 0, "text": "hi", "logprobs": None, "finish_reason": "length"}
    assert world.mesh.submits[0].max_new_tokens == 0
    assert reply["usage"]["completion_tokens"] == 0


async def test_echo_comes_first_in_a_stream_too(world):
    world.mesh.answer = says("lo")
    assert text_of(await world.stream_completion(prompt="hel", echo=True)) == "hello"
    assert (await world.complete(prompt=ids("hel"), echo=True)).json()["choices"][0]["text"] == "hello"


def scored(submit: Submit) -> list[Emission]:
    """Each token is its own likeliest; the prompt is scored from position 1 on."""
    answer = ids("🔥!")
    top = submit.sampling.num_logprobs or 0

    def logprobs(tokens: list[int]) -> Logprobs:
        return Logprobs(
            num_top=top,
            chosen=pack_float32([-0.5] * len(tokens)),
            top_ids=pack_int32([(t + i) % 128 if t < 128 else t for t in tokens for i in range(top)]),
            top=pack_float32([-0.5 - i for _ in tokens for i in range(top)]),
        )

    wants_prompt = submit.sampling.prompt_logprobs_start is not None
    return [
        Emission(
            request_id=submit.request_id,
            position=i,
            token_ids=pack_int32([token]),
            finish=FinishReason.LENGTH if i == len(answer) - 1 else None,
            logprobs=logprobs([token]),
            prompt_logprobs=logprobs(unpack_int32(submit.prompt)[1:]) if wants_prompt and i == 0 else None,
        )
        for i, token in enumerate(answer)
    ]


async def test_chat_logprobs_spell_the_text_and_are_the_same_in_a_stream(world):
    world.mesh.answer = scored
    whole = (await world.chat(logprobs=True, top_logprobs=2)).json()["choices"][0]
    entries = whole["logprobs"]["content"]
    assert b"".join(bytes(entry["bytes"]) for entry in entries).decode() == whole["message"]["content"] == "🔥!"
    assert [entry["token"] for entry in entries] == ["\\xf0", "\\x9f", "\\x94", "\\xa5", "!"]
    assert [top["logprob"] for top in entries[-1]["top_logprobs"]] == [-0.5, -1.5]
    events = await world.stream_chat(logprobs=True, top_logprobs=2)
    streamed = [e for event in events[:-1] for c in event["choices"] for e in (c["logprobs"] or {}).get("content", [])]
    assert streamed == entries


async def test_logprobs_are_null_unless_asked_for(world):
    world.mesh.answer = scored
    assert (await world.chat()).json()["choices"][0]["logprobs"] is None
    assert (await world.complete(logprobs=None)).json()["choices"][0]["logprobs"] is None


@pytest.mark.parametrize(("asked", "entries"), [(0, 1), (1, 1), (3, 3)])
async def test_completion_logprobs_have_the_likeliest_and_the_chosen(world, asked, entries):
    world.mesh.answer = scored
    logprobs = (await world.complete(logprobs=asked)).json()["choices"][0]["logprobs"]
    assert logprobs["tokens"] == ["bytes:\\xf0", "bytes:\\x9f", "bytes:\\x94", "bytes:\\xa5", "!"]
    assert logprobs["token_logprobs"] == [-0.5] * 5
    assert len(logprobs["top_logprobs"][-1]) == entries
    assert logprobs["text_offset"] == [0, 0, 0, 0, 1]


async def test_echoed_logprobs_begin_with_null_and_offsets_count_on(world):
    world.mesh.answer = scored
    choice = (await world.complete(prompt="abc", echo=True, logprobs=1)).json()["choices"][0]
    assert choice["logprobs"]["tokens"][:3] == ["a", "b", "c"]
    assert choice["logprobs"]["token_logprobs"][:2] == [None, -0.5]
    assert choice["logprobs"]["top_logprobs"][0] is None
    assert choice["logprobs"]["text_offset"] == [0, 1, 2, 3, 3, 3, 3, 4]
    events = await world.stream_completion(prompt="abc", echo=True, logprobs=1)
    parts = [c["logprobs"] for e in events[:-1] for c in e["choices"] if c["logprobs"]]
    for key, value in choice["logprobs"].items():
        assert list(itertools.chain.from_iterable(part[key] for part in parts)) == value


async def test_best_of_keeps_the_likeliest(world):
    def answer(submit: Submit) -> list[Emission]:
        quality = submit.sampling.seed % 3
        return [
            Emission(
                request_id=submit.request_id,
                position=0,
                token_ids=pack_int32(ids(str(quality))),
                finish=FinishReason.LENGTH,
                logprobs=Logprobs(num_top=0, chosen=pack_float32([float(quality) - 3])),
            )
        ]

    world.mesh.answer = answer
    reply = (await world.complete(seed=0, best_of=3, n=2)).json()
    assert [(c["index"], c["text"]) for c in reply["choices"]] == [(0, "2"), (1, "1")]
    assert [c["logprobs"] for c in reply["choices"]] == [None, None]
    assert reply["usage"]["completion_tokens"] == 3


TOOLS = [{"type": "function", "function": {"name": "add", "parameters": {"type": "object"}}}]
CALLS = "".join(
    f'<tool_call>\n{{"name": "add", "arguments": {{"a": {a}}}}}\n</tool_call>' + ("\n" if a == 1 else "")
    for a in (1, 2)
)


@pytest.mark.parametrize(
    ("tool_choice", "finish"),
    [("auto", "tool_calls"), ("required", "tool_calls"), ({"type": "function", "function": {"name": "add"}}, "stop")],
)
async def test_tool_calls_are_the_same_streamed_and_whole(world, tool_choice, finish):
    world.mesh.answer = says(CALLS)
    choice = (await world.chat(tools=TOOLS, tool_choice=tool_choice)).json()["choices"][0]
    assert choice["finish_reason"] == finish
    assert choice["message"]["content"] is None
    calls = choice["message"]["tool_calls"]
    assert [(c["type"], c["function"]["name"], json.loads(c["function"]["arguments"])) for c in calls] == [
        ("function", "add", {"a": 1}),
        ("function", "add", {"a": 2}),
    ]
    assert len({call["id"] for call in calls}) == 2

    events = await world.stream_chat(tools=TOOLS, tool_choice=tool_choice)
    pieces = [piece for e in events[:-1] for c in e["choices"] for piece in c["delta"].get("tool_calls") or []]
    for index in (0, 1):
        mine = [piece for piece in pieces if piece["index"] == index]
        assert [piece.get("id") is not None for piece in mine] == [True] + [False] * (len(mine) - 1)
        assert [piece["function"].get("name") for piece in mine] == ["add"] + [None] * (len(mine) - 1)
        assert json.loads("".join(piece["function"].get("arguments") or "" for piece in mine)) == {"a": index + 1}
    assert text_of(events) == ""
    assert events[-2]["choices"][0]["finish_reason"] == finish


async def test_a_cut_call_is_length_and_not_valid(world):
    world.mesh.answer = says(CALLS[:46], finish=FinishReason.LENGTH)
    choice = (await world.chat(tools=TOOLS, tool_choice="required")).json()["choices"][0]
    assert choice["finish_reason"] == "length"
    with pytest.raises(ValueError, match="line 1"):
        json.loads(choice["message"]["tool_calls"][0]["function"]["arguments"])


async def test_a_forced_call_is_submitted_with_its_grammar(world):
    await world.chat(tools=TOOLS, tool_choice="required")
    assert world.mesh.submits[0].grammar == "grammar"


async def test_without_tools_calls_are_text(world):
    world.mesh.answer = says(CALLS)
    choice = (await world.chat(tools=TOOLS, tool_choice="none")).json()["choices"][0]
    assert (choice["message"]["content"], choice["finish_reason"]) == (CALLS, "stop")


async def test_the_native_answer_has_ids_and_meta_info(world):
    world.mesh.answer = says("abc", cached_tokens=1)
    reply = (await world.client.post("/generate", json={"text": "hi", "rid": "mine"})).json()
    assert (reply["text"], reply["output_ids"]) == ("abc", [*ids("abc"), END])
    assert reply["meta_info"] == {
        "id": "mine",
        "finish_reason": {"type": "stop", "matched": END},
        "prompt_tokens": 2,
        "completion_tokens": 4,
        "cached_tokens": 1,
    }


async def test_native_streams_are_cumulative(world):
    world.mesh.answer = says("abc")
    events = await world.stream("/generate", text="hi")
    assert [event["text"] for event in events[:-1]] == ["a", "ab", "abc", "abc"]
    assert events[-2]["meta_info"]["finish_reason"]["type"] == "stop"
    assert all(event["meta_info"]["finish_reason"] is None for event in events[:-2])


async def test_native_batches_are_lists(world):
    world.mesh.answer = lambda submit: emissions(submit, unpack_int32(submit.prompt), finish=FinishReason.STOP)
    body = {"input_ids": [ids("ab"), ids("c")], "sampling_params": {"n": 2, "temperature": 0}}
    reply = (await world.client.post("/generate", json=body)).json()
    assert [each["text"] for each in reply] == ["ab", "ab", "c", "c"]


async def test_a_native_batch_may_ask_for_something_else_for_each_prompt(world):
    world.mesh.answer = lambda submit: (
        scored(submit)
        if submit.sampling.num_logprobs is not None
        else emissions(submit, ids("plain"), finish=FinishReason.STOP)
    )
    body = {
        "text": ["a", "bc"],
        "rid": ["first", "second"],
        "sampling_params": [{"max_new_tokens": 3}, {"regex": "x+"}],
        "return_logprob": [False, True],
        "top_logprobs_num": [0, 2],
    }
    one, two = (await world.client.post("/generate", json=body)).json()
    assert (one["text"], one["meta_info"]["finish_reason"]) == ("pla", {"type": "length", "length": 3})
    assert (one["meta_info"]["id"], two["meta_info"]["id"]) == ("first", "second")
    assert "output_token_logprobs" not in one["meta_info"]
    assert two["meta_info"]["output_top_logprobs"][-1] == [[-0.5, 33, None], [-1.5, 34, None]]
    by_prompt = {bytes(unpack_int32(submit.prompt)): submit for submit in world.mesh.submits}
    assert (by_prompt[b"a"].grammar, by_prompt[b"bc"].grammar) == (None, "grammar")
    events = await world.stream("/generate", **body)
    last = {event["index"]: event["text"] for event in events[:-1]}
    assert last == {0: one["text"], 1: two["text"]}


async def test_an_id_for_a_batch_is_the_stem_of_its_ids(world):
    body = {"text": ["a", "b"], "rid": "mine", "sampling_params": {"n": 2}}
    reply = await world.client.post("/generate", json=body)
    assert reply.headers["x-request-id"] == "mine"
    assert [each["meta_info"]["id"] for each in reply.json()] == ["mine_0_0", "mine_0_1", "mine_1_0", "mine_1_1"]


async def test_native_logprobs_are_triples(world):
    world.mesh.answer = scored
    body = {"text": "abc", "return_logprob": True, "logprob_start_len": 0, "top_logprobs_num": 2}
    meta = (await world.client.post("/generate", json=body | {"return_text_in_logprobs": True})).json()["meta_info"]
    assert meta["input_token_logprobs"] == [[None, 97, "a"], [-0.5, 98, "b"], [-0.5, 99, "c"]]
    assert meta["output_token_logprobs"][-1] == [-0.5, 33, "!"]
    assert meta["input_top_logprobs"][0] is None
    assert meta["output_top_logprobs"][-1] == [[-0.5, 33, "!"], [-1.5, 34, '"']]


# -- what the others refuse


async def test_a_prompt_that_fills_the_context_is_refused_with_both_numbers(world):
    reply = await world.complete(prompt="x" * CONTEXT_LEN)
    assert reply.status_code == 400
    error = reply.json()["error"]
    assert (error["param"], error["code"]) == ("prompt", "context_length_exceeded")
    assert f"{CONTEXT_LEN} tokens" in error["message"]
    assert not world.mesh.submits


async def test_a_limit_beyond_the_context_is_capped(world):
    assert (await world.complete(prompt="x" * 500, max_tokens=9999)).status_code == 200
    assert world.mesh.submits[0].max_new_tokens == CONTEXT_LEN - 500
    assert (await world.chat()).status_code == 200
    assert world.mesh.submits[1].max_new_tokens == CONTEXT_LEN - 20


@pytest.mark.parametrize(
    ("code", "retry_after_s", "status"),
    [
        (RejectCode.TOO_LONG, None, 400),
        (RejectCode.INVALID, None, 400),
        (RejectCode.QUEUE_FULL, 2.0, 503),
        (RejectCode.DRAINING, 1.0, 503),
        (RejectCode.NO_REPLICA, 1.0, 503),
        (RejectCode.DEADLINE, None, 504),
    ],
)
async def test_a_rejection_of_the_scheduler_keeps_its_words(world, code, retry_after_s, status):
    refusal = Rejected(code=code, message="513 tokens, the pool holds 512", retry_after_s=retry_after_s)
    world.mesh.answer = lambda submit: refusal
    reply = await world.complete()
    assert reply.status_code == status
    assert reply.json()["error"]["message"] == "513 tokens, the pool holds 512"
    assert (reply.headers.get("retry-after") is not None) == (status == 503)


async def test_a_constraint_that_cannot_be_enforced_is_the_clients_mistake(world):
    world.mesh.compile = lambda constraint: ConstraintRefused(message="look-around is not supported")
    reply = await world.chat(regex="(?=a)")
    assert reply.status_code == 400
    assert reply.json()["error"]["param"] == "regex"
    world.mesh.compile = lambda constraint: ConstraintRefused(message="busy", retry_after_s=2.0)
    assert (await world.chat(regex="a")).status_code == 503
    assert not world.mesh.submits


async def test_a_chat_that_cannot_be_rendered_is_the_clients_mistake(world):
    world.mesh.encode = lambda request: EncodeFailed(message="roles must alternate", param="messages")
    reply = await world.chat()
    assert (reply.status_code, reply.json()["error"]["param"]) == (400, "messages")
    world.mesh.encode = lambda request: EncodeRefused(message="too much to do", retry_after_s=1.0)
    assert (await world.chat()).status_code == 503


async def test_a_generation_that_fails_is_an_error_and_never_a_stop(world):
    def answer(submit: Submit) -> list[Emission]:
        failed = Emission(
            request_id=submit.request_id, position=1, token_ids=b"", finish=FinishReason.ERROR, error="grammar broke"
        )
        return [*emissions(submit, ids("a"), finish=None), failed]

    world.mesh.answer = answer
    reply = await world.complete()
    assert (reply.status_code, reply.json()["error"]["message"]) == (500, "grammar broke")
    events = await world.stream_completion()
    assert events[-1]["error"].keys() >= {"message", "type", "param", "code"}
    assert not any(choice["finish_reason"] for event in events[:-1] for choice in event["choices"])


async def test_integers_that_no_message_can_carry_are_refused(world):
    tool = {"type": "function", "function": {"name": "f", "parameters": {"maximum": 10**30}}}
    assert (await world.chat(tools=[tool])).status_code == 400


async def test_the_model_must_be_the_served_one(world):
    reply = await world.client.post("/v1/completions", json={"model": "other", "prompt": "x"})
    assert reply.status_code == 404
    assert reply.json()["error"]["code"] == "model_not_found"
    assert MODEL in reply.json()["error"]["message"]


async def test_naughty_strings_survive_as_prompt_and_as_answer(world):
    strings = [string for string in naughty_strings() if string]
    world.mesh.answer = lambda submit: emissions(submit, unpack_int32(submit.prompt), finish=FinishReason.STOP)
    for start in range(0, len(strings), 50):
        batch = [string[: CONTEXT_LEN // 8] for string in strings[start : start + 50]]
        reply = (await world.complete(prompt=batch, max_tokens=CONTEXT_LEN)).json()
        assert [choice["text"] for choice in reply["choices"]] == batch
        events = await world.stream_completion(prompt=batch, max_tokens=CONTEXT_LEN)
        assert [text_of(events, index) for index in range(len(batch))] == batch
