"""One list of settings: what the services' config Structs say is what `serve` takes and what its children get."""

import msgspec
import pytest

from radixmesh.command import serve as command
from radixmesh.errors import UsageError
from radixmesh.models.resolve import ResolvedModel
from radixmesh.serve.mesh import service_processes
from radixmesh.serve.settings import ROLES, all_settings, child_environ, load_settings
from shared.config import load_config


def test_every_setting_of_every_service_is_a_documented_flag():
    flags = {flag for option in command.serve_command.params for flag in option.opts}
    for setting in all_settings():
        assert setting.flag in flags
        assert setting.description, f"{setting.name} of {setting.roles} has no description"


def test_the_common_settings_exist():
    assert set(command._COMMON) <= {setting.name for setting in all_settings()}


def test_a_setting_of_several_services_is_listed_once_with_all_of_them():
    by_name = {setting.name: setting for setting in all_settings()}
    assert by_name["log_level"].roles == ROLES
    assert by_name["port"].roles == ("gateway",)


def test_a_child_resolves_exactly_what_its_parent_resolved(tmp_path):
    file = tmp_path / "mesh.toml"
    file.write_text('log_level = "debug"\n[gateway]\napi_keys = ["a", "b"]\nport = 1\n[scheduler]\noverlap = false\n')
    argv = [f"--config={file}", "--port=18000", "--num-slots=700"]
    settings = load_settings(argv, {"RADIXMESH_LOG_FORMAT": "json", "RADIXMESH_ROUTER_SETTLE_MS": "7"})
    environ = child_environ(settings.services, {"PATH": "/bin", "RADIXMESH_PORT": "2", "RADIXMESH_CONFIG": "gone.toml"})
    assert environ["PATH"] == "/bin"
    for role, config in settings.services.items():
        assert load_config(type(config), role, [], environ) == config
    gateway = msgspec.to_builtins(settings.services["gateway"])
    assert (gateway["port"], gateway["api_keys"], gateway["log_level"]) == (18000, ("a", "b"), "debug")


def test_keys_are_not_visible_in_the_process_list(tmp_path):
    settings = load_settings(["--api-keys=secret"], {})
    processes = service_processes(settings, ResolvedModel("tiny", tmp_path), "nats://127.0.0.1:4222", {})
    assert not any("secret" in argument for process in processes for argument in process.command)


@pytest.mark.parametrize(
    ("argv", "complaint"),
    [
        (["--port=70000"], "--port: '70000' does not fit"),
        (["--dtype=int4"], "--dtype: 'int4' is not one of auto, bfloat16, float32"),
        (["--replicas=0"], "--replicas: '0' does not fit"),
        (["--host=0.0.0.0"], "host '0.0.0.0' is reachable from outside and there are no api_keys"),
        (["--config=missing.toml"], "--config: cannot read 'missing.toml'"),
    ],
)
def test_a_wrong_setting_is_named_with_its_value(argv, complaint):
    with pytest.raises(UsageError) as caught:
        load_settings(argv, {})
    assert complaint in str(caught.value)
    assert "\n" not in str(caught.value)


def test_replicas_get_engines_of_their_own_and_share_the_cores(tmp_path):
    settings = load_settings(["--replicas=2"], {})
    processes = service_processes(settings, ResolvedModel("tiny", tmp_path), "nats://127.0.0.1:4222", {})
    assert [process.name for process in processes] == ["front", "scheduler-0", "worker-0", "scheduler-1", "worker-1"]
    workers = [process for process in processes if process.name.startswith("worker")]
    assert all(int(worker.environ["RADIXMESH_WORKER_NUM_THREADS"]) >= 1 for worker in workers)


def test_streams_end_before_what_feeds_them(tmp_path):
    processes = service_processes(load_settings([], {}), ResolvedModel("tiny", tmp_path), "nats://127.0.0.1:4222", {})
    stages = {process.name: process.stop_stage for process in processes}
    assert stages["front"] < stages["scheduler"] == stages["worker"]
