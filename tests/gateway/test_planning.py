"""From request types to plans: limits that types cannot express, defaults, and what the other services are told."""

from typing import Any

import msgspec
import pytest

from services.gateway.api.chat import interpret_chat
from services.gateway.api.chat_types import ChatRequest
from services.gateway.api.completion_types import CompletionRequest
from services.gateway.api.completions import interpret_completion
from services.gateway.api.native import interpret_generate
from services.gateway.api.native_types import GenerateRequest
from services.gateway.errors import ApiError
from services.gateway.generation.plan import Plan
from services.gateway.model_facts import SamplingDefaults
from shared.messages.constraints import Choice, Ebnf, JsonObject, JsonSchema, Regex, StructuralTag, ToolCalls
from tests.support.gateway_world import MODEL, VOCAB_SIZE

USER = [{"role": "user", "content": "hi"}]
TOOL = {"type": "function", "function": {"name": "add", "parameters": {"type": "object"}}}


def chat(circumstances, **fields: Any) -> Plan:
    request = msgspec.convert({"model": MODEL, "messages": USER} | fields, ChatRequest)
    return interpret_chat(request, circumstances).plan


def completion(circumstances, **fields: Any) -> Plan:
    request = msgspec.convert({"model": MODEL, "prompt": "hi"} | fields, CompletionRequest)
    return interpret_completion(request, circumstances).plan


def generate(circumstances, **fields: Any) -> Plan:
    return interpret_generate(msgspec.convert(fields, GenerateRequest), circumstances).plan


CHAT_REFUSALS = [
    ({"model": "other"}, "model"),
    ({"stream_options": {}}, "stream_options"),
    ({"top_logprobs": 3}, "top_logprobs"),
    ({"stop": ""}, "stop"),
    ({"stop": ["a", ""]}, "stop"),
    ({"stop": [str(i) for i in range(33)]}, "stop"),
    ({"stop_token_ids": [VOCAB_SIZE]}, "stop_token_ids[0]"),
    ({"stop_token_ids": [0, -1]}, "stop_token_ids[1]"),
    ({"stop_token_ids": [0] * 257}, "stop_token_ids"),
    ({"logit_bias": {VOCAB_SIZE: 1.0}}, f"logit_bias.{VOCAB_SIZE}"),
    ({"logit_bias": {5: 100.5}}, "logit_bias.5"),
    ({"min_tokens": 5, "max_tokens": 4}, "min_tokens"),
    ({"regex": "a", "ebnf": "start: x"}, "ebnf"),
    ({"regex": "a", "response_format": {"type": "json_object"}}, "regex"),
    ({"response_format": {"type": "json_schema"}}, "response_format.json_schema"),
    ({"json_schema": "{"}, "json_schema"),
    ({"choice": []}, "choice"),
    ({"messages": [{"role": "assistant"}]}, "messages[0].content"),
    ({"messages": [*USER, {"role": "assistant", "content": None, "tool_calls": []}]}, "messages[1].content"),
    ({"tool_choice": "required"}, "tool_choice"),
    ({"continue_final_message": True}, "continue_final_message"),
    ({"tool_choice": "required", "tools": []}, "tool_choice"),
    (
        {
            "tool_choice": {
                "type": "allowed_tools",
                "allowed_tools": {"mode": "auto", "tools": [{"type": "function", "function": {"name": "nope"}}]},
            },
            "tools": [TOOL],
        },
        "tool_choice",
    ),
    ({"tool_choice": {"type": "function", "function": {"name": "nope"}}, "tools": [TOOL]}, "tool_choice"),
    ({"tools": [TOOL, TOOL]}, "tools"),
    ({"tools": [TOOL], "tool_choice": "required", "regex": "a"}, "regex"),
    ({"functions": []}, "functions"),
    ({"function_call": "auto"}, "function_call"),
    ({"audio": {}}, "audio"),
    ({"modalities": ["text", "audio"]}, "modalities"),
    ({"prediction": {}}, "prediction"),
    ({"web_search_options": {}}, "web_search_options"),
]


@pytest.mark.parametrize(("fields", "param"), CHAT_REFUSALS)
def test_a_chat_that_cannot_be_honoured_is_refused_by_field(circumstances, fields, param):
    with pytest.raises(ApiError) as caught:
        chat(circumstances, **fields)
    assert caught.value.body.error.param == param
    assert caught.value.status == (404 if param == "model" else 400)


COMPLETION_REFUSALS = [
    ({"prompt": ""}, "prompt"),
    ({"prompt": []}, "prompt"),
    ({"prompt": [""]}, "prompt[0]"),
    ({"prompt": [[]]}, "prompt[0]"),
    ({"prompt": [1, "a"]}, "prompt"),
    ({"prompt": [[1], "a"]}, "prompt"),
    ({"prompt": [VOCAB_SIZE]}, "prompt[0]"),
    ({"prompt": [3, -1]}, "prompt[1]"),
    ({"prompt": [[1], [5279552648203111001]]}, "prompt[1][0]"),
    ({"best_of": 1, "n": 2}, "best_of"),
    ({"best_of": 2, "stream": True}, "best_of"),
    ({"suffix": "x"}, "suffix"),
    ({"min_tokens": 17}, "min_tokens"),
]


@pytest.mark.parametrize(("fields", "param"), COMPLETION_REFUSALS)
def test_a_completion_that_cannot_be_honoured_is_refused_by_field(circumstances, fields, param):
    with pytest.raises(ApiError) as caught:
        completion(circumstances, **fields)
    assert (caught.value.status, caught.value.body.error.param) == (400, param)


GENERATE_REFUSALS = [
    ({}, "text"),
    ({"text": "a", "input_ids": [1]}, "text"),
    ({"text": ""}, "text"),
    ({"text": []}, "text"),
    ({"input_ids": []}, "input_ids"),
    ({"input_ids": [[1], []]}, "input_ids"),
    ({"input_ids": [1, [2]]}, "input_ids"),
    ({"input_ids": [VOCAB_SIZE]}, "input_ids[0]"),
    ({"text": "a", "sampling_params": {"stop": ""}}, "sampling_params.stop"),
    ({"text": "a", "sampling_params": {"stop_regex": "x"}}, "sampling_params.stop_regex"),
    ({"text": "a", "sampling_params": {"min_new_tokens": 200}}, "sampling_params.min_new_tokens"),
    ({"text": "a", "sampling_params": {"regex": "a", "json_schema": "{}"}}, "sampling_params.json_schema"),
    ({"text": "a", "sampling_params": [{}]}, "sampling_params"),
    ({"text": ["a", "b"], "sampling_params": [{}]}, "sampling_params"),
    ({"text": ["a", "b"], "sampling_params": [{"n": 2}, {}]}, "sampling_params[1].n"),
    ({"text": ["a", "b"], "sampling_params": [{}, {"stop": ""}]}, "sampling_params[1].stop"),
    ({"text": ["a", "b"], "return_logprob": [True]}, "return_logprob"),
    ({"text": ["a", "b"], "rid": ["x", "x"]}, "rid"),
]


@pytest.mark.parametrize(("fields", "param"), GENERATE_REFUSALS)
def test_a_native_call_that_cannot_be_honoured_is_refused_by_field(circumstances, fields, param):
    with pytest.raises(ApiError) as caught:
        generate(circumstances, **fields)
    assert (caught.value.status, caught.value.body.error.param) == (400, param)


def test_limits_come_with_both_numbers(circumstances):
    with pytest.raises(ApiError, match=r"33 stop strings, the limit is 32"):
        chat(circumstances, stop=[str(i) for i in range(33)])
    with pytest.raises(ApiError, match=r"100\.5.*-100 and 100"):
        chat(circumstances, logit_bias={5: 100.5})


@pytest.mark.parametrize("plan", [chat, completion])
def test_absent_sampling_fields_take_the_models_defaults(circumstances, plan):
    defaults = SamplingDefaults(temperature=0.6, top_k=20, top_p=0.9, min_p=0.1, repetition_penalty=1.1)
    facts = msgspec.structs.replace(circumstances.facts, defaults=defaults)
    sampling = plan(msgspec.structs.replace(circumstances, facts=facts), top_p=0.5).continuations[0].sampling
    assert (sampling.temperature, sampling.top_k, sampling.min_p) == (0.6, 20, 0.1)
    assert (sampling.top_p, sampling.repetition_penalty) == (0.5, 1.1)


@pytest.mark.parametrize(("top_k", "told"), [(-1, 0), (0, 0), (5, 5), (VOCAB_SIZE, 0), (10**30, 0)])
def test_a_top_k_that_keeps_everything_is_off(circumstances, top_k, told):
    assert chat(circumstances, top_k=top_k).continuations[0].sampling.top_k == told


@pytest.mark.parametrize(("temperature", "told"), [(0, 0.0), (1e-40, 0.0), (1e-7, 0.0), (1e-4, 1e-4), (1e308, 1e308)])
def test_a_temperature_too_small_to_divide_by_is_greedy(circumstances, temperature, told):
    assert chat(circumstances, temperature=temperature).continuations[0].sampling.temperature == told


def test_an_unset_seed_is_drawn_once_and_a_set_one_is_kept(circumstances):
    assert chat(circumstances).continuations[0].sampling.seed == 1000
    assert chat(circumstances, seed=-5).continuations[0].sampling.seed == -5


def test_choices_draw_with_different_seeds_that_stay_int64(circumstances):
    plan = chat(circumstances, n=3, seed=2**63 - 1)
    assert [plan.sampling_of(0, i).seed for i in range(3)] == [2**63 - 1, -(2**63), -(2**63) + 1]


def test_the_smaller_of_both_limits_counts(circumstances):
    assert chat(circumstances, max_tokens=6, max_completion_tokens=3).continuations[0].max_new_tokens == 3
    assert chat(circumstances).continuations[0].max_new_tokens is None
    assert completion(circumstances).continuations[0].max_new_tokens == 16
    assert completion(circumstances, max_tokens=0).continuations[0].max_new_tokens == 0
    assert generate(circumstances, text="a").continuations[0].max_new_tokens == 128


SCHEMA = {"type": "object"}


@pytest.mark.parametrize(
    ("fields", "constraint"),
    [
        ({}, None),
        ({"response_format": {"type": "text"}}, None),
        ({"response_format": {"type": "json_object"}}, JsonObject()),
        ({"response_format": {"type": "json_object"}, "json_whitespace": "compact"}, JsonObject(whitespace="compact")),
        (
            {"response_format": {"type": "json_schema", "json_schema": {"name": "t", "schema": SCHEMA}}},
            JsonSchema(schema=SCHEMA),
        ),
        (
            {"response_format": {"type": "json_schema", "json_schema": {"schema": SCHEMA, "strict": False}}},
            JsonSchema(schema=SCHEMA, strict=False),
        ),
        ({"json_schema": SCHEMA}, JsonSchema(schema=SCHEMA)),
        ({"json_schema": '{"type": "object"}'}, JsonSchema(schema=SCHEMA)),
        ({"regex": ""}, Regex(pattern="")),
        ({"ebnf": "root ::= x"}, Ebnf(grammar="root ::= x")),
        ({"choice": ["a", "b"]}, Choice(options=("a", "b"))),
        ({"structural_tag": {"type": "x"}}, StructuralTag(spec={"type": "x"})),
    ],
)
def test_constraints_are_passed_on(circumstances, fields, constraint):
    assert chat(circumstances, **fields).continuations[0].constraint == constraint
    assert completion(circumstances, **fields).continuations[0].constraint == constraint


@pytest.mark.parametrize(
    ("choice", "mode"),
    [("required", "required"), ({"type": "function", "function": {"name": "add"}}, "add")],
)
def test_a_forced_call_becomes_a_constraint(circumstances, choice, mode):
    plan = chat(circumstances, tools=[TOOL], tool_choice=choice, parallel_tool_calls=False)
    assert plan.continuations[0].constraint == ToolCalls(tools=(TOOL,), mode=mode, parallel=False)
    assert plan.continuations[0].output.tool_parser == "hermes"


def test_free_choice_of_tools_is_parsed_and_not_constrained(circumstances):
    plan = chat(circumstances, tools=[TOOL])
    assert (plan.continuations[0].constraint, plan.continuations[0].output.tool_parser, plan.prompt.tools) == (
        None,
        "hermes",
        (TOOL,),
    )


@pytest.mark.parametrize("mode", ["auto", "required"])
def test_tools_that_are_not_allowed_do_not_exist(circumstances, mode):
    other = {"type": "function", "function": {"name": "other"}}
    allowed = {"mode": mode, "tools": [{"type": "function", "function": {"name": "add"}}]}
    plan = chat(circumstances, tools=[other, TOOL], tool_choice={"type": "allowed_tools", "allowed_tools": allowed})
    assert plan.prompt.tools == (TOOL,)
    forced = ToolCalls(tools=(TOOL,), mode="required")
    assert plan.continuations[0].constraint == (forced if mode == "required" else None)


def test_strict_tools_are_constrained_under_auto(circumstances):
    strict = {"type": "function", "function": TOOL["function"] | {"strict": True}}
    assert chat(circumstances, tools=[strict]).continuations[0].constraint == ToolCalls(tools=(strict,), mode="auto")


def test_with_tool_choice_none_the_model_is_told_of_no_tools(circumstances):
    plan = chat(circumstances, tools=[TOOL], tool_choice="none")
    assert (plan.prompt.tools, plan.continuations[0].output.tool_parser, plan.continuations[0].constraint) == (
        (),
        None,
        None,
    )


def test_messages_become_plain_text_messages(circumstances):
    call = {"id": "c1", "type": "function", "function": {"name": "add", "arguments": '{"a": 1}'}}
    plan = chat(
        circumstances,
        messages=[
            {"role": "developer", "content": [{"type": "text", "text": "a"}, {"type": "text", "text": "b"}]},
            {"role": "user", "content": "", "name": "ann"},
            {"role": "assistant", "content": None, "tool_calls": [call]},
            {"role": "tool", "tool_call_id": "c1", "content": "3"},
        ],
    )
    assert plan.prompt.messages == (
        {"role": "developer", "content": "a\nb"},
        {"role": "user", "content": "", "name": "ann"},
        {"role": "assistant", "content": "", "tool_calls": [call]},
        {"role": "tool", "content": "3", "tool_call_id": "c1"},
    )


def test_prompts_share_a_seed_only_when_the_client_gave_it(circumstances):
    prompts = {"prompt": ["a", "a"], "n": 2}
    drawn, given = completion(circumstances, **prompts), completion(circumstances, seed=5, **prompts)
    assert [drawn.sampling_of(prompt, i).seed for prompt in range(2) for i in range(2)] == [1000, 1001, 1002, 1003]
    assert [given.sampling_of(prompt, i).seed for prompt in range(2) for i in range(2)] == [5, 6, 5, 6]


def test_each_prompt_of_a_native_batch_has_parameters_of_its_own(circumstances):
    plan = generate(
        circumstances,
        text=["a", "b"],
        sampling_params=[{"max_new_tokens": 3, "stop": "x"}, {"temperature": 0, "regex": "b+"}],
        return_logprob=[False, True],
        top_logprobs_num=[0, 2],
        logprob_start_len=[-1, 0],
    )
    first, second = plan.continuations
    assert (first.max_new_tokens, second.max_new_tokens) == (3, 128)
    assert (first.stops, second.stops) == (("x",), ())
    assert (first.constraint, second.constraint) == (None, Regex(pattern="b+"))
    assert (first.sampling.num_logprobs, second.sampling.num_logprobs) == (None, 2)
    assert (first.sampling.prompt_logprobs_start, second.sampling.prompt_logprobs_start) == (None, 0)
    assert second.sampling.temperature == 0


def test_best_of_asks_for_scores_it_does_not_show(circumstances):
    plan = completion(circumstances, n=1, best_of=3)
    assert (plan.num_choices, plan.num_kept, plan.continuations[0].sampling.num_logprobs) == (3, 1, 0)


def test_echo_with_logprobs_scores_the_prompt(circumstances):
    assert completion(circumstances, echo=True, logprobs=2).continuations[0].sampling.prompt_logprobs_start == 0
    assert completion(circumstances, echo=True).continuations[0].sampling.prompt_logprobs_start is None
    native = generate(circumstances, text="a", return_logprob=True, logprob_start_len=3, top_logprobs_num=2)
    assert (native.continuations[0].sampling.prompt_logprobs_start, native.continuations[0].sampling.num_logprobs) == (
        3,
        2,
    )
