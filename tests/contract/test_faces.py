"""The same bits whichever way one asks."""

from pathlib import Path
from typing import Any

import grpc
import msgspec
import numpy as np
import pytest

from service import answers, catalogue
from service.scoring_service_pb2 import CandidateColumns, ScoreRequest
from service.scoring_service_pb2_grpc import ScoringServiceStub
from tests.contract.conftest import settings_in
from tests.contract.running import RunningTrainer, RunningWorker, wait_until
from tests.unit.worlds import EVERY_KIND
from trainer.broker import Broker
from trainer.event_pb2 import InputColumn

TIME_MS = 1_700_000_000_000
CONTEXT = {"user_id": "u3", "previous": ["i1", "i2"]}
CANDIDATES: list[dict[str, Any]] = [
    {
        "item_id": f"i{k % 12}",
        "price": k * 0.37,
        "content": [k, 0.5, -k],
        **({"user_id": f"u{k}"} if k % 4 == 0 else {}),
    }
    for k in range(100)
]
REQUEST = {"context": CONTEXT, "candidates": CANDIDATES, "time_ms": TIME_MS}


def scores_of(answer: dict[str, Any]) -> np.ndarray:
    """Scores as float32, having checked that this loses nothing."""
    scores = np.array(answer["scores"])
    assert (scores == scores.astype(np.float32)).all()
    return scores.astype(np.float32)


def test_a_score_has_the_same_bits_over_every_face_alone_and_among_others(system: RunningWorker) -> None:
    whole = scores_of(system.http.post("/v1/score", json=REQUEST).json())
    assert len(set(whole.tolist())) > 50
    assert 0 < whole.min() < whole.max() < 1
    alone = [
        system.http.post("/v1/score", json={**REQUEST, "candidates": [candidate]}).json() for candidate in CANDIDATES
    ]
    rows = [{**CONTEXT, **candidate} for candidate in CANDIDATES]
    complete = system.http.post("/v1/score", json={"rows": rows, "time_ms": TIME_MS}).json()
    ranked = system.http.post("/v1/rank", json=REQUEST).json()
    rpc = system.sdk.score(CANDIDATES, context=CONTEXT, time_ms=TIME_MS)
    rpc_ranked = system.sdk.rank(CANDIDATES, context=CONTEXT, time_ms=TIME_MS)
    for other in (
        np.concatenate([scores_of(one) for one in alone]),
        scores_of(complete),
        rpc.scores,
        scores_of(ranked)[np.argsort(ranked["indices"])],
        rpc_ranked.scores[np.argsort(rpc_ranked.indices)],
    ):
        np.testing.assert_array_equal(whole.view(np.uint32), other.view(np.uint32))


def test_candidates_by_column_score_as_rows_do(system: RunningWorker) -> None:
    items = [f"i{k}" for k in range(12)]
    columns = CandidateColumns(count=12, columns=[InputColumn(name="item_id", strings=items)])
    with grpc.insecure_channel(system.grpc_target) as channel:
        answer = ScoringServiceStub(channel).Score(ScoreRequest(columns=columns, time_ms=TIME_MS), timeout=20)
    by_row = system.sdk.score([{"item_id": item} for item in items], time_ms=TIME_MS)
    assert answer.scores == by_row.scores.tobytes()
    assert answer.model.version == by_row.model.version


def test_a_rank_is_the_best_first_and_of_equals_the_earlier_one(system: RunningWorker) -> None:
    request = {**REQUEST, "candidates": [CANDIDATES[1], CANDIDATES[2], CANDIDATES[1], CANDIDATES[3]]}
    scores = system.http.post("/v1/score", json=request).json()["scores"]
    answer = system.http.post("/v1/rank", json={**request, "top_k": 3}).json()
    assert answer["indices"] == sorted(range(4), key=lambda index: (-scores[index], index))[:3]
    assert answer["scores"] == sorted(scores, reverse=True)[:3]
    rpc = system.sdk.rank(request["candidates"], context=CONTEXT, time_ms=TIME_MS, top_k=3)
    assert rpc.indices.tolist() == answer["indices"]


def test_a_row_has_the_same_bits_as_json_as_raw_bytes_and_over_grpc(system: RunningWorker) -> None:
    ids: list[str | int] = ["i1", "i2", "never seen", 7, "7", "i0"]
    url = "/v1/tables/item/embeddings:lookup"
    as_json = system.http.post(url, json={"ids": ids}).json()
    raw = system.http.post(url, json={"ids": ids}, headers={"accept": "application/octet-stream"})
    rpc = system.sdk.lookup("item", ids)
    vectors = np.array(as_json["vectors"])
    assert as_json["status"] == ["learned", "learned", "unknown", "unknown", "unknown", "learned"] == rpc.status
    assert vectors[0].any()
    assert not vectors[2].any()
    np.testing.assert_array_equal(vectors, rpc.vectors.astype(np.float64))
    assert raw.headers["x-embedding-dim"] == "4" == str(as_json["dim"])
    assert raw.content == rpc.vectors.tobytes() + bytes([1, 1, 0, 0, 0, 1])


def test_an_integer_and_its_decimal_text_are_one_id(system: RunningWorker) -> None:
    one, other = (system.http.post("/v1/score", json={"rows": [{"user_id": user}]}).json() for user in (42, "42"))
    assert one["scores"] == other["scores"]


def test_unknown_ids_score_and_are_named_by_candidate_and_feature(system: RunningWorker) -> None:
    rows = [
        {"user_id": "u1", "item_id": "i1"},
        {"user_id": "nobody", "item_id": "i1", "previous": ["i1", "nothing"]},
        {},
    ]
    answer = system.http.post("/v1/score", json={"rows": rows, "time_ms": 3_600_000}).json()
    assert answer["unknown"] == [{"index": 1, "features": ["user_id", "previous"]}]
    assert system.sdk.score(rows, time_ms=3_600_000).unknown == {1: ["user_id", "previous"]}


def test_no_candidates_have_no_scores(system: RunningWorker) -> None:
    assert system.http.post("/v1/score", json={"candidates": []}).json()["scores"] == []
    assert system.sdk.rank([]).indices.tolist() == []
    empty = system.http.post("/v1/tables/user/embeddings:lookup", json={"ids": []}).json()
    assert (empty["vectors"], empty["dim"]) == ([], 8)


@pytest.mark.parametrize(
    ("method", "path", "body", "documented"),
    [
        ("POST", "/v1/score", REQUEST, answers.ScoreAnswer),
        ("POST", "/v1/rank", REQUEST, answers.RankAnswer),
        ("POST", "/v1/tables/user/embeddings:lookup", {"ids": ["u1", "?"]}, answers.LookupAnswer),
        ("GET", "/v1/model", None, catalogue.ModelAnswer),
        ("GET", "/v1/tables", None, catalogue.TablesAnswer),
        ("GET", "/v1/info", None, catalogue.InfoAnswer),
        ("GET", "/readyz?verbose", None, catalogue.Readiness),
    ],
)
def test_an_answer_is_what_its_documented_type_says(
    system: RunningWorker, method: str, path: str, body: Any, documented: Any
) -> None:
    reply = system.http.request(method, path, json=body)
    assert (reply.status_code, reply.headers["content-type"]) == (200, "application/json")
    msgspec.json.decode(reply.content, type=documented)


def test_every_answer_carries_the_model_it_came_from(system: RunningWorker) -> None:
    reply = system.http.post("/v1/score", json=REQUEST, headers={"x-request-id": "my-request"})
    model = reply.json()["model"]
    assert reply.headers["x-request-id"] == "my-request" == reply.json()["request_id"]
    assert reply.headers["x-model-version"] == str(model["version"])
    assert int(reply.headers["x-model-age-ms"]) == int(model["age_ms"]) < 5000
    stages = [part.partition(";")[0] for part in reply.headers["server-timing"].split(", ")]
    assert stages == ["queue", "gather", "model", "total"]
    assert system.http.get("/livez", headers={"x-request-id": "no spaces please"}).headers["x-request-id"].isalnum()


def test_the_watermark_follows_the_clock_on_a_quiet_log(system: RunningWorker) -> None:
    accepted_us = system.http.get("/v1/model").json()["watermark"]
    assert accepted_us > 1_600_000_000_000_000
    assert system.http.get("/v1/model").json()["age_ms"] < 1000


def test_an_id_without_a_row_in_a_table_with_admission_is_answered_with_the_default(
    tmp_path: Path, broker: Broker
) -> None:
    tables = EVERY_KIND["tables"] | {"user": EVERY_KIND["tables"]["user"] | {"admission": {"kind": "count"}}}
    settings = settings_in(tmp_path, broker.url, tables=tables)
    with RunningTrainer(settings), RunningWorker(settings) as worker:
        worker.wait_ready()
        events = [{"features": {"user_id": user, "item_id": "i"}, "label": 1} for user in ("twice", "once", "twice")]
        assert worker.http.post("/v1/events", json=events).json()["accepted"] == 3
        wait_until(lambda: worker.http.get("/v1/model").json()["step"] >= 3)
        assert worker.sdk.lookup("user", ["twice", "once", "never"]).status == ["learned", "default", "default"]
        assert worker.sdk.lookup("item", ["i", "never"]).status == ["learned", "unknown"]
        assert not worker.sdk.lookup("user", ["once"]).vectors.any()
