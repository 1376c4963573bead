"""Parts of a worker's engine that need no weights: a model made of a table, a small tokenizer for grammars, or none."""

import numpy as np
import torch
from llguidance import LLTokenizer
from torch import Tensor

from services.worker.batch import ForwardBatch
from services.worker.engine import Engine
from services.worker.matching.matchers import Matchers
from services.worker.runner import ModelLimits
from services.worker.torch_runner import TorchRunner
from tests.support.tokenizer_models import tokenizer_json

END = 0
VOCAB = 640
"""Wider than the tokenizer's vocabulary, as logits often are."""


class RandomModel:
    """Logits are a function of the last token and its position: any text is as likely as another."""

    def __init__(self, seed: int = 0) -> None:
        table = np.random.default_rng(seed).standard_normal((997, VOCAB)) * 3
        self.table = torch.from_numpy(table.astype(np.float32))

    def forward(self, batch: ForwardBatch) -> Tensor:
        wanted = batch.logit_index
        return self.table[torch.from_numpy((batch.token_ids[wanted] * 31 + batch.positions[wanted] * 17) % 997)].clone()


def limits(num_slots: int = 1 << 20, context_len: int = 4000) -> ModelLimits:
    return ModelLimits(num_slots=num_slots, context_len=context_len, vocab_size=VOCAB, end_token_ids=(END,))


def open_tokenizer() -> LLTokenizer:
    return LLTokenizer(tokenizer_json("byte_level"), n_vocab=VOCAB, eos_token=[END])


def no_tokenizer() -> LLTokenizer:
    """For engines that meet no grammar."""
    raise FileNotFoundError("no tokenizer.json in model_path ''")


def make_engine(model_seed: int, model_limits: ModelLimits, matchers: Matchers) -> Engine:
    runner = TorchRunner(RandomModel(model_seed), model_limits, torch.device("cpu"))  # type: ignore[arg-type]
    return Engine(runner, matchers)
