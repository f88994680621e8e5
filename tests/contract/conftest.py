"""One running system that most contract tests share: broker, trainer, worker, a model that has learned something."""

import uuid
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.contract.running import RunningTrainer, RunningWorker, wait_until
from tests.unit.worlds import EVERY_KIND
from trainer.broker import Broker
from trainer.settings import Settings

HOUR_MS = 3_600_000


def settings_in(directory: Path, broker_url: str, **overrides: object) -> Settings:
    """A system of its own in a directory, on the session's broker under a key of its own."""
    own = {
        "name": "contract",
        "run_dir": str(directory / "run"),
        "data_dir": str(directory / "data"),
        "stream": {"url": broker_url, "key": f"contract:{uuid.uuid4().hex}"},
        "serving": {"http_port": 0, "admin_port": 0, "grpc_port": 0},
    }
    return Settings.load(None, {**EVERY_KIND, **own, **overrides}, {})


@pytest.fixture(scope="module")
def settings(tmp_path_factory: pytest.TempPathFactory, broker: Broker) -> Settings:
    return settings_in(tmp_path_factory.mktemp("c"), broker.url)


@pytest.fixture(scope="module")
def system(settings: Settings) -> Iterator[RunningWorker]:
    """A worker whose model knows users u0 to u9, items i0 to i9, and the price and tags of item i0."""
    with RunningTrainer(settings), RunningWorker(settings) as worker:
        worker.wait_ready()
        events: list[dict[str, object]] = [
            {"entity": "item", "id": "i0", "features": {"price": 20.0, "tags": ["i1", "i2"], "content": [1, 0, 1]}}
        ]
        for k in range(400):
            row = {"user_id": f"u{k % 10}", "item_id": f"i{k % 7}", "previous": [f"i{k % 3}"], "price": float(k % 5)}
            events.append({"features": row, "label": int(k % 7 < 3), "time_ms": (k % 24) * HOUR_MS})
        answer = worker.http.post("/v1/events", json=events).json()
        assert answer["accepted"] == 401, answer
        wait_until(lambda: worker.http.get("/v1/model").json()["step"] >= 400)
        yield worker
