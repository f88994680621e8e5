"""Spans over OTLP, received by a collector of our own."""

import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, HTTPServer
from pathlib import Path

import grpc
import pytest
from opentelemetry.proto.collector.trace.v1.trace_service_pb2 import ExportTraceServiceRequest
from opentelemetry.proto.trace.v1.trace_pb2 import Span

from service.scoring_service_pb2 import ScoreRequest
from service.scoring_service_pb2_grpc import ScoringServiceStub
from tests.contract.conftest import settings_in
from tests.contract.running import RunningWorker
from trainer.broker import Broker

TRACE, PARENT = "0af7651916cd43dd8448eb211c80319c", "b7ad6b7169203331"
EVENT = {"features": {"user_id": "a secret id"}, "label": 1}


@pytest.fixture
def collector() -> Iterator[tuple[str, list[Span]]]:
    """Where it listens, and the spans that it got."""
    spans: list[Span] = []

    class Collect(BaseHTTPRequestHandler):
        def do_POST(self) -> None:
            body = self.rfile.read(int(self.headers["content-length"]))
            for resource in ExportTraceServiceRequest.FromString(body).resource_spans:
                spans.extend(span for scope in resource.scope_spans for span in scope.spans)
            self.send_response(200 if self.path == "/v1/traces" else 404)
            self.end_headers()

        def log_message(self, *_: object) -> None:
            """Nothing."""

    server = HTTPServer(("127.0.0.1", 0), Collect)
    thread = threading.Thread(target=server.serve_forever)
    thread.start()
    yield f"http://127.0.0.1:{server.server_port}", spans
    server.shutdown()
    thread.join()
    server.server_close()


def test_requests_are_spans_of_their_clients_trace(
    tmp_path: Path, broker: Broker, collector: tuple[str, list[Span]]
) -> None:
    endpoint, spans = collector
    parent = f"00-{TRACE}-{PARENT}-01"
    with RunningWorker(settings_in(tmp_path, broker.url, **{"serving.otel_endpoint": endpoint})) as worker:
        headers = {"traceparent": parent, "x-request-id": "mine"}
        assert worker.http.post("/v1/events", json=EVENT, headers=headers).status_code == 202
        worker.http.get("/readyz")
        with grpc.insecure_channel(worker.grpc_target) as channel, pytest.raises(grpc.RpcError):
            ScoringServiceStub(channel).Score(ScoreRequest(), timeout=10, metadata=(("traceparent", parent),))
    assert {span.name for span in spans} == {"POST /v1/events", "livebed.v1.ScoringService/Score"}
    for span in spans:
        assert (span.trace_id.hex(), span.parent_span_id.hex()) == (TRACE, PARENT)
        assert span.end_time_unix_nano > span.start_time_unix_nano
    by_name = {span.name: {one.key: one.value for one in span.attributes} for span in spans}
    assert by_name["POST /v1/events"]["http.response.status_code"].int_value == 202
    assert by_name["POST /v1/events"]["livebed.request_id"].string_value == "mine"
    assert by_name["livebed.v1.ScoringService/Score"]["rpc.grpc.status_code"].int_value == 14  # not ready
    assert "secret" not in str(spans)
