"""Before a request can be submitted: its prompts as token ids, how much may be generated, its constraint as a grammar."""

import asyncio
from collections.abc import Sequence

import msgspec

from services.gateway.errors import invalid
from services.gateway.generation.plan import Continuation, Plan, Prompts
from services.gateway.generation.splitting import thinking_after
from services.gateway.mesh import Mesh
from services.gateway.model_facts import ModelFacts
from services.gateway.text.vocabulary import Vocabulary
from shared.messages.packing import pack_int32, unpack_int32
from shared.messages.tokenization import EncodeChat, EncodeText
from shared.telemetry import tracer


class Prepared(msgspec.Struct, frozen=True, kw_only=True):
    """packed: token ids of each prompt. token_ids: the same, unpacked. limits: max_new_tokens of each prompt.

    grammars: of each prompt, None where nothing constrains it.
    """

    packed: list[bytes]
    token_ids: list[list[int]]
    limits: list[int]
    grammars: list[str | None]


async def prepare(plan: Plan, mesh: Mesh, facts: ModelFacts, pool_len: int | None) -> Prepared:
    """Encode and compile, side by side. `pool_len`: the longest sequence that some replica holds. Raises ApiError."""
    with tracer().start_as_current_span("prepare"):
        grammars: Sequence[str | None] = [None] * len(plan.continuations)
        if all(continuation.constraint is None for continuation in plan.continuations):
            packed = await _encode(plan.prompt, mesh)
        else:
            encoding = asyncio.create_task(_encode(plan.prompt, mesh))
            compiling = [
                _compile(continuation, index, encoding, mesh, facts.vocabulary)
                for index, continuation in enumerate(plan.continuations)
            ]
            packed, grammars = await asyncio.gather(encoding, asyncio.gather(*compiling))
    if len(plan.continuations) == 1:  # the same for all
        grammars = [grammars[0]] * len(packed)
    token_ids = [unpack_int32(prompt) for prompt in packed]
    limits = [_limit(plan, index, len(prompt), facts.context_len, pool_len) for index, prompt in enumerate(token_ids)]
    return Prepared(packed=packed, token_ids=token_ids, limits=limits, grammars=list(grammars))


async def _compile(
    continuation: Continuation, index: int, encoding: asyncio.Task[list[bytes]], mesh: Mesh, vocabulary: Vocabulary
) -> str | None:
    if continuation.constraint is None:
        return None
    thinking = None
    if continuation.output.reasoning_parser is not None:
        # Only the end of the prompt says whether the thinking has begun.
        prompt = unpack_int32((await encoding)[index])
        thinking = thinking_after(prompt, continuation.output, vocabulary)
    return await mesh.compile(continuation.constraint, continuation.constraint_param, thinking)


async def _encode(prompt: Prompts | EncodeChat, mesh: Mesh) -> list[bytes]:
    if isinstance(prompt, EncodeChat):
        return list(await mesh.encode(prompt))
    texts = tuple(item for item in prompt.items if isinstance(item, str))
    encoded: Sequence[bytes] = ()
    if texts:
        # Whoever writes a raw prompt writes the model's control tokens too; only chats are hardened against them.
        question = EncodeText(texts=texts, add_special_tokens=prompt.add_special_tokens, allow_special=True)
        encoded = await mesh.encode(question)
    from_text = iter(encoded)
    return [next(from_text) if isinstance(item, str) else pack_int32(item) for item in prompt.items]


def _limit(plan: Plan, index: int, prompt_len: int, context_len: int, pool_len: int | None) -> int:
    """How many tokens may be generated behind a prompt: what was asked for, as far as context and pool go."""
    if prompt_len == 0:
        raise invalid(plan.prompt_param, "the prompt is empty, at least 1 token is needed")
    if prompt_len + 1 > context_len:
        problem = f"the prompt has {prompt_len} tokens; with 1 to generate, the model takes {context_len}"
        raise invalid(plan.prompt_param, problem, code="context_length_exceeded")
    room = context_len - prompt_len
    if pool_len is not None and pool_len > prompt_len:  # a prompt that fits no pool is refused by the scheduler
        room = min(room, pool_len - prompt_len)
    asked = plan.continuation(index).max_new_tokens
    return room if asked is None else min(room, asked)
