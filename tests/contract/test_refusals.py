"""Quotas, deadlines and clients that have gone, on real sockets."""

import socket
import time
from collections.abc import Iterator
from pathlib import Path

import grpc
import httpx
import orjson
import pytest

from service.client import CallError
from service.scoring_service_pb2 import ScoreRequest
from service.scoring_service_pb2_grpc import ScoringServiceStub
from tests.contract.conftest import settings_in
from tests.contract.running import RunningWorker, wait_until
from trainer.board import read
from trainer.broker import Broker

EVENTS = [{"features": {"user_id": "u1"}, "label": 1}] * 60


@pytest.fixture
def worker(tmp_path: Path, broker: Broker) -> Iterator[RunningWorker]:
    """Without a model: events need none."""
    quota = {"serving.quota.ids_per_s": 30.0, "serving.quota.burst": 50}
    with RunningWorker(settings_in(tmp_path, broker.url, **quota)) as running:
        yield running


def refused(worker: RunningWorker, reason: str) -> float:
    return read(worker.settings.metrics_path).value("livebed_rejected_requests_total", reason=reason)


def test_a_quota_counts_events_and_says_when_to_come_back(worker: RunningWorker) -> None:
    assert worker.http.post("/v1/events", json=EVENTS).status_code == 202
    reply = worker.http.post("/v1/events", json=EVENTS[:1])
    assert (reply.status_code, reply.json()["code"], reply.headers["retry-after"]) == (429, "quota_exceeded", "1")
    assert refused(worker, "quota_exceeded") == 1
    wait_until(lambda: worker.http.post("/v1/events", json=EVENTS * 5).status_code == 202, within_s=5)
    assert int(worker.http.post("/v1/events", json=EVENTS[:1]).headers["retry-after"]) >= 8


def test_a_quota_holds_over_grpc_and_in_streams(worker: RunningWorker) -> None:
    assert worker.sdk.publish(EVENTS).accepted == 60
    with pytest.raises(CallError) as raised:
        worker.sdk.publish(EVENTS[:1])
    assert (raised.value.code, raised.value.retry_after_s) == ("quota_exceeded", 1.0)
    assert worker.http.get("/livez").status_code == 200


def test_probes_that_say_no_are_no_refusals(worker: RunningWorker) -> None:
    assert worker.http.get("/readyz").status_code == 503
    assert refused(worker, "not_ready") == 0
    assert worker.http.post("/v1/score", json={"candidates": []}).status_code == 503
    assert refused(worker, "not_ready") == 1


def test_a_client_that_left_while_its_events_waited_has_none_of_them_read(worker: RunningWorker) -> None:
    body = orjson.dumps(EVENTS * 8)
    head = f"POST /v1/events HTTP/1.1\r\nhost: x\r\ncontent-length: {len(body)}\r\n\r\n".encode()
    loop = worker.loop
    loop.call_soon_threadsafe(time.sleep, 0.3)  # what the worker is busy with
    with socket.create_connection(("127.0.0.1", worker.http_port)) as connection:
        connection.sendall(head + body)
    wait_until(lambda: refused(worker, "client_gone") == 1)
    assert read(worker.settings.metrics_path).value("livebed_events_received_total") == 0


@pytest.mark.parametrize("header", ["0", "-5", "soon", "1.5", "1" * 12])
def test_a_timeout_that_is_none_is_refused(system: RunningWorker, header: str) -> None:
    reply = system.http.post("/v1/score", json={"candidates": []}, headers={"x-request-timeout-ms": header})
    assert (reply.status_code, reply.json()["code"]) == (422, "invalid")
    assert "whole milliseconds" in reply.json()["detail"]


def test_a_score_that_is_not_ready_in_time_is_not_sent(system: RunningWorker) -> None:
    body = {"candidates": [{"user_id": f"u{k}", "item_id": f"i{k}"} for k in range(1024)]}

    def score(timeout_ms: int) -> httpx.Response:
        return system.http.post("/v1/score", json=body, headers={"x-request-timeout-ms": str(timeout_ms)})

    assert (score(1).status_code, score(1).json()["code"]) == (504, "deadline_exceeded")
    assert score(4000).status_code == 200


def test_a_body_has_no_longer_than_its_client_says(system: RunningWorker) -> None:
    with socket.create_connection(("127.0.0.1", system.http_port), timeout=4) as connection:
        connection.sendall(
            b"POST /v1/score HTTP/1.1\r\nhost: x\r\nx-request-timeout-ms: 100\r\ncontent-length: 9\r\n\r\n{"
        )
        assert connection.recv(1024).startswith(b"HTTP/1.1 504 ")


def test_a_call_whose_time_is_over_is_not_worked_on(system: RunningWorker, monkeypatch: pytest.MonkeyPatch) -> None:
    """The worker is busy until after the caller's deadline; then there is nobody to work for."""
    scored = read(system.settings.metrics_path).count("livebed_queue_wait_seconds")
    with grpc.insecure_channel(system.grpc_target) as channel:
        grpc.channel_ready_future(channel).result(10)
        system.loop.call_soon_threadsafe(time.sleep, 0.5)
        with pytest.raises(grpc.RpcError) as raised:
            ScoringServiceStub(channel).Score(ScoreRequest(), timeout=0.2)
    error: grpc.RpcError = raised.value
    assert error.code() is grpc.StatusCode.DEADLINE_EXCEEDED  # type: ignore[attr-defined]
    assert read(system.settings.metrics_path).count("livebed_queue_wait_seconds") == scored
