"""Health through the life of a system: before a store, with a trainer, without one, without a log."""

from collections.abc import Iterator
from pathlib import Path

import grpc
import pytest
import redis
from google.protobuf.descriptor_pool import DescriptorPool
from grpc_health.v1 import health_pb2, health_pb2_grpc
from grpc_reflection.v1alpha.proto_reflection_descriptor_database import ProtoReflectionDescriptorDatabase

from service.client import CallError
from tests.contract.conftest import settings_in
from tests.contract.running import RunningTrainer, RunningWorker, wait_until
from trainer.broker import Broker

EVENT = {"features": {"user_id": "u1"}, "label": 1}
EVENTS, SCORING = "livebed.v1.EventService", "livebed.v1.ScoringService"


@pytest.fixture
def own_broker(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Broker]:
    directory = tmp_path_factory.mktemp("b")
    with Broker(directory / "files", directory / "valkey.sock") as running:
        yield running


def serving(worker: RunningWorker, service: str = "") -> bool:
    with grpc.insecure_channel(worker.grpc_target) as channel:
        request = health_pb2.HealthCheckRequest(service=service)
        status: int = health_pb2_grpc.HealthStub(channel).Check(request, timeout=20).status
    return status == health_pb2.HealthCheckResponse.SERVING


def failed(worker: RunningWorker) -> list[str]:
    checks = worker.http.get("/readyz?verbose").json()["checks"]
    return [check["name"] for check in checks if not check["ok"]]


def test_a_worker_lives_before_there_is_a_store_and_attaches_when_there_is_one(tmp_path: Path, broker: Broker) -> None:
    settings = settings_in(tmp_path, broker.url)
    with RunningWorker(settings) as worker:
        assert worker.http.get("/livez").json() == {"status": "ok"}
        for path in ("/startupz", "/readyz", "/v1/model"):
            reply = worker.http.get(path)
            assert (reply.status_code, reply.json()["code"], reply.headers["retry-after"]) == (503, "not_ready", "1")
        assert worker.http.post("/v1/score", json={"candidates": [{}]}).json()["code"] == "not_ready"
        with pytest.raises(CallError) as raised:
            worker.sdk.lookup("user", [1])
        assert (raised.value.code, raised.value.retry_after_s) == ("not_ready", 1.0)
        assert not serving(worker, SCORING)
        assert worker.sdk.publish([EVENT]).accepted == 1  # the log needs no model
        with RunningTrainer(settings):
            worker.wait_ready()
            assert worker.http.get("/startupz").status_code == 200
            wait_until(lambda: serving(worker, SCORING) and serving(worker))
            wait_until(lambda: worker.sdk.lookup("user", ["u1"]).status == ["learned"])


def test_reads_go_on_without_a_trainer_and_say_so(tmp_path: Path, broker: Broker) -> None:
    settings = settings_in(tmp_path, broker.url)
    with RunningWorker(settings) as worker:
        with RunningTrainer(settings):
            worker.wait_ready()
            assert worker.http.get("/readyz").json() == {"status": "ok"}
            before = worker.sdk.score([{"user_id": "u1"}], time_ms=1)
            wait_until(lambda: worker.sdk.score([]).model.age_ms is not None)  # it has read the log once
        assert worker.http.get("/readyz").json() == {"status": "degraded"}
        assert failed(worker) == ["trainer"]
        assert worker.http.get("/v1/model").json()["trainer"]["alive"] is False
        after = worker.sdk.score([{"user_id": "u1"}], time_ms=1)
        assert after.scores.tobytes() == before.scores.tobytes()
        assert worker.sdk.score([]).model.age_ms > (after.model.age_ms or 0) > 0  # type: ignore[operator]
        with RunningTrainer(settings):  # a new one, with its own generation: no restart is needed
            wait_until(lambda: worker.http.get("/readyz").json() == {"status": "ok"})
            assert worker.sdk.score([]).model.version > after.model.version


def test_without_a_log_events_are_refused_and_reads_go_on(tmp_path: Path, own_broker: Broker) -> None:
    settings = settings_in(tmp_path, own_broker.url)
    with RunningTrainer(settings), RunningWorker(settings) as worker:
        worker.wait_ready()
        own_broker.stop()
        reply = worker.http.post("/v1/events", json=EVENT)
        assert (reply.status_code, reply.json()["code"], reply.headers["retry-after"]) == (503, "log_unavailable", "1")
        with pytest.raises(CallError, match="log_unavailable"):
            worker.sdk.publish([EVENT])
        with pytest.raises(CallError, match="log_unavailable"):
            list(worker.sdk.publish_stream([[EVENT]]))
        assert len(worker.sdk.score([{}]).scores) == 1
        assert worker.http.get("/readyz").json()["status"] == "degraded"
        assert "log" in failed(worker)
        wait_until(lambda: not serving(worker, EVENTS))
        assert serving(worker, SCORING)


def test_a_full_log_refuses_events_as_full(tmp_path: Path, own_broker: Broker) -> None:
    settings = settings_in(tmp_path, own_broker.url)
    with RunningWorker(settings) as worker:
        with redis.Redis.from_url(own_broker.url) as client:
            client.config_set("maxmemory", 1)
        reply = worker.http.post("/v1/events", json=EVENT)
        assert (reply.status_code, reply.json()["code"]) == (507, "log_full")
        with pytest.raises(CallError, match="log_full"):
            worker.sdk.publish([EVENT])


def test_a_store_of_another_schema_is_not_read(tmp_path: Path, broker: Broker) -> None:
    settings = settings_in(tmp_path, broker.url)
    other = settings_in(tmp_path, broker.url, **{"model.hidden": [8]})
    with RunningTrainer(settings), RunningWorker(other) as worker:
        wait_until(lambda: "schema" in worker.http.get("/readyz").json()["detail"])
        assert worker.http.get("/readyz").status_code == 503


def test_a_family_that_needs_torch_is_served_too(tmp_path: Path, broker: Broker) -> None:
    same_width: dict[str, object] = {f"tables.{name}.width": 8 for name in ("user", "item", "hour")}
    settings = settings_in(tmp_path, broker.url, **{"model.family": "dlrm", **same_width})
    with RunningTrainer(settings), RunningWorker(settings) as worker:
        worker.wait_ready()
        worker.sdk.publish([EVENT] * 10)
        wait_until(lambda: worker.sdk.lookup("user", ["u1"]).status == ["learned"])
        rows = [{"user_id": "u1"}, {"user_id": "u2"}]
        rpc = worker.sdk.score(rows, time_ms=1)
        assert rpc.scores.tolist() == worker.http.post("/v1/score", json={"rows": rows, "time_ms": 1}).json()["scores"]
        assert rpc.scores[0] != rpc.scores[1]
        assert rpc.unknown == {0: ["hour"], 1: ["user_id", "hour"]}  # no event has said when it happened


def test_the_admin_listener_has_metrics_and_health_and_nothing_else(system: RunningWorker) -> None:
    metrics = system.admin.get("/metrics")
    assert metrics.headers["content-type"].startswith("text/plain")
    for name in ("livebed_build_info", "livebed_model_age_seconds", "livebed_request_duration_seconds_bucket"):
        assert f"\n{name}" in metrics.text
    assert system.admin.get("/readyz").json() == {"status": "ok"}
    assert system.admin.get("/livez").json() == {"status": "ok"}
    assert system.admin.post("/v1/score", json={}).json()["code"] == "not_found"
    assert system.http.get("/metrics").status_code == 404


def test_reflection_describes_every_service(system: RunningWorker) -> None:
    with grpc.insecure_channel(system.grpc_target) as channel:
        described = ProtoReflectionDescriptorDatabase(channel)
        services = set(described.get_services())
        pool = DescriptorPool(described)
        methods = {
            method.name
            for name in ("EventService", "EmbeddingService", "ScoringService", "ModelService")
            for method in pool.FindServiceByName(f"livebed.v1.{name}").methods
        }
    assert {"grpc.health.v1.Health", "grpc.reflection.v1alpha.ServerReflection", EVENTS, SCORING} <= services
    reading = {"LookupEmbeddings", "StreamLookup", "WatchEmbeddings", "Score", "Rank"}
    operating = {"ActivateVersion", "Release", "CreateCheckpoint", "ResizeTable", "ForgetEmbedding"}
    asking = {"GetModel", "ListVersions", "InspectEmbedding"}
    assert methods >= {"PublishEvents", "PublishEventStream"} | reading | operating | asking
