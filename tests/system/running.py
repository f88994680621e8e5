"""A running system with what tests of its processes need: who runs, what was said, how much is learned."""

import shutil
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from tests.stack import Stack


def wait_until(condition: Callable[[], Any], *, timeout_s: float, why: str) -> Any:
    """The condition's first true value, or a failure that says what was waited for."""
    deadline_s = time.monotonic() + timeout_s
    while not (value := condition()):
        assert time.monotonic() < deadline_s, f"waited {timeout_s:g} s in vain: {why}"
        time.sleep(0.02)
    return value


def alive(pid: int) -> bool:
    """Whether a process runs (a zombie does not)."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()[0] != "Z"
    except FileNotFoundError:
        return False


def descendants(pid: int) -> set[int]:
    """All processes below this one."""
    try:
        children = {int(word) for word in Path(f"/proc/{pid}/task/{pid}/children").read_text().split()}
    except FileNotFoundError:
        return set()
    return children.union(*(descendants(child) for child in children))


class Running(Stack):
    """A `livebed up` in a directory of its own."""

    @property
    def run_dir(self) -> Path:
        return self.directory / "run"

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.http_port}"

    @property
    def log(self) -> str:
        return self.output.read_text()

    def pid_of(self, words: str) -> int:
        """The child whose command line holds these words."""
        return int(wait_until(lambda: self._pid_of(words), timeout_s=30.0, why=f"a process {words}"))

    def _pid_of(self, words: str) -> int | None:
        for pid in descendants(self.pid):
            try:
                command = Path(f"/proc/{pid}/cmdline").read_bytes().decode().replace("\0", " ")
            except FileNotFoundError:
                continue
            if words in command and " -I " not in command:  # -I: not yet the program itself
                return pid
        return None

    def step(self) -> int:
        """How many examples the served model has learned; waits while the worker that is asked still starts."""
        answers: list[dict[str, Any]] = []

        def answered() -> bool:
            status, model = self.get("/v1/model")
            answers.append(model)
            return status == 200

        wait_until(answered, timeout_s=30.0, why="a worker that is ready")
        return int(answers[-1]["step"])

    def learn(self, count: int) -> None:
        """Send so many examples and wait until they are learned."""
        before = self.step()
        events = [{"features": {"user_id": 1, "video_id": k}, "label": k % 2} for k in range(count)]
        status, answer = self.post("/v1/events", events)
        assert (status, answer["accepted"]) == (202, count)
        wait_until(lambda: self.step() >= before + count, timeout_s=30.0, why="the events are learned")


@contextmanager
def short_directory() -> Iterator[Path]:
    """A temporary directory; pytest's has too long a path for a Unix socket in it."""
    directory = Path(tempfile.mkdtemp(prefix="lb-"))
    try:
        yield directory
    finally:
        shutil.rmtree(directory)


@contextmanager
def system(**overrides: Any) -> Iterator[Running]:
    """A ready system, and nothing of it afterwards."""
    with short_directory() as directory, Running(directory, **overrides) as running:
        yield running
