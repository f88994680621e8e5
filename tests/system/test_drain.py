"""The end of a system under load: who looks at readiness loses nothing, and what is under way is answered."""

import signal
import socket
import threading
from collections.abc import Callable

import grpc
import pytest
from grpc_health.v1 import health_pb2, health_pb2_grpc

from service.client import Client
from service.keepalive import KeepAlive
from tests.system.running import Running, system

pytestmark = pytest.mark.alone

SCORE = b'{"rows": [{"user_id": 1, "video_id": 2}]}'
EVENT = b'[{"features": {"user_id": 1, "video_id": 1}, "label": 1}]'
SERVING = health_pb2.HealthCheckResponse.SERVING


def over_http(running: Running, counts: list[int]) -> None:
    """A client on one kept connection that asks for readiness before each request; any failure is raised."""
    with KeepAlive("127.0.0.1", running.http_port) as client:
        while client.get("/readyz")[0] == 200:
            assert client.post("/v1/score", SCORE)[0] == 200
            assert client.post("/v1/events", EVENT)[0] == 202
            counts.append(1)


def over_grpc(running: Running, counts: list[int]) -> None:
    """The same over gRPC, with the health service."""
    target = f"127.0.0.1:{running.grpc_port}"
    with Client(target) as client, grpc.insecure_channel(target) as channel:
        health = health_pb2_grpc.HealthStub(channel)
        while health.Check(health_pb2.HealthCheckRequest(), timeout=5).status == SERVING:
            assert len(client.score([{"user_id": 1, "video_id": 2}]).scores) == 1
            assert client.publish([{"features": {"user_id": 1, "video_id": 1}, "label": 1}]).accepted == 1
            counts.append(1)


@pytest.mark.parametrize("num_workers", [1, 2])
def test_nothing_fails_for_clients_that_look_at_readiness(num_workers: int) -> None:
    failed: list[BaseException] = []
    counts: list[int] = []

    def watched(client: Callable[[Running, list[int]], None]) -> None:
        try:
            client(running, counts)
        except BaseException as error:
            failed.append(error)

    with system(serving__workers=num_workers) as running:
        clients = [threading.Thread(target=watched, args=(one,)) for one in (over_http, over_http, over_grpc)]
        for client in clients:
            client.start()
        running.wait_until(lambda: len(counts) > 60, "load")
        assert running.stop(signal.SIGTERM) == 0
        for client in clients:
            client.join(30)
    assert failed == []


def test_a_request_under_way_is_answered_before_the_end() -> None:
    with system() as running, socket.create_connection(("127.0.0.1", running.http_port), timeout=20) as slow:
        head = f"POST /v1/score HTTP/1.1\r\nhost: x\r\ncontent-length: {len(SCORE)}\r\n\r\n".encode()
        slow.sendall(head + SCORE[:5])
        running.wait_until(lambda: running.get("/livez")[0] == 200, "the worker to have read the head")
        stopping = threading.Thread(target=lambda: statuses.append(running.stop(signal.SIGTERM)))
        statuses: list[int] = []
        stopping.start()
        running.wait_until(lambda: "draining" in running.log, "the drain to begin")
        running.wait_until(lambda: not accepts(running), "no more connections")
        slow.sendall(SCORE[5:])
        assert slow.recv(4096).startswith(b"HTTP/1.1 200 ")
        stopping.join(30)
        assert statuses == [0]
        assert "Traceback" not in running.log


def accepts(running: Running) -> bool:
    """Whether a worker still answers new connections (the supervisor's own socket is open to the end)."""
    try:
        with socket.create_connection(("127.0.0.1", running.http_port), timeout=0.3) as probe:
            probe.sendall(b"GET /livez HTTP/1.1\r\nhost: x\r\n\r\n")
            probe.settimeout(0.3)
            return probe.recv(16) != b""
    except OSError:
        return False
