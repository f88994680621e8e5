"""The control socket: asked from outside, answered by the loop."""

import socket
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.system.running import short_directory
from trainer.control import MAX_LINE, SOCKET, ControlServer, ask
from trainer.errors import ControlRefused, ControlUnavailable


def loop(server: ControlServer, stop: threading.Event) -> None:
    while not stop.wait(0.005):
        for request in server.pending():
            if request.op == "double":
                request.answer(value=2 * request.arguments["value"])
            else:
                request.refuse("unknown_op", f"no {request.op}")


@pytest.fixture
def run_path() -> Iterator[Path]:
    with short_directory() as directory:
        server, stop = ControlServer(directory), threading.Event()
        thread = threading.Thread(target=loop, args=(server, stop))
        thread.start()
        yield directory
        stop.set()
        thread.join()
        server.close()


def test_a_question_is_answered(run_path: Path) -> None:
    assert ask(run_path, "double", value=21) == {"value": 42}


def test_a_refusal_has_its_code_and_its_sentence(run_path: Path) -> None:
    with pytest.raises(ControlRefused, match="no dance") as refusal:
        ask(run_path, "dance")
    assert refusal.value.code == "unknown_op"


@pytest.mark.parametrize("line", [b"\n", b"{}\n", b"[]\n", b"{" * 100 + b"\n", b'{"op": 1' + b" " * MAX_LINE + b"}\n"])
def test_what_is_no_question_is_refused(run_path: Path, line: bytes) -> None:
    with socket.socket(socket.AF_UNIX) as connection:
        connection.settimeout(5)
        connection.connect(str(run_path / SOCKET))
        connection.sendall(line)
        with connection.makefile("rb") as answer:
            assert b"malformed" in answer.readline()
    assert ask(run_path, "double", value=1) == {"value": 2}


def test_without_a_trainer_the_error_names_the_socket(tmp_path: Path) -> None:
    with pytest.raises(ControlUnavailable, match=SOCKET):
        ask(tmp_path, "status")
