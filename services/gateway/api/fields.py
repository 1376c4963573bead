"""Fields that the OpenAI-style APIs share, with their limits; and how they become sampling parameters."""

from collections.abc import Sequence
from typing import Annotated, Any, Literal

import msgspec
from msgspec import Meta

from services.gateway.api.dialect import Circumstances
from services.gateway.errors import invalid, model_not_found, shown
from services.gateway.model_facts import ModelFacts
from shared.messages.constraints import (
    Choice,
    Constraint,
    Ebnf,
    JsonObject,
    JsonSchema,
    Regex,
    StructuralTag,
)
from shared.messages.sampling import SamplingParams

MAX_STOPS = 32
MAX_STOP_TOKEN_IDS = 256
MAX_TOP_LOGPROBS = 20
GREEDY_BELOW = 1e-6
"""A temperature this small is greedy: dividing by it overflows, and nothing else could be sampled anyway."""
STRONGEST_REPETITION = 1e-4
"""A repetition_penalty below is no stronger, and would overflow the logits it divides."""

Probability = Annotated[float, Meta(ge=0, le=1)]
Penalty = Annotated[float, Meta(ge=-2, le=2)]
NumChoices = Annotated[int, Meta(ge=1, le=128)]
Seed = Annotated[int, Meta(ge=-(2**63), le=2**63 - 1)]
CacheSalt = Annotated[str, Meta(min_length=1, description="Requests of different salts share no prefix.")]
Priority = Annotated[int, Meta(ge=-(2**31), le=2**31 - 1, description="Higher goes first.")]
Timeout = Annotated[float, Meta(gt=0, description="Seconds until the request ends with 504.")]
Rid = Annotated[
    str,
    Meta(max_length=128, pattern=r"^[\x21-\x7e]+$", description="Id by which the request can be aborted."),
]


class JsonSchemaFormat(msgspec.Struct, frozen=True, kw_only=True):
    name: str = ""
    description: str | None = None
    schema_: dict[str, Any] | bool = msgspec.field(name="schema", default_factory=dict)
    strict: bool | None = None


class ResponseFormat(msgspec.Struct, frozen=True, kw_only=True):
    """`json_schema` must be given for the type of that name."""

    type: Literal["text", "json_object", "json_schema"]
    json_schema: JsonSchemaFormat | None = None


class StreamOptions(msgspec.Struct, frozen=True, kw_only=True):
    include_usage: bool | None = None


class SamplingFields(msgspec.Struct, frozen=True, kw_only=True):
    """How tokens are chosen. Absent or null: the model's default."""

    temperature: Annotated[float, Meta(ge=0, description="0 is greedy.")] | None = None
    top_p: Annotated[float, Meta(gt=0, le=1)] | None = None
    top_k: Annotated[int, Meta(ge=-1, description="-1 and 0 are off.")] | None = None
    min_p: Probability | None = None
    presence_penalty: Penalty | None = None
    frequency_penalty: Penalty | None = None
    repetition_penalty: Annotated[float, Meta(gt=0, le=2)] | None = None
    logit_bias: Annotated[dict[int, float], Meta(description="Token id to bias, -100 to 100.")] | None = None
    stop: Annotated[str | list[str], Meta(description=f"Up to {MAX_STOPS} non-empty strings.")] | None = None
    stop_token_ids: list[int] | None = None
    ignore_eos: bool | None = None
    skip_special_tokens: bool | None = None


class OutputFields(SamplingFields, frozen=True, kw_only=True):
    """And what the output must look like: at most one of the constraints."""

    regex: str | None = None
    ebnf: Annotated[str, Meta(description="A grammar in GBNF or Lark.")] | None = None
    json_schema: Annotated[dict[str, Any] | bool | str, Meta(description="A schema, or its JSON text.")] | None = None
    choice: Annotated[list[str], Meta(description="The answer is one of these.")] | None = None
    structural_tag: Annotated[dict[str, Any] | str, Meta(description="A specification, or its JSON text.")] | None = (
        None
    )
    json_whitespace: Literal["compact", "flexible"] | None = None


class GenerationFields(OutputFields, frozen=True, kw_only=True):
    """What chat and text completions have in common."""

    model: Annotated[str, Meta(min_length=1)]
    stream: bool | None = None
    stream_options: StreamOptions | None = None
    n: NumChoices | None = None
    seed: Seed | None = None
    min_tokens: Annotated[int, Meta(ge=0)] | None = None
    response_format: ResponseFormat | None = None
    cache_salt: CacheSalt | None = None
    priority: Priority | None = None
    timeout: Timeout | None = None
    rid: Rid | None = None
    user: str | None = None


def sampling_params(
    fields: SamplingFields,
    circumstances: Circumstances,
    *,
    seed: int | None,
    min_new_tokens: int = 0,
    num_logprobs: int | None = None,
    prompt_logprobs_start: int | None = None,
    prefix: str = "",
) -> SamplingParams:
    """Checked against the vocabulary, with the model's defaults filled in. `prefix` names the fields' place in the body."""
    facts, defaults = circumstances.facts, circumstances.facts.defaults
    temperature = _given(fields.temperature, defaults.temperature)
    top_k = _given(fields.top_k, defaults.top_k)
    return SamplingParams(
        temperature=temperature if temperature >= GREEDY_BELOW else 0.0,
        top_k=top_k if 0 < top_k < facts.vocab_size else 0,
        top_p=_given(fields.top_p, defaults.top_p),
        min_p=_given(fields.min_p, defaults.min_p),
        presence_penalty=fields.presence_penalty or 0.0,
        frequency_penalty=fields.frequency_penalty or 0.0,
        repetition_penalty=max(STRONGEST_REPETITION, _given(fields.repetition_penalty, defaults.repetition_penalty)),
        seed=circumstances.draw_seed() if seed is None else seed,
        logit_bias=_checked_bias(fields.logit_bias or {}, facts, f"{prefix}logit_bias"),
        min_new_tokens=min_new_tokens,
        stop_token_ids=checked_ids(fields.stop_token_ids or (), facts, f"{prefix}stop_token_ids", MAX_STOP_TOKEN_IDS),
        ignore_eos=bool(fields.ignore_eos),
        num_logprobs=num_logprobs,
        prompt_logprobs_start=prompt_logprobs_start,
    )


def _given(value: float | int | None, default: Any) -> Any:
    return default if value is None else value


def checked_stops(stop: str | Sequence[str] | None, param: str = "stop") -> tuple[str, ...]:
    stops = () if stop is None else (stop,) if isinstance(stop, str) else tuple(stop)
    if len(stops) > MAX_STOPS:
        raise invalid(param, f"there are {len(stops)} stop strings, the limit is {MAX_STOPS}")
    if not all(stops):
        raise invalid(param, "a stop string is empty, at least 1 character is needed")
    return tuple(dict.fromkeys(stops))


def checked_ids(ids: Sequence[int], facts: ModelFacts, param: str, max_ids: int | None = None) -> tuple[int, ...]:
    """Token ids that the model knows; the worker would look them up in its embedding."""
    if max_ids is not None and len(ids) > max_ids:
        raise invalid(param, f"there are {len(ids)} ids, the limit is {max_ids}")
    if ids and not (min(ids) >= 0 and max(ids) < facts.vocab_size):
        position, token_id = next((i, t) for i, t in enumerate(ids) if not 0 <= t < facts.vocab_size)
        raise invalid(f"{param}[{position}]", f"token id {token_id} is outside 0 to {facts.vocab_size - 1}")
    return tuple(ids)


def _checked_bias(biases: dict[int, float], facts: ModelFacts, param: str) -> tuple[tuple[int, float], ...]:
    for token_id, bias in biases.items():
        if not 0 <= token_id < facts.vocab_size:
            raise invalid(f"{param}.{token_id}", f"token id {token_id} is outside 0 to {facts.vocab_size - 1}")
        if not -100 <= bias <= 100:
            raise invalid(f"{param}.{token_id}", f"the bias is {shown(bias)}, the limits are -100 and 100")
    return tuple(biases.items())


def check_model(model: str, facts: ModelFacts) -> None:
    if model != facts.id:
        raise model_not_found(model, facts.id)


def checked_stream_options(fields: GenerationFields) -> StreamOptions:
    if fields.stream_options is not None and not fields.stream:
        raise invalid("stream_options", "given although stream is not true")
    return fields.stream_options or StreamOptions()


def checked_min_tokens(fields: GenerationFields, max_tokens: int | None) -> int:
    min_tokens = fields.min_tokens or 0
    if max_tokens is not None and min_tokens > max_tokens:
        raise invalid("min_tokens", f"it is {min_tokens}, more than max_tokens, which is {max_tokens}")
    return min_tokens


def constraint_of(
    fields: OutputFields, response_format: ResponseFormat | None = None, prefix: str = ""
) -> tuple[str, Constraint] | None:
    """The field that constrains the output, and how. Raises ApiError when there are two."""
    whitespace = fields.json_whitespace or "default"
    found: list[tuple[str, Constraint]] = []
    if response_format is not None and (formatted := _format_constraint(response_format, whitespace)) is not None:
        found.append(("response_format", formatted))
    if fields.regex is not None:
        found.append((f"{prefix}regex", Regex(pattern=fields.regex)))
    if fields.ebnf is not None:
        found.append((f"{prefix}ebnf", Ebnf(grammar=fields.ebnf)))
    if fields.json_schema is not None:
        param = f"{prefix}json_schema"
        found.append((param, JsonSchema(schema=_parsed(fields.json_schema, param), whitespace=whitespace)))
    if fields.choice is not None:
        if not fields.choice:
            raise invalid(f"{prefix}choice", "the list is empty, at least 1 choice is needed")
        found.append((f"{prefix}choice", Choice(options=tuple(fields.choice))))
    if fields.structural_tag is not None:
        param = f"{prefix}structural_tag"
        found.append((param, StructuralTag(spec=_parsed(fields.structural_tag, param))))
    if len(found) > 1:
        names = " and ".join(name for name, _ in found)
        raise invalid(found[1][0], f"{names} exclude each other, at most 1 may be given")
    return found[0] if found else None


def _format_constraint(wanted: ResponseFormat, whitespace: str) -> Constraint | None:
    match wanted.type:
        case "text":
            return None
        case "json_object":
            return JsonObject(whitespace=whitespace)
        case "json_schema":
            described = wanted.json_schema
            if described is None:
                raise invalid("response_format.json_schema", "this field is required for the type json_schema")
            strict = described.strict is not False
            return JsonSchema(schema=described.schema_, strict=strict, whitespace=whitespace)


def _parsed(value: Any, param: str) -> Any:
    """Some clients send JSON inside of a string."""
    if not isinstance(value, str):
        return value
    try:
        return msgspec.json.decode(value)
    except (msgspec.DecodeError, RecursionError) as error:
        raise invalid(param, f"the text is not JSON: {error}") from None
