"""What a user meets at the command line: help, exit codes, and one clear line for each mistake."""

import os
import socket
import subprocess
import sys
from pathlib import Path

import pytest

REPO = Path(__file__).parents[2]


def radixmesh(*arguments: str, stdin: str = "", **environ: str) -> subprocess.CompletedProcess[str]:
    inherited = {name: value for name, value in os.environ.items() if not name.startswith("RADIXMESH_")}
    return subprocess.run(
        [sys.executable, "-m", "radixmesh", *arguments],
        input=stdin,
        env=inherited | environ,
        cwd=REPO,
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )


def assert_one_line(done: subprocess.CompletedProcess[str], code: int, *parts: str) -> None:
    assert done.returncode == code, done.stderr
    lines = (done.stdout + done.stderr).strip().splitlines()
    assert len(lines) == 1, lines
    for part in parts:
        assert part in lines[0]


@pytest.fixture
def taken_port() -> int:
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        listener.listen()
        yield listener.getsockname()[1]


def test_help_names_every_command():
    done = radixmesh("--help")
    assert done.returncode == 0
    for command in ("serve", "generate", "chat", "models", "settings"):
        assert f"  {command} " in done.stdout


def test_the_command_needs_no_service_and_no_torch_to_start():
    script = "import sys, radixmesh.__main__; print([m for m in ('torch', 'nats', 'numpy', 'opentelemetry') if m in sys.modules])"
    done = subprocess.run([sys.executable, "-c", script], cwd=REPO, capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"


def test_a_misspelt_flag_is_wrong_usage_with_a_hint():
    done = radixmesh("serve", "--prot", "8000")
    assert done.returncode == 2
    assert "--port" in done.stderr


def test_a_wrong_value_is_wrong_usage():
    assert_one_line(radixmesh("serve", "--dtype", "int4"), 2, "--dtype", "int4", "float32")


def test_a_taken_port_is_named(taken_port):
    assert_one_line(
        radixmesh("serve", "--port", str(taken_port)), 1, f"port {taken_port} on 127.0.0.1 is taken", "--port"
    )


def test_an_unknown_model_is_named_with_what_could_be_given(tmp_path):
    done = radixmesh("serve", "--port", "0", "--model", "smollm", RADIXMESH_CACHE=str(tmp_path))
    assert_one_line(done, 1, "'smollm' not found", "smollm2-135m-instruct", "hub id")


def test_an_absent_nats_server_is_named():
    done = radixmesh("serve", "--port", "0", "--nats-url", "nats://127.0.0.1:1")
    assert_one_line(done, 1, "NATS at nats://127.0.0.1:1 is not reachable")


def test_talking_without_a_server_says_how_to_start_one():
    done = radixmesh("generate", "Hello", "--base-url", "http://127.0.0.1:1")
    assert_one_line(done, 1, "no server answers at http://127.0.0.1:1", "radixmesh serve", "--base-url")
    assert radixmesh("chat", "--base-url", "http://127.0.0.1:1").returncode == 1


def test_models_are_listed_with_their_state(tmp_path):
    done = radixmesh("models", "list", RADIXMESH_CACHE=str(tmp_path), COLUMNS="120")
    assert done.returncode == 0
    assert "smollm2-135m-instruct" in done.stdout
    assert str(tmp_path) in done.stdout
