"""The whole system as a user starts it: `livebed up` in its own process and directory, on free ports."""

import http.client
import json
import os
import signal
import socket
import subprocess
import sys
import time
from pathlib import Path
from types import TracebackType
from typing import Any, Self

from service.examples import KUAIRAND
from trainer.settings import Settings

START_S = 60.0
STOP_S = 30.0


def free_port() -> int:
    """A port that was free a moment ago."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


class Stack:
    """`with Stack(directory) as stack: stack.post("/v1/score", {...})`."""

    def __init__(self, directory: Path, *, configuration: Path = KUAIRAND / "livebed.yaml", **overrides: Any) -> None:
        self.directory = directory
        self.configuration = configuration
        self.http_port, self.admin_port, self.grpc_port = (free_port() for _ in range(3))
        self.environment = {
            "LIVEBED_SERVING__HTTP_PORT": str(self.http_port),
            "LIVEBED_SERVING__ADMIN_PORT": str(self.admin_port),
            "LIVEBED_SERVING__GRPC_PORT": str(self.grpc_port),
            "LIVEBED_DATA_DIR": str(directory / "data"),
            "LIVEBED_RUN_DIR": str(directory / "run"),
            **{f"LIVEBED_{name.upper()}": json.dumps(value) for name, value in overrides.items()},
        }
        self.settings = Settings.load(configuration, environment=self.environment)
        self.output = directory / "output.txt"
        self._process: subprocess.Popen[bytes] | None = None

    def __enter__(self) -> Self:
        """Start, and wait until it serves."""
        self.directory.mkdir(parents=True, exist_ok=True)
        environment = {**os.environ, **self.environment}
        command = [sys.executable, "-m", "service.cli", "up", "-c", str(self.configuration)]
        with self.output.open("ab") as output:
            self._process = subprocess.Popen(
                command, env=environment, stdout=output, stderr=output, start_new_session=True
            )
        self.wait_until(self.is_ready, f"{' '.join(command)} to serve", START_S)
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        """Stop as Ctrl-C does."""
        self.stop()

    def stop(self, number: int = signal.SIGINT) -> int:
        """Send a signal to the supervisor and wait for it; its exit status."""
        assert self._process is not None
        if self._process.poll() is None:
            self._process.send_signal(number)
        try:
            return self._process.wait(STOP_S)
        except subprocess.TimeoutExpired:
            os.killpg(self._process.pid, signal.SIGKILL)
            raise

    @property
    def pid(self) -> int:
        """The supervisor's process id."""
        assert self._process is not None
        return self._process.pid

    def is_ready(self) -> bool:
        """Whether the service answers that it is ready."""
        assert self._process is not None
        if self._process.poll() is not None:
            said = self.output.read_text()[-3000:]
            raise AssertionError(f"livebed up ended with {self._process.returncode}:\n{said}")
        try:
            return self.get("/readyz")[0] == 200
        except OSError:
            return False

    def wait_until(self, condition: Any, what: str, deadline_s: float = 20.0) -> None:
        """Ask until it is so, or fail saying what did not come."""
        end = time.monotonic() + deadline_s
        while not condition():
            if time.monotonic() > end:
                raise AssertionError(f"waited {deadline_s:g} s for {what}:\n{self.output.read_text()[-3000:]}")
            time.sleep(0.01)

    def connection(self) -> http.client.HTTPConnection:
        """A connection of one's own; keep-alive."""
        return http.client.HTTPConnection("127.0.0.1", self.http_port, timeout=10)

    def request(
        self, method: str, path: str, body: bytes | None = None, *, admin: bool = False, **headers: str
    ) -> tuple[int, Any]:
        """One request on a new connection: status, and the body as JSON if it is."""
        connection = http.client.HTTPConnection("127.0.0.1", self.admin_port if admin else self.http_port, timeout=10)
        try:
            named = {name.replace("_", "-"): value for name, value in headers.items()}
            connection.request(method, path, body, named)
            response = connection.getresponse()
            content = response.read()
            is_json = "json" in (response.getheader("content-type") or "")
            return response.status, json.loads(content) if is_json else content
        finally:
            connection.close()

    def get(self, path: str, *, admin: bool = False) -> tuple[int, Any]:
        """GET."""
        return self.request("GET", path, admin=admin)

    def post(self, path: str, body: Any) -> tuple[int, Any]:
        """POST JSON."""
        return self.request("POST", path, json.dumps(body).encode(), content_type="application/json")
