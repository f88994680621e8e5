"""Events in every form; accepted means in the log."""

import time
import uuid
from typing import Any

import numpy as np
import orjson
import pytest
import redis

from service.client import CallError, Client
from service.event_service_pb2 import PublishEventsRequest, PublishEventStreamRequest
from service.event_service_pb2_grpc import EventServiceStub
from tests.contract.running import RunningWorker, wait_until
from trainer.codec import EntryDecoder
from trainer.event_pb2 import EventBatch, InputColumn
from trainer.events import RawEvents
from trainer.schema import Schema
from trainer.stream import EventLog

EVENT = {"features": {"user_id": "u1", "item_id": "i1"}, "label": 1, "time_ms": 5}


def publish(system: RunningWorker, body: Any, content_type: str = "application/json") -> dict[str, Any]:
    content = body if isinstance(body, bytes) else orjson.dumps(body)
    reply = system.http.post("/v1/events", content=content, headers={"content-type": content_type})
    assert reply.status_code == 202, reply.text
    answer: dict[str, Any] = reply.json()
    return answer


def in_the_log(system: RunningWorker, stream_id: str) -> RawEvents:
    """The events of one entry, read as the trainer reads them."""
    stream = system.settings.stream
    assert stream.url is not None
    milliseconds, _, sequence = stream_id.partition("-")
    before = f"{milliseconds}-{int(sequence) - 1}" if int(sequence) else f"{int(milliseconds) - 1}-{2**63}"
    with EventLog(stream.url, stream.key) as log:
        [(found, fields), *_] = log.read(before, count=1)
    assert found == stream_id
    raw, rejected = EntryDecoder(Schema.from_settings(system.settings)).decode_entry(fields, 0)
    assert not rejected
    return raw


@pytest.mark.parametrize(
    ("body", "content_type"),
    [
        ([EVENT, EVENT], "application/json"),
        (orjson.dumps(EVENT) + b"\n" + orjson.dumps(EVENT) + b"\n", "application/x-ndjson"),
        (
            {"columns": {"user_id": ["u1", "u1"], "item_id": ["i1", "i1"]}, "labels": [1, 1], "times_ms": [5, 5]},
            "application/json; charset=utf-8",
        ),
    ],
)
def test_every_body_form_puts_the_same_events_into_the_log(system: RunningWorker, body: Any, content_type: str) -> None:
    answer = publish(system, body, content_type)
    assert (answer["accepted"], answer["duplicates"], answer["rejected"]) == (2, 0, [])
    raw = in_the_log(system, answer["stream_id"])
    assert raw.labels_B.tolist() == [1, 1]
    assert raw.event_time_ms_B.tolist() == [5, 5]
    assert set(raw.inputs.columns) == {"user_id", "item_id"}
    one = in_the_log(system, publish(system, EVENT)["stream_id"])
    assert one.inputs.columns["user_id"].ids == raw.inputs.columns["user_id"].ids[:1]  # type: ignore[index]


def test_events_over_grpc_are_those_of_json(system: RunningWorker) -> None:
    feature_event = {"entity": "item", "id": "i9", "features": {"price": 2.0, "tags": ["a", 1], "content": [1, 2, 3]}}
    by_rpc = in_the_log(system, system.sdk.publish([EVENT, feature_event]).stream_id)
    by_http = in_the_log(system, publish(system, [EVENT, feature_event])["stream_id"])
    assert by_rpc.inputs.columns.keys() == by_http.inputs.columns.keys()
    for name in ("labels_B", "event_time_ms_B", "entity_B", "entity_id_B"):
        np.testing.assert_array_equal(getattr(by_rpc, name), getattr(by_http, name))


def test_a_bad_event_is_refused_alone(system: RunningWorker) -> None:
    events = [EVENT, {"label": 1, "features": {"price": "x"}}, {"label": 3}, EVENT]
    answer = publish(system, events)
    assert answer["accepted"] == 2
    assert [(r["index"], r["code"]) for r in answer["rejected"]] == [(1, "invalid"), (2, "bad_label")]
    rpc = system.sdk.publish([{"label": 1.0, "features": {"price": float("nan")}}, EVENT])
    assert (rpc.accepted, [r[:2] for r in rpc.rejected]) == (1, [(0, "not_finite")])


def test_an_event_id_given_twice_in_a_request_is_a_duplicate(system: RunningWorker) -> None:
    events = [
        {**EVENT, "event_id": "a", "time_ms": 1},
        {**EVENT, "event_id": "a"},
        EVENT,
        EVENT,
        {**EVENT, "event_id": "b"},
    ]
    answer = publish(system, events)
    assert (answer["accepted"], answer["duplicates"]) == (4, 1)
    assert in_the_log(system, answer["stream_id"]).event_time_ms_B.tolist() == [1, 5, 5, 5]


def test_columns_over_grpc_are_stamped_when_they_are_accepted(system: RunningWorker) -> None:
    lies = np.full(2, 12345, np.int64).tobytes()
    column = InputColumn(name="user_id", strings=["u1", "u2"])
    batch = EventBatch(count=2, columns=[column], labels=np.ones(2, np.float32).tobytes(), accepted_times_us=lies)
    [answer] = stream(system, [PublishEventsRequest(batch=batch)])
    raw = in_the_log(system, answer.published.stream_id)
    assert (raw.accepted_us_B > 1_600_000_000_000_000).all()


def stream(system: RunningWorker, requests: list[PublishEventsRequest]) -> list[Any]:
    stub = EventServiceStub(system.sdk._channel)
    messages = iter([PublishEventStreamRequest(publish=request) for request in requests])
    return list(stub.PublishEventStream(messages, timeout=20))


def test_a_stream_answers_each_message_and_survives_a_bad_one(system: RunningWorker) -> None:
    good = PublishEventsRequest(batch=EventBatch(count=1, labels=np.ones(1, np.float32).tobytes()))
    bad = PublishEventsRequest(batch=EventBatch(count=513, labels=np.ones(513, np.float32).tobytes()))
    answers = stream(system, [good, bad, good])
    assert [answer.WhichOneof("answer") for answer in answers] == ["published", "error", "published"]
    assert answers[1].error.code == "too_many"
    assert answers[0].published.stream_id < answers[2].published.stream_id


def test_the_sdk_streams_batches_in_order(system: RunningWorker) -> None:
    ids = [answer.stream_id for answer in system.sdk.publish_stream([[EVENT], [EVENT, EVENT], [EVENT]])]
    assert len(ids) == 3
    assert sorted(ids) == ids


def test_an_empty_list_is_accepted_and_writes_nothing(system: RunningWorker) -> None:
    assert publish(system, []) == {"accepted": 0, "duplicates": 0, "rejected": [], "stream_id": None}


def test_a_plain_xadd_trains_the_model_that_is_served(system: RunningWorker) -> None:
    stream_settings = system.settings.stream
    assert stream_settings.url is not None
    user = f"plain-{uuid.uuid4().hex}"
    with redis.Redis.from_url(stream_settings.url) as client:
        client.xadd(stream_settings.key, {"json": orjson.dumps({"features": {"user_id": user}, "label": 1})})
    wait_until(lambda: system.sdk.lookup("user", [user]).status == ["learned"])


def test_what_was_accepted_is_in_the_answer_once_the_watermark_has_passed_it(system: RunningWorker) -> None:
    user = f"fresh-{uuid.uuid4().hex}"
    publish(system, {"features": {"user_id": user}, "label": 1})
    acknowledged_us = time.time_ns() // 1000
    answer = wait_until(lambda: (a := system.sdk.lookup("user", [user])).model.watermark_us > acknowledged_us and a)
    assert answer.status == ["learned"]


def test_counts_of_events_are_right(system: RunningWorker) -> None:
    def count(name: str) -> float:
        lines = system.admin.get("/metrics").text.splitlines()
        return float(next(line for line in lines if line.startswith(f"livebed_events_{name}_total ")).split()[1])

    before = {name: count(name) for name in ("received", "accepted", "duplicate", "rejected")}
    publish(system, [{**EVENT, "event_id": "x"}, {**EVENT, "event_id": "x"}, {"label": 7}])
    after = {name: count(name) - before[name] for name in before}
    assert after == {"received": 3, "accepted": 1, "duplicate": 1, "rejected": 1}


def test_the_sdk_names_a_member_that_an_event_does_not_have(system: RunningWorker) -> None:
    with pytest.raises(CallError, match="lable"):
        system.sdk.publish([{"lable": 1}])


@pytest.mark.parametrize("id_", [1.5, True, None, b"x"])
def test_the_sdk_refuses_what_is_no_id_instead_of_changing_it(system: RunningWorker, id_: Any) -> None:
    with pytest.raises(CallError, match="an id is"):
        system.sdk.lookup("user", [id_])


def test_a_service_that_is_not_there_is_said_plainly() -> None:
    with Client("127.0.0.1:1", timeout_s=0.5) as client, pytest.raises(CallError) as raised:
        client.lookup("user", [1])
    assert raised.value.code in {"unavailable", "deadline_exceeded"}
