"""Puts together what the settings ask for: runner, matchers, engine."""

import json
from pathlib import Path

from llguidance import LLTokenizer

from services.worker.config import WorkerConfig
from services.worker.engine import Engine
from services.worker.matching.matchers import Matchers
from services.worker.runner import ModelLimits, Runner
from services.worker.simulated_runner import SimulatedRunner
from shared.config import StartupError

_TEXT_LENGTHS = (5, 10, 15, 20, 30)
_CHARACTER = r'[^"\\\x00-\x1F\x7F]'
SLICES = [r"[\x20\x0A\x0D\x09]+", *(f"{_CHARACTER}{{1,{length}}}" for length in _TEXT_LENGTHS), f"{_CHARACTER}+"]
"""Classes of tokens that a mask takes in whole where a string may go on. With more lengths than llguidance's own two (10, 30) a
mask in a string of limited length takes a third less time."""

SIMULATED_SLOTS = 1 << 18
SIMULATED_CONTEXT_LEN = 8192
SIMULATED_VOCAB_SIZE = 49152


def open_engine(config: WorkerConfig) -> Engine:
    """Load the model. Raises StartupError with what is missing."""
    runner = open_runner(config)
    limits = runner.limits
    matchers = Matchers(
        lambda: _open_tokenizer(config.model_path, limits),
        limits.vocab_size,
        jump_forward=config.jump_forward,
        max_grammars=config.max_grammars,
    )
    return Engine(runner, matchers)


def open_runner(config: WorkerConfig) -> Runner:
    """Raises StartupError with what is missing."""
    if config.model_kind == "simulated":
        return _open_simulated(config)
    if not config.model_path:
        raise StartupError("model_path is not set: the folder of a model, or a GGUF file")
    if not Path(config.model_path).exists():
        raise StartupError(f"model_path {config.model_path!r} does not exist")
    # Only here: torch takes a second to import, and a simulated worker does without.
    from services.worker.torch_runner import open_torch_runner

    return open_torch_runner(config)


def _open_tokenizer(model_path: str, limits: ModelLimits) -> LLTokenizer:
    """The tokenizer as matchers need it: as wide as the logits, with the model's own end tokens. Raises OSError, ValueError."""
    path = Path(model_path) / "tokenizer.json"
    if not model_path or not path.is_file():
        raise FileNotFoundError(f"no tokenizer.json in model_path {model_path!r}")
    if not limits.end_token_ids:
        raise ValueError("the model has no end token")
    return LLTokenizer(str(path), n_vocab=limits.vocab_size, eos_token=list(limits.end_token_ids), slices=SLICES)


def _open_simulated(config: WorkerConfig) -> SimulatedRunner:
    """Without weights; vocabulary and end tokens are the model's where its config is there, so that its tokenizer fits."""
    model: dict[str, object] = {}
    path = Path(config.model_path) / "config.json"
    if config.model_path and path.is_file():
        model = json.loads(path.read_text(encoding="utf-8"))
    ends = model.get("eos_token_id", ())
    limits = ModelLimits(
        num_slots=config.num_slots or SIMULATED_SLOTS,
        context_len=config.context_len or int(str(model.get("max_position_embeddings", SIMULATED_CONTEXT_LEN))),
        vocab_size=int(str(model.get("vocab_size", SIMULATED_VOCAB_SIZE))),
        end_token_ids=tuple(ends) if isinstance(ends, list | tuple) else (int(str(ends)),),
    )
    return SimulatedRunner(limits, step_s=config.simulated_step_ms / 1000)
