"""The console's stream: what it says, how many may listen, when it ends; and what every reply says of the model."""

import time
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path

import grpc
import httpx
import msgspec
import pytest

from service.client import Changed, Client
from service.embedding_service_pb2 import LookupEmbeddingsRequest
from service.embedding_service_pb2_grpc import EmbeddingServiceStub
from service.live_feed import MAX_LISTENERS, LiveAnswer
from tests.contract.conftest import settings_in
from tests.contract.running import RunningTrainer, RunningWorker, wait_until
from trainer import board
from trainer.broker import Broker

DURATION = "livebed_request_duration_seconds"
STAGES = ["queue", "gather", "model", "total"]


def objects(reply: httpx.Response) -> Iterator[LiveAnswer]:
    for line in reply.iter_lines():
        if line.startswith("data: {"):
            yield msgspec.json.decode(line.removeprefix("data: "), type=LiveAnswer)


def stages_of(timing: str) -> list[str]:
    return [part.partition(";")[0] for part in timing.split(", ")]


def test_a_listener_gets_an_object_a_second_with_what_happened_in_it(system: RunningWorker) -> None:
    event = {"features": {"user_id": "u1", "item_id": "i1"}, "label": 1}
    with system.http.stream("GET", "/v1/live", headers={"accept": "text/event-stream"}) as reply:
        assert reply.headers["content-type"].startswith("text/event-stream")
        stream = objects(reply)
        first, began_s = next(stream), time.monotonic()
        system.sdk.publish([event] * 50)
        system.sdk.lookup("item", ["i1"] * 20)
        second = next(stream)
        took_s = time.monotonic() - began_s
    assert (first.events.accepted, first.requests.answered) == (None, None)
    assert 0.8 < took_s < 3
    assert 0.5 * 50 < second.events.accepted * took_s < 1.5 * 50
    assert 0.5 * 20 < second.requests.ids_looked_up * took_s < 1.5 * 20
    assert second.requests.answered > 0
    assert second.step is not None and first.step is not None and second.step >= first.step > 0
    assert second.model is not None and int(second.model.version) >= int(first.model.version)
    assert {table.name: table.rows for table in second.tables}["user"] >= 10
    assert second.trainer_alive
    assert second.publishing == "live"


@pytest.mark.parametrize("route", ["/v1/live", "/livebed.v1.EmbeddingService/WatchEmbeddings"])
def test_how_long_a_caller_stays_is_no_request_duration(system: RunningWorker, route: str) -> None:
    def counted() -> board.Snapshot:
        return board.read(system.settings.metrics_path)

    before = counted()
    began_s = time.monotonic()
    if route == "/v1/live":
        with system.http.stream("GET", route) as reply:
            for _, _ in zip(range(2), objects(reply), strict=False):
                pass
    else:
        with Client(system.grpc_target) as client:
            list(zip(range(2), _steps(client.watch("item", interval_ms=500), system), strict=False))
    lasted_s = time.monotonic() - began_s
    wait_until(lambda: counted().since(before).count(DURATION, route=route) == 1)
    assert counted().since(before).mean(DURATION, route=route) < 0.5 * lasted_s


def _steps(watch: Iterator[Changed], system: RunningWorker) -> Iterator[Changed]:
    """The beginning of a watch, and a change, which its second look half a second later finds."""
    yield next(watch)
    system.sdk.publish([{"features": {"user_id": "u1", "item_id": "i1"}, "label": 1}])
    yield next(watch)


def test_listeners_are_bounded_and_one_that_goes_makes_room(system: RunningWorker) -> None:
    with ExitStack() as stack:
        opened = [stack.enter_context(system.http.stream("GET", "/v1/live")) for _ in range(MAX_LISTENERS)]
        assert {reply.status_code for reply in opened} == {200}
        refused = system.http.get("/v1/live")
        assert (refused.status_code, refused.json()["code"]) == (503, "overloaded")
        opened[0].close()
        wait_until(lambda: _status(system) == 200)


def _status(system: RunningWorker) -> int:
    with system.http.stream("GET", "/v1/live") as reply:
        return reply.status_code


def test_a_listener_does_not_hold_up_the_drain_and_is_told_of_it(tmp_path: Path, broker: Broker) -> None:
    settings = settings_in(tmp_path, broker.url)
    with RunningTrainer(settings), RunningWorker(settings) as worker:
        worker.wait_ready()
        with worker.http.stream("GET", "/v1/live") as reply:
            lines = reply.iter_lines()
            assert next(lines).startswith("retry: ")
            began_s = time.monotonic()
            worker.stop()
            assert [line for line in lines if line][-2:] == ["event: end", "data: draining"]
        assert time.monotonic() - began_s < 5


def test_every_call_that_reads_the_model_says_where_its_time_went(system: RunningWorker) -> None:
    for path, body in (
        ("/v1/score", {"rows": [{}]}),
        ("/v1/rank", {"rows": [{}]}),
        ("/v1/tables/item/embeddings:lookup", {"ids": ["i1"]}),
    ):
        assert stages_of(system.http.post(path, json=body).headers["server-timing"]) == STAGES
    with grpc.insecure_channel(system.grpc_target) as channel:
        lookup = EmbeddingServiceStub(channel).LookupEmbeddings
        _, call = lookup.with_call(LookupEmbeddingsRequest(table="item", texts=["i1"]), timeout=20)
    assert stages_of(dict(call.trailing_metadata())["server-timing"]) == STAGES


def test_errors_and_answers_without_rows_say_which_model_is_served(system: RunningWorker) -> None:
    for reply in (
        system.http.post("/v1/score", json={"rows": [{"colour": 1}]}),
        system.http.get("/nowhere"),
        system.http.get("/v1/info"),
        system.http.post("/v1/events", json=[]),
        system.admin.get("/livez"),
    ):
        assert int(reply.headers["x-model-version"]) > 0
        assert 0 <= int(reply.headers["x-model-age-ms"]) < 5000
        assert reply.headers["x-request-id"]
    with grpc.insecure_channel(system.grpc_target) as channel, pytest.raises(grpc.RpcError) as refused:
        EmbeddingServiceStub(channel).LookupEmbeddings(LookupEmbeddingsRequest(table="nothing"), timeout=20)
    trailing = dict(refused.value.trailing_metadata())
    assert int(trailing["x-model-version"]) > 0
    assert int(trailing["x-model-age-ms"]) < 5000
