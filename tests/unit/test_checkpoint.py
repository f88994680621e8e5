"""Checkpoints: everything comes back bit for bit, and a save that is not whole is never used."""

import hashlib
import json
import os
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest
import safetensors.numpy

from tests.unit.test_entities import batch_of, example, fact
from trainer import checkpoint
from trainer.checkpoint import listing, load, load_latest, path_of, point_to, save, saved_progress, verify
from trainer.dense import LearnerState
from trainer.entities import Entities
from trainer.errors import CheckpointError, SchemaMismatch
from trainer.hashing import hash_values
from trainer.manifest import MANIFEST
from trainer.schema import Schema
from trainer.settings import ModelSettings, Settings
from trainer.snapshot import Progress, Snapshot, capture, restore, saved_capacities
from trainer.tables import Ids, Tables

TABLES: dict[str, Any] = {"user": {"width": 4, "capacity": 128, "ttl_s": 50}, "item": {"width": 8, "capacity": 300}}
FEATURES: dict[str, Any] = {
    "user": {"kind": "categorical"},
    "item": {"kind": "categorical"},
    "price": {"kind": "numeric", "entity": "item"},
}
STATE = ("keys", "stamps", "seen_s", "counts", "accumulators", "wide_z", "wide_n", "weights")


class Trainer:
    """The state that a trainer would have, moved by random steps instead of learning."""

    def __init__(self, *, tables: Any = TABLES, features: Any = FEATURES, item_records: int = 64, **model: Any) -> None:
        model = {"wide": True, "pairs": [["user", "item"]], "pair_bits": 8, "hidden": [4]} | model
        entities = {"item": {"key": "item", "capacity": item_records}}
        settings = Settings.model_validate(
            {"tables": tables, "features": features, "entities": entities, "model": model}
        )
        self.settings = settings
        self.schema, self.model = Schema.from_settings(settings), settings.model
        self.tables, self.entities = Tables(self.schema, self.model), Entities(self.schema)
        self.learner = LearnerState.initial(self.schema, self.model)
        self.step = 0

    def run(self, steps: int) -> "Trainer":
        """Steps that depend on nothing but their number."""
        for _ in range(steps):
            self.step += 1
            random = np.random.default_rng(self.step)
            ids_BC = random.integers(0, 400, (20, len(self.schema.tables)))
            touched = self.tables.assign(Ids(ids_BC), None, 3 * self.step).touched_K
            for name in ("accumulators", "wide_z", "wide_n"):
                getattr(self.tables, name)[touched] += random.standard_normal(len(touched), np.float32)
            for t, base in enumerate(self.tables.slot_base_T.tolist()):
                local = self.tables.find(t, ids_BC[:, t]) - base
                self.tables.rows(t)[local[local >= 0]] *= np.float32(1.01)
            self.tables.expire(3 * self.step, 40)
            self.tables.remove(0, ids_BC[:2, 0])
            item = int(ids_BC[0, 1])
            self.entities.apply(batch_of(fact(item, price=self.step), example(item=item % 90), schema=self.schema))
            for name in ("params", "accumulators", "offset"):
                array = getattr(self.learner, name)
                array += random.standard_normal(len(array)).astype(array.dtype)
            pair = random.integers(0, 256)
            self.learner.pair_z[pair], self.learner.pair_n[pair] = random.standard_normal(2)
        return self

    def capture(self, position: str = "7-1") -> Snapshot:
        progress = Progress(step=self.step, position=position, store_version=11 << 40, watermark_us=12)
        groups = {"metrics": {"histogram": np.arange(5.0), "count": np.array(3)}, "dedup": {}}
        return capture(self.tables, self.entities, self.learner, self.settings, progress=progress, groups=groups)

    def restored(self, snapshot: Snapshot) -> list[str]:
        self.step = snapshot.progress.step
        return restore(snapshot, self.tables, self.entities, self.learner, self.model)

    def rows_by_id(self, table: int) -> dict[int, Any]:
        ids = self.tables.keys[self.tables.slot_base_T[table] + self.tables.occupied(table)].tolist()
        rows = {id_: self.tables.row_of(table, id_) for id_ in ids}
        return {
            id_: (*r.row_D.tolist(), r.accumulator, r.wide_z, r.wide_n, r.seen_s, r.count)
            for id_, r in rows.items()
            if r
        }


def assert_same_state(a: Trainer, b: Trainer) -> None:
    for name in STATE:
        in_use = (a.tables.keys >= 0) if name not in ("keys", "weights") else slice(None)
        np.testing.assert_array_equal(getattr(a.tables, name)[in_use], getattr(b.tables, name)[in_use], name)
    for name in ("keys", "stamps", "seen_s", "counts", "words"):
        np.testing.assert_array_equal(getattr(a.entities, name), getattr(b.entities, name), name)
    for name in ("params", "accumulators", "offset", "pair_z", "pair_n"):
        np.testing.assert_array_equal(getattr(a.learner, name), getattr(b.learner, name), name)
    assert [a.tables.clock, a.entities.clock, a.tables.sweep_position, a.tables.num_rows_T.tolist()] == [
        b.tables.clock, b.entities.clock, b.tables.sweep_position, b.tables.num_rows_T.tolist()
    ]  # fmt: skip


def flip_a_bit(path: Path, at: int) -> None:
    content = bytearray(path.read_bytes())
    content[at] ^= 4
    path.write_bytes(content)


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


def test_keep_is_how_many_saves_stay(tmp_path: Path) -> None:
    trainer = Trainer()
    for step in range(5):
        save(tmp_path, trainer.run(1).capture(f"{step}-0"), keep=2)
    assert [progress.position for progress in saved_progress(tmp_path)] == ["4-0", "3-0"]
    assert sorted(path.name for path in tmp_path.iterdir()) == ["LATEST", "save-00000004", "save-00000005"]


def test_an_empty_directory_is_a_first_start(tmp_path: Path) -> None:
    for directory in (tmp_path, tmp_path / "not there yet"):
        loaded = load_latest(directory)
        assert loaded.snapshot is None
        assert loaded.problems == []


@pytest.mark.parametrize("damage", ["cut", "flip", "missing"])
@pytest.mark.parametrize("name", ["table-item.safetensors", "learner.safetensors", "manifest.json"])
def test_a_damaged_save_is_refused_and_the_previous_one_used(tmp_path: Path, name: str, damage: str) -> None:
    trainer = Trainer()
    save(tmp_path, trainer.run(1).capture("1-0"), keep=3)
    path = save(tmp_path, trainer.run(1).capture("2-0"), keep=3) / name
    if damage == "cut":
        path.write_bytes(path.read_bytes()[:-1])
    elif damage == "flip":
        flip_a_bit(path, path.stat().st_size // 2)
    else:
        path.unlink()
    loaded = load_latest(tmp_path)
    assert loaded.snapshot is not None
    assert loaded.snapshot.progress.position == "1-0"
    (problem,) = loaded.problems
    assert problem.startswith(f"save-00000002/{name}")


def test_a_flip_anywhere_in_a_manifest_is_noticed(tmp_path: Path) -> None:
    path = save(tmp_path, Trainer().run(1).capture(), keep=1) / MANIFEST
    good, text = path.read_bytes(), json.loads(path.read_text())
    for at in range(0, len(good), 7):
        flip_a_bit(path, at)
        try:
            load(path.parent)
        except CheckpointError:
            pass
        else:
            assert json.loads(path.read_text()) == text, f"byte {at}"
        path.write_bytes(good)


def test_when_no_save_is_good_it_says_why_instead_of_starting_anew(tmp_path: Path) -> None:
    for path in [save(tmp_path, Trainer().run(1).capture(), keep=2) for _ in range(2)]:
        flip_a_bit(path / "learner.safetensors", 100)
    with pytest.raises(
        CheckpointError, match=r"no checkpoint can be used: save-00000002/learner.*save-00000001/learner"
    ):
        load_latest(tmp_path)


def test_a_lost_pointer_is_said_and_the_newest_used(tmp_path: Path) -> None:
    trainer = Trainer()
    for step in range(2):
        save(tmp_path, trainer.run(1).capture(f"{step}-0"), keep=2)
    (tmp_path / checkpoint.POINTER).write_text("save-99999999")
    loaded = load_latest(tmp_path)
    assert loaded.snapshot is not None
    assert loaded.snapshot.progress.position == "1-0"
    assert loaded.problems == ["LATEST names no save; trying the newest first"]


def test_the_format_of_another_version_is_refused_and_nothing_older_used(tmp_path: Path) -> None:
    save(tmp_path, Trainer().run(1).capture(), keep=2)
    path = save(tmp_path, Trainer().run(2).capture(), keep=2) / MANIFEST
    write_manifest(path, json.loads(path.read_text()) | {"format": 99})
    with pytest.raises(
        CheckpointError, match=r"manifest\.json has format 99, this version reads formats 1 to 2: start the"
    ):
        load_latest(tmp_path)


def test_a_save_killed_at_any_point_leaves_the_one_before_or_is_whole(tmp_path: Path) -> None:
    """Before each forced write, rename and removal in turn the process dies; then the next one saves again."""
    trainer = Trainer()
    save(tmp_path, trainer.run(1).capture("1-0"), keep=1)
    trainer.run(1)
    for effects in range(100):
        child = os.fork()
        if child == 0:
            die_before(effects, lambda: os._exit(9))
            save(tmp_path, trainer.capture("2-0"), keep=1)
            os._exit(0)
        finished = os.waitpid(child, 0)[1] == 0
        loaded = load_latest(tmp_path)
        assert loaded.problems == []
        assert loaded.snapshot is not None
        assert loaded.snapshot.progress.position in ({"2-0"} if finished else {"1-0", "2-0"})
        for path in tmp_path.glob("save-*"):
            load(path)
        if finished:
            break
    assert effects > 10
    assert not list(tmp_path.glob(".*")), "a finished save sweeps up what killed ones left"


def die_before(effects: int, die: Callable[[], None]) -> None:
    """Let this process die before the given forced write, rename or removal."""
    left = [effects]

    def counted(call: Any) -> Any:
        def wrapper(*arguments: Any, **named: Any) -> Any:
            left[0] -= 1
            if left[0] < 0:
                die()
            return call(*arguments, **named)

        return wrapper

    for name in ("fsync", "rename", "replace", "unlink", "rmdir"):
        setattr(os, name, counted(getattr(os, name)))


def test_a_full_disk_is_said_and_costs_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    trainer = Trainer()
    save(tmp_path, trainer.run(1).capture("1-0"), keep=2)

    def no_space(descriptor: int) -> None:
        raise OSError(28, "No space left on device")

    with monkeypatch.context() as patched:
        patched.setattr(os, "fsync", no_space)
        with pytest.raises(CheckpointError, match="No space left on device; earlier ones are kept"):
            save(tmp_path, trainer.run(1).capture("2-0"), keep=2)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["LATEST", "save-00000001"]
    save(tmp_path, trainer.capture("3-0"), keep=2)
    assert [progress.position for progress in saved_progress(tmp_path)] == ["3-0", "1-0"]


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


def test_both_the_capacity_in_force_and_the_configured_one_are_told(tmp_path: Path) -> None:
    saved = Trainer().run(3)
    saved.schema = saved.tables.schema = replace(  # as after a resize while running
        saved.schema, tables=(saved.schema.tables[0], replace(saved.schema.tables[1], capacity=300))
    )
    saved.settings = Settings.model_validate(
        saved.settings.model_dump() | {"tables": {**TABLES, "item": {"width": 8, "capacity": 500}}}
    )
    snapshot = load(save(tmp_path, saved.capture(), keep=1))
    assert saved_capacities(snapshot) == {"user": (128, 128), "item": (300, 500)}


def test_the_manifest_holds_the_configuration_without_the_brokers_password(tmp_path: Path) -> None:
    trainer = Trainer().run(1)
    stream = {"url": "redis://joe:s3cret@host:6379/0"}
    trainer.settings = Settings.model_validate(trainer.settings.model_dump() | {"stream": stream})
    path = save(tmp_path, trainer.capture(), keep=1)
    text = (path / MANIFEST).read_text()
    assert "s3cret" not in text and "redis://joe:***@host:6379/0" in text
    assert Settings.model_validate(load(path).settings).tables == trainer.settings.tables
    rows = {f"table-{table.name}": trainer.tables.num_rows(table.index) for table in trainer.schema.tables}
    assert json.loads(text)["num_rows"] == rows | {"entity-item": 1}


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


class Counting(Tables):
    """Tables that count sightings of ids without a row, for the second table."""

    def __init__(self, schema: Schema, model: ModelSettings, num_counters: int) -> None:
        super().__init__(schema, model)
        self.counters = np.zeros(num_counters, np.uint8)

    def sketch(self, table: int) -> npt.NDArray[np.uint8]:
        return self.counters[: len(self.counters) * table]


@pytest.mark.parametrize(("num_counters", "notes"), [(64, 0), (128, 1), (0, 0)])
def test_a_sketch_is_kept_where_it_has_the_same_size(tmp_path: Path, num_counters: int, notes: int) -> None:
    saved, restored = Trainer(), Trainer()
    saved.tables = Counting(saved.schema, saved.model, 64)
    saved.tables.counters[:] = np.arange(64)
    restored.tables = Counting(restored.schema, restored.model, num_counters)
    said = restored.restored(load(save(tmp_path, saved.capture(), keep=1)))
    assert said == ["table item: the checkpoint has no sketch that fits, it starts anew"] * notes
    assert restored.tables.counters.tolist() == (list(range(64)) if num_counters == 64 else [0] * num_counters)


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


def as_format_1(path: Path, trainer: Trainer) -> None:
    """Turn a save into what the first format was: other numbers, no configuration, every array always there."""
    manifest = json.loads((path / MANIFEST).read_text())
    about = manifest["about"]
    scalars = about.pop("scalars")
    about |= {"table_clock": scalars["clock"], "sweep_position": scalars["sweep_position"]}
    del about["dense_optimizer"]
    for table in about["tables"].values():
        del table["optimizer"], table["configured"]
    for name in ("created_us", "settings", "num_rows", "checksum"):
        del manifest[name]
    (path / "dedup.safetensors").unlink()
    del manifest["files"]["dedup.safetensors"]
    for table in trainer.schema.tables:
        name = f"table-{table.name}.safetensors"
        local_N = trainer.tables.occupied(table.index)
        slots_N = trainer.tables.slot_base_T[table.index] + local_N
        state = {n: getattr(trainer.tables, n)[slots_N] for n in STATE if n not in ("keys", "weights")}
        tensors = safetensors.numpy.load_file(path / name)
        own = {n: tensors[n] for n in ("ids", "slots", "removed", "rows")}
        content = safetensors.numpy.save({**own, **state, "stamps": state["stamps"].astype(np.int64)})
        (path / name).write_bytes(content)
        manifest["files"][name] = {"bytes": len(content), "sha256": hashlib.sha256(content).hexdigest()}
    write_manifest(path / MANIFEST, manifest | {"format": 1})


def write_manifest(path: Path, manifest: dict[str, Any]) -> None:
    manifest.pop("checksum", None)
    manifest["checksum"] = hashlib.sha256(json.dumps(manifest, sort_keys=True).encode()).hexdigest()
    path.write_text(json.dumps(manifest, indent=1, sort_keys=True))


def test_a_save_of_format_1_is_read(tmp_path: Path) -> None:
    saved, restored = Trainer().run(25), Trainer()
    path = save(tmp_path, saved.capture(), keep=1)
    as_format_1(path, saved)
    snapshot = load(path)
    assert restored.restored(snapshot) == []
    assert [restored.tables.clock, restored.tables.sweep_position] == [saved.tables.clock, saved.tables.sweep_position]
    assert restored.run(10).rows_by_id(1) == saved.run(10).rows_by_id(1)
    assert saved_capacities(snapshot) == {"user": (128, 128), "item": (300, 300)}
    (info,) = listing(tmp_path)
    assert info.format == 1 and info.problem is None and info.created_us is not None
    assert verify(path) == []


def test_saves_are_listed_with_what_is_wrong_with_them(tmp_path: Path) -> None:
    trainer = Trainer()
    for step in range(4):
        save(tmp_path, trainer.run(1).capture(f"{step}-0"), keep=9)
    (path_of(tmp_path, 2) / "learner.safetensors").unlink()
    flip_a_bit(path_of(tmp_path, 3) / MANIFEST, 50)
    flip_a_bit(path_of(tmp_path, 1) / "learner.safetensors", 300)
    four, three, two, one = listing(tmp_path)
    assert (four.number, four.is_latest, four.problem, four.format) == (4, True, None, 2)
    assert (four.step, four.position, four.store_version) == (4, "3-0", 11 << 40)
    assert four.num_bytes == sum(file.stat().st_size for file in four.path.iterdir())
    assert four.created_us is not None and abs(four.created_us / 1e6 - time.time()) < 60
    assert three.problem is not None and three.problem.startswith("save-00000003/manifest.json") and three.step is None
    assert two.problem == "save-00000002/learner.safetensors is missing or cut off" and two.position == "1-0"
    assert one.problem is None, "only verify reads every byte"
    assert [len(verify(info.path)) for info in (four, three, two, one)] == [0, 1, 1, 1]
    assert verify(one.path)[0].startswith("save-00000001/learner.safetensors was changed")
    assert not any(info.is_latest for info in (three, two, one))


def test_a_start_begins_from_the_save_that_was_pointed_to_and_leaves_the_later_ones(tmp_path: Path) -> None:
    trainer = Trainer()
    for step in range(1, 6):
        save(tmp_path, trainer.run(1).capture(f"{step}-0"), keep=4)
    assert point_to(tmp_path, 3) == path_of(tmp_path, 3)
    rolled_back = load_latest(tmp_path)
    assert rolled_back.path == path_of(tmp_path, 3) and rolled_back.problems == []
    assert [info.number for info in listing(tmp_path) if info.is_latest] == [3]
    flip_a_bit(path_of(tmp_path, 3) / "learner.safetensors", 300)
    assert load_latest(tmp_path).path == path_of(tmp_path, 2), "not what the rollback turned away from"
    flip_a_bit(path_of(tmp_path, 3) / "learner.safetensors", 300)
    save(tmp_path, trainer.capture("3.5-0"), keep=4)
    assert [info.number for info in listing(tmp_path)] == [6, 3, 2]


def test_pointing_to_a_save_that_is_not_there_or_not_good_changes_nothing(tmp_path: Path) -> None:
    for _ in range(2):
        save(tmp_path, Trainer().run(1).capture(), keep=2)
    with pytest.raises(CheckpointError, match=r"there is no checkpoint 7 in .*, only 1, 2"):
        point_to(tmp_path, 7)
    flip_a_bit(path_of(tmp_path, 1) / "learner.safetensors", 300)
    with pytest.raises(CheckpointError, match=r"save-00000001/learner.safetensors was changed"):
        point_to(tmp_path, 1)
    assert load_latest(tmp_path).path == path_of(tmp_path, 2)
