"""Runs steps with a model: batch, forward pass, logprobs, sampling."""

from pathlib import Path

import torch
from safetensors import SafetensorError

from services.worker.batch import BatchRow, build_batch
from services.worker.config import WorkerConfig
from services.worker.memory import available_memory_bytes, check_weights_fit, pool_slots
from services.worker.model import Model, ModelConfig, UnsupportedModel, kv_bytes_per_slot, load_config, load_model
from services.worker.runner import ForwardFailed, ModelLimits, Sampled, StepPlan
from services.worker.step_sampling import sample_step
from shared.config import StartupError


class TorchRunner:
    def __init__(self, model: Model, limits: ModelLimits, device: torch.device) -> None:
        self.limits = limits
        self._model = model
        self._device = device

    @torch.inference_mode()
    def run(self, plan: StepPlan) -> Sampled:
        """Raises ForwardFailed where the pass failed as a whole, for want of memory say, and the device is sound."""
        batch = build_batch(
            [BatchRow(row.token_ids, row.start, row.sequence.extents, row.num_logits) for row in plan.rows]
        )
        try:
            logits = self._model.forward(batch)
            if plan.masks is not None:
                plan.masks.wait()
            return sample_step(logits, plan)
        except (torch.OutOfMemoryError, MemoryError) as error:
            raise ForwardFailed(f"out of memory in a step of {batch.num_tokens} tokens: {error}") from error
        except RuntimeError as error:
            if self._device.type != "cpu":
                raise  # a failed kernel may have left anything in the device's memory
            raise ForwardFailed(f"the forward pass failed: {error}") from error


# ---------------------------------------------------------------- opening


def open_torch_runner(config: WorkerConfig) -> TorchRunner:
    """Load the model and take memory for its KV. Raises StartupError with what is missing."""
    if config.num_threads:
        torch.set_num_threads(config.num_threads)
    path = Path(config.model_path)
    device = _device(config)
    try:
        model_config = load_config(path)
        dtype = _dtype(config, model_config, device)
        check_weights_fit(_weight_bytes(path), _available_bytes(device))
        num_slots = pool_slots(
            num_slots=config.num_slots,
            kv_memory_bytes=config.kv_memory_bytes,
            kv_memory_fraction=config.kv_memory_fraction,
            slot_bytes=kv_bytes_per_slot(model_config, dtype),
            available_bytes=_available_bytes(device) - _weight_bytes(path),
        )
        limits = _limits(config, model_config, num_slots)
        model = load_model(path, dtype=dtype, device=device, num_slots=num_slots, attention=_attention(config, device))
    except FileNotFoundError as error:
        raise StartupError(
            f"model_path {config.model_path!r}: no {Path(error.filename or path).name!r} there"
        ) from error
    except (UnsupportedModel, SafetensorError, ValueError) as error:
        raise StartupError(f"model_path {config.model_path!r}: {error}") from error
    return TorchRunner(model, limits, device)


def _limits(config: WorkerConfig, model: ModelConfig, num_slots: int) -> ModelLimits:
    if config.context_len > model.context_len:
        raise StartupError(f"context_len is {config.context_len}, the model takes {model.context_len}")
    return ModelLimits(
        num_slots=num_slots,
        context_len=config.context_len or model.context_len,
        vocab_size=model.vocab_size,
        end_token_ids=model.end_token_ids,
    )


def _device(config: WorkerConfig) -> torch.device:
    if config.device == "cuda" and not torch.cuda.is_available():
        raise StartupError("device is 'cuda', but torch finds no such device")
    if config.device == "auto":
        return torch.device("cuda" if torch.cuda.is_available() else "cpu")
    return torch.device(config.device)


def _dtype(config: WorkerConfig, model: ModelConfig, device: torch.device) -> torch.dtype:
    if config.dtype != "auto":
        return torch.bfloat16 if config.dtype == "bfloat16" else torch.float32
    if model.dtype == "float32":
        return torch.float32  # rounding a checkpoint changes its answers: nobody gets that without asking
    if device.type == "cuda":
        native = torch.cuda.is_bf16_supported()
    else:
        native = torch.cpu._is_avx512_bf16_supported() or torch.cpu._is_amx_tile_supported()
    return torch.bfloat16 if native else torch.float32


def _attention(config: WorkerConfig, device: torch.device) -> str:
    if config.attention_backend != "auto":
        return config.attention_backend
    return "flashinfer" if device.type == "cuda" else "cpu"


def _available_bytes(device: torch.device) -> int:
    if device.type == "cuda":
        return int(torch.cuda.mem_get_info(device)[0])
    return available_memory_bytes()


def _weight_bytes(path: Path) -> int:
    files = [path] if path.is_file() else [*path.glob("*.safetensors")]
    return sum(file.stat().st_size for file in files)
