"""Who may call what, the same over HTTP and gRPC: a worker with a file of tokens, on a thread, on real sockets."""

import contextlib
import logging
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import grpc
import httpx
import pytest
from google.rpc import error_details_pb2, status_pb2
from grpc_health.v1 import health_pb2, health_pb2_grpc
from grpc_reflection.v1alpha import reflection_pb2, reflection_pb2_grpc

from service.client import CallError, Client
from service.rest import Face
from service.scopes import SCOPES, http_scope
from service.scoring_service_pb2 import ScoreRequest
from service.scoring_service_pb2_grpc import ScoringServiceStub
from service.token_file import create, revoke
from tests.contract.conftest import settings_in
from tests.contract.running import RunningTrainer, RunningWorker, wait_until
from trainer.broker import Broker

ROW = {"user_id": "u1", "item_id": "i1"}
EVENT = {"features": ROW, "label": 1}


class Guarded:
    """A worker, and a token for each scope."""

    def __init__(self, worker: RunningWorker, path: Path, tokens: dict[str, str]) -> None:
        self.worker = worker
        self.path = path
        self.tokens = tokens

    def call(self, call: str, token: str | None, *, admin: bool = False, **more: Any) -> httpx.Response:
        method, path = call.split(" ")
        client = self.worker.admin if admin else self.worker.http
        headers = more.pop("headers", {}) | ({"authorization": f"Bearer {token}"} if token is not None else {})
        return client.request(method, path, headers=headers, **more)

    def sdk(self, token: str | None) -> Client:
        return Client(self.worker.grpc_target, timeout_s=20, token=token)


@pytest.fixture(scope="module")
def guarded(tmp_path_factory: pytest.TempPathFactory, broker: Broker) -> Iterator[Guarded]:
    directory = tmp_path_factory.mktemp("g")
    path = directory / "tokens.jsonl"
    tokens = {scope: create(path, scope, [scope]) for scope in sorted(SCOPES)}
    serving = {"http_port": 0, "admin_port": 0, "grpc_port": 0, "tokens_file": str(path)}
    settings = settings_in(directory, broker.url, serving=serving)
    with RunningTrainer(settings), RunningWorker(settings) as worker:
        yield Guarded(worker.wait_ready(), path, tokens)


LOOKUP = "POST /v1/tables/user/embeddings:lookup"
PUBLIC = [
    ("POST /v1/events", [EVENT], "ingest"),
    ("POST /v1/score", {"candidates": [ROW]}, "score"),
    ("POST /v1/rank", {"candidates": [ROW]}, "score"),
    (LOOKUP, {"ids": ["u1"]}, "lookup"),
    ("GET /v1/tables/user/embeddings/u1", None, "lookup"),
]


@pytest.mark.parametrize(("call", "body", "scope"), PUBLIC)
def test_a_call_needs_a_token_with_its_scope(guarded: Guarded, call: str, body: Any, scope: str) -> None:
    without = guarded.call(call, None, json=body)
    assert (without.status_code, without.json()["code"]) == (401, "unauthenticated")
    assert without.headers["www-authenticate"] == "Bearer"
    assert without.headers["content-type"] == "application/problem+json"
    assert guarded.call(call, "lbd_made-up", json=body).status_code == 401
    for other in SCOPES - {scope}:
        refused = guarded.call(call, guarded.tokens[other], json=body)
        assert (refused.status_code, refused.json()["code"]) == (403, "permission_denied")
        assert f"the scope {scope}" in refused.json()["detail"]
    assert guarded.call(call, guarded.tokens[scope], json=body).status_code in {200, 202, 404}


def test_the_open_inference_protocol_wants_the_same_tokens_and_refuses_in_its_own_grammar(guarded: Guarded) -> None:
    call = "POST /v2/models/contract/infer"
    body = {"inputs": [{"name": "user_id", "datatype": "BYTES", "shape": [1], "data": ["u1"]}]}
    for token, status in ((None, 401), ("lookup", 403)):
        reply = guarded.call(call, token and guarded.tokens[token], json=body)
        assert (reply.status_code, list(reply.json())) == (status, ["error"])
    assert guarded.call(call, guarded.tokens["score"], json=body).status_code == 200


@pytest.mark.parametrize(
    "call", ["GET /v1/model", "GET /v1/model/versions", "GET /v1/tables", "GET /v1/info", "GET /openapi.json"]
)
def test_what_says_no_more_than_how_it_is_set_up_needs_any_token(guarded: Guarded, call: str) -> None:
    assert guarded.call(call, None).status_code == 401
    assert guarded.call(call, guarded.tokens["metrics"]).status_code == 200


@pytest.mark.parametrize(
    "call", ["GET /nowhere", "DELETE /v1/tables", "GET //livez", "GET /livez/", "GET /v1/%2e%2e/livez"]
)
def test_what_is_unknown_needs_a_token_too(guarded: Guarded, call: str) -> None:
    assert guarded.call(call, None).status_code == 401
    assert guarded.call(call, guarded.tokens["score"]).status_code in {404, 405}


@pytest.mark.parametrize("path", ["/livez", "/readyz", "/startupz"])
def test_probes_need_no_token(guarded: Guarded, path: str) -> None:
    assert guarded.call(f"GET {path}", None).status_code == 200


@pytest.mark.parametrize(
    ("call", "scope"),
    [
        ("GET /metrics", "metrics"),
        ("POST /v1/checkpoints", "admin"),
        ("POST /v1/model:release", "admin"),
        ("DELETE /v1/tables/user/embeddings/u9", "admin"),
        ("GET /openapi.json", "admin"),
        ("GET /nowhere", "admin"),
    ],
)
def test_the_admin_port_wants_admin_and_its_metrics_metrics(guarded: Guarded, call: str, scope: str) -> None:
    assert guarded.call(call, None, admin=True).status_code == 401
    for other in SCOPES - {scope}:
        assert guarded.call(call, guarded.tokens[other], admin=True).status_code == 403
    assert guarded.call(call, guarded.tokens[scope], admin=True).status_code not in {401, 403}
    assert guarded.worker.admin.get("/readyz").status_code == 200


RPC: list[tuple[Any, str]] = [
    (lambda sdk: sdk.score([ROW]), "score"),
    (lambda sdk: sdk.rank([ROW]), "score"),
    (lambda sdk: sdk.lookup("user", ["u1"]), "lookup"),
    (lambda sdk: sdk.publish([EVENT]), "ingest"),
    (lambda sdk: list(sdk.publish_stream([[EVENT], [EVENT]])), "ingest"),
]


@pytest.mark.parametrize(("call", "scope"), RPC)
def test_over_grpc_a_call_needs_a_token_with_its_scope(guarded: Guarded, call: Any, scope: str) -> None:
    wanted = {None: "unauthenticated", "lbd_made-up": "unauthenticated"}
    wanted |= {guarded.tokens[other]: "permission_denied" for other in SCOPES - {scope}}
    for token, code in wanted.items():
        with guarded.sdk(token) as sdk, pytest.raises(CallError) as refused:
            call(sdk)
        assert refused.value.code == code
    with guarded.sdk(guarded.tokens[scope]) as sdk:
        call(sdk)


def test_a_refusal_over_grpc_carries_googles_details(guarded: Guarded) -> None:
    with grpc.insecure_channel(guarded.worker.grpc_target) as channel, pytest.raises(grpc.RpcError) as raised:
        ScoringServiceStub(channel).Score(ScoreRequest(), metadata=(("x-request-id", "mine"),), timeout=20)
    error: Any = raised.value
    assert error.code() is grpc.StatusCode.UNAUTHENTICATED
    details = status_pb2.Status.FromString(dict(error.trailing_metadata())["grpc-status-details-bin"]).details
    info = error_details_pb2.ErrorInfo()
    assert details[0].Unpack(info)
    assert (info.reason, info.metadata["request_id"]) == ("UNAUTHENTICATED", "mine")


def test_health_needs_no_token_reflection_any_and_an_unknown_method_one(guarded: Guarded) -> None:
    with grpc.insecure_channel(guarded.worker.grpc_target) as channel:
        check = health_pb2_grpc.HealthStub(channel).Check
        serving = health_pb2.HealthCheckResponse.SERVING
        wait_until(lambda: check(health_pb2.HealthCheckRequest(), timeout=20).status == serving)
        ask = reflection_pb2_grpc.ServerReflectionStub(channel).ServerReflectionInfo
        unknown = channel.unary_unary("/livebed.v1.Nothing/Call")
        request = reflection_pb2.ServerReflectionRequest(list_services="")
        token = (("authorization", f"Bearer {guarded.tokens['metrics']}"),)
        admin = (("authorization", f"Bearer {guarded.tokens['admin']}"),)
        assert len(next(ask(iter([request]), metadata=token, timeout=20)).list_services_response.service) >= 5
        for call in (lambda: next(ask(iter([request]), timeout=20)), lambda: unknown(b"", timeout=20)):
            with pytest.raises(grpc.RpcError) as refused:
                call()
            assert refused.value.code() is grpc.StatusCode.UNAUTHENTICATED  # type: ignore[attr-defined]
        with pytest.raises(grpc.RpcError) as refused:
            unknown(b"", metadata=admin, timeout=20)
        assert refused.value.code() is grpc.StatusCode.UNIMPLEMENTED  # type: ignore[attr-defined]


def test_a_stream_ends_at_the_first_message_after_its_token_was_revoked(guarded: Guarded) -> None:
    token = create(guarded.path, "streaming", ["ingest"])
    wait_until(lambda: guarded.call("GET /v1/info", token).status_code == 200)
    may_send = threading.Semaphore(1)

    def batches() -> Iterator[list[dict[str, Any]]]:
        while may_send.acquire(timeout=20):
            yield [EVENT]

    with guarded.sdk(token) as sdk:
        answers = sdk.publish_stream(batches())
        assert next(answers).accepted == 1
        revoke(guarded.path, "streaming")
        wait_until(lambda: guarded.call("GET /v1/info", token).status_code == 401)
        may_send.release()
        with pytest.raises(CallError) as ended:
            next(answers)
        may_send.release()
    assert ended.value.code == "unauthenticated"


def test_tokens_are_rotated_while_the_worker_runs(guarded: Guarded) -> None:
    old = create(guarded.path, "rotated-1", ["score"])
    wait_until(lambda: guarded.call("GET /v1/info", old).status_code == 200)
    new = create(guarded.path, "rotated-2", ["score"])
    wait_until(lambda: guarded.call("GET /v1/info", new).status_code == 200)
    assert guarded.call("GET /v1/info", old).status_code == 200
    revoke(guarded.path, "rotated-1")
    wait_until(lambda: guarded.call("GET /v1/info", old).status_code == 401)
    assert guarded.call("GET /v1/info", new).status_code == 200


def test_the_openapi_document_says_which_scope_a_call_needs(guarded: Guarded) -> None:
    document = guarded.call("GET /openapi.json", guarded.tokens["score"]).json()
    score = document["paths"]["/v1/score"]["post"]
    assert score["security"] == [{"token": ["score"]}]
    assert {"401", "403"} <= set(score["responses"])
    assert "security" not in document["paths"]["/livez"]["get"]
    admin = guarded.call("GET /openapi.json", guarded.tokens["admin"], admin=True).json()
    assert admin["paths"]["/v1/checkpoints"]["post"]["security"] == [{"token": ["admin"]}]


def test_an_upload_without_a_token_is_not_read(guarded: Guarded) -> None:
    sent = 0

    def endless() -> Iterator[bytes]:
        nonlocal sent
        while True:
            sent += 65_536
            yield b" " * 65_536

    with contextlib.suppress(httpx.TransportError):  # closed under the upload, before its client looked for an answer
        assert guarded.call("POST /v1/events", None, content=endless()).status_code == 401
    assert sent < 32 * 2**20


def test_refusals_are_counted_by_reason_and_under_no_raw_path(guarded: Guarded) -> None:
    guarded.call("GET /v1/some-secret-path", None)
    metrics = guarded.call("GET /metrics", guarded.tokens["metrics"], admin=True).text
    assert 'livebed_rejected_requests_total{reason="unauthenticated"}' in metrics
    assert 'livebed_rejected_requests_total{reason="permission_denied"}' in metrics
    assert 'code="UNAUTHENTICATED",face="grpc",route="/livebed.v1.ScoringService/Score"' in metrics
    assert "secret" not in metrics


def test_no_token_gets_into_a_log_an_answer_or_a_metric(guarded: Guarded, caplog: pytest.LogCaptureFixture) -> None:
    good, bad = guarded.tokens["score"], "lbd_" + "s3cret" * 7
    said: list[str] = []
    with caplog.at_level(logging.DEBUG):
        for token in (good, bad):
            for call, body, _ in PUBLIC:
                said.append(guarded.call(call, token, json=body).text)
            said.append(guarded.call("POST /v1/score", token, content=b"{").text)
            said.append(guarded.call("GET /metrics", token, admin=True).text)
            with guarded.sdk(token) as sdk, pytest.raises(CallError) as refused:
                sdk.lookup("user", ["u1"])
            said.append(str(refused.value))
    said += [
        record.getMessage() for record in caplog.records if record.name.startswith(("livebed", "uvicorn", "asyncio"))
    ]
    said.append(guarded.call("GET /metrics", guarded.tokens["metrics"], admin=True).text)
    assert not any(secret in text for text in said for secret in (good, bad, good[4:], bad[4:]))


def test_every_route_is_in_the_table_of_scopes(guarded: Guarded) -> None:
    face = Face(guarded.worker.worker.parts)
    routes = [*face.routes(), *face.admin_routes(), ("/metrics", "GET", None)]
    missing = [(method, path) for path, method, _ in routes if http_scope(method, path) == "admin"]
    assert {f"{method} {path}" for method, path in missing} == {
        "DELETE /v1/tables/{table}/embeddings/{id}",
        "POST /v1/tables/{table}:resize",
        "POST /v1/model/versions/{version}:activate",
        "POST /v1/model:release",
        "POST /v1/checkpoints",
    }
