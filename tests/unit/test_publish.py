"""What becomes visible to a reader of the live store, and what the guard keeps from it."""

from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from tests.unit.test_entities import batch_of, fact
from tests.unit.test_index import ids_at_home
from trainer.dense import LearnerState, offset_logit
from trainer.entities import Entities, EntityChanges
from trainer.hashing import hash_values
from trainer.live import DEFAULT, UNKNOWN, Reader, Writer
from trainer.optim import ftrl_weight
from trainer.probe import WINDOW
from trainer.publish import CHUNK, Publisher, PublishReport, entity_section, layout_for, missing_status, row_section
from trainer.schema import Schema
from trainer.settings import Settings
from trainer.tables import Assignment, Ids, Tables

NO_PAIRS = np.empty(0, np.int64)
CONFIGURATION: dict[str, Any] = {
    "tables": {"user": {"width": 3, "capacity": 80, "ttl_s": 60}, "item": {"width": 8, "capacity": 10_000}},
    "entities": {"item": {"key": "item", "capacity": 100}},
    "features": {
        "user": {"kind": "categorical"},
        "item": {"kind": "categorical"},
        "price": {"kind": "numeric", "entity": "item"},
    },
    "model": {"wide": True, "pairs": [["user", "item"]], "pair_bits": 8, "hidden": [4], "wide_optimizer": {"l1": 0.5}},
}


class World:
    """A trainer's state without an engine, its publisher, and a reader beside it."""

    def __init__(self, directory: Path, **model: Any) -> None:
        settings = Settings.model_validate(CONFIGURATION | {"model": CONFIGURATION["model"] | model})
        self.schema, self.model = Schema.from_settings(settings), settings.model
        self.directory = directory
        self.tables, self.entities = Tables(self.schema, self.model), Entities(self.schema)
        self.learner = LearnerState.initial(self.schema, self.model)
        self.writer: Writer | None = None
        self.new_generation()
        self.reader = Reader(directory, schema_hash=self.schema.layout_hash)
        self.reader.attach(0)

    def new_generation(self) -> PublishReport:
        self.close()
        self.writer = writer = Writer.create(self.directory, layout_for(self.schema, self.model, 1))
        self.publisher = Publisher(writer, self.tables, self.entities, self.learner, self.model)
        report = self.publisher.publish_all(step=0, watermark_us=0)
        writer.activate()
        return report

    def close(self) -> None:
        if self.writer is not None:
            self.writer.close()

    def assign(self, rows: Sequence[tuple[int, int]], now_s: int = 100) -> Assignment:
        return self.tables.assign(Ids(np.array(rows, np.int64)), None, now_s)

    def publish(self, assignment: Assignment, pairs: Sequence[int] = ()) -> PublishReport:
        nothing = EntityChanges(NO_PAIRS, NO_PAIRS)
        return self.publisher.publish(
            assignment, nothing, np.array(pairs, np.int64), step=self.tables.clock, watermark_us=7
        )

    def learn(self, rows: Sequence[tuple[int, int]]) -> PublishReport:
        return self.publish(self.assign(rows))

    def seen(self, table: str, *ids: int) -> list[list[float] | None]:
        """Rows that a reader gets (without the wide weight), None where it knows none."""
        self.reader.refresh()
        words_NW, status_N = self.reader.gather(f"table/{table}", np.array(ids, np.int64))
        rows = words_NW.view(np.float32)[:, :-1].tolist()
        return [row if status else None for row, status in zip(rows, status_N, strict=True)]

    def trained(self, table: int, *ids: int) -> list[list[float]]:
        return [row.row_D.tolist() for id_ in ids if (row := self.tables.row_of(table, id_)) is not None]

    def spoil(self, table: int, id_: int, value: float = np.nan) -> None:
        slot = int(self.tables.find(table, np.array([id_]))[0] - self.tables.slot_base_T[table])
        self.tables.rows(table)[slot, -1] = value


@pytest.fixture
def world(tmp_path: Path) -> Iterator[World]:
    world = World(tmp_path)
    yield world
    world.close()


def test_a_step_shows_the_rows_it_touched_under_one_version(world: World) -> None:
    before = world.reader.state().version
    report = world.learn([(1, 1), (2, 1)])
    assert (report.rows, report.held_rows, report.removed) == (3, 0, 0)
    assert world.seen("user", 1, 2, 3) == [*world.trained(0, 1, 2), None]
    assert world.seen("item", 1) == world.trained(1, 1)
    state = world.reader.state()
    assert report.version == state.version > before
    assert (state.step, state.watermark_us) == (world.tables.clock, 7)


def test_rows_that_were_not_touched_stay_as_they_were_published(world: World) -> None:
    world.learn([(1, 1), (2, 2)])
    before = world.seen("user", 1)
    world.tables.weights[:] = 9
    world.learn([(2, 2)])
    assert world.seen("user", 1, 2) == [*before, [9, 9, 9]]


def test_the_wide_weight_is_what_the_state_stands_for(world: World) -> None:
    assignment = world.assign([(1, 1), (2, 2)])
    user_1, user_2 = assignment.slots_BC[:, 0]
    world.tables.wide_z[user_1], world.tables.wide_n[user_1] = -2.0, 4.0
    world.tables.wide_z[user_2] = 0.4  # within l1
    world.publish(assignment)
    words_NW, _ = world.reader.gather("table/user", np.array([1, 2]))
    assert words_NW.view(np.float32)[:, -1].tolist() == pytest.approx([1.5 / ((1 + 2) / 0.07), 0])


def test_without_a_wide_part_the_wide_weight_is_zero(tmp_path: Path) -> None:
    world = World(tmp_path, wide=False)
    world.learn([(1, 1), (2, 2)])
    words_NW, _ = world.reader.gather("table/user", np.array([1, 2]))
    assert words_NW[:, -1].tolist() == [0, 0]
    assert world.seen("user", 1, 2) == world.trained(0, 1, 2)
    world.close()


def test_last_seen_and_count_go_along(world: World) -> None:
    world.assign([(1, 1)], now_s=100)
    world.publish(world.assign([(1, 1)], now_s=105))
    assert world.reader.peek("table/user", 1) == (105, 2)


@pytest.mark.parametrize("value", [np.nan, np.inf, -np.inf])
def test_a_row_that_is_not_finite_is_held_and_the_last_good_one_stays(world: World, value: float) -> None:
    world.learn([(1, 1)])
    good = world.seen("user", 1)
    world.spoil(0, 1, value)
    report = world.learn([(1, 1), (2, 1)])
    assert (report.rows, report.held_rows, report.removed) == (2, 1, 0)
    assert world.seen("user", 1, 2) == [*good, *world.trained(0, 2)]


@pytest.mark.parametrize("state", ["wide_z", "wide_n"])
def test_a_wide_weight_that_is_not_finite_holds_its_row(world: World, state: str) -> None:
    world.learn([(1, 1)])
    assignment = world.assign([(1, 1)])
    getattr(world.tables, state)[assignment.slots_BC[0, 0]] = np.nan
    assert world.publish(assignment).held_rows == 1


def test_a_held_row_in_a_slot_of_another_id_takes_that_id_out(world: World) -> None:
    *old, new = ids_at_home(7, WINDOW + 1)
    world.learn([(id_, 1) for id_ in old])
    assignment = world.assign([(new, 1)])
    world.spoil(0, new)
    report = world.publish(assignment)
    gone = int(assignment.evicted_ids_E[0])
    assert (report.held_rows, report.removed) == (1, 1)
    assert world.seen("user", gone, new) == [None, None]
    assert world.seen("user", *(set(old) - {gone})) == world.trained(0, *(set(old) - {gone}))
    world.tables.weights[:] = 1
    world.learn([(new, 1)])
    assert world.seen("user", new) == [[1, 1, 1]]


def test_ids_behind_a_held_row_are_found(world: World) -> None:
    first, second = ids_at_home(7, 2)
    assignment = world.assign([(first, 1), (second, 1)])
    world.spoil(0, first)
    world.publish(assignment)
    assert world.seen("user", first, second) == [None, *world.trained(0, second)]
    world.new_generation()
    assert world.seen("user", first, second) == [None, *world.trained(0, second)]


def test_an_evicted_id_is_unknown_and_never_reads_the_new_ones_row(world: World) -> None:
    *old, new = ids_at_home(7, WINDOW + 1)
    world.learn([(id_, 1) for id_ in old])
    world.learn([(new, 1)])
    assert world.seen("user", old[0], new) == [None, *world.trained(0, new)]


def test_removed_and_expired_ids_are_taken_out(world: World) -> None:
    world.learn([(1, 1), (2, 2), (3, 3)])
    removed = np.concatenate([world.tables.remove(1, np.array([2])), world.tables.remove(0, np.array([3]))])
    report = world.publisher.remove(removed, step=1, watermark_us=1)
    assert report.removed == 2
    assert world.seen("user", 3) == world.seen("item", 2) == [None]
    assert world.seen("user", 1) == world.trained(0, 1)
    assert world.publisher.remove(world.tables.expire(1000, 80), step=1, watermark_us=1).removed == 2
    assert world.seen("user", 1, 2) == [None, None]
    assert world.seen("item", 1) == world.trained(1, 1)


def test_dense_weights_end_in_the_offset(world: World) -> None:
    world.learner.params[:] = np.arange(len(world.learner.params))
    world.learner.offset[:] = 30, 100, 0.5, 1
    world.learn([(1, 1)])
    dense, _ = world.reader.dense()
    assert dense[:-1].tolist() == world.learner.params.tolist()
    assert dense[-1] == offset_logit(world.learner.offset)


def test_dense_weights_that_are_not_finite_hold_everything_until_they_are(world: World) -> None:
    world.learn([(1, 1)])
    version, rows = world.reader.state().version, world.seen("user", 1)
    world.tables.weights[:] = 2
    world.learner.params[3] = np.inf
    report = world.learn([(1, 1), (2, 2)])
    assert report.held_dense
    assert (report.rows, report.version) == (0, version)
    assert world.seen("user", 1, 2) == [*rows, None]
    assert world.reader.state().version == version
    world.learner.params[3] = 0
    report = world.learn([(3, 3)])
    assert report.rows == 6, "the held step's rows go out with the next good one"
    assert world.seen("user", 1, 2) == [[2, 2, 2], *world.trained(0, 2)]


def test_pairs_that_were_touched_show_their_weights(world: World) -> None:
    world.learner.pair_z[[3, 200, 9]] = 2, -3, np.nan
    world.learner.pair_n[[3, 200]] = 1, 4
    report = world.publish(world.assign([(1, 1)]), pairs=[3, 200, 9, 3])
    assert (report.pairs, report.held_pairs) == (2, 1)
    view = world.reader.shards[0]
    weights = view.f32[view.pairs_off : view.pairs_off + view.pair_slots]
    ftrl = [np.float32(v) for v in (0.07, 1, 0.5, 0)]
    wanted = np.zeros(256, np.float32)
    wanted[3] = ftrl_weight(np.float32(2), np.float32(1), *ftrl)
    wanted[200] = ftrl_weight(np.float32(-3), np.float32(4), *ftrl)
    assert wanted[200] > 0 > wanted[3]
    np.testing.assert_array_equal(weights, wanted)


def test_entity_records_are_served_as_they_were_written(world: World) -> None:
    batch = batch_of(fact("a", price=3), fact("b", price=4), schema=world.schema)
    changes = world.entities.apply(batch)
    report = world.publisher.publish(world.assign([(1, 1)]), changes, NO_PAIRS, step=1, watermark_us=1)
    assert report.records == 2
    section = entity_section(world.schema.entities[0])
    records, status = world.reader.gather(section, hash_values(["b", "a", "c"]))
    assert status.tolist() == [1, 1, 0]
    assert records[:2, -1].view(np.float32).tolist() == [4, 3]


def test_a_new_generation_holds_everything(world: World) -> None:
    world.learn([(id_, id_) for id_ in range(1, 2 * CHUNK)])
    world.entities.apply(batch_of(fact("a", price=3), schema=world.schema))
    world.learner.pair_z[5] = 9
    report = world.new_generation()
    items = world.tables.keys[world.tables.slot_base_T[1] :][world.tables.occupied(1)].tolist()
    assert len(items) > CHUNK
    assert report.rows == len(items) + world.tables.num_rows(0)
    assert (report.records, report.pairs) == (1, 1)
    assert world.seen("item", *items) == world.trained(1, *items)


def test_section_names_tell_tables_from_entities(world: World) -> None:
    names = [section.name for section in layout_for(world.schema, world.model, 1).sections]
    assert names == [row_section(world.schema.tables[0]), row_section(world.schema.tables[1]), "entity/item"]


def test_an_id_without_a_row_is_unknown_only_where_every_id_gets_one() -> None:
    for admission, status in (("all", UNKNOWN), ("probability", DEFAULT), ("count", DEFAULT)):
        tables = CONFIGURATION["tables"] | {"user": {"width": 3, "admission": {"kind": admission}}}
        schema = Schema.from_settings(Settings.model_validate(CONFIGURATION | {"tables": tables}))
        assert [missing_status(table) for table in schema.tables] == [status, UNKNOWN]


def test_what_is_forgotten_is_taken_out_and_no_byte_of_it_stays(world: World) -> None:
    world.tables.assign(Ids(np.array([[1, 1], [2, 2]])), None, 100)
    world.tables.rows(0)[:] = 1234.5
    world.learn([(1, 1), (2, 2)])
    in_memory = np.count_nonzero(world.reader.shards[0].f32 == 1234.5)
    report = world.publisher.remove(world.tables.remove(0, np.array([1, 9])), step=1, watermark_us=1)
    assert report.removed == 1
    assert world.seen("user", 1, 2) == [None, *world.trained(0, 2)]
    assert (in_memory, np.count_nonzero(world.reader.shards[0].f32 == 1234.5)) == (6, 3)


def test_shards_share_the_capacity() -> None:
    settings = Settings.model_validate(CONFIGURATION)
    layout = layout_for(Schema.from_settings(settings), settings.model, 3)
    assert [section.capacity for section in layout.sections] == [27, 3334, 34]
