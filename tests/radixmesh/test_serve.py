"""`radixmesh serve` as a user meets it: the real model, real processes, real signals."""

import json
import os
import re
import shlex
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import httpx
import psutil
import pytest
from openai import OpenAI

from radixmesh import Client
from tests.support.default_model import default_model_folder

pytestmark = pytest.mark.slow

REPO = Path(__file__).parents[2]
START_TIMEOUT_S = 180.0
QUESTION = [{"role": "user", "content": "What is the capital of France?"}]


class Served:
    """A running `radixmesh serve` and what it printed when it was ready."""

    def __init__(self, *flags: str) -> None:
        command = [sys.executable, "-m", "radixmesh", "serve", "--port", "0", *flags]
        self.process = subprocess.Popen(
            command, cwd=REPO, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, stdin=subprocess.DEVNULL, text=True
        )
        assert self.process.stdout is not None
        self.announcement = ""
        while "curl" not in self.announcement:
            line = self.process.stdout.readline()
            assert line, f"ended with {self.process.wait()} before it was ready"
            self.announcement += line

    @property
    def base_url(self) -> str:
        found = re.search(r"http://localhost:\d+", self.announcement)
        assert found is not None
        return found[0]

    def child(self, name: str) -> psutil.Process:
        (found,) = (child for child in self.children() if name in " ".join(child.cmdline()))
        return found

    def children(self) -> list[psutil.Process]:
        return psutil.Process(self.process.pid).children(recursive=True)

    def stop(self) -> int:
        """As Ctrl-C does; the exit code."""
        self.process.send_signal(signal.SIGINT)
        return self.process.wait(30)

    def close(self) -> None:
        if self.process.poll() is None:
            self.process.kill()
            self.process.wait()
        assert self.process.stdout is not None
        self.process.stdout.close()


def serving(*flags: str) -> Iterator[Served]:
    default_model_folder()  # skips where it was not fetched
    served = Served(*flags)
    try:
        yield served
    finally:
        served.close()


@pytest.fixture(scope="module")
def served() -> Iterator[Served]:
    yield from serving()


@pytest.fixture
def own_served() -> Iterator[Served]:
    """For a test that ends it."""
    yield from serving()


def test_the_printed_curl_line_answers_paris(served):
    (line,) = (line for line in served.announcement.splitlines() if line.strip().startswith("curl"))
    arguments = shlex.split(line)
    body = json.loads(arguments[arguments.index("-d") + 1])
    headers = {"Content-Type": "application/json"}
    response = httpx.post(arguments[1], json=body, headers=headers, timeout=60, trust_env=False)
    assert "Paris" in response.json()["choices"][0]["message"]["content"]


def test_clients_and_commands_agree_with_each_other(served):
    with Client(served.base_url) as client:
        answer = client.generate(QUESTION, temperature=0)
        pieces = [chunk.text for chunk in client.stream(QUESTION, temperature=0)]
        again = client.generate(QUESTION, temperature=0)
    assert "Paris" in answer.text
    assert "".join(pieces) == answer.text == again.text
    assert again.usage.cached_tokens == again.usage.prompt_tokens - 1
    openai = OpenAI(base_url=f"{served.base_url}/v1", api_key="none")
    stream = openai.chat.completions.create(
        model="smollm2-135m-instruct", messages=QUESTION, temperature=0, stream=True
    )
    assert "".join(chunk.choices[0].delta.content or "" for chunk in stream) == answer.text
    command = [sys.executable, "-m", "radixmesh", "generate", QUESTION[0]["content"], "--chat", "--temperature", "0"]
    done = subprocess.run(
        [*command, "--base-url", served.base_url], cwd=REPO, capture_output=True, text=True, check=True
    )
    assert done.stdout.strip() == answer.text
    chat = [sys.executable, "-m", "radixmesh", "chat", "--base-url", served.base_url, "--temperature", "0"]
    done = subprocess.run(
        chat, cwd=REPO, input=f"{QUESTION[0]['content']}\n/exit\n", capture_output=True, text=True, check=True
    )
    assert done.stdout.strip() == answer.text


def test_a_killed_worker_comes_back_and_the_answer_is_the_same(served):
    with Client(served.base_url) as client:
        answer = client.generate(QUESTION, temperature=0)
        served.child("services worker").kill()
        assert client.generate(QUESTION, temperature=0).text == answer.text


def test_ctrl_c_stops_everything_within_five_seconds_while_a_stream_runs(own_served):
    children = own_served.children()
    with Client(own_served.base_url) as client:
        stream = client.stream("Once upon a time", max_tokens=4000, ignore_eos=True)
        next(stream)
        started = time.monotonic()
        assert own_served.stop() == 0
        assert time.monotonic() - started < 5
        stream.close()
    _, alive = psutil.wait_procs(children, timeout=2)
    assert not alive


def test_nothing_is_left_when_the_command_is_killed_outright(own_served):
    children = own_served.children()
    own_served.process.kill()
    gone, alive = psutil.wait_procs(children, timeout=10)
    assert not alive
    assert len(gone) == len(children) >= 4


@pytest.mark.skipif(os.cpu_count() == 1, reason="two workers need two cores")
def test_two_replicas_answer_behind_one_address():
    for served in serving("--replicas", "2", "--num-slots", "4000"):
        with Client(served.base_url) as client:
            assert "Paris" in client.generate(QUESTION, temperature=0).text
        info = httpx.get(f"{served.base_url}/server_info", timeout=10, trust_env=False).json()
        assert len(info["replicas"]) == 2
        assert served.stop() == 0
