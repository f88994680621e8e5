"""What many tests share: a real broker, and an event log of one's own on it."""

import uuid
from collections.abc import Iterator

import pytest

from trainer.broker import Broker
from trainer.stream import EventLog


@pytest.fixture(scope="session")
def broker(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Broker]:
    """One real Valkey for the whole run; a test that stops or fills its broker starts another."""
    directory = tmp_path_factory.mktemp("b")
    with Broker(directory / "files", directory / "valkey.sock") as running:
        yield running


@pytest.fixture
def log(broker: Broker) -> Iterator[EventLog]:
    """An event log under a key that no other test uses."""
    with EventLog(broker.url, f"test:{uuid.uuid4().hex}") as fresh:
        yield fresh
