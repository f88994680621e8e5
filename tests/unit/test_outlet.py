"""What readers see, generation after generation; and the state it comes from."""

import resource
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import numpy as np
import pytest

from tests.unit.worlds import EVERY_KIND
from trainer.checkpoint import save
from trainer.commands import Forget, Resize
from trainer.errors import CheckpointError, ControlRefused, StoreUnavailable
from trainer.event_json import EventParser
from trainer.events import EventBatch, derive_batch
from trainer.hashing import hash_values
from trainer.live import LEARNED, Reader
from trainer.outlet import Outlet, rolled_back_to
from trainer.publish import entity_section, row_section
from trainer.settings import Settings
from trainer.training import TrainingState


def settings_in(directory: Path, **overrides: object) -> Settings:
    paths = {"data_dir": str(directory / "data"), "run_dir": str(directory / "run")}
    return Settings.load(None, {**EVERY_KIND, **paths, **overrides}, {})


def batch_of(state: TrainingState, *users: str) -> EventBatch:
    body = [
        '{"entity": "item", "id": "i", "features": {"price": 3}}',
        *(
            f'{{"features": {{"user_id": "{user}", "item_id": "i"}}, "label": 1, "event_id": "{user}"}}'
            for user in users
        ),
    ]
    raw, rejected = EventParser(state.schema).parse("\n".join(body).encode(), accepted_us=1_700_000_000_000_000)
    assert not rejected
    return derive_batch(state.schema, raw)


class World:
    """A state, its outlet, and a reader."""

    def __init__(self, directory: Path) -> None:
        self.settings = settings_in(directory)
        self.state = TrainingState(self.settings)
        self.outlet = Outlet(self.settings, self.state, after_version=0)
        self.outlet.release(self.state)
        self.reader = Reader(self.settings.store_path)
        self.reader.attach(0)

    def learn(self, *users: str) -> None:
        learned = self.state.learn(batch_of(self.state, *users))
        self.state.count(learned)
        self.outlet.publish(learned, self.state.place)

    def save(self) -> TrainingState:
        """Checkpoint 1, and a state of its own that holds the same."""
        snapshot = self.state.capture(version=1)
        save(self.settings.checkpoint_path, snapshot, keep=3)
        return TrainingState.from_snapshot(self.settings, snapshot)[0]

    def forget(self, user: str) -> None:
        table, key = self.state.schema.tables[0], int(hash_values([user])[0])
        self.outlet.forget(table, key, self.state.forget(Forget(table.name, key)), self.state.place)

    def knows(self, user: str) -> bool:
        self.reader.refresh()
        table = row_section(self.state.schema.tables[0])
        return bool(self.reader.gather(table, hash_values([user]))[1][0] == LEARNED)


@pytest.fixture
def world(tmp_path: Path) -> Iterator[World]:
    made = World(tmp_path)
    yield made
    made.outlet.close()


@contextmanager
def no_room() -> Iterator[None]:
    """No file can grow beyond 4 KiB."""
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (4096, hard))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))


def test_rolled_back_readers_see_the_saved_state_until_it_is_released(world: World) -> None:
    saved = world.save()
    world.learn("new")
    assert world.knows("new")
    version = world.outlet.version
    assert world.outlet.roll_back(saved, 1) > version
    assert not world.knows("new")
    assert rolled_back_to(world.settings) == 1
    world.learn("newer")
    assert not world.knows("newer")
    world.outlet.release(world.state)
    assert world.knows("newer")
    assert rolled_back_to(world.settings) is None


@pytest.mark.parametrize("mode", ["held", "rolled_back"])
def test_what_is_forgotten_is_not_served_while_something_older_is(world: World, mode: str) -> None:
    world.learn("a", "b")
    saved = world.save()
    if mode == "held":
        world.outlet.hold(["a test"])
    else:
        world.outlet.roll_back(saved, 1)
    world.learn("c")  # the index goes its own way meanwhile
    world.forget("a")
    assert not world.knows("a")
    assert world.knows("b")


def test_a_state_with_a_row_that_is_not_finite_is_not_released(world: World) -> None:
    world.learn("a")
    world.outlet.hold(["a test"])
    world.state.tables.rows(0)[3, 1] = np.nan
    with pytest.raises(ControlRefused, match="1 numbers of rows"):
        world.outlet.release(world.state)
    assert world.outlet.mode == "held"


def test_a_checkpoint_that_is_gone_cannot_be_rolled_back_to(world: World) -> None:
    with pytest.raises(CheckpointError, match="no checkpoint 7"):
        world.outlet.roll_back(TrainingState(world.settings), 7)
    assert rolled_back_to(world.settings) is None
    assert world.outlet.is_live


def test_without_room_for_another_generation_all_stays_as_it_was(world: World) -> None:
    saved = world.save()
    with no_room(), pytest.raises(StoreUnavailable, match="no room"):
        world.outlet.roll_back(saved, 1)
    assert rolled_back_to(world.settings) is None
    assert world.outlet.is_live
    world.learn("still shown")
    assert world.knows("still shown")


def test_a_resized_table_is_read_with_all_its_rows(world: World) -> None:
    world.learn("a", "b")
    assert world.state.resize(Resize("user", 64)) == 0
    world.outlet.release(world.state)
    assert world.knows("a")
    world.learn("c")
    assert world.knows("c")


def test_what_is_forgotten_leaves_rows_and_records(world: World) -> None:
    world.learn("a")
    (entity,) = world.state.schema.entities
    key = hash_values(["i"])
    assert world.reader.gather(entity_section(entity), key)[1].tolist() == [1]
    forgotten = world.state.forget(Forget("item", int(key[0])))
    assert (len(forgotten.slots_N), len(forgotten.records.slots_K)) == (1, 1)
    world.outlet.forget(world.state.schema.tables[1], int(key[0]), forgotten, world.state.place)
    assert world.reader.gather(entity_section(entity), key)[1].tolist() == [0]
    assert world.reader.gather(row_section(world.state.schema.tables[1]), key)[1].tolist() == [0]
    assert world.state.entities.find(0, key).tolist() == [-1]
    restored, notes = TrainingState.from_snapshot(world.settings, world.state.capture(version=1))
    assert notes == []
    assert restored.entities.keys.tolist() == world.state.entities.keys.tolist()


@pytest.mark.parametrize("engine", ["event", "torchrec"])
def test_a_batch_of_duplicates_alone_teaches_nothing(tmp_path: Path, engine: str) -> None:
    state = TrainingState(settings_in(tmp_path, engine=engine))
    batch = batch_of(state, "a", "b")
    examples = batch.only(batch.entity_B < 0)
    state.count(state.learn(examples))
    before, step = state.learner.params.copy(), state.place.step
    learned = state.learn(examples)
    state.count(learned)
    assert state.judge(learned) == []
    assert learned.num_duplicates == 2
    assert state.place.step == step == 2
    assert np.array_equal(before, state.learner.params)
