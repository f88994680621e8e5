"""Every error of the table, in the one grammar of each face."""

import gzip
import http.client
import logging
import socket
from collections.abc import Iterator
from typing import Any

import grpc
import httpx
import pytest
from google.rpc import error_details_pb2, status_pb2

from service.client import CallError
from service.embedding_service_pb2 import LookupEmbeddingsRequest
from service.embedding_service_pb2_grpc import EmbeddingServiceStub
from tests.contract.running import RunningWorker, wait_until

JSON = "application/json"
LOOKUP = "/v1/tables/user/embeddings:lookup"


def problem(reply: httpx.Response) -> dict[str, Any]:
    """The reply's problem, having checked its grammar."""
    assert reply.headers["content-type"] == "application/problem+json", reply.text
    found: dict[str, Any] = reply.json()
    assert {"type", "title", "status", "detail", "instance", "code", "request_id", "errors"} <= found.keys()
    assert found["status"] == reply.status_code
    assert found["instance"] == reply.request.url.path
    assert found["request_id"] == reply.headers["x-request-id"]
    return found


@pytest.mark.parametrize(
    ("call", "body", "content_type", "expected"),
    [
        ("POST /v1/score", b"{", JSON, (400, "malformed")),
        ("POST /v1/score", b'{"candidates": [{"price": NaN}]}', JSON, (400, "malformed")),
        ("POST /v1/rank", b"", JSON, (400, "malformed")),
        ("POST /v1/events", b"{", JSON, (400, "malformed")),
        ("POST /v1/events", b'[{"label": 1, "features": {"price": Infinity}}]', JSON, (400, "malformed")),
        ("POST /v1/score", b'{"candidates": [{"colour": 1}]}', JSON, (422, "unknown_feature")),
        ("POST /v1/events", b'[{"label": 1, "features": {"colour": 1}}]', JSON, (422, "unknown_feature")),
        ("POST /v1/score", b'{"candidates": [{"content": [1, 2]}]}', JSON, (422, "invalid")),
        (f"POST {LOOKUP}", b'{"ids": [1.5]}', JSON, (422, "invalid")),
        ("POST /v1/tables/nothing/embeddings:lookup", b'{"ids": []}', JSON, (404, "unknown_table")),
        ("POST /v1/score", b"[" + b"[" * 100_000, JSON, (422, "invalid")),
        ("POST /v1/score", b'{"candidates": [' + b"{}," * 1024 + b"{}]}", JSON, (413, "too_many")),
        (f"POST {LOOKUP}", b'{"ids": [' + b"1," * 4096 + b"1]}", JSON, (413, "too_many")),
        ("POST /v1/events", b"[" + b'{"label": 1},' * 512 + b'{"label": 1}]', JSON, (413, "too_many")),
        ("POST /v1/rank", b'{"candidates": [], "top_k": 1001}', JSON, (413, "too_many")),
        ("POST /v1/rank", b'{"candidates": [], "top_k": 0}', JSON, (422, "invalid")),
        ("POST /v1/score", b"<x/>", "application/xml", (415, "unsupported_media_type")),
        ("POST /v1/score", b"{}", "application/x-www-form-urlencoded", (415, "unsupported_media_type")),
        ("GET /nowhere", None, None, (404, "not_found")),
        ("GET /docs", None, None, (404, "not_found")),
        ("GET /v1/info/", None, None, (404, "not_found")),
        ("GET /v1/score", None, None, (405, "method_not_allowed")),
        ("DELETE /v1/tables", None, None, (405, "method_not_allowed")),
    ],
)
def test_an_error_over_http_is_a_problem(
    system: RunningWorker, call: str, body: bytes | None, content_type: str | None, expected: tuple[int, str]
) -> None:
    method, path = call.split()
    headers = {"content-type": content_type} if content_type else {}
    reply = system.http.request(method, path, content=body, headers=headers)
    assert (reply.status_code, problem(reply)["code"]) == expected


def test_an_unknown_feature_of_an_event_is_named_at_its_place(system: RunningWorker) -> None:
    reply = system.http.post("/v1/events", json=[{"label": 1, "features": {"colour": 1}}])
    assert problem(reply)["errors"][0]["pointer"] == "/0"
    assert "`colour`" in problem(reply)["errors"][0]["detail"]


def test_a_method_that_is_not_allowed_says_which_are(system: RunningWorker) -> None:
    assert system.http.get("/v1/score").headers["allow"] == "POST"


def test_a_format_that_is_not_offered_is_not_acceptable(system: RunningWorker) -> None:
    for path in ("/v1/score", LOOKUP):
        reply = system.http.post(path, json={}, headers={"accept": "text/csv"})
        assert (reply.status_code, problem(reply)["code"]) == (406, "not_acceptable")


GZIPPED = {"content-type": JSON, "content-encoding": "gzip"}


def test_a_gzipped_body_says_the_same_as_a_plain_one(system: RunningWorker) -> None:
    body = b'{"candidates": [{"user_id": "u1"}], "time_ms": 1}'
    plain = system.http.post("/v1/score", content=body, headers={"content-type": JSON})
    packed = system.http.post("/v1/score", content=gzip.compress(body), headers=GZIPPED)
    assert packed.json()["scores"] == plain.json()["scores"]


@pytest.mark.parametrize(
    ("content", "encoding", "expected"),
    [
        (b"x", "br", (415, "unsupported_media_type")),
        (b"x", "gzip, gzip", (415, "unsupported_media_type")),
        (b"x", "gzip", (400, "malformed")),
        (b"", "gzip", (400, "malformed")),
        (gzip.compress(b"{}", mtime=0)[:-5], "gzip", (400, "malformed")),
        (gzip.compress(b"{}", mtime=0) + b"{}", "gzip", (400, "malformed")),
        (gzip.compress(b"{}", mtime=0)[:-8] + b"12345678", "gzip", (400, "malformed")),
        (gzip.compress(b" " * (2**21 + 1)), "gzip", (413, "too_large")),
        (gzip.compress(b" " * 2**28), "gzip", (413, "too_large")),
    ],
)
def test_a_packed_body_that_is_broken_or_too_large_unpacked_is_refused(
    system: RunningWorker, content: bytes, encoding: str, expected: tuple[int, str]
) -> None:
    headers = {"content-type": JSON, "content-encoding": encoding}
    reply = system.http.post("/v1/score", content=content, headers=headers)
    assert (reply.status_code, problem(reply)["code"]) == expected


def test_a_gzipped_body_is_unpacked_up_to_the_limit(system: RunningWorker) -> None:
    body = b'{"candidates": []}'
    packed = gzip.compress(body + b" " * (2**21 - len(body)))
    assert system.http.post("/v1/score", content=packed, headers=GZIPPED).status_code == 200


def in_chunks(num_bytes: int) -> Iterator[bytes]:
    for _ in range(num_bytes // 65_536):
        yield b" " * 65_536


@pytest.mark.parametrize("num_bytes", [2 * 2**20 + 65_536, 40 * 2**20])
@pytest.mark.parametrize("chunked", [False, True])
def test_a_body_of_too_many_bytes_is_refused_before_it_is_parsed(
    system: RunningWorker, num_bytes: int, chunked: bool
) -> None:
    content = in_chunks(num_bytes) if chunked else b" " * num_bytes
    try:
        reply = system.http.post("/v1/score", content=content, headers={"content-type": JSON})
    except httpx.TransportError:  # the connection was closed under a body far beyond any use
        assert num_bytes > 8 * 2 * 2**20
    else:
        assert reply.status_code == 413
        assert problem(reply)["limit"] == {"name": "body_bytes", "value": 2 * 2**20}
    assert system.http.get("/livez").status_code == 200


def test_a_body_at_the_limit_is_read(system: RunningWorker) -> None:
    body = b'{"candidates": []}'
    reply = system.http.post("/v1/score", content=body + b" " * (2**21 - len(body)), headers={"content-type": JSON})
    assert reply.status_code == 200


def test_a_client_that_asks_first_is_refused_before_it_sends(system: RunningWorker) -> None:
    with socket.create_connection(("127.0.0.1", system.http_port), timeout=20) as connection:
        connection.sendall(
            b"POST /v1/score HTTP/1.1\r\nhost: x\r\ncontent-length: 3000000\r\nexpect: 100-continue\r\n\r\n"
        )
        assert connection.recv(4096).startswith(b"HTTP/1.1 413 ")


def test_what_is_not_http_is_answered_as_a_problem(system: RunningWorker) -> None:
    with socket.create_connection(("127.0.0.1", system.http_port), timeout=20) as connection:
        connection.sendall(b"NONSENSE\r\n\r\n")
        reply = http.client.HTTPResponse(connection)
        reply.begin()
        assert (reply.status, reply.headers["content-type"]) == (400, "application/problem+json")


def test_a_body_that_does_not_arrive_is_given_up(system: RunningWorker) -> None:
    with socket.create_connection(("127.0.0.1", system.http_port), timeout=20) as connection:
        connection.sendall(b"POST /v1/score HTTP/1.1\r\nhost: x\r\ncontent-length: 10\r\n\r\n{")
        reply = http.client.HTTPResponse(connection)
        reply.begin()
        assert reply.status == 504


def test_of_an_error_of_ours_only_its_request_id_is_told(
    system: RunningWorker, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def fail(*_: object) -> None:
        raise RuntimeError("the secret cause")

    monkeypatch.setattr(system.worker.parts.model, "score", fail)
    with caplog.at_level(logging.ERROR):
        reply = system.http.post("/v1/score", json={"candidates": []})
    assert (reply.status_code, problem(reply)["code"]) == (500, "internal")
    assert "secret" not in reply.text
    wait_until(lambda: any(problem(reply)["request_id"] in record.getMessage() for record in caplog.records))
    with pytest.raises(CallError) as raised:
        system.sdk.score([])
    assert raised.value.code == "internal"
    assert "secret" not in str(raised.value)


@pytest.mark.parametrize(
    ("call", "code", "place"),
    [
        (lambda sdk: sdk.score([{}, {"colour": 1}]), "unknown_feature", "/candidates/1/colour"),
        (lambda sdk: sdk.score([{"price": float("nan")}]), "invalid", "/candidates/0/price"),
        (lambda sdk: sdk.score([{"content": [1.0]}]), "invalid", "/candidates/0/content"),
        (lambda sdk: sdk.score([{}] * 1025), "too_many", None),
        (lambda sdk: sdk.rank([], top_k=1001), "too_many", None),
        (lambda sdk: sdk.lookup("user", range(4097)), "too_many", None),
        (lambda sdk: sdk.lookup("nothing", [1]), "unknown_table", None),
        (lambda sdk: sdk.publish([{"label": 2, "features": {}}]), "invalid", "/0"),
        (lambda sdk: sdk.publish([{"label": 1}] * 513), "too_many", None),
        (lambda sdk: sdk.score([{"user_id": "x" * 2_100_000}]), "resource_exhausted", None),
    ],
)
def test_an_error_over_grpc_has_the_same_code_and_place(
    system: RunningWorker, call: Any, code: str, place: str | None
) -> None:
    with pytest.raises(CallError) as raised:
        call(system.sdk)
    assert raised.value.code == code
    assert [pointer for pointer, _ in raised.value.errors] == ([place] if place is not None else [])


def test_an_error_over_grpc_carries_googles_details(system: RunningWorker) -> None:
    with grpc.insecure_channel(system.grpc_target) as channel, pytest.raises(grpc.RpcError) as raised:
        EmbeddingServiceStub(channel).LookupEmbeddings(
            LookupEmbeddingsRequest(table="user", integers=range(4097)),
            metadata=(("x-request-id", "mine"),),
            timeout=20,
        )
    error: Any = raised.value
    trailing = dict(error.trailing_metadata())
    details = status_pb2.Status.FromString(trailing["grpc-status-details-bin"]).details
    info = error_details_pb2.ErrorInfo()
    assert error.code() is grpc.StatusCode.INVALID_ARGUMENT
    assert details[0].Unpack(info)
    assert (info.reason, info.domain) == ("TOO_MANY", "livebed")
    assert dict(info.metadata) == {"request_id": "mine", "limit_name": "ids", "limit_value": "4096"}
    assert trailing["x-request-id"] == "mine"


def test_refusals_are_counted_by_reason_and_requests_by_route(system: RunningWorker) -> None:
    system.http.get("/somewhere/with/a/secret")
    metrics = system.admin.get("/metrics").text
    assert 'livebed_rejected_requests_total{reason="too_many"}' in metrics
    assert 'route="/v1/tables/{table}/embeddings:lookup"' in metrics
    assert 'route="/livebed.v1.ScoringService/Score"' in metrics
    assert 'route="unmatched"' in metrics
    assert "secret" not in metrics
