"""How the next token is chosen: travels unchanged from the gateway to the worker."""

import msgspec


class SamplingParams(msgspec.Struct, frozen=True, array_like=True, kw_only=True):
    """Sampling controls of one request, already validated by the gateway.

    The order of application is penalties, logit bias, grammar mask, temperature, top-k, top-p, min-p. A token is drawn with
    the random number `hash(seed, position)`, so the same request gives the same tokens in any batch and after any restart.
    """

    temperature: float = 1.0
    """0 is greedy."""
    top_k: int = 0
    """0 is off."""
    top_p: float = 1.0
    min_p: float = 0.0
    presence_penalty: float = 0.0
    """Subtracted once for each token id among the generated tokens."""
    frequency_penalty: float = 0.0
    """Subtracted for each occurrence among the generated tokens."""
    repetition_penalty: float = 1.0
    """Divides positive and multiplies negative logits of ids in the prompt or the output."""
    seed: int = 0
    logit_bias: tuple[tuple[int, float], ...] = ()
    """(token id, bias), ids inside the vocabulary."""
    min_new_tokens: int = 0
    """Until then neither end tokens nor `stop_token_ids` can be sampled."""
    stop_token_ids: tuple[int, ...] = ()
    ignore_eos: bool = False
    """The model's own end tokens are tokens like any other; `stop_token_ids` still stop."""
    num_logprobs: int | None = None
    """None: no logprobs; k >= 0: of the chosen token and of the k likeliest."""
    prompt_logprobs_start: int | None = None
    """None: no logprobs of the prompt; else of its tokens from this position on, with the `num_logprobs` likeliest.

    The prefix cache is not used beyond `prompt_logprobs_start`: logits exist only for tokens that are computed.
    """


class Logprobs(msgspec.Struct, frozen=True, array_like=True, kw_only=True):
    """Log probabilities (natural, before temperature) of a run of n tokens, with the k likeliest at each."""

    num_top: int
    """k"""
    chosen: bytes
    """float32 [n]"""
    top_ids: bytes = b""
    """int32 [n, k], likeliest first"""
    top: bytes = b""
    """float32 [n, k]"""
