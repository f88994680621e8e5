"""A client that has no stubs of ours, only what reflection tells it, as grpcurl works."""

from typing import Any

import grpc
from google.protobuf import descriptor_pool, message_factory
from grpc_reflection.v1alpha.proto_reflection_descriptor_database import ProtoReflectionDescriptorDatabase

from tests.contract.running import RunningWorker

TIME_MS = 1_700_000_000_000


class Reflected:
    """Calls methods by their names."""

    def __init__(self, channel: grpc.Channel) -> None:
        self._channel = channel
        self._pool = descriptor_pool.DescriptorPool(ProtoReflectionDescriptorDatabase(channel))

    def request(self, service: str, method: str) -> Any:
        """An empty request of a method."""
        found = self._pool.FindServiceByName(service).methods_by_name[method]
        return message_factory.GetMessageClass(found.input_type)()

    def call(self, service: str, method: str, request: Any) -> Any:
        """The answer to a request."""
        found = self._pool.FindServiceByName(service).methods_by_name[method]
        answer = message_factory.GetMessageClass(found.output_type)
        caller = self._channel.unary_unary(
            f"/{service}/{method}",
            request_serializer=lambda message: message.SerializeToString(),
            response_deserializer=answer.FromString,
        )
        return caller(request, timeout=20)


def test_a_client_that_knows_only_reflection_scores_and_looks_up(system: RunningWorker) -> None:
    with grpc.insecure_channel(system.grpc_target) as channel:
        reflected = Reflected(channel)
        asked = reflected.request("livebed.v1.ScoringService", "Score")
        asked.time_ms = TIME_MS
        asked.candidates.add().values["item_id"].text = "i1"
        scored = reflected.call("livebed.v1.ScoringService", "Score", asked)
        wanted = reflected.request("livebed.v1.EmbeddingService", "LookupEmbeddings")
        wanted.table = "item"
        wanted.texts.extend(["i1", "never seen"])
        found = reflected.call("livebed.v1.EmbeddingService", "LookupEmbeddings", wanted)
    assert scored.scores == system.sdk.score([{"item_id": "i1"}], time_ms=TIME_MS).scores.tobytes()
    assert found.values == system.sdk.lookup("item", ["i1", "never seen"]).vectors.tobytes()
    assert list(found.status) == [1, 0]
