"""`POST /generate`: SGLang's native call."""

from typing import TypeVar

from services.gateway.api.dialect import Asked, Circumstances
from services.gateway.api.fields import checked_ids, checked_stops, constraint_of, sampling_params
from services.gateway.api.native_dialect import NativeDialect
from services.gateway.api.native_types import GenerateRequest, NativeSampling
from services.gateway.errors import invalid, unsupported
from services.gateway.generation.plan import Continuation, Output, Plan, Prompts
from services.gateway.model_facts import ModelFacts

T = TypeVar("T")

DEFAULT_MAX_NEW_TOKENS = 128


def interpret_generate(request: GenerateRequest, circumstances: Circumstances) -> Asked:
    """Validate what types cannot express, and plan the generation. Raises ApiError."""
    prompts, is_batch = _checked_prompts(request, circumstances.facts)
    num_lists = _check_lists(request, len(prompts.items), is_batch)
    # What is the same for all prompts is checked, and its constraint compiled, once.
    continuations = tuple(
        _continuation(request, index, circumstances) for index in range(len(prompts.items) if num_lists else 1)
    )
    num_choices = _num_choices(request)
    plan = Plan(
        prompt=prompts,
        continuations=continuations,
        num_choices=num_choices,
        num_kept=num_choices,
        cache_salt=request.cache_salt,
        priority=request.priority or 0,
        timeout_s=request.timeout,
    )
    given = [] if request.rid is None else [request.rid] if isinstance(request.rid, str) else request.rid

    def make_dialect(rid: str) -> NativeDialect:
        rids = [rid]
        if is_batch:
            rids = given if isinstance(request.rid, list) else [f"{rid}_{i}" for i in range(len(prompts.items))]
        return NativeDialect(
            rids=rids,
            vocabulary=circumstances.facts.vocabulary,
            is_batch=is_batch or num_choices > 1,
            with_text=bool(request.return_text_in_logprobs),
        )

    return Asked(plan=plan, stream=bool(request.stream), make_dialect=make_dialect, rids=tuple(given))


def _check_lists(request: GenerateRequest, num_prompts: int, is_batch: bool) -> int:
    """How many fields say something else for each prompt. Raises ApiError for a list of another length than theirs."""
    num_lists = 0
    for name in ("sampling_params", "return_logprob", "logprob_start_len", "top_logprobs_num", "rid"):
        value = getattr(request, name)
        if not isinstance(value, list):
            continue
        if not is_batch:
            raise invalid(name, "it is a list, but there is a single prompt, not a list of prompts")
        if len(value) != num_prompts:
            raise invalid(name, f"the list has {len(value)} entries, but there are {num_prompts} prompts")
        num_lists += name != "rid"
    if isinstance(request.rid, list) and len(set(request.rid)) < num_prompts:
        raise invalid("rid", "two prompts have the same id")
    return num_lists


def _num_choices(request: GenerateRequest) -> int:
    """Raises ApiError when prompts disagree about it."""
    given = request.sampling_params
    counts = [sampling.n or 1 for sampling in given] if isinstance(given, list) else [(given and given.n) or 1]
    for index, count in enumerate(counts):
        if count != counts[0]:
            raise invalid(f"sampling_params[{index}].n", f"it is {count}, but {counts[0]} for the first prompt")
    return counts[0]


def _continuation(request: GenerateRequest, index: int, circumstances: Circumstances) -> Continuation:
    """What is asked for prompt number `index`. Raises ApiError."""
    sampling = _entry(request.sampling_params, index) or NativeSampling()
    prefix = f"sampling_params[{index}]." if isinstance(request.sampling_params, list) else "sampling_params."
    if sampling.stop_regex is not None:
        raise unsupported(f"{prefix}stop_regex", "use stop, or constrain the output with regex")
    if sampling.no_stop_trim:
        raise unsupported(f"{prefix}no_stop_trim", "a stop string is never part of the text")
    max_tokens = DEFAULT_MAX_NEW_TOKENS if sampling.max_new_tokens is None else sampling.max_new_tokens
    min_tokens = sampling.min_new_tokens or 0
    if min_tokens > max_tokens:
        problem = f"it is {min_tokens}, more than max_new_tokens, which is {max_tokens}"
        raise invalid(f"{prefix}min_new_tokens", problem)
    with_logprobs = _entry(request.return_logprob, index)
    start = _entry(request.logprob_start_len, index)
    constraint_param, constraint = constraint_of(sampling, prefix=prefix) or (None, None)
    return Continuation(
        sampling=sampling_params(
            sampling,
            circumstances,
            seed=sampling.sampling_seed,
            min_new_tokens=min_tokens,
            num_logprobs=(_entry(request.top_logprobs_num, index) or 0) if with_logprobs else None,
            prompt_logprobs_start=start if with_logprobs and start is not None and start >= 0 else None,
            prefix=prefix,
        ),
        max_new_tokens=max_tokens,
        stops=checked_stops(sampling.stop, f"{prefix}stop"),
        output=Output(skip_special_tokens=sampling.skip_special_tokens is not False),
        constraint=constraint,
        constraint_param=constraint_param,
        is_seed_drawn=sampling.sampling_seed is None,
    )


def _entry(given: T | list[T] | None, index: int) -> T | None:
    """The value for prompt number `index`, of one for all or one for each."""
    return given[index] if isinstance(given, list) else given


def _checked_prompts(request: GenerateRequest, facts: ModelFacts) -> tuple[Prompts, bool]:
    """The prompts, and whether the client sent a list of them."""
    if (request.text is None) == (request.input_ids is None):
        raise invalid("text", "exactly one of text and input_ids must be given")
    if request.text is not None:
        texts = [request.text] if isinstance(request.text, str) else request.text
        if not texts or not all(texts):
            raise invalid("text", "it is empty, at least 1 character is needed")
        return Prompts(items=tuple(texts), param="text"), isinstance(request.text, list)
    given = request.input_ids or []
    lists = [item for item in given if isinstance(item, list)]
    if lists and len(lists) < len(given):
        raise invalid("input_ids", "token ids and lists of token ids are mixed, expected one kind")
    is_batch = bool(lists)
    if not is_batch:
        lists = [[item for item in given if isinstance(item, int)]]
    if not all(lists):
        raise invalid("input_ids", "it is empty, at least 1 token id is needed")
    items = tuple(
        checked_ids(ids, facts, f"input_ids[{i}]" if is_batch else "input_ids") for i, ids in enumerate(lists)
    )
    return Prompts(items=items, param="input_ids"), is_batch
