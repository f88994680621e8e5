"""A lean HTTP/1.1 client for one server: one kept-alive connection, about 60 us of our own time a call.

For closed loops where a general client would cost more than the server it asks: the demo's replay and the
benchmarks. It speaks what our server answers: a status line, headers, and a body with Content-Length.
"""

import socket
from types import TracebackType
from typing import Final, Self

MAX_HEAD_BYTES: Final = 64 * 1024


class AnswerError(OSError):
    """The server's answer is not HTTP as expected here; the connection was closed."""


class KeepAlive:
    """One connection; used by one thread. After an error the next call connects again.

    with KeepAlive("127.0.0.1", 8080) as http:
        status, body = http.post("/v1/score", b'{"rows": [{"user_id": 7}]}')
    """

    def __init__(self, host: str, port: int, *, timeout_s: float = 10.0) -> None:
        """Take the address; connects at the first call."""
        self._host = host
        self._port = port
        self._timeout_s = timeout_s
        self._socket: socket.socket | None = None

    def get(self, path: str) -> tuple[int, bytes]:
        """GET: status and body. Raises OSError."""
        return self._call(f"GET {path} HTTP/1.1\r\nhost: {self._host}\r\n\r\n".encode())

    def post(self, path: str, body: bytes, *, content_type: str = "application/json") -> tuple[int, bytes]:
        """POST: status and body. Raises OSError; the server may have done what was asked."""
        head = (
            f"POST {path} HTTP/1.1\r\nhost: {self._host}\r\ncontent-type: {content_type}\r\n"
            f"content-length: {len(body)}\r\n\r\n"
        )
        return self._call(head.encode() + body)

    def close(self) -> None:
        """Close the connection, if there is one."""
        if self._socket is not None:
            self._socket.close()
            self._socket = None

    def __enter__(self) -> Self:
        """Nothing to do: the first call connects."""
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        """Close."""
        self.close()

    def _call(self, request: bytes) -> tuple[int, bytes]:
        try:
            connection = self._connected()
            connection.sendall(request)
            return self._read_answer(connection)
        except OSError:
            self.close()
            raise

    def _connected(self) -> socket.socket:
        if self._socket is None:
            self._socket = socket.create_connection((self._host, self._port), timeout=self._timeout_s)
            self._socket.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        return self._socket

    def _read_answer(self, connection: socket.socket) -> tuple[int, bytes]:
        received = b""
        while (end := received.find(b"\r\n\r\n")) < 0:
            chunk = connection.recv(65536)
            if not chunk or len(received) > MAX_HEAD_BYTES:
                raise AnswerError(f"the server closed the connection after {len(received)} bytes of an answer")
            received += chunk
        status, length, closes = _head(received[:end])
        body = bytearray(received[end + 4 :])
        while len(body) < length:
            chunk = connection.recv(length - len(body))
            if not chunk:
                raise AnswerError(f"the server closed the connection after {len(body)} of {length} bytes of a body")
            body += chunk
        if closes:
            self.close()
        return status, bytes(body)


def _head(head: bytes) -> tuple[int, int, bool]:
    """Status, content length, and whether the server closes the connection after this answer.

    >>> _head(b"HTTP/1.1 202 Accepted\\r\\ncontent-length: 12\\r\\nconnection: close")
    (202, 12, True)
    """
    lines = head.split(b"\r\n")
    words = lines[0].split(b" ", 2)
    headers = {name.lower(): value.strip() for name, _, value in (line.partition(b":") for line in lines[1:])}
    if len(words) < 2 or not words[0].startswith(b"HTTP/1.") or b"transfer-encoding" in headers:
        raise AnswerError(f"not an answer this client reads: {lines[0][:80]!r}")
    closes = headers.get(b"connection", b"").lower() == b"close"
    return int(words[1]), int(headers.get(b"content-length", b"0")), closes
