"""Requests that cannot be served however long they wait."""

from shared.messages.generation import RejectCode, Rejected, Submit
from shared.messages.packing import num_int32


def refusal(submit: Submit, max_total_tokens: int, limit_of: str, now_ms: int) -> Rejected | None:
    """Why `submit` can never be served; None if it can. `limit_of` says what sets `max_total_tokens`."""
    prompt_len, num_resumed = num_int32(submit.prompt), num_int32(submit.resumed)
    if prompt_len == 0:
        return Rejected(code=RejectCode.INVALID, message="the prompt is empty")
    if num_resumed and num_resumed >= submit.max_new_tokens:
        message = f"{num_resumed} tokens are resumed, the limit is {submit.max_new_tokens}: nothing is left to generate"
        return Rejected(code=RejectCode.INVALID, message=message)
    if prompt_len + num_resumed + 1 > max_total_tokens:
        message = (
            f"{prompt_len + num_resumed} prompt tokens leave no room for one new token:"
            f" the {limit_of} holds {max_total_tokens}"
        )
        return Rejected(code=RejectCode.TOO_LONG, message=message)
    if submit.deadline_ms is not None and submit.deadline_ms <= now_ms:
        return Rejected(code=RejectCode.DEADLINE, message="the deadline passed before the request was queued")
    return None
