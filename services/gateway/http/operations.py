"""Everything that is not a generation: models, health, tokens, aborts, the cache, what runs where."""

import platform
from importlib import metadata
from typing import Any

import msgspec
from starlette.types import Scope

from services.gateway.api.chat import chat_prompt
from services.gateway.api.fields import check_model, checked_ids
from services.gateway.api.messages import messages_prompt
from services.gateway.api.messages_types import CountTokensRequest, TokenCount
from services.gateway.api.operation_types import (
    Aborted,
    AbortRequest,
    Detokenized,
    DetokenizeRequest,
    Flushed,
    ModelCard,
    ModelInfo,
    ModelList,
    ReplicaInfo,
    ServerInfo,
    Status,
    Tokenized,
    TokenizeRequest,
)
from services.gateway.errors import invalid, model_not_found, not_found, unavailable
from services.gateway.gateway import Gateway
from services.gateway.http.call import call_of
from shared.messages.packing import num_int32, pack_int32, unpack_int32
from shared.messages.tokenization import Detokenize, EncodeRequest, EncodeText

SECRET_SETTINGS = ("api_keys",)


class Operations:
    """Handlers by name of route. Each returns what is sent as JSON, or raises ApiError."""

    def __init__(self, gateway: Gateway) -> None:
        self._gateway = gateway

    # -- is it there?

    async def live(self, scope: Scope) -> Status:
        """This process answers, whatever the others do."""
        return Status(status="ok")

    async def ready(self, scope: Scope) -> Status:
        """A request would be routed now. From what the others last said: no question is asked, nothing is waited for."""
        if (reason := self._gateway.why_not_ready()) is not None:
            raise unavailable(reason, code="not_ready")
        return Status(status="ok")

    # -- the model

    async def models(self, scope: Scope) -> ModelList:
        return ModelList(data=[self._card()])

    async def model(self, scope: Scope) -> ModelCard:
        name = scope["path_params"]["model"]
        if name != self._gateway.facts.id:
            raise model_not_found(name, self._gateway.facts.id)
        return self._card()

    def _card(self) -> ModelCard:
        facts = self._gateway.facts
        return ModelCard(id=facts.id, created=facts.created, max_model_len=facts.context_len, root=facts.id)

    async def model_info(self, scope: Scope) -> ModelInfo:
        facts = self._gateway.facts
        return ModelInfo(
            model_path=self._gateway.config.model_path,
            tokenizer_path=self._gateway.config.model_path,
            served_model_name=facts.id,
            model_type=facts.family,
            context_length=facts.context_len,
            vocab_size=facts.vocab_size,
            is_generation=True,
            preferred_sampling_params=facts.defaults,
            **facts.details,
        )

    # -- tokens

    async def tokenize(self, request: TokenizeRequest, scope: Scope) -> Tokenized:
        gateway = self._gateway
        if request.model is not None:
            check_model(request.model, gateway.facts)
        if (request.prompt is None) == (request.messages is None):
            raise invalid("prompt", "exactly one of prompt and messages must be given")
        question: EncodeRequest
        if request.messages is not None:
            question = chat_prompt(request.messages, request.tools or (), request.add_generation_prompt is not False)
        else:
            texts = (request.prompt,) if isinstance(request.prompt, str) else tuple(request.prompt or ())
            special = request.add_special_tokens is not False
            question = EncodeText(texts=texts, add_special_tokens=special, allow_special=True)
        tokens = [unpack_int32(ids) for ids in await gateway.mesh.encode(question)]
        max_len = gateway.facts.context_len
        if isinstance(request.prompt, list):
            return Tokenized(tokens=[*tokens], count=[len(ids) for ids in tokens], max_model_len=max_len)
        return Tokenized(tokens=[*tokens[0]], count=len(tokens[0]), max_model_len=max_len)

    async def count_tokens(self, request: CountTokensRequest, scope: Scope) -> TokenCount:
        check_model(request.model, self._gateway.facts)
        prompts = await self._gateway.mesh.encode(messages_prompt(request))
        return TokenCount(input_tokens=num_int32(prompts[0]))

    async def detokenize(self, request: DetokenizeRequest, scope: Scope) -> Detokenized:
        if request.model is not None:
            check_model(request.model, self._gateway.facts)
        ids = checked_ids(request.tokens, self._gateway.facts, "tokens")
        question = Detokenize(token_ids=pack_int32(ids), skip_special_tokens=request.skip_special_tokens is not False)
        return Detokenized(text=await self._gateway.mesh.detokenize(question))

    # -- running requests

    async def abort(self, request: AbortRequest, scope: Scope) -> Aborted:
        return self._abort(request.rid, scope)

    async def delete(self, scope: Scope) -> Aborted:
        return self._abort(scope["path_params"]["rid"], scope)

    def _abort(self, rid: str, scope: Scope) -> Aborted:
        if not self._gateway.abort(rid, key=call_of(scope).key):
            raise not_found(f"no request with the id {rid!r} is running")
        return Aborted(rid=rid)

    async def flush_cache(self, scope: Scope) -> Flushed:
        answers = await self._gateway.mesh.flush_caches()
        return Flushed(
            num_freed_tokens=sum(answer.num_freed_tokens for answer in answers),
            num_kept_tokens=sum(answer.num_kept_tokens for answer in answers),
        )

    # -- the mesh

    async def server_info(self, scope: Scope) -> ServerInfo:
        gateway, now_s = self._gateway, self._gateway.now()
        settings = {
            name: "***" if name in SECRET_SETTINGS and value else value
            for name, value in msgspec.structs.asdict(gateway.config).items()
        }
        return ServerInfo(
            version=metadata.version(OWN_PACKAGE),
            python=platform.python_version(),
            packages={name: metadata.version(name) for name in ("msgspec", "starlette", "uvicorn", "nats-py")},
            ready=gateway.why_not_ready() is None,
            num_active_requests=gateway.num_active,
            config=settings,
            replicas=[
                ReplicaInfo(load=msgspec.structs.asdict(view.load), heard_s_ago=round(now_s - view.heard_s, 3))
                for view in gateway.view.replicas(now_s)
            ],
            members=[_as_dict(member) for member in gateway.view.members(now_s)],
        )


OWN_PACKAGE = "radixmesh"


def _as_dict(member: msgspec.Struct) -> dict[str, Any]:
    plain: dict[str, Any] = msgspec.to_builtins(member)
    return plain
