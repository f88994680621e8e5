"""Streams of rows last as long as their caller likes: through messages that are refused, and not beyond a drain."""

import threading
import time
from pathlib import Path

import grpc

from service.embedding_service_pb2 import LookupEmbeddingsRequest, StreamLookupRequest
from service.embedding_service_pb2_grpc import EmbeddingServiceStub
from tests.contract.conftest import settings_in
from tests.contract.running import RunningTrainer, RunningWorker
from trainer.broker import Broker


def test_a_lookup_that_is_refused_does_not_end_the_stream(system: RunningWorker) -> None:
    lookups = [
        LookupEmbeddingsRequest(table="item", texts=["i1"]),
        LookupEmbeddingsRequest(table="nothing", texts=["i1"]),
        LookupEmbeddingsRequest(table="item", texts=["i"] * 4097),
        LookupEmbeddingsRequest(table="item", ids=b"12345"),
        LookupEmbeddingsRequest(table="user", texts=["u1", "nobody"]),
    ]
    with grpc.insecure_channel(system.grpc_target) as channel:
        messages = (StreamLookupRequest(lookup=lookup) for lookup in lookups)
        answers = list(EmbeddingServiceStub(channel).StreamLookup(messages, timeout=20))
    assert [answer.error.code for answer in answers] == ["", "unknown_table", "too_many", "invalid", ""]
    assert answers[0].rows.values == system.sdk.lookup("item", ["i1"]).vectors.tobytes()
    assert list(answers[4].rows.status) == [1, 0]


def test_a_lookup_is_answered_before_the_next_one_is_sent(system: RunningWorker) -> None:
    answered = threading.Event()

    def messages() -> object:
        yield StreamLookupRequest(lookup=LookupEmbeddingsRequest(table="item", texts=["i1"]))
        assert answered.wait(20)
        yield StreamLookupRequest(lookup=LookupEmbeddingsRequest(table="item", texts=["i2"]))

    with grpc.insecure_channel(system.grpc_target) as channel:
        stream = EmbeddingServiceStub(channel).StreamLookup(messages(), timeout=20)
        assert next(stream).rows.dim == 4
        answered.set()
        assert [answer.rows.dim for answer in stream] == [4]


def test_a_watch_that_rests_does_not_hold_up_the_drain(tmp_path: Path, broker: Broker) -> None:
    settings = settings_in(tmp_path, broker.url)
    with RunningTrainer(settings), RunningWorker(settings) as worker:
        worker.wait_ready()
        watch = worker.sdk.watch("item", interval_ms=60_000)
        next(watch)
        began_s = time.monotonic()
        worker.stop()
        assert list(watch) == []
        assert time.monotonic() - began_s < 5
