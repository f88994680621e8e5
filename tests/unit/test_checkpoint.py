"""Checkpoints on disk: a save that is not whole is never used, whatever happened to it."""

import hashlib
import json
import os
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import safetensors.numpy

from tests.unit.saving import STATE, TABLES, Trainer
from trainer import checkpoint
from trainer.checkpoint import listing, load, load_latest, path_of, point_to, save, saved_progress, verify
from trainer.errors import CheckpointError
from trainer.manifest import MANIFEST
from trainer.settings import Settings
from trainer.snapshot import saved_capacities


def flip_a_bit(path: Path, at: int) -> None:
    content = bytearray(path.read_bytes())
    content[at] ^= 4
    path.write_bytes(content)


def test_keep_is_how_many_saves_stay(tmp_path: Path) -> None:
    trainer = Trainer()
    for step in range(5):
        save(tmp_path, trainer.run(1).capture(f"{step}-0"), keep=2)
    assert [progress.position for progress in saved_progress(tmp_path)] == ["4-0", "3-0"]
    assert sorted(path.name for path in tmp_path.iterdir()) == ["LATEST", "choice", "save-00000004", "save-00000005"]


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
    assert sorted(path.name for path in tmp_path.iterdir()) == ["LATEST", "choice", "save-00000001"]
    save(tmp_path, trainer.capture("3-0"), keep=2)
    assert [progress.position for progress in saved_progress(tmp_path)] == ["3-0", "1-0"]


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
