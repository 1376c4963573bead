"""Batches of requests in, their answers out: rendering, encoding and detokenizing without a bus or a clock."""

from collections.abc import Sequence
from typing import NamedTuple, assert_never

import msgspec

from services.tokenizer.chat_template import ChatTemplate, TemplateRefusal
from services.tokenizer.control_tokens import GuardedTokenizer
from services.tokenizer.conversation import prepare
from services.tokenizer.placeholders import ControlTexts, Placeholders
from services.tokenizer.template_traits import traits_of
from shared.messages.packing import pack_int32, unpack_int32
from shared.messages.tokenization import (
    Detokenize,
    Detokenized,
    EncodeChat,
    Encoded,
    EncodeFailed,
    EncodeReply,
    EncodeRequest,
    EncodeText,
)


class _Text(NamedTuple):
    """A text ready to encode: what may be a control token has been revealed."""

    text: str
    add_special_tokens: bool


class TokenizerCore:
    """Stateless after construction: `answer` may run in several threads at once."""

    def __init__(self, tokenizer: GuardedTokenizer, template: ChatTemplate | None, nonce: str) -> None:
        """`nonce`: digits that no client can guess. Without a `template`, chats are refused."""
        self._tokenizer = tokenizer
        self._template = template
        self._traits = None if template is None else traits_of(template)
        self._control_texts = ControlTexts(tokenizer.control_texts)
        self._nonce = nonce

    def answer(self, requests: Sequence[EncodeRequest]) -> list[EncodeReply]:
        """One reply for each request, in order; a bad request spoils only its own."""
        prepared = [self._prepare(request) for request in requests]
        texts = [text for item in prepared if isinstance(item, list) for text in item]
        encoded = iter(self._encode(texts))
        return [self._reply([next(encoded) for _ in item]) if isinstance(item, list) else item for item in prepared]

    def _prepare(self, request: EncodeRequest) -> list[_Text] | EncodeReply:
        """The texts to encode, or the answer already."""
        match request:
            case EncodeText():
                texts = map(self._tokenizer.reveal, request.texts) if request.allow_special else request.texts
                return [_Text(text, request.add_special_tokens) for text in texts]
            case EncodeChat():
                try:
                    return [_Text(self._render(request), add_special_tokens=False)]
                except TemplateRefusal as refusal:
                    return EncodeFailed(message=f"chat template: {refusal}", param="messages")
                except msgspec.ValidationError as error:
                    return EncodeFailed(message=f"messages: {error}", param="messages")
                except RecursionError:
                    return EncodeFailed(message="messages or tools are nested too deeply", param="messages")
            case Detokenize():
                return self._detokenize(request)
            case _:
                assert_never(request)

    def _render(self, request: EncodeChat) -> str:
        """The chat as one text with the template's control tokens revealed and the client's not."""
        if self._template is None or self._traits is None:
            raise TemplateRefusal("this model has none; use text completions")
        if not request.messages:
            raise TemplateRefusal("there are no messages")
        placeholders = Placeholders(self._nonce)
        messages, tools = prepare(request.messages, request.tools, self._traits, placeholders)
        rendered = self._template.render(
            self._control_texts.hide(messages, placeholders),
            self._control_texts.hide(tools, placeholders),
            add_generation_prompt=request.add_generation_prompt,
            template_args=self._control_texts.hide(request.template_args, placeholders),
        )
        return placeholders.restore(self._tokenizer.reveal(rendered))

    def _encode(self, texts: Sequence[_Text]) -> list[list[int] | EncodeFailed]:
        """Encode everything that arrived together in at most two batches."""
        results: dict[int, list[int] | EncodeFailed] = {}
        for add_special_tokens in (False, True):
            indices = [i for i, text in enumerate(texts) if text.add_special_tokens is add_special_tokens]
            ids = self._encode_batch([texts[i].text for i in indices], add_special_tokens)
            results.update(zip(indices, ids, strict=True))
        return [results[i] for i in range(len(texts))]

    def _encode_batch(self, texts: list[str], add_special_tokens: bool) -> list[list[int] | EncodeFailed]:
        if not texts:
            return []
        try:
            return list(self._tokenizer.encode(texts, add_special_tokens=add_special_tokens))
        except Exception as error:  # the Rust encoder raises plain Exception
            if len(texts) == 1:
                return [EncodeFailed(message=f"the text cannot be encoded: {error}")]
            return [self._encode_batch([text], add_special_tokens)[0] for text in texts]

    def _reply(self, prompts: Sequence[list[int] | EncodeFailed]) -> EncodeReply:
        packed = []
        for prompt in prompts:
            if isinstance(prompt, EncodeFailed):
                return prompt
            packed.append(pack_int32(prompt))
        return Encoded(prompts=tuple(packed))

    def _detokenize(self, request: Detokenize) -> EncodeReply:
        try:
            token_ids = unpack_int32(request.token_ids)
        except ValueError as error:
            return EncodeFailed(message=f"token ids: {error}", param="tokens")
        size = self._tokenizer.size
        if (unknown := next((i for i in token_ids if not 0 <= i < size), None)) is not None:
            return EncodeFailed(message=f"token id {unknown} is not in the vocabulary of {size}", param="tokens")
        return Detokenized(text=self._tokenizer.decode(token_ids, skip_special_tokens=request.skip_special_tokens))
