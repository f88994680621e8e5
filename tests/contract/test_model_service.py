"""The operator's calls over gRPC say and do what they do over HTTP."""

from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest

from service.client import CallError, Client
from service.token_file import create
from tests.contract.conftest import settings_in
from tests.contract.running import RunningTrainer, RunningWorker, wait_until
from trainer.broker import Broker
from trainer.hashing import hash_values

EVENTS = [{"features": {"user_id": f"u{k % 5}", "item_id": f"i{k % 3}"}, "label": k % 2} for k in range(60)]


@pytest.fixture(scope="module")
def operated(tmp_path_factory: pytest.TempPathFactory, broker: Broker) -> Iterator[RunningWorker]:
    """A system that tests may change."""
    settings = settings_in(tmp_path_factory.mktemp("o"), broker.url)
    with RunningTrainer(settings), RunningWorker(settings) as worker:
        worker.wait_ready()
        worker.sdk.publish(EVENTS)
        wait_until(lambda: worker.sdk.model().step >= len(EVENTS))
        yield worker


def test_the_model_is_what_http_says(operated: RunningWorker) -> None:
    found, wanted = operated.sdk.model(), operated.http.get("/v1/model").json()
    assert (found.name, found.family, found.step) == (wanted["name"], wanted["family"], wanted["step"])
    assert (found.schema_hash, found.publishing, found.trainer_alive) == (wanted["schema_hash"], "live", True)


def test_an_id_is_inspected_as_over_http(operated: RunningWorker) -> None:
    found = operated.sdk.inspect("user", "u1")
    wanted = operated.http.get("/v1/tables/user/embeddings/u1").json()
    assert (found.status, found.count, str(found.key)) == ("learned", wanted["count"], wanted["key"])
    assert np.frombuffer(found.values, "<f4").tolist() == wanted["vector"]
    assert found.optimizer.accumulator == wanted["optimizer"]["accumulator"]
    assert found.optimizer.wide_z == wanted["optimizer"]["wide_z"]
    assert not found.optimizer.HasField("moment_norm")
    with pytest.raises(CallError, match="unknown_id"):
        operated.sdk.inspect("user", "nobody")


def test_serving_is_rolled_back_and_released(operated: RunningWorker) -> None:
    saved = operated.sdk.create_checkpoint()
    rows = operated.sdk.lookup("user", ["u1"]).vectors
    operated.sdk.publish(EVENTS)
    wait_until(lambda: operated.sdk.lookup("user", ["u1"]).vectors.tobytes() != rows.tobytes())
    assert operated.sdk.activate(saved.version).version == saved.version
    wait_until(lambda: operated.sdk.lookup("user", ["u1"]).vectors.tobytes() == rows.tobytes())
    listed = operated.sdk.versions()
    assert listed.publishing == "rolled_back"
    assert [one.version for one in listed.versions if one.active] == [saved.version]
    operated.sdk.release()
    wait_until(lambda: operated.sdk.lookup("user", ["u1"]).vectors.tobytes() != rows.tobytes())
    assert operated.sdk.versions().publishing == "live"


def test_a_table_is_resized_and_an_id_forgotten_at_their_place_in_the_log(operated: RunningWorker) -> None:
    assert operated.sdk.lookup("item", ["i2"]).status == ["learned"]
    forgotten = operated.sdk.forget("item", "i2")
    assert forgotten.stream_id
    wait_until(lambda: operated.sdk.lookup("item", ["i2"]).status == ["unknown"])
    operated.sdk.resize("user", 128)
    wait_until(lambda: operated.http.get("/v1/tables").json()["tables"][0]["capacity"] == 128)
    with pytest.raises(CallError, match="capacity: got 3"):
        operated.sdk.resize("user", 3)
    with pytest.raises(CallError, match="memory that is available"):
        operated.sdk.resize("user", 2**31 - 1)
    with pytest.raises(CallError, match="unknown_table"):
        operated.sdk.resize("nothing", 128)


def test_with_tokens_only_admin_may_change_what_is_served(tmp_path: Path, broker: Broker) -> None:
    path = tmp_path / "tokens.jsonl"
    reader, admin = (create(path, scope, [scope]) for scope in ("lookup", "admin"))
    serving = {"http_port": 0, "admin_port": 0, "grpc_port": 0, "tokens_file": str(path)}
    settings = settings_in(tmp_path, broker.url, serving=serving)
    with RunningTrainer(settings), RunningWorker(settings) as worker:
        worker.wait_ready()
        with Client(worker.grpc_target, timeout_s=20, token=reader) as client:
            assert client.model().trainer_alive
            for call in (client.create_checkpoint, client.release, lambda: client.forget("user", "u")):
                with pytest.raises(CallError, match="permission_denied"):
                    call()
        with Client(worker.grpc_target, timeout_s=20, token=admin) as client:
            assert client.create_checkpoint().version >= 1


def test_a_public_listener_without_tokens_lets_nobody_change_what_is_served(tmp_path: Path, broker: Broker) -> None:
    serving = {"host": "0.0.0.0", "http_port": 0, "admin_port": 0, "grpc_port": 0, "insecure_no_auth": True}  # noqa: S104
    settings = settings_in(tmp_path, broker.url, serving=serving)
    with RunningTrainer(settings), RunningWorker(settings) as worker:
        worker.wait_ready()
        assert worker.sdk.model().trainer_alive
        for call in (worker.sdk.create_checkpoint, worker.sdk.release, lambda: worker.sdk.resize("user", 128)):
            with pytest.raises(CallError, match="permission_denied"):
                call()


def test_lookups_in_a_stream_are_answered_in_order_and_with_the_same_bits(operated: RunningWorker) -> None:
    batches = [["u1", "u2"], ["u3"], []]
    answers = list(operated.sdk.lookup_stream("user", batches))
    for ids, answer in zip(batches, answers, strict=True):
        assert answer.vectors.tobytes() == operated.sdk.lookup("user", ids).vectors.tobytes()
    with pytest.raises(CallError, match="unknown_table"):
        list(operated.sdk.lookup_stream("nothing", batches))


def test_a_watch_names_the_ids_that_changed_and_those_that_went(operated: RunningWorker) -> None:
    watch = operated.sdk.watch("item", interval_ms=10)
    begun = next(watch)
    assert (len(begun.changed), len(begun.removed), begun.resync) == (0, 0, False)
    one, new = hash_values(["i0", "brand new"]).tolist()
    operated.sdk.publish([{"features": {"user_id": "u1", "item_id": item}, "label": 1} for item in ("i0", "brand new")])
    seen: set[int] = set()
    while not {one, new} <= seen:
        change = next(watch)
        seen |= set(change.changed.tolist())
        assert change.removed.tolist() == []
    assert hash_values(["i1"])[0] not in seen
    operated.sdk.forget("item", "brand new")
    while new not in (change := next(watch)).removed:
        assert new not in change.changed
    assert change.model.version > begun.model.version
    operated.sdk.resize("item", 256)
    while not next(watch).resync:
        pass


def test_a_watch_that_cannot_be_says_why(operated: RunningWorker) -> None:
    with pytest.raises(CallError, match="interval_ms: got 5"):
        next(operated.sdk.watch("item", interval_ms=5))
    with pytest.raises(CallError, match="unknown_table"):
        next(operated.sdk.watch("nothing"))
    watching = [operated.sdk.watch("item") for _ in range(17)]
    with pytest.raises(CallError, match="overloaded"):
        for watch in watching:
            next(watch)
