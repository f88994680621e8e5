"""Whatever comes in, nobody is answered with an error of ours, and what is answered is what the documents say."""

import contextlib
import socket
from collections import Counter
from collections.abc import Callable, Iterator
from random import Random
from typing import Any

import grpc
import orjson
import pytest
import schemathesis
from google.protobuf.message_factory import GetMessageClass
from hypothesis import HealthCheck, Phase, given, settings
from hypothesis import strategies as st
from hypothesis.errors import Unsatisfiable
from schemathesis import GenerationMode
from schemathesis.specs.openapi.checks import (
    content_type_conformance,
    response_schema_conformance,
    status_code_conformance,
)

from service import (
    embedding_service_pb2,
    event_service_pb2,
    model_service_pb2,
    open_inference_pb2,
    scoring_service_pb2,
)
from service.event_service_pb2 import PublishEventStreamRequest
from tests.contract.running import RunningWorker
from tests.fuzzing import JsonMaker, Parsers, damaged, fill
from tests.unit.worlds import every_kind

NUM_PARSED, NUM_POSTED, NUM_DAMAGED, NUM_MESSAGES = 95_000, 4_000, 300, 1_500  # together over 100,000
SHARES = 5  # of the parsed ones, so that a test stays well within its time limit
EXAMPLES = 25  # of each operation and mode, from schemathesis
PROFILE = settings(
    max_examples=EXAMPLES, deadline=None, database=None, derandomize=True, phases=[Phase.generate],
    suppress_health_check=list(HealthCheck),
)  # fmt: skip
PATHS = ("/v1/score", "/v1/rank", "/v1/events", "/v1/tables/item/embeddings:lookup", "/v1/tables/no/embeddings:lookup")
FILES = (
    scoring_service_pb2, embedding_service_pb2, event_service_pb2, model_service_pb2, open_inference_pb2,
)  # fmt: skip
# What changes the system for the tests beside; the same calls over HTTP are in the admin document.
OPERATING = {"ActivateVersion", "Release", "CreateCheckpoint", "ResizeTable"}
CALLS = {
    f"/{service.full_name}/{method.name}": GetMessageClass(method.input_type)
    for file in FILES
    for service in file.DESCRIPTOR.services_by_name.values()
    for method in service.methods
    if not (method.client_streaming or method.server_streaming)
}
METHODS = {name: kind for name, kind in CALLS.items() if name.rpartition("/")[2] not in OPERATING}
STREAM = "/livebed.v1.EventService/PublishEventStream"
OURS = {grpc.StatusCode.INTERNAL, grpc.StatusCode.UNKNOWN, grpc.StatusCode.DEADLINE_EXCEEDED}


@pytest.mark.parametrize("share", range(SHARES))
def test_no_input_makes_a_parser_fail(share: int) -> None:
    chosen, schema = every_kind()
    parsers = Parsers(schema, chosen.serving.limits, seed=share)
    parsers.run(NUM_PARSED // SHARES)
    refused = NUM_PARSED // SHARES - parsers.outcomes["ok"]
    assert refused > NUM_PARSED // SHARES // 2, parsers.outcomes  # it is bad input, and some of each kind
    assert parsers.outcomes.keys() >= {"ok", "malformed", "invalid", "unknown_feature", "too_many"}


def test_no_body_is_answered_with_an_error_of_ours(system: RunningWorker) -> None:
    maker, random = JsonMaker(Random(1)), Random(2)
    statuses = Counter[int]()
    for _ in range(NUM_POSTED):
        path, body = random.choice(PATHS), maker.body()
        answer = system.http.post(path, content=body, headers={"content-type": "application/json"})
        statuses[answer.status_code] += 1
        assert answer.status_code < 500, (path, body, answer.content)
        if answer.status_code >= 400:
            assert orjson.loads(answer.content)["code"] in {"malformed", "invalid", "unknown_feature", "too_many",
                                                            "unknown_table"}  # fmt: skip
    assert {200, 202, 400, 404, 422} <= statuses.keys(), statuses


def test_damaged_http_is_refused_or_dropped_and_the_next_request_is_answered(system: RunningWorker) -> None:
    random = Random(3)
    body = b'{"candidates":[{"user_id":"u1"}]}'
    head = b"POST /v1/score HTTP/1.1\r\nhost: x\r\ncontent-type: application/json\r\ncontent-length: %d\r\n\r\n"
    for _ in range(NUM_DAMAGED):
        given = damaged(random, head % len(body) + body)
        with socket.create_connection(("127.0.0.1", system.http_port), timeout=10) as connection:
            connection.sendall(given)
            connection.shutdown(socket.SHUT_WR)
            answer = b"".join(iter(lambda: connection.recv(65536), b""))
        assert not answer.startswith(b"HTTP/1.1 5"), (given, answer)
    assert system.http.post("/v1/score", content=body).status_code == 200


def operations(document: dict[str, Any]) -> Iterator[Any]:
    """Operations of a document, as schemathesis has them; but for streams, whose answers have no end."""
    for result in schemathesis.openapi.from_dict(document).get_all_operations():
        operation = result.ok()
        if "text/event-stream" not in orjson.dumps(operation.definition.raw).decode():
            yield operation


def check_operation(operation: Any, base_url: str, mode: GenerationMode) -> None:
    """The operation's answers to generated requests are those of the document; none is an error of ours."""

    @PROFILE
    @given(case=operation.as_strategy(generation_mode=mode))
    def check(case: Any) -> None:
        response = case.call(base_url=base_url)
        assert response.status_code != 500, (case.as_curl_command(), response.content)
        case.validate_response(
            response, checks=[status_code_conformance, content_type_conformance, response_schema_conformance]
        )

    # Of an operation that takes nothing, or any text in its path, nothing wrong can be made.
    with contextlib.suppress(*([Unsatisfiable] if mode is GenerationMode.NEGATIVE else [])):
        check()


@pytest.mark.parametrize("mode", list(GenerationMode))
def test_answers_are_what_the_public_document_says(system: RunningWorker, mode: GenerationMode) -> None:
    for operation in operations(system.http.get("/openapi.json").json()):
        check_operation(operation, f"http://127.0.0.1:{system.http_port}", mode)


def test_answers_are_what_the_admin_document_says(system: RunningWorker) -> None:
    """Bad input only: what is right there resizes tables to any size and writes checkpoints."""
    for operation in operations(system.admin.get("/openapi.json").json()):
        check_operation(operation, f"http://127.0.0.1:{system.admin_port}", GenerationMode.NEGATIVE)


def ended(call: Callable[[], Any]) -> grpc.StatusCode:
    """How a call ended."""
    try:
        call()
    except grpc.RpcError as error:
        return error.code()  # type: ignore[no-any-return]  # every error of a call has it
    return grpc.StatusCode.OK


@pytest.mark.parametrize("method", METHODS)
def test_hostile_messages_are_answered_or_refused(system: RunningWorker, method: str) -> None:
    random, codes = Random(method), Counter[grpc.StatusCode]()
    with grpc.insecure_channel(system.grpc_target) as channel:
        call = channel.unary_unary(method)
        for k in range(NUM_MESSAGES // len(METHODS)):
            message = METHODS[method]()
            fill(random, message)
            content = message.SerializeToString()
            if k % 3 == 0:
                content = random.choice((damaged(random, content), random.randbytes(random.randrange(200))))
            code = ended(lambda: call(content, timeout=10))  # noqa: B023 - called here
            codes[code] += 1
            assert code not in OURS, (method, content, code)
    if METHODS[method].DESCRIPTOR.fields:  # else any bytes are a message of unknown fields, or none
        assert codes[grpc.StatusCode.INVALID_ARGUMENT], codes


def test_hostile_messages_of_a_stream_are_answered_one_by_one(system: RunningWorker) -> None:
    random, messages = Random(4), []
    for _ in range(200):
        message = PublishEventStreamRequest()
        fill(random, message)
        messages.append(message.SerializeToString())
    with grpc.insecure_channel(system.grpc_target) as channel:
        answers = list(channel.stream_stream(STREAM)(iter(messages), timeout=60))
        assert len(answers) == len(messages)
        bad = channel.stream_stream(STREAM)(iter([b"\xff\xff"]), timeout=10)
        assert ended(lambda: list(bad)) == grpc.StatusCode.INVALID_ARGUMENT


@PROFILE
@given(content=st.binary(max_size=300) | st.just(b"\xff"))
def test_bytes_that_are_no_message_are_the_callers_fault(system: RunningWorker, content: bytes) -> None:
    with grpc.insecure_channel(system.grpc_target) as channel:
        for method in CALLS if content.startswith(b"\xff") else METHODS:
            assert ended(lambda: channel.unary_unary(method)(content, timeout=10)) not in OURS  # noqa: B023
