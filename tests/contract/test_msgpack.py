"""MessagePack and raw bytes say what JSON says, bit for bit, and are refused for the same reasons."""

from typing import Any

import httpx
import msgspec
import numpy as np
import pytest

from tests.contract.running import RunningWorker, wait_until
from tests.contract.test_faces import REQUEST, scores_of

MSGPACK, RAW = "application/x-msgpack", "application/octet-stream"
LOOKUP = "/v1/tables/item/embeddings:lookup"


def post(system: RunningWorker, path: str, value: Any, accept: str = MSGPACK) -> httpx.Response:
    headers = {"content-type": MSGPACK, "accept": accept}
    return system.http.post(path, content=msgspec.msgpack.encode(value), headers=headers)


def test_a_score_has_the_same_bits_in_every_form(system: RunningWorker) -> None:
    wanted = scores_of(system.http.post("/v1/score", json=REQUEST).json())
    packed, raw = post(system, "/v1/score", REQUEST), post(system, "/v1/score", REQUEST, RAW)
    assert (packed.headers["content-type"], raw.headers["content-type"]) == (MSGPACK, RAW)
    answer = msgspec.msgpack.decode(packed.content)
    assert answer["scores"] == raw.content == wanted.astype("<f4").tobytes()
    assert answer["request_id"] == packed.headers["x-request-id"]
    assert answer["model"]["version"] == int(packed.headers["x-model-version"])
    assert scores_of(post(system, "/v1/score", REQUEST, "application/json").json()).tolist() == wanted.tolist()


def test_a_rank_has_the_same_places_in_every_form(system: RunningWorker) -> None:
    wanted = system.http.post("/v1/rank", json={**REQUEST, "top_k": 7}).json()
    packed = msgspec.msgpack.decode(post(system, "/v1/rank", {**REQUEST, "top_k": 7}).content)
    raw = post(system, "/v1/rank", {**REQUEST, "top_k": 7}, RAW)
    assert np.frombuffer(packed["indices"], "<u4").tolist() == wanted["indices"]
    assert np.frombuffer(packed["scores"], "<f4").tolist() == wanted["scores"]
    assert raw.headers["x-rank-count"] == "7"
    assert raw.content == packed["indices"] + packed["scores"]
    assert packed["unknown"] == wanted["unknown"]


def test_a_row_has_the_same_bits_in_every_form(system: RunningWorker) -> None:
    ids = {"ids": ["i1", "never seen", 7]}
    raw, packed = post(system, LOOKUP, ids, RAW), msgspec.msgpack.decode(post(system, LOOKUP, ids).content)
    assert packed["vectors"] + packed["status"] == raw.content
    assert packed["status"] == bytes([1, 0, 0])
    as_json = system.http.post(LOOKUP, json=ids).json()
    assert np.frombuffer(packed["vectors"], "<f4").reshape(3, packed["dim"]).tolist() == as_json["vectors"]


@pytest.mark.parametrize(
    ("value", "status", "code"),
    [
        ({"rows": [{"colour": 1}]}, 422, "unknown_feature"),
        ({"rows": [{"price": float("nan")}]}, 422, "invalid"),
        ({"rows": [{"user_id": b"bytes"}]}, 422, "invalid"),
        ({"rows": [{}] * 1025}, 413, "too_many"),
        ([1], 422, "invalid"),
    ],
)
def test_a_bad_body_is_refused_as_in_json(system: RunningWorker, value: Any, status: int, code: str) -> None:
    reply = post(system, "/v1/score", value, "application/json")
    assert (reply.status_code, reply.json()["code"]) == (status, code)


@pytest.mark.parametrize("body", [b"\xc1", b"\x81", b"\x91" * 5000, b"{}"])
def test_what_is_no_messagepack_is_malformed(system: RunningWorker, body: bytes) -> None:
    for path in ("/v1/score", "/v1/events", LOOKUP):
        reply = system.http.post(path, content=body, headers={"content-type": MSGPACK})
        assert reply.status_code in {400, 422}, reply.text
        assert reply.headers["content-type"] == "application/problem+json"
    assert system.http.post("/v1/events", content=b"\xc1", headers={"content-type": MSGPACK}).status_code == 400


def test_events_in_messagepack_are_learned_and_the_bad_ones_named(system: RunningWorker) -> None:
    before = system.http.get("/v1/model").json()["step"]
    good = {"features": {"user_id": "packed", "item_id": "i1"}, "label": 1}
    bad = {"features": {"price": float("inf")}, "label": 1}
    reply = post(system, "/v1/events", [good, bad, good | {"label": 0}]).json()
    assert reply["accepted"] == 2
    assert [(one["index"], one["code"]) for one in reply["rejected"]] == [(1, "invalid")]
    columns = {"columns": {"user_id": ["packed"] * 2}, "labels": [0, 1]}
    assert post(system, "/v1/events", columns).json()["accepted"] == 2
    assert post(system, "/v1/events", good).json()["accepted"] == 1
    wait_until(lambda: system.http.get("/v1/model").json()["step"] >= before + 5)
    assert system.sdk.lookup("user", ["packed"]).status == ["learned"]
