"""Search over every face, on a model that has learned: the same rows and bits as comparing all that a lookup gives."""

import asyncio
import json
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
from google.rpc import code_pb2
from typer.testing import CliRunner

from service.cli import app
from service.client import CallError
from service.embedding_service_pb2 import SearchEmbeddingsRequest
from service.embedding_service_pb2_grpc import EmbeddingServiceStub
from service.errors import ServiceError
from service.exchange import Exchange
from service.search import Query, Search
from tests.contract.conftest import settings_in
from tests.contract.running import RunningTrainer, RunningWorker, wait_until
from trainer.broker import Broker
from trainer.hashing import hash_values
from trainer.settings import SearchSettings

ITEMS = [f"i{k}" for k in range(7)]  # what `system` has learned
PATH = "/v1/tables/item/embeddings:search"


def search(system: RunningWorker, **request: Any) -> dict[str, Any]:
    reply = system.http.post(PATH, json=request)
    assert reply.status_code == 200, reply.text
    found: dict[str, Any] = reply.json()
    return found


def code_of(system: RunningWorker, status: int, **request: Any) -> str:
    reply = system.http.post(PATH, json=request)
    assert reply.status_code == status, reply.text
    return str(reply.json()["code"])


@pytest.mark.parametrize("metric", ["cosine", "dot"])
def test_an_ids_neighbours_are_those_of_comparing_all_rows(system: RunningWorker, metric: str) -> None:
    answer = search(system, id="i3", k=1000, metric=metric, known_ids=ITEMS)
    rows = system.sdk.lookup("item", ITEMS).vectors
    similarity = rows @ rows[3]
    if metric == "cosine":
        similarity /= np.linalg.norm(rows, axis=1) * np.linalg.norm(rows[3])
    others = [k for k in np.argsort(-similarity).tolist() if k != 3]
    assert answer["ids"] == [ITEMS[k] for k in others]
    assert answer["keys"] == [str(key) for key in hash_values(answer["ids"]).tolist()]
    np.testing.assert_allclose(answer["similarities"], similarity[others], rtol=1e-5, atol=1e-6)
    assert (answer["index"]["kind"], answer["index"]["lag_ms"]) == ("exact", 0)


def test_http_grpc_sdk_and_command_line_answer_the_same_bits(system: RunningWorker) -> None:
    vector = [0.25, -1.0, 0.5, 0.125]
    answer = search(system, vector=vector, k=3, known_ids=["i1", "i2"])
    found = system.sdk.search("item", vector=vector, k=3, known_ids=["i1", "i2"])
    assert found.keys.tolist() == [int(key) for key in answer["keys"]]
    assert found.similarities.astype(np.float64).tolist() == answer["similarities"]
    assert found.ids == answer["ids"]
    assert (found.index.kind, found.model.version) == ("exact", int(answer["model"]["version"]))
    command = ["search", "item", "--vector", "-", "--k", "3", "--json", "--url", str(system.http.base_url)]
    said = CliRunner().invoke(app, command, input=json.dumps(vector))
    assert said.exit_code == 0, said.output
    assert json.loads(said.output)["similarities"] == answer["similarities"]


def test_a_key_of_an_answer_is_where_the_next_search_can_begin(system: RunningWorker) -> None:
    nearest = search(system, id="i0", k=1)["keys"][0]
    onwards = search(system, key=nearest, k=1000)
    assert nearest not in onwards["keys"]
    assert str(hash_values(["i0"])[0]) in onwards["keys"]
    found = system.sdk.search("item", key=int(nearest), k=1000)
    assert [str(key) for key in found.keys.tolist()] == onwards["keys"]


def test_an_answer_says_which_model_and_how_long(system: RunningWorker) -> None:
    reply = system.http.post(PATH, json={"id": "i0"})
    assert reply.headers["x-model-version"] == str(reply.json()["model"]["version"])
    assert "search;dur=" in reply.headers["server-timing"]


@pytest.mark.parametrize(
    ("status", "code", "request_"),
    [
        (404, "unknown_id", {"id": "never seen"}),
        (413, "too_many", {"id": "i0", "k": 1001}),
        (413, "too_many", {"id": "i0", "known_ids": [1] * 4097}),
        (422, "invalid", {"id": "i0", "k": 0}),
        (422, "invalid", {}),
        (422, "invalid", {"id": "i0", "vector": [1, 2, 3, 4]}),
        (422, "invalid", {"vector": [1, 2, 3]}),
        (422, "invalid", {"vector": [1, 2, 3, 1e39]}),
        (422, "invalid", {"vector": [0, 0, 0, 0]}),
        (422, "invalid", {"id": "i0", "metric": "l2"}),
        (422, "invalid", {"key": "-1"}),
        (422, "invalid", {"key": "99999999999999999999"}),
        (422, "invalid", {"key": "9999999999999999999"}),
        (422, "invalid", {"id": "i0", "kk": 3}),
    ],
)
def test_what_cannot_be_searched_for_is_refused(
    system: RunningWorker, status: int, code: str, request_: dict[str, Any]
) -> None:
    assert code_of(system, status, **request_) == code


def test_an_unknown_table_is_not_found(system: RunningWorker) -> None:
    assert system.http.post("/v1/tables/none/embeddings:search", json={"id": 1}).json()["code"] == "unknown_table"


@pytest.mark.parametrize(
    ("vector", "words"),
    [(b"\x00" * 15, "whole number"), (np.array([1, 2, 3, np.nan], "<f4").tobytes(), "NaN"), (b"", "0 numbers")],
)
def test_vectors_that_are_none_are_refused_over_grpc(system: RunningWorker, vector: bytes, words: str) -> None:
    stub = EmbeddingServiceStub(system.sdk._channel)
    with pytest.raises(Exception) as caught:
        stub.SearchEmbeddings(SearchEmbeddingsRequest(table="item", vector=vector), timeout=10)
    assert caught.value.code().value[0] == code_pb2.INVALID_ARGUMENT  # type: ignore[attr-defined]
    assert words in caught.value.details()  # type: ignore[attr-defined]


def test_an_unknown_id_is_the_same_error_to_the_sdk(system: RunningWorker) -> None:
    with pytest.raises(CallError) as caught:
        system.sdk.search("item", id="never seen")
    assert caught.value.code == "unknown_id"


def test_search_can_be_switched_off(system: RunningWorker) -> None:
    model = system.worker.parts.model
    search_off = Search(model, SearchSettings(enabled=False))
    with pytest.raises(ServiceError) as caught:
        asyncio.run(search_off.nearest(model.table("item"), Query(None, 1, 1, "cosine"), Exchange(None)))
    assert caught.value.code == "refused"


@pytest.fixture(scope="module")
def followed(tmp_path_factory: pytest.TempPathFactory, broker: Broker) -> Iterator[RunningWorker]:
    """A system whose tables are all large enough for a graph; it has learned 60 users."""
    settings = settings_in(tmp_path_factory.mktemp("f"), broker.url, **{"serving.search.exact_rows": 2})
    with RunningTrainer(settings), RunningWorker(settings) as worker:
        worker.wait_ready()
        learn(worker, USERS)
        yield worker


USERS = [f"u{k}" for k in range(60)]


def learn(worker: RunningWorker, users: list[str], *, label: int = 1) -> None:
    step = worker.http.get("/v1/model").json()["step"]
    events = [{"features": {"user_id": user, "item_id": "i1"}, "label": label} for user in users]
    assert worker.http.post("/v1/events", json=events).json()["accepted"] == len(users)
    wait_until(lambda: worker.http.get("/v1/model").json()["step"] >= step + len(users))


def near_user(worker: RunningWorker, user: str, **request: Any) -> dict[str, Any]:
    body = {"id": user, "k": 5, "known_ids": USERS, **request}
    found: dict[str, Any] = worker.http.post("/v1/tables/user/embeddings:search", json=body).json()
    return found


def test_a_graph_answers_for_a_large_table_and_follows_what_is_learned(followed: RunningWorker) -> None:
    wait_until(lambda: near_user(followed, "u1")["index"]["kind"] == "hnsw")
    for turn in range(5):
        learn(followed, USERS[:40] * 3, label=turn % 2)
        version = int(near_user(followed, "u1")["model"]["version"])
        wait_until(lambda least=version: int(near_user(followed, "u1")["index"]["version"]) >= least, within_s=5)
        answer = near_user(followed, "u1")
        rows = followed.sdk.lookup("user", USERS).vectors
        cosine = rows @ rows[1] / np.linalg.norm(rows, axis=1) / np.linalg.norm(rows[1])
        cosine[1] = -2
        best = np.argsort(-cosine)[:5]
        assert answer["ids"] == [USERS[k] for k in best]
        np.testing.assert_allclose(answer["similarities"], cosine[best], atol=1e-5)


@pytest.mark.parametrize("which", ["system", "followed"])
def test_a_forgotten_id_is_no_longer_found(which: str, request: pytest.FixtureRequest) -> None:
    worker: RunningWorker = request.getfixturevalue(which)
    learn(worker, ["here", "gone"])
    gone = str(hash_values(["gone"])[0])
    wait_until(lambda: gone in near_user(worker, "here", k=1000)["keys"], within_s=10)
    assert worker.admin.delete("/v1/tables/user/embeddings/gone").status_code == 202
    wait_until(lambda: gone not in near_user(worker, "here", k=1000)["keys"], within_s=10)
    assert gone not in near_user(worker, "here", k=1000)["keys"]
    assert near_user(worker, "gone")["code"] == "unknown_id"
