import json

import pytest

from services.worker.config import WorkerConfig
from services.worker.opening import open_runner
from services.worker.simulated_runner import SimulatedRunner
from shared.config import StartupError


def test_a_simulated_worker_needs_no_model():
    runner = open_runner(WorkerConfig(model_kind="simulated", num_slots=99, context_len=77))
    assert isinstance(runner, SimulatedRunner)
    assert (runner.limits.num_slots, runner.limits.context_len) == (99, 77)


@pytest.mark.parametrize(("ends", "expected"), [(5, (5,)), ([5, 6], (5, 6))])
def test_a_simulated_worker_takes_vocabulary_and_end_tokens_from_the_model_it_stands_for(tmp_path, ends, expected):
    config = {"vocab_size": 321, "eos_token_id": ends, "max_position_embeddings": 64}
    (tmp_path / "config.json").write_text(json.dumps(config))
    limits = open_runner(WorkerConfig(model_kind="simulated", model_path=str(tmp_path))).limits
    assert (limits.vocab_size, limits.end_token_ids, limits.context_len) == (321, expected, 64)


@pytest.mark.parametrize(
    ("path", "message"),
    [("", "model_path is not set"), ("/does/not/exist", "'/does/not/exist' does not exist")],
)
def test_a_missing_model_is_one_clear_line(path, message):
    with pytest.raises(StartupError, match=message):
        open_runner(WorkerConfig(model_path=path))


def test_a_folder_without_a_model_names_the_missing_file(tmp_path):
    with pytest.raises(StartupError, match=r"no 'config\.json' there"):
        open_runner(WorkerConfig(model_path=str(tmp_path)))


def test_a_model_of_an_unknown_architecture_is_refused_by_name(tmp_path):
    (tmp_path / "config.json").write_text(json.dumps({"architectures": ["MambaForCausalLM"]}))
    (tmp_path / "model.safetensors").write_bytes((2).to_bytes(8, "little") + b"{}")
    with pytest.raises(StartupError, match="MambaForCausalLM"):
        open_runner(WorkerConfig(model_path=str(tmp_path)))


def test_a_damaged_weights_file_is_one_clear_line(tmp_path):
    (tmp_path / "config.json").write_text(json.dumps({"architectures": ["LlamaForCausalLM"]}))
    (tmp_path / "model.safetensors").write_bytes(b"cut off")
    with pytest.raises(StartupError, match=r"model_path .*: "):
        open_runner(WorkerConfig(model_path=str(tmp_path)))
