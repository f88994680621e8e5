"""Snapshots: everything comes back bit for bit, into any capacity, and what cannot is said."""

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from tests.unit.saving import FEATURES, TABLES, Trainer, assert_same_state
from tests.unit.test_entities import batch_of, fact
from trainer.checkpoint import load, load_latest, path_of, save
from trainer.dense import LearnerState
from trainer.errors import SchemaMismatch
from trainer.hashing import hash_values
from trainer.manifest import MANIFEST
from trainer.snapshot import Progress, capture
from trainer.tables import Ids


def test_a_run_goes_on_as_if_it_had_never_stopped(tmp_path: Path) -> None:
    save(tmp_path, Trainer().run(30).capture(), keep=1)
    resumed, uninterrupted = Trainer(), Trainer().run(60)
    loaded = load_latest(tmp_path)
    assert loaded.problems == []
    assert loaded.snapshot is not None
    assert loaded.snapshot.progress == Progress(30, "7-1", 11 << 40, 12)
    assert loaded.snapshot.tensors["metrics"]["histogram"].tolist() == [0, 1, 2, 3, 4]
    assert loaded.snapshot.tensors["metrics"]["count"] == 3
    assert resumed.restored(loaded.snapshot) == []
    resumed.run(30)
    assert resumed.rows_by_id(1) == uninterrupted.rows_by_id(1)
    np.testing.assert_array_equal(resumed.tables.keys, uninterrupted.tables.keys)
    np.testing.assert_array_equal(resumed.learner.params, uninterrupted.learner.params)
    np.testing.assert_array_equal(resumed.entities.words, uninterrupted.entities.words)


@pytest.mark.parametrize("admission", [{"kind": "count", "halve_every": 150}, {"kind": "probability"}])
@pytest.mark.parametrize("eviction", ["lru", "lfu"])
def test_admission_and_eviction_go_on_as_if_the_run_had_never_stopped(
    tmp_path: Path, admission: dict[str, Any], eviction: str
) -> None:
    tables = {name: table | {"admission": admission, "eviction": eviction} for name, table in TABLES.items()}
    save(tmp_path, Trainer(tables=tables).run(25).capture(), keep=1)
    resumed, uninterrupted = Trainer(tables=tables), Trainer(tables=tables).run(70)
    assert resumed.restored(load(path_of(tmp_path, 1))) == []
    resumed.run(45)
    assert resumed.tables.scalars == uninterrupted.tables.scalars
    for table in (0, 1):
        assert resumed.rows_by_id(table) == uninterrupted.rows_by_id(table)
        np.testing.assert_array_equal(resumed.tables.sketch(table), uninterrupted.tables.sketch(table))
    np.testing.assert_array_equal(resumed.tables.keys, uninterrupted.tables.keys)


def test_a_restored_trainer_has_every_bit_of_the_saved_one(tmp_path: Path) -> None:
    saved, restored = Trainer().run(25), Trainer()
    restored.restored(load(save(tmp_path, saved.capture(), keep=1)))
    for table in (0, 1):
        unused = np.setdiff1d(np.arange(len(saved.tables.rows(table))), saved.tables.occupied(table))
        saved.tables.rows(table)[unused] = 0  # left by ids that are gone
    assert_same_state(saved, restored)


def test_saving_changes_nothing_and_a_snapshot_does_not_change(tmp_path: Path) -> None:
    saving, plain = Trainer().run(10), Trainer().run(20)
    snapshot = saving.capture()
    before = {g: {n: t.copy() for n, t in ts.items()} for g, ts in snapshot.tensors.items()}
    saving.run(10)
    save(tmp_path, snapshot, keep=1)
    assert_same_state(saving, plain)
    for group, tensors in load_latest(tmp_path).snapshot.tensors.items():  # type: ignore[union-attr]
        for name, tensor in tensors.items():
            np.testing.assert_array_equal(tensor, before[group][name])


def test_the_same_state_makes_the_same_bytes(tmp_path: Path) -> None:
    a, b = (save(tmp_path / name, Trainer().run(5).capture(), keep=1) for name in ("a", "b"))
    one, other = (json.loads((path / MANIFEST).read_text()) for path in (a, b))
    assert one["files"] == other["files"]  # by their SHA-256
    assert one.keys() == other.keys()
    assert [name for name in one if one[name] != other[name]] == ["checksum", "created_us"]


def test_rows_keep_their_ids_in_a_larger_capacity() -> None:
    saved = Trainer().run(25)
    larger = Trainer(tables={n: t | {"capacity": 5 * t["capacity"]} for n, t in TABLES.items()}, item_records=640)
    assert larger.restored(saved.capture()) == []
    for table in (0, 1):
        assert larger.rows_by_id(table) == saved.rows_by_id(table)
    ids = saved.entities.keys[saved.entities.occupied(0)]
    np.testing.assert_array_equal(
        larger.entities.records(0)[larger.entities.find(0, ids)], saved.entities.records(0)[saved.entities.occupied(0)]
    )
    larger.run(5)


def test_a_smaller_capacity_keeps_the_ids_used_last_and_says_how_many_it_dropped() -> None:
    saved = Trainer().run(25)
    smaller = Trainer(tables={**TABLES, "item": {"width": 8, "capacity": 64}})
    (note,) = smaller.restored(saved.capture())
    before, after = saved.rows_by_id(1), smaller.rows_by_id(1)
    assert f"no room for {len(before) - len(after)} ids in 64 slots" in note
    assert after.items() <= before.items()
    assert smaller.tables.num_rows(1) == len(after) > 40

    def age(ids: set[int]) -> float:
        return float(np.mean([saved.tables.stamps[saved.tables.find(1, np.array([id_]))[0]] for id_ in ids]))

    assert age(set(after)) > age(set(before) - set(after))


def test_a_new_table_starts_empty_and_one_that_is_gone_is_dropped() -> None:
    changed = Trainer(
        tables={"item": TABLES["item"], "hour": {"width": 2}},
        features={"item": FEATURES["item"], "hour": {"kind": "categorical"}, "price": FEATURES["price"]},
        pairs=[["item", "hour"]],
    )
    saved = Trainer().run(10)
    notes = changed.restored(saved.capture())
    assert changed.rows_by_id(0) == saved.rows_by_id(1)
    assert changed.tables.num_rows(1) == 0
    assert [note.split(" ")[:2] for note in notes] == [
        ["table", "hour"], ["table", "user"], ["the", "network"], ["the", "hashed"]
    ]  # fmt: skip
    fresh = LearnerState.initial(changed.schema, changed.model)
    np.testing.assert_array_equal(changed.learner.params, fresh.params)
    assert not changed.learner.pair_z.any()
    np.testing.assert_array_equal(changed.learner.offset, saved.learner.offset)


def test_a_table_of_another_width_is_refused_by_name() -> None:
    with pytest.raises(SchemaMismatch, match=r"tables\.item\.width is 16, the checkpoint's is 8"):
        Trainer(tables={**TABLES, "item": {"width": 16}}).restored(Trainer().run(1).capture())


def test_records_of_other_features_start_anew() -> None:
    changed = Trainer(features={**FEATURES, "age": {"kind": "numeric", "entity": "item"}})
    notes = changed.restored(Trainer().run(10).capture())
    assert any(note.startswith("entity item has other features") for note in notes)
    assert len(changed.entities.occupied(0)) == 0


def says(id_: int, step: int, width: int) -> Any:
    """A row that tells whose it is and when it was written."""
    return np.array([id_, step, *((id_ * 31 + step * 7 + k) % 1009 for k in range(width - 2))], np.float32)


class SelfDescribing(Trainer):
    """Every row, record and state says which id it belongs to and at which step it was last touched."""

    def run(self, steps: int) -> "SelfDescribing":
        for _ in range(steps):
            self.step += 1
            ids_BC = np.random.default_rng(self.step).integers(0, 2000, (20, 2))
            self.tables.assign(Ids(ids_BC), None, self.step)
            for t in (0, 1):
                for id_ in set(ids_BC[:, t].tolist()):
                    (slot,) = self.tables.find(t, np.array([id_]))
                    if slot >= 0:
                        rows = self.tables.rows(t)
                        rows[slot - self.tables.slot_base_T[t]] = says(id_, self.step, rows.shape[1])
                        self.tables.accumulators[slot] = id_ + self.step
            self.entities.apply(batch_of(fact(int(ids_BC[0, 1]), price=ids_BC[0, 1] + 0.5), schema=self.schema))
            self.learner.params[:] = self.step
        return self

    def check(self, step: int) -> list[int]:
        """Everything is what it says it is; the number of rows of each table."""
        for t in (0, 1):
            for id_, (*row, accumulator, _, _, seen_s, _) in self.rows_by_id(t).items():
                assert row[0] == id_ and row[1] == seen_s <= step
                assert row == says(id_, int(row[1]), len(row)).tolist()
                assert accumulator == id_ + row[1]
        for slot in self.entities.occupied(0):
            price = self.entities.records(0)[slot, 1:2].view(np.float32)[0]
            assert hash_values([int(price - 0.5)]) == self.entities.keys[slot]
        assert (self.learner.params == step).all()
        return [self.tables.num_rows(0), self.tables.num_rows(1)]


@pytest.mark.parametrize("scale", [1, 0.7, 3])
@pytest.mark.parametrize("eviction", ["lru", "lfu"])
def test_a_model_that_tells_its_id_and_step_is_what_it_says_after_every_restore(
    tmp_path: Path, scale: float, eviction: str
) -> None:
    tables = {"user": {"width": 4, "capacity": 128}, "item": {"width": 8, "capacity": 300}}
    saved = SelfDescribing(tables={n: t | {"eviction": eviction} for n, t in tables.items()}).run(60)
    before = saved.check(60)
    resized = {n: t | {"eviction": eviction, "capacity": int(scale * int(t["capacity"]))} for n, t in tables.items()}
    restored = SelfDescribing(tables=resized, item_records=int(64 * scale) + 20)
    restored.restored(load(save(tmp_path, saved.capture(), keep=1)))
    after = restored.check(60)
    assert after == before if scale >= 1 else 0.5 * sum(before) < sum(after) < sum(before)
    restored.run(20).check(80)


def test_a_smaller_table_that_evicts_by_use_keeps_the_ids_used_most() -> None:
    tables = {**TABLES, "item": {"width": 8, "capacity": 300, "eviction": "lfu"}}
    saved = Trainer(tables=tables).run(25)
    occupied = saved.tables.slot_base_T[1] + saved.tables.occupied(1)
    saved.tables.counts[occupied] = np.arange(1, len(occupied) + 1)
    saved.tables.stamps[occupied] = saved.tables.clock - np.arange(len(occupied))  # the most used are the oldest
    smaller = Trainer(tables={**tables, "item": tables["item"] | {"capacity": 64}})
    smaller.restored(saved.capture())
    kept = smaller.tables.counts[smaller.tables.slot_base_T[1] + smaller.tables.occupied(1)]
    assert kept.mean() > len(occupied) - 70


def test_state_of_another_optimizer_starts_anew_and_rows_stay() -> None:
    saved = Trainer().run(10)
    sgd = {"user": TABLES["user"], "item": TABLES["item"] | {"optimizer": {"kind": "sgd", "initial_accumulator": 0.5}}}
    changed = Trainer(tables=sgd, optimizer={"kind": "sgd"})
    notes = changed.restored(saved.capture())
    assert notes == [
        "table item: its optimizer was adagrad and is sgd: its state starts anew",
        "the network: its optimizer was adagrad and is sgd: its state starts anew",
    ]
    assert changed.rows_by_id(0) == saved.rows_by_id(0)
    rows, before = changed.rows_by_id(1), saved.rows_by_id(1)
    assert {id_: row[:8] for id_, row in rows.items()} == {id_: row[:8] for id_, row in before.items()}
    assert {row[8] for row in rows.values()} == {0.0}  # SGD keeps nothing
    np.testing.assert_array_equal(changed.learner.params, saved.learner.params)
    fresh = LearnerState.initial(changed.schema, changed.model)
    np.testing.assert_array_equal(changed.learner.accumulators, fresh.accumulators)


def test_an_array_that_the_save_lacks_starts_anew_and_is_named(tmp_path: Path) -> None:
    snapshot = Trainer().run(10).capture()
    del snapshot.tensors["table-item"]["wide_z"]
    del snapshot.tensors["learner"]["accumulators"]
    restored = Trainer()
    assert restored.restored(load(save(tmp_path, snapshot, keep=1))) == [
        "table item: the checkpoint has no wide_z that fits, it starts anew",
        "the network: the checkpoint has no accumulators that fits, it starts anew",
    ]
    assert {row[-4] for row in restored.rows_by_id(1).values()} == {0.0}


def counting(sketch_bytes: int) -> Any:
    """Tables of which the second admits by count, with a sketch of that size (0: it admits all)."""
    admission = {"kind": "count", "min_count": 3, "sketch_bytes": sketch_bytes} if sketch_bytes else {}
    return TABLES | {"item": TABLES["item"] | ({"admission": admission} if admission else {})}


@pytest.mark.parametrize(("sketch_bytes", "notes"), [(1024, 0), (2048, 1), (0, 0)])
def test_a_sketch_is_kept_where_it_has_the_same_size(tmp_path: Path, sketch_bytes: int, notes: int) -> None:
    saved, restored = Trainer(tables=counting(1024)).run(10), Trainer(tables=counting(sketch_bytes))
    assert saved.tables.sketch(1).any()
    said = restored.restored(load(save(tmp_path, saved.capture(), keep=1)))
    assert said == ["table item: the checkpoint has no sketch that fits, it starts anew"] * notes
    kept = saved.tables.sketch(1) if sketch_bytes == 1024 else np.zeros(sketch_bytes, np.uint8)
    np.testing.assert_array_equal(restored.tables.sketch(1), kept)


def test_groups_come_back_by_name_and_may_not_take_the_trainers_own(tmp_path: Path) -> None:
    trainer = Trainer().run(1)
    progress = Progress(1, "1-1", 0, 0)
    state = (trainer.tables, trainer.entities, trainer.learner, trainer.settings)
    fortran = np.asfortranarray(np.arange(6).reshape(2, 3))
    snapshot = capture(*state, progress=progress, groups={"guard": {"window": fortran}})
    fortran[:] = 0
    loaded = load(save(tmp_path, snapshot, keep=1))
    np.testing.assert_array_equal(loaded.tensors["guard"]["window"], np.arange(6).reshape(2, 3))
    with pytest.raises(ValueError, match="groups called learner"):
        capture(*state, progress=progress, groups={"learner": {}})
