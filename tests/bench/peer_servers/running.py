"""A peer as a child process: started, waited for, asked, ended with all that it started."""

import json
import os
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path

import httpx

from tests.stack import free_port

START_S, STOP_S = 90.0, 20.0


@dataclass(frozen=True)
class Peer:
    """A server of the frozen model."""

    name: str
    module: str
    path: str
    needs: tuple[str, ...]  # packages and programs without which it is skipped

    def missing(self) -> str | None:
        """Why it cannot run here, or None."""
        for one in self.needs:
            if find_spec(one) is None and shutil.which(one) is None:
                return f"there is no {one} here"
        return None


PEERS = (
    Peer("handwritten", "tests.bench.peer_servers.handwritten", "/score", ("torch",)),
    Peer("litserve", "tests.bench.peer_servers.litserve_server", "/score", ("torch", "litserve")),
    Peer("torchserve", "tests.bench.peer_servers.torchserve_server", "/predictions/score", ("torch", "ts", "java")),
)


@contextmanager
def serving(peer: Peer, directory: Path, question: bytes) -> Iterator[tuple[int, int]]:
    """The peer's port and process, once it has answered. Raises RuntimeError, with what it said, if it does not."""
    port = free_port()
    command = [sys.executable, "-m", peer.module, str(directory), str(port)]
    said = directory / f"{peer.name}.txt"
    with said.open("wb") as output:
        process = subprocess.Popen(command, stdout=output, stderr=output, start_new_session=True)
    try:
        end = time.monotonic() + START_S
        while not _answers(port, peer.path, question):
            if process.poll() is not None or time.monotonic() > end:
                raise RuntimeError(f"{peer.name} did not come up: {said.read_text()[-2000:]}")
            time.sleep(0.2)
        yield port, process.pid
    finally:
        _end(process)


def ask(port: int, path: str, question: bytes) -> list[float]:
    """Scores of one request."""
    answer = httpx.post(
        f"http://127.0.0.1:{port}{path}", content=question, headers={"content-type": "application/json"}, timeout=30
    )
    answer.raise_for_status()
    scores: list[float] = json.loads(answer.content)["scores"]
    return scores


def _answers(port: int, path: str, question: bytes) -> bool:
    try:
        return bool(ask(port, path, question))
    except (httpx.HTTPError, OSError):
        return False


def _end(process: subprocess.Popen[bytes]) -> None:
    """Its session: TorchServe is a Java process with Python workers of its own."""
    for number in (signal.SIGTERM, signal.SIGKILL):
        try:
            os.killpg(process.pid, number)
            process.wait(STOP_S)
        except ProcessLookupError:
            return
        except subprocess.TimeoutExpired:
            continue
