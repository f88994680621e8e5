"""The Open Inference Protocol, as a client that nobody here wrote speaks it, and by hand where no client would."""

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import grpc
import httpx
import numpy as np
import pytest
from google.protobuf.descriptor_pb2 import FileDescriptorProto

from service import open_inference_pb2
from service.open_inference_pb2 import ModelInferRequest
from service.open_inference_pb2_grpc import GRPCInferenceServiceStub
from tests.contract.conftest import settings_in
from tests.contract.running import RunningTrainer, RunningWorker, wait_until
from trainer.board import read
from trainer.broker import Broker

TIME_MS = 1_700_000_000_000
NUM_ROWS = 40
ROWS: list[dict[str, Any]] = [
    {
        "user_id": f"u{k % 12}",
        "item_id": f"i{k % 9}" if k % 5 else f"\u00e9{k}",  # of more bytes than characters
        "previous": [f"i{j}" for j in range(k % 4)],
        "price": k * 0.37,
        "content": [k, 0.5, -k],
    }
    for k in range(NUM_ROWS)
]
TENSORS: list[list[Any]] = [
    *([name, "BYTES", [row[name] for row in ROWS]] for name in ("user_id", "item_id")),
    ["previous", "BYTES", [[*row["previous"], "", "", ""][:3] for row in ROWS]],
    ["price", "FP64", [row["price"] for row in ROWS]],
    ["content", "FP32", [row["content"] for row in ROWS]],
    ["$time_ms", "INT64", [TIME_MS]],
]
FORMS = ("http", "http-json", "grpc")
BY_FORM = {"http": "http", "http-json": "http", "grpc": "grpc"}
ITEMS = ["item_id", "BYTES", ["i1", "i2"]]


def triton(system: RunningWorker, *calls: dict[str, Any]) -> list[dict[str, Any]]:
    """What each call came to; see `triton_calls.py`."""
    arguments = [f"127.0.0.1:{system.http_port}", system.grpc_target, "contract"]
    done = subprocess.run(
        [sys.executable, "-m", "tests.contract.triton_calls", *arguments],
        input=json.dumps(calls),
        capture_output=True,
        check=False,
        text=True,
        timeout=60,
    )
    assert done.returncode == 0, done.stderr
    outcomes: list[dict[str, Any]] = json.loads(done.stdout)
    return outcomes


def scores_of(system: RunningWorker, rows: list[dict[str, Any]]) -> list[float]:
    answer = system.http.post("/v1/score", json={"rows": rows, "time_ms": TIME_MS})
    return list(answer.json()["scores"])


def infer(system: RunningWorker, body: Any, path: str = "/v2/models/contract/infer", **headers: str) -> httpx.Response:
    content = body if isinstance(body, bytes) else json.dumps(body).encode()
    named = {name.replace("_", "-"): value for name, value in headers.items()}
    return system.http.post(path, content=content, headers={"content-type": "application/json", **named})


def tensor(name: str, datatype: str, data: list[Any], shape: list[int] | None = None) -> dict[str, Any]:
    return {"name": name, "datatype": datatype, "shape": shape or [len(data)], "data": data}


def test_tritonclient_gets_the_bits_of_v1_score_over_http_binary_http_json_and_grpc(system: RunningWorker) -> None:
    outcomes = triton(system, *({"over": form, "tensors": TENSORS, "id": "my-id"} for form in FORMS))
    expected = scores_of(system, ROWS)
    assert len(set(expected)) > 20
    assert [outcome["scores"] for outcome in outcomes] == [expected] * 3
    assert {outcome["id"] for outcome in outcomes} == {"my-id"}
    assert [outcome["is_binary"] for outcome in outcomes] == [True, False, True]
    np.testing.assert_array_equal(expected, system.sdk.score(ROWS, time_ms=TIME_MS).scores)


def test_tritonclient_finds_the_server_and_the_model(system: RunningWorker) -> None:
    asked = [
        ("is_server_live", []),
        ("is_server_ready", []),
        ("is_model_ready", ["contract"]),
        ("is_model_ready", ["contract", "latest"]),
    ]
    calls = [{"over": form, "ask": ask, "arguments": a} for form in ("http", "grpc") for ask, a in asked]
    assert [outcome["said"] for outcome in triton(system, *calls)] == [True] * 8


def test_tritonclient_is_told_the_inputs_and_the_output(system: RunningWorker) -> None:
    ask = {"ask": "get_model_metadata", "arguments": ["contract"]}
    server = {"ask": "get_server_metadata", "arguments": []}
    as_json = {"options": {"as_json": True}}
    http, rpc, http_server, rpc_server = triton(
        system,
        {"over": "http", **ask},
        {"over": "grpc", **ask, **as_json},
        {"over": "http", **server},
        {"over": "grpc", **server, **as_json},
    )
    inputs = {one["name"]: (one["datatype"], one["shape"]) for one in http["said"]["inputs"]}
    assert inputs == {
        "user_id": ("BYTES", [-1]),
        "item_id": ("BYTES", [-1]),
        "previous": ("BYTES", [-1, 3]),
        "price": ("FP64", [-1]),
        "tags": ("BYTES", [-1, 4]),
        "content": ("FP32", [-1, 3]),
        "$time_ms": ("INT64", [1]),
    }
    assert http["said"]["outputs"] == [{"name": "score", "datatype": "FP32", "shape": [-1]}]
    assert http["said"]["versions"][1] == "latest"
    rpc_inputs = {one["name"]: (one["datatype"], list(map(int, one["shape"]))) for one in rpc["said"]["inputs"]}
    assert rpc_inputs == inputs
    assert "binary_tensor_data" in http_server["said"]["extensions"] == rpc_server["said"]["extensions"]


REFUSED: dict[str, tuple[dict[str, Any], str, str, str]] = {
    "another model": ({"tensors": [ITEMS], "model": "other"}, "404", "NOT_FOUND", "no model 'other'"),
    "a version that is not live": ({"tensors": [ITEMS], "version": "1"}, "404", "NOT_FOUND", "version '1' is not"),
    "a wrong shape": (
        {"tensors": [["content", "FP32", [[1, 2]]]]}, "422", "INVALID_ARGUMENT", "[1, 2], wanted [rows, 3]",
    ),
    "a list that is too long": (
        {"tensors": [["previous", "BYTES", [["a", "b", "c", "d"]]]]}, "422", "INVALID_ARGUMENT", "at most 3",
    ),
    "rows that do not match": (
        {"tensors": [ITEMS, ["price", "FP64", [1.0]]]}, "422", "INVALID_ARGUMENT", "1 rows, but 'item_id' has 2",
    ),
    "a wrong datatype": ({"tensors": [["price", "BYTES", ["1"]]]}, "422", "INVALID_ARGUMENT", "datatype is BYTES"),
    "an unknown input": ({"tensors": [["colour", "BYTES", ["x"]]]}, "422", "INVALID_ARGUMENT", "'colour' is no input"),
    "too many rows": ({"tensors": [["price", "FP64", [1.0] * 1025]]}, "413", "INVALID_ARGUMENT", "at most 1024"),
    "a text that is too long": ({"tensors": [["user_id", "BYTES", ["x" * 257]]]}, "422", "INVALID_ARGUMENT", "257"),
    "a time that is none": (
        {"tensors": [ITEMS, ["$time_ms", "INT64", [-5]]]}, "422", "INVALID_ARGUMENT", "$time_ms",
    ),
    "no input at all": ({"tensors": [["$time_ms", "INT64", [5]]]}, "422", "INVALID_ARGUMENT", "at least one tensor"),
}  # fmt: skip


def test_tritonclient_is_told_what_it_did_wrong_over_every_form(system: RunningWorker) -> None:
    calls = [{"over": form, **call} for call, *_ in REFUSED.values() for form in FORMS]
    outcomes = iter(triton(system, *calls))
    for name, (_, http, code, said) in REFUSED.items():
        for form in FORMS:
            outcome = next(outcomes)
            status = http if BY_FORM[form] == "http" else f"StatusCode.{code}"
            assert (outcome.get("status"), said in outcome.get("error", "")) == (status, True), (name, form, outcome)


@pytest.mark.parametrize("datatype", ["INT64", "INT32"])
def test_integers_are_the_ids_of_their_text_and_minus_one_pads(system: RunningWorker, datatype: str) -> None:
    rows = [{"user_id": 42, "previous": [7, 8]}, {"user_id": -3, "previous": []}]
    events = [{"features": {"user_id": user, "item_id": 7 + user % 2}, "label": user % 2} for user in (42, -3) * 10]
    step = system.http.get("/v1/model").json()["step"]
    system.sdk.publish(events)
    wait_until(lambda: system.http.get("/v1/model").json()["step"] == step + len(events))
    users, previous = ["user_id", datatype, [42, -3]], ["previous", datatype, [[7, -1, 8], [-1, -1, -1]]]
    time = ["$time_ms", "INT64", [TIME_MS]]
    outcomes = triton(system, *({"over": form, "tensors": [users, previous, time]} for form in FORMS))
    assert [outcome["scores"] for outcome in outcomes] == [scores_of(system, rows)] * 3


def test_what_is_left_out_is_filled_in_from_the_entity(system: RunningWorker) -> None:
    (outcome,) = triton(
        system, {"over": "grpc", "tensors": [["item_id", "BYTES", ["i0"]], ["$time_ms", "INT64", [TIME_MS]]]}
    )
    assert outcome["scores"] == scores_of(system, [{"item_id": "i0"}])
    assert outcome["scores"] != scores_of(system, [{"item_id": "i0", "price": 0}])


def test_no_rows_have_no_scores(system: RunningWorker) -> None:
    outcomes = triton(system, *({"over": form, "tensors": [["price", "FP64", []]]} for form in FORMS))
    assert [outcome["scores"] for outcome in outcomes] == [[]] * 3


def test_values_may_be_nested_as_their_shape_is(system: RunningWorker) -> None:
    data = [row["content"] for row in ROWS[:2]]
    nested = infer(system, {"inputs": [tensor("content", "FP32", data, [2, 3])]}).json()
    flat = infer(system, {"inputs": [tensor("content", "FP32", [*data[0], *data[1]], [2, 3])]}).json()
    assert nested["outputs"][0]["data"] == flat["outputs"][0]["data"]
    assert nested["outputs"][0]["shape"] == [2]
    assert "id" not in nested


def test_an_answer_carries_the_headers_of_every_answer(system: RunningWorker) -> None:
    reply = infer(system, {"inputs": [tensor("item_id", "BYTES", ["i1"])]}, x_request_id="mine")
    assert reply.headers["x-request-id"] == "mine"
    assert reply.headers["x-model-version"] == reply.json()["model_version"]
    assert int(reply.headers["x-model-age-ms"]) < 5000
    stages = [part.partition(";")[0] for part in reply.headers["server-timing"].split(", ")]
    assert stages == ["queue", "gather", "model", "total"]


def test_the_live_version_can_be_named_where_one_is_held_still(system: RunningWorker) -> None:
    version = system.http.get("/v2/models/contract").json()["versions"][0]
    body = {"inputs": [tensor("item_id", "BYTES", ["i1"])]}
    for name in (version, "latest"):
        reply = infer(system, body, f"/v2/models/contract/versions/{name}/infer")
        assert (reply.status_code, reply.json()["model_version"]) == (200, version)
    assert system.http.get(f"/v2/models/contract/versions/{version}/ready").json() == {
        "name": "contract",
        "ready": True,
    }


ONE = tensor("price", "FP64", [1.0])
BINARY = {"name": "price", "datatype": "FP64", "shape": [1], "parameters": {"binary_data_size": 8}}


@pytest.mark.parametrize(
    ("body", "headers", "status", "said"),
    [
        (b"{", {}, 400, "not valid JSON"),
        ({}, {}, 422, "inputs"),
        ({"inputs": [{**ONE, "shape": [-1]}]}, {}, 422, "shape"),
        ({"inputs": [{**ONE, "shape": []}]}, {}, 422, "shape"),
        ({"inputs": [{**ONE, "shape": [10**15]}]}, {}, 422, "1 values"),
        ({"inputs": [{**ONE, "datatype": "FP16"}]}, {}, 422, "FP16"),
        ({"inputs": [ONE, ONE]}, {}, 422, "twice"),
        ({"inputs": [tensor("price", "FP64", ["x"])]}, {}, 422, "Expected"),
        ({"inputs": [tensor("price", "FP64", [1e300])]}, {}, 422, "price"),
        ({"inputs": [tensor("user_id", "INT32", [2**31])]}, {}, 422, "INT32"),
        ({"inputs": [tensor("content", "FP32", [[1, 2], [3]], [1, 3])]}, {}, 422, "nested"),
        ({"inputs": [ONE], "outputs": [{"name": "logit"}]}, {}, 422, "'logit'"),
        ({"inputs": [ONE], "outputs": [{"name": "score", "parameters": {"classification": 3}}]}, {}, 422, "extension"),
        ({"inputs": [BINARY]}, {}, 422, "binary_data_size"),
        (json.dumps({"inputs": [ONE]}).encode(), {"inference_header_content_length": "9999"}, 400, "9999"),
        (json.dumps({"inputs": [ONE]}).encode(), {"inference_header_content_length": "x"}, 400, "'x'"),
        (b'{"inputs":[]}12345678', {"inference_header_content_length": "13"}, 400, "8 bytes at the body's end"),
        (b"x", {"content_type": "text/csv"}, 415, "text/csv"),
        (b"x" * (2 * 1024 * 1024 + 1), {}, 413, "at most 2097152 bytes"),
    ],
)
def test_an_error_is_in_the_protocols_own_grammar(
    system: RunningWorker, body: Any, headers: dict[str, str], status: int, said: str
) -> None:
    reply = infer(system, body, **headers)
    assert (reply.status_code, reply.headers["content-type"]) == (status, "application/json"), reply.text
    assert list(reply.json()) == ["error"]
    assert said in reply.json()["error"]


@pytest.mark.parametrize(
    ("raw", "count", "status"),
    [
        (b"\x02\x00\x00\x00\xc3\xa9", 1, 200),
        (b"\x01\x00\x00\x00\xc3", 1, 422),  # half a character
        (b"\x01\x00\x00\x00\xc3\x01\x00\x00\x00\xa9", 2, 422),  # one character across two texts
        (b"\xff\xff\xff\xff", 1, 422),
        (b"\x00" * 5, 1, 422),
        (b"\x00" * 4, 2, 422),
    ],
)
def test_bytes_are_texts_of_their_own_or_refused(system: RunningWorker, raw: bytes, count: int, status: int) -> None:
    parameters = {"binary_data_size": len(raw)}
    inputs = [{"name": "user_id", "datatype": "BYTES", "shape": [count], "parameters": parameters}]
    head = json.dumps({"inputs": inputs}).encode()
    reply = infer(system, head + raw, inference_header_content_length=str(len(head)))
    assert reply.status_code == status, reply.text


def test_a_number_that_is_not_finite_is_refused(system: RunningWorker) -> None:
    request = ModelInferRequest(model_name="contract")
    request.inputs.add(name="price", datatype="FP32", shape=[1]).contents.fp32_contents.append(float("nan"))
    with grpc.insecure_channel(system.grpc_target) as channel, pytest.raises(grpc.RpcError, match="not finite") as told:
        GRPCInferenceServiceStub(channel).ModelInfer(request, timeout=20)
    assert told.value.code() == grpc.StatusCode.INVALID_ARGUMENT


def test_contents_by_type_are_answered_by_type_with_the_same_bits(system: RunningWorker) -> None:
    request = ModelInferRequest(model_name="contract", id="7")
    users = request.inputs.add(name="user_id", datatype="BYTES", shape=[2])
    users.contents.bytes_contents.extend([b"u1", b"u2"])
    request.inputs.add(name="price", datatype="FP64", shape=[2]).contents.fp64_contents.extend([0.1, 0.2])
    request.inputs.add(name="$time_ms", datatype="INT64", shape=[1]).contents.int64_contents.append(TIME_MS)
    with grpc.insecure_channel(system.grpc_target) as channel:
        answer = GRPCInferenceServiceStub(channel).ModelInfer(request, timeout=20)
    rows = [{"user_id": "u1", "price": 0.1}, {"user_id": "u2", "price": 0.2}]
    assert list(answer.outputs[0].contents.fp32_contents) == scores_of(system, rows)
    assert (answer.id, list(answer.raw_output_contents)) == ("7", [])


def test_paths_under_v2_that_lead_nowhere_say_so_in_the_protocols_grammar(system: RunningWorker) -> None:
    for method, path, status in (
        ("GET", "/v2/models/other", 404),
        ("GET", "/v2/models/contract/versions/1/ready", 404),
        ("GET", "/v2/nowhere", 404),
        ("GET", "/v2/models/contract/infer", 405),
    ):
        reply = system.http.request(method, path)
        assert (reply.status_code, list(reply.json())) == (status, ["error"])


def test_without_a_model_it_lives_and_is_not_ready(tmp_path: Path, broker: Broker) -> None:
    with RunningWorker(settings_in(tmp_path, broker.url)) as worker:
        wait_until(lambda: "loading" not in worker.http.get("/readyz").json()["detail"])
        assert worker.http.get("/v2/health/live").json() == {"live": True}
        for path in ("/v2/health/ready", "/v2/models/contract/ready", "/v2/models/contract"):
            reply = worker.http.get(path)
            assert (reply.status_code, list(reply.json()), reply.headers["retry-after"]) == (503, ["error"], "1")
        refusals = read(worker.settings.metrics_path).value("livebed_rejected_requests_total", reason="not_ready")
        assert refusals == 1  # of the metadata: the others are probes, which say so and refuse nothing
        assert infer(worker, {"inputs": [ONE]}).status_code == 503
        asked = [("is_server_live", []), ("is_server_ready", []), ("is_model_ready", ["contract"])]
        calls = [{"over": form, "ask": ask, "arguments": a} for form in ("http", "grpc") for ask, a in asked]
        assert [outcome["said"] for outcome in triton(worker, *calls)] == [True, False, False] * 2


def test_rows_that_are_not_scored_in_time_are_not_answered(system: RunningWorker) -> None:
    body = {"inputs": [tensor("user_id", "BYTES", [f"u{k}" for k in range(1024)])]}
    late = infer(system, body, x_request_timeout_ms="1")
    assert (late.status_code, list(late.json())) == (504, ["error"])
    assert infer(system, body, x_request_timeout_ms="4000").status_code == 200


def test_rows_are_charged_to_a_quota(tmp_path: Path, broker: Broker) -> None:
    quota = {"serving.quota.ids_per_s": 1.0, "serving.quota.burst": 50}
    settings = settings_in(tmp_path, broker.url, **quota)
    with RunningTrainer(settings), RunningWorker(settings) as worker:
        worker.wait_ready()
        rows = {"inputs": [tensor("price", "FP64", [1.0] * 60)]}
        replies = [infer(worker, rows) for _ in range(2)]
        assert [reply.status_code for reply in replies] == [200, 429]
        assert (list(replies[1].json()), replies[1].headers["retry-after"].isdigit()) == (["error"], True)
        (refused,) = triton(worker, {"over": "grpc", "tensors": [["price", "FP64", [1.0] * 60]]})
        assert refused["status"] == "StatusCode.RESOURCE_EXHAUSTED"  # one address has one quota over both


def test_requests_are_counted_by_the_template_of_their_route(system: RunningWorker) -> None:
    infer(system, {"inputs": [ONE]})
    text = system.admin.get("/metrics").text
    assert 'route="/v2/models/{model}/infer"' in text
    assert 'route="/v2/models/contract' not in text


def test_our_file_has_the_published_protocols_fields_and_numbers() -> None:
    """Against the descriptor that tritonclient ships: a message of ours has fields of theirs only."""
    code = "import sys, tritonclient.grpc.service_pb2 as s; sys.stdout.buffer.write(s.DESCRIPTOR.serialized_pb)"
    printed = subprocess.run([sys.executable, "-c", code], capture_output=True, check=True).stdout
    theirs = FileDescriptorProto.FromString(printed)
    ours = FileDescriptorProto.FromString(open_inference_pb2.DESCRIPTOR.serialized_pb)
    assert len(ours.message_type) == 14
    assert fields_of(ours) <= fields_of(theirs)


def fields_of(file: FileDescriptorProto) -> set[tuple[str, str, int, int, str]]:
    nested = [(f"{message.name}.", one) for message in file.message_type for one in message.nested_type]
    messages = [("", message) for message in file.message_type] + nested
    return {
        (prefix + message.name, field.name, field.number, field.type, field.type_name)
        for prefix, message in messages
        for field in message.field
    }
