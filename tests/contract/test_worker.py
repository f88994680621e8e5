"""A worker as the supervisor runs it: a process of its own on inherited sockets."""

import re
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import httpx
import pytest

from service.client import Client
from tests.contract.conftest import settings_in
from tests.contract.running import RunningTrainer, listener, wait_until
from trainer.broker import Broker
from trainer.settings import Settings


class Process:
    """A worker process and where it answers."""

    def __init__(self, settings: Settings, path: Path) -> None:
        with socket.create_server(("127.0.0.1", 0)) as free:
            self.grpc_port = free.getsockname()[1]
        serving = settings.serving.model_copy(update={"grpc_port": self.grpc_port})
        path.write_text(settings.model_copy(update={"serving": serving}).model_dump_json())
        self.sockets = http, admin = listener(), listener()
        arguments = ["--worker", "0", "--http-fd", str(http.fileno()), "--admin-fd", str(admin.fileno())]
        self.process = subprocess.Popen(
            [sys.executable, "-W", "error", "-m", "service", "--settings", str(path), *arguments],
            pass_fds=[http.fileno(), admin.fileno()],
            stderr=subprocess.PIPE,
            text=True,
        )
        self.http = httpx.Client(base_url=f"http://127.0.0.1:{http.getsockname()[1]}", timeout=20)


@pytest.fixture
def process(tmp_path: Path, broker: Broker) -> Iterator[Process]:
    settings = settings_in(tmp_path, broker.url)
    with RunningTrainer(settings):
        started = Process(settings, tmp_path / "settings.json")
        wait_until(lambda: started.http.get("/readyz").status_code == 200, within_s=60)
        yield started
        started.http.close()
        for opened in started.sockets:
            opened.close()
        started.process.kill()
        started.process.communicate()


def test_a_worker_scores_without_torch_in_it(process: Process) -> None:
    with Client(f"127.0.0.1:{process.grpc_port}") as client:
        assert len(client.score([{"user_id": 1}]).scores) == 1
    assert process.http.post("/v1/score", json={"candidates": [{}]}).status_code == 200
    mapped = Path(f"/proc/{process.process.pid}/maps").read_text()
    assert "numba" in mapped  # the file does name what is loaded
    assert not re.search("torch|fbgemm|pyarrow|pandas", mapped)


def test_a_worker_told_to_stop_finishes_what_is_under_way_and_ends_well(process: Process) -> None:
    answered: list[int] = []

    def ask() -> None:
        while True:
            try:
                answered.append(process.http.post("/v1/score", json={"candidates": [{}] * 100}).status_code)
            except httpx.TransportError:  # no worker accepts any more
                return

    asking = threading.Thread(target=ask)
    asking.start()
    wait_until(lambda: len(answered) > 20)
    process.process.send_signal(signal.SIGTERM)
    wait_until(lambda: process.process.poll() is not None)
    for opened in process.sockets:
        opened.close()
    asking.join(30)
    assert process.process.returncode == 0
    assert set(answered) == {200}
    assert process.process.stderr is not None
    said = process.process.stderr.read()
    assert "drained" in said
    assert "Traceback" not in said


def test_a_configuration_of_no_use_ends_it_with_a_sentence(tmp_path: Path) -> None:
    settings = settings_in(tmp_path, "unix:///nowhere")
    without_log = settings.model_copy(update={"stream": settings.stream.model_copy(update={"url": None})})
    process = Process(without_log, tmp_path / "settings.json")
    began_s = time.monotonic()
    _, said = process.process.communicate(timeout=60)
    process.http.close()
    for opened in process.sockets:
        opened.close()
    assert process.process.returncode == 2
    assert "stream.url" in said
    assert "Traceback" not in said
    assert time.monotonic() - began_s < 30
