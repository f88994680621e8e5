"""Asking a running trainer: a Unix socket in the run directory, one JSON line each way.

The trainer answers between two steps, so a request waits for a step at most; one that takes long (a checkpoint) is
answered when it is done. Only processes of the same user reach the socket: the run directory has mode 0700.
"""

import contextlib
import json
import logging
import queue
import socket
import socketserver
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from trainer.errors import ControlRefused, ControlUnavailable

logger = logging.getLogger(__name__)

SOCKET = "trainer.sock"
MAX_LINE = 64 * 1024
MAX_WAITING = 32  # requests not yet looked at; further ones are refused as busy
ANSWER_S = 120.0  # the longest that a connection waits for the loop, a checkpoint of a large model included


class Request:
    """One question, answered exactly once: by `answer`, or by `refuse` with a short code and a sentence."""

    def __init__(self, op: str, arguments: dict[str, Any]) -> None:
        self.op = op
        self.arguments = arguments
        self._answer: dict[str, Any] = {}
        self._answered = threading.Event()

    def answer(self, **content: Any) -> None:
        """Give what was asked for, as plain JSON values."""
        self._answer = {"ok": True, **content}
        self._answered.set()

    def refuse(self, code: str, detail: str) -> None:
        """Say why not."""
        self._answer = {"ok": False, "code": code, "detail": detail}
        self._answered.set()

    def wait(self, timeout_s: float) -> dict[str, Any]:
        """The answer, or a refusal at the deadline."""
        if not self._answered.wait(timeout_s):
            return {"ok": False, "code": "timeout", "detail": f"the trainer did not answer within {timeout_s:g} s"}
        return self._answer


class ControlServer:
    """Takes requests in threads of its own and keeps them for the loop, which fetches them with `pending`."""

    def __init__(self, run_path: Path) -> None:
        """Listen on `<run_path>/trainer.sock`, in place of what a dead trainer left there."""
        self._waiting: queue.Queue[Request] = queue.Queue(MAX_WAITING)  # full: refused as busy
        self._path = run_path / SOCKET
        self._path.unlink(missing_ok=True)
        waiting = self._waiting

        class Connection(socketserver.StreamRequestHandler):
            timeout = ANSWER_S

            def handle(self) -> None:
                with contextlib.suppress(OSError):
                    line = self.rfile.readline(MAX_LINE)
                    self.wfile.write(json.dumps(_take(line, waiting)).encode() + b"\n")

        class Server(socketserver.ThreadingMixIn, socketserver.UnixStreamServer):
            daemon_threads = True

        self._server = Server(str(self._path), Connection)
        self._thread = threading.Thread(target=self._server.serve_forever, args=(0.1,), name="control", daemon=True)
        self._thread.start()

    def pending(self) -> Iterator[Request]:
        """The requests that have come in; each must be answered, now or later."""
        with contextlib.suppress(queue.Empty):
            while True:
                yield self._waiting.get_nowait()

    def close(self) -> None:
        """Stop listening; who still waits is told so."""
        self._server.shutdown()
        self._server.server_close()
        self._path.unlink(missing_ok=True)
        for request in self.pending():
            request.refuse("stopping", "the trainer is stopping")


def _take(line: bytes, waiting: "queue.Queue[Request]") -> dict[str, Any]:
    try:
        content = json.loads(line)
        request = Request(str(content.pop("op")), content)
    except (ValueError, KeyError, TypeError, AttributeError):
        return {"ok": False, "code": "malformed", "detail": "wanted one line of JSON with `op`"}
    try:
        waiting.put_nowait(request)
    except queue.Full:
        return {"ok": False, "code": "busy", "detail": f"{MAX_WAITING} requests already wait for the trainer"}
    return request.wait(ANSWER_S)


def ask(run_path: Path, op: str, *, timeout_s: float = 5.0, **arguments: Any) -> dict[str, Any]:
    """Ask the trainer that runs on this run directory.

    Raises:
        ControlUnavailable: none runs there, or it did not answer within `timeout_s`.
        ControlRefused: it cannot do that; `code` and `detail` say why.
    """
    path = run_path / SOCKET
    try:
        with socket.socket(socket.AF_UNIX) as connection:
            connection.settimeout(timeout_s)
            connection.connect(str(path))
            connection.sendall(json.dumps({"op": op, **arguments}).encode() + b"\n")
            with connection.makefile("rb") as answer:
                content: dict[str, Any] = json.loads(answer.readline())
    except (OSError, ValueError) as error:
        why = str(error) or type(error).__name__
        raise ControlUnavailable(f"no trainer answers at {path} ({why}): is `livebed up` or `train` running?") from None
    if not content.pop("ok"):
        raise ControlRefused(content["code"], content["detail"])
    return content
