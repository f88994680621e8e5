"""Checkpoints: everything comes back bit for bit, and a save that is not whole is never used."""

import hashlib
import json
import os
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from tests.unit.test_entities import batch_of, example, fact
from trainer import checkpoint
from trainer.checkpoint import load, load_latest, save, saved_progress
from trainer.dense import LearnerState
from trainer.entities import Entities
from trainer.errors import CheckpointError, SchemaMismatch
from trainer.schema import Schema
from trainer.settings import Settings
from trainer.snapshot import Progress, Snapshot, capture, restore
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
        model = {"pairs": [["user", "item"]], "pair_bits": 8, "hidden": [4]} | model
        entities = {"item": {"key": "item", "capacity": item_records}}
        settings = Settings.model_validate(
            {"tables": tables, "features": features, "entities": entities, "model": model}
        )
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
        metrics = {"histogram": np.arange(5.0), "count": np.array(3)}
        return capture(self.tables, self.entities, self.learner, self.model, progress=progress, metrics=metrics)

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
    assert loaded.snapshot.metrics["histogram"].tolist() == [0, 1, 2, 3, 4]
    assert loaded.snapshot.metrics["count"] == 3
    assert resumed.restored(loaded.snapshot) == []
    resumed.run(30)
    assert resumed.rows_by_id(1) == uninterrupted.rows_by_id(1)
    np.testing.assert_array_equal(resumed.tables.keys, uninterrupted.tables.keys)
    np.testing.assert_array_equal(resumed.learner.params, uninterrupted.learner.params)
    np.testing.assert_array_equal(resumed.entities.words, uninterrupted.entities.words)


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
    assert {p.name: p.read_bytes() for p in a.iterdir()} == {p.name: p.read_bytes() for p in b.iterdir()}


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
    path = save(tmp_path, Trainer().run(1).capture(), keep=1) / checkpoint.MANIFEST
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
    path = save(tmp_path, Trainer().run(2).capture(), keep=2) / checkpoint.MANIFEST
    manifest = json.loads(path.read_text()) | {"format": 99}
    del manifest["checksum"]
    manifest["checksum"] = hashlib.sha256(json.dumps(manifest, sort_keys=True).encode()).hexdigest()
    path.write_text(json.dumps(manifest))
    with pytest.raises(CheckpointError, match=r"manifest\.json has format 99, this version reads format 1: start the"):
        load_latest(tmp_path)


def test_a_save_killed_at_any_point_leaves_the_one_before_or_is_whole(tmp_path: Path) -> None:
    """Before each forced write, rename and removal in turn the process dies; then the next one saves again."""
    trainer = Trainer()
    save(tmp_path, trainer.run(1).capture("1-0"), keep=1)
    trainer.run(1)
    for effects in range(100):
        child = os.fork()
        if child == 0:
            _die_after(effects)
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


def _die_after(effects: int) -> None:
    """End this process like kill -9 before the given forced write, rename or removal."""
    left = [effects]

    def counted(call: Any) -> Any:
        def wrapper(*arguments: Any, **named: Any) -> Any:
            left[0] -= 1
            if left[0] < 0:
                os._exit(9)
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
