"""Which runner the settings ask for."""

import json
from pathlib import Path

from services.worker.config import WorkerConfig
from services.worker.runner import ModelLimits, Runner
from services.worker.simulated_runner import SimulatedRunner
from shared.config import StartupError

SIMULATED_SLOTS = 1 << 18
SIMULATED_CONTEXT_LEN = 8192
SIMULATED_VOCAB_SIZE = 49152


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
