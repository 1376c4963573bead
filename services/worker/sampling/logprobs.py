"""Log probabilities of tokens from the model's own logits: before penalties, bias, masks and temperature."""

import numpy as np
from torch import Tensor

from services.worker.runner import TokenScores


def score_tokens(logits: Tensor, token_ids: Tensor, num_top: int) -> TokenScores:
    """Natural log probabilities of `token_ids` and of the `num_top` likeliest.

    logits     float32 [n, vocab]
    token_ids  int64 [n]
    """
    norm = logits.logsumexp(dim=-1, keepdim=True)
    chosen = (logits.gather(1, token_ids.unsqueeze(1)) - norm).squeeze(1)
    top, top_ids = logits.topk(num_top, dim=-1)
    return TokenScores(
        chosen=chosen.cpu().numpy(),
        top_ids=top_ids.cpu().numpy().astype(np.int32),
        top=(top - norm).cpu().numpy(),
    )
