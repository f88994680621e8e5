"""The lean HTTP client against a real server of the standard library."""

import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

import pytest

from service.keepalive import AnswerError, KeepAlive


class Echo(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    wbufsize = 0  # the head and the body arrive apart

    def do_POST(self) -> None:
        body = self.rfile.read(int(self.headers["content-length"]))
        self.send_response(202 if self.path == "/echo" else 404)
        length = len(body) + (1 if self.path == "/short" else 0)
        self.send_header("content-length", str(length))
        if self.path == "/close":
            self.send_header("connection", "close")
        self.end_headers()
        self.wfile.write(body)
        self.close_connection = self.path in {"/close", "/short"}

    def do_GET(self) -> None:
        self.send_response(200)
        body = f"{self.client_address[1]}".encode()
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, format: str, *arguments: object) -> None:
        """Not on the test's output."""


@pytest.fixture
def http() -> Iterator[KeepAlive]:
    with ThreadingHTTPServer(("127.0.0.1", 0), Echo) as server:
        thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.01})
        thread.start()
        with KeepAlive("127.0.0.1", server.server_address[1], timeout_s=5.0) as client:
            yield client
        server.shutdown()
        thread.join()


def test_it_returns_status_and_whole_body(http: KeepAlive) -> None:
    body = bytes(range(256)) * 4000
    assert http.post("/echo", body) == (202, body)
    assert http.post("/nowhere", b"") == (404, b"")


def test_calls_share_one_connection(http: KeepAlive) -> None:
    assert http.get("/port") == http.get("/port")


def test_it_connects_again_after_the_server_closed(http: KeepAlive) -> None:
    _, before = http.get("/port")
    assert http.post("/close", b"x") == (404, b"x")
    assert http.get("/port")[1] != before


def test_a_cut_answer_is_an_error_and_the_next_call_works(http: KeepAlive) -> None:
    with pytest.raises(AnswerError, match="1 of 2 bytes"):
        http.post("/short", b"x")
    assert http.get("/port")[0] == 200
