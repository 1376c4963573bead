import numpy as np
import torch

from services.worker.sampling.logprobs import score_tokens


def test_logprobs_are_the_raw_log_softmax_and_the_likeliest_come_first():
    logits = np.random.default_rng(0).standard_normal((5, 100)).astype(np.float32) * 4
    logits[2, 7] = -np.inf
    tokens = [1, 50, 7, 99, 0]
    scores = score_tokens(torch.from_numpy(logits), torch.tensor(tokens), num_top=3)
    exact = logits.astype(np.float64)
    exact -= np.log(np.exp(exact).sum(axis=1, keepdims=True))
    assert np.allclose(scores.chosen, exact[np.arange(5), tokens], atol=1e-5)
    assert scores.chosen[2] == -np.inf
    assert (scores.top_ids == np.argsort(-exact, axis=1)[:, :3]).all()
    assert np.allclose(scores.top, -np.sort(-exact, axis=1)[:, :3], atol=1e-5)


def test_no_alternatives_are_no_columns():
    scores = score_tokens(torch.zeros(2, 10), torch.tensor([1, 2]), num_top=0)
    assert scores.top_ids.shape == scores.top.shape == (2, 0)
