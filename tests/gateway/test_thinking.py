"""Constraints of a model that thinks: the grammar service is told where the thinking stands."""

import pytest

from shared.messages.constraints import Thinking
from shared.messages.packing import pack_int32
from shared.messages.tokenization import Encoded
from tests.support.gateway_world import gateway_world, ids, says

CHOICE = {"choice": ["yes", "no"]}


async def asked_thinking(tmp_path, reasoning_parser: str, prompt: str, **fields):
    async with gateway_world(tmp_path, reasoning_parser=reasoning_parser) as world:
        world.mesh.answer = says("I say </think>\n\nyes")
        answer = await world.chat(messages=[{"role": "user", "content": prompt}], **CHOICE, **fields)
        assert answer.status_code == 200, answer.text
        (compiled,) = world.mesh.compiled
        return compiled.thinking, answer.json()["choices"][0]["message"]


async def test_the_constraint_is_compiled_for_what_stands_behind_the_thinking(tmp_path):
    thinking, _ = await asked_thinking(tmp_path, "think", "hi")
    assert thinking == Thinking(start="<think>", end="</think>", opened=False)


@pytest.mark.parametrize("tail", ["<think>", "<think>\n"])
async def test_a_prompt_that_has_opened_the_thinking_is_recognised(tmp_path, tail):
    async with gateway_world(tmp_path, reasoning_parser="think") as world:
        encode = world.mesh.encode

        def opening(request):
            return Encoded(prompts=tuple(prompt + pack_int32(ids(tail)) for prompt in encode(request).prompts))

        world.mesh.encode = opening
        world.mesh.answer = says("I say</think>\n\nyes")
        message = (await world.chat(**CHOICE)).json()["choices"][0]["message"]
        assert world.mesh.compiled[0].thinking == Thinking(start="<think>", end="</think>", opened=True)
        assert (message["reasoning_content"], message["content"]) == ("I say", "yes")


@pytest.mark.parametrize(("reasoning_parser", "fields"), [("", {}), ("think", {"separate_reasoning": False})])
async def test_where_thinking_is_not_told_apart_the_constraint_binds_the_whole_text(tmp_path, reasoning_parser, fields):
    thinking, _ = await asked_thinking(tmp_path, reasoning_parser, "hi", **fields)
    assert thinking is None
