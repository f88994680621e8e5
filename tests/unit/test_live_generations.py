"""The live store over generations: writers that die, directories that vanish, shards, stores unfit to read."""

import json
import shutil
import time
from pathlib import Path

import numpy as np
import pytest

from tests.unit.test_live import CAPACITY, LAYOUT, int64s, learned, put, store
from trainer.live import Layout, Reader, SchemaMismatch, Section, StoreUnavailable, Writer
from trainer.live_kernels import RECORDS, SEQ, STRIDE
from trainer.live_layout import Manifest
from trainer.probe import home_slot, shard_of


def test_a_new_generation_is_seen_when_it_is_activated(tmp_path: Path) -> None:
    old, reader = store(tmp_path, [3])
    old.commit(step=1, watermark_us=1)
    old.close()
    new = Writer.create(tmp_path, LAYOUT)
    put(new, [4])
    reader.refresh()
    assert learned(reader, [3, 4]) == [3]
    new.activate()
    reader.refresh()
    assert learned(reader, [3, 4]) == [4]
    assert reader.state().version == new.version > old.version
    assert [path.name for path in tmp_path.glob("shard-*.g*")] == ["shard-0-of-1.g2"]


def test_a_generation_begins_after_the_version_of_a_checkpoint(tmp_path: Path) -> None:
    writer = Writer.create(tmp_path, LAYOUT, after_version=(41 << 40) + 12345)
    assert writer.version == 42 << 40


def test_a_writer_that_died_before_it_activated_leaves_nothing_behind(tmp_path: Path) -> None:
    Writer.create(tmp_path, LAYOUT).close()
    store(tmp_path, [3])
    assert [path.name for path in tmp_path.glob("shard-*.g*")] == ["shard-0-of-1.g2"]


def wait_for_a_newer_version(reader: Reader, version: int) -> None:
    until = time.monotonic() + 5
    while reader.state().version <= version:
        assert reader.state().version == version
        assert time.monotonic() < until
        reader.refresh()


def test_versions_go_on_when_the_directory_is_removed_and_made_again(tmp_path: Path) -> None:
    writer = Writer.create(tmp_path / "store", LAYOUT, after_version=9 << 40)
    put(writer, [3])
    writer.activate()
    reader = Reader(tmp_path / "store")
    reader.attach(0)
    version = reader.state().version
    shutil.rmtree(tmp_path / "store")
    reader.refresh()
    assert learned(reader, [3, 4]) == [3]
    second, _ = store(tmp_path / "store", [4])  # knows nothing of the first: generation 1
    wait_for_a_newer_version(reader, version)
    assert learned(reader, [3, 4]) == [4]
    second.close()
    version = reader.state().version
    store(tmp_path / "store", [5])
    reader.refresh()
    assert reader.state().version > version
    assert learned(reader, [4, 5]) == [5]


def test_two_live_writers_of_one_shard_are_refused(tmp_path: Path) -> None:
    first = Writer.create(tmp_path, LAYOUT)
    with pytest.raises(StoreUnavailable, match="being written by process"):
        Writer.create(tmp_path, LAYOUT)
    first.close()
    Writer.create(tmp_path, LAYOUT).close()


def test_a_row_that_a_dead_writer_left_half_written_is_unknown_until_the_next_generation(tmp_path: Path) -> None:
    writer, reader = store(tmp_path, [3, 4])
    descriptor_7 = reader.shards[0].descriptors_S7[0]
    seq = int(descriptor_7[RECORDS] + home_slot(3, CAPACITY) * descriptor_7[STRIDE] + SEQ)
    with (tmp_path / "shard-0-of-1.g1").open("r+b") as file:
        file.seek(4 * seq)
        file.write((1).to_bytes(4, "little"))
    began_s = time.perf_counter()
    assert learned(reader, [3, 4]) == [4]
    assert time.perf_counter() - began_s < 1
    assert reader.peek("users", 3) is None
    writer.close()
    store(tmp_path, [3, 4])
    reader.refresh()
    assert learned(reader, [3, 4]) == [3, 4]


def test_shards_share_the_ids_and_readers_find_them_all(tmp_path: Path) -> None:
    layout = Layout(LAYOUT.sections, dense_size=3, pair_slots=5, num_shards=2, schema_hash=7)
    writers = [Writer.create(tmp_path, layout, shard=shard) for shard in range(2)]
    reader, ids = Reader(tmp_path), [3, 4, 5, 6, 7, 8]
    for shard, writer in enumerate(writers):
        with pytest.raises(StoreUnavailable):
            reader.attach(0)
        put(writer, [id_ for id_ in ids if shard_of(id_, 2) == shard])
        writer.put_pairs(int64s(*range(shard, 5, 2)), np.arange(shard, 5, 2, dtype=np.float32))
        writer.activate()
    reader.attach(0)
    assert learned(reader, [*ids, 99]) == ids
    assert {reader.peek("users", id_) for id_ in ids} == {(50, 2)}
    pairs = [view.f32[view.pairs_off : view.pairs_off + view.pair_slots].tolist() for view in reader.shards]
    assert pairs == [[0, 2, 4], [1, 3]]
    before = reader.state()
    writers[0].commit(step=1, watermark_us=10)
    assert reader.state()[:4] == before[:4]  # what all shards have reached
    writers[1].commit(step=1, watermark_us=8)
    assert (reader.state().step, reader.state().watermark_us) == (1, 8)
    with pytest.raises(ValueError, match="shard 0"):
        writers[1].put_dense(np.zeros(3, np.float32))


def test_a_store_that_is_not_there_is_unavailable(tmp_path: Path) -> None:
    reader, began_s = Reader(tmp_path / "none"), time.monotonic()
    with pytest.raises(StoreUnavailable, match="start the trainer"):
        reader.attach(0.05)
    assert time.monotonic() - began_s >= 0.05
    with pytest.raises(StoreUnavailable, match=r"call attach"):
        reader.state()


@pytest.mark.parametrize(
    "text", ["", "{", "[]", "{}", '{"format": 1, "generation": 1, "layout": {}, "files": []}', "\udcff"]
)
def test_a_corrupt_manifest_is_unavailable_and_a_new_writer_mends_it(tmp_path: Path, text: str) -> None:
    writer, reader = store(tmp_path, [3])
    (tmp_path / "CURRENT").write_bytes(text.encode("utf-8", "surrogateescape"))
    with pytest.raises(StoreUnavailable, match="not a manifest"):
        Reader(tmp_path).attach(0)
    writer.close()
    store(tmp_path, [3, 4])
    reader.refresh()
    assert reader.state().generation == 2
    assert learned(reader, [3, 4]) == [3, 4]


def test_a_manifest_of_another_format_is_refused_by_name(tmp_path: Path) -> None:
    store(tmp_path, [3])
    manifest = json.loads((tmp_path / "CURRENT").read_text())
    (tmp_path / "CURRENT").write_text(json.dumps({**manifest, "format": 2}))
    with pytest.raises(StoreUnavailable, match="format 2, this version reads 1"):
        Reader(tmp_path).attach(0)


@pytest.mark.parametrize(
    ("damage", "message"), [("truncate", "bytes, wanted"), ("zero", "magic is 0"), ("remove", "No such")]
)
def test_a_damaged_file_is_unavailable(tmp_path: Path, damage: str, message: str) -> None:
    store(tmp_path, [3])
    path = tmp_path / "shard-0-of-1.g1"
    if damage == "truncate":
        path.write_bytes(path.read_bytes()[:-1])
    elif damage == "zero":
        path.write_bytes(bytes(path.stat().st_size))
    else:
        path.unlink()
    with pytest.raises(StoreUnavailable, match=message):
        Reader(tmp_path).attach(0)


def test_another_schema_is_refused_but_what_was_attached_stays_readable(tmp_path: Path) -> None:
    old, _ = store(tmp_path, [3])
    with pytest.raises(SchemaMismatch, match=r"0000000000000007.*0000000000000008"):
        Reader(tmp_path, schema_hash=8).attach(0)
    reader = Reader(tmp_path, schema_hash=7)
    reader.attach(0)
    old.close()
    store(tmp_path, [4], layout=Layout(LAYOUT.sections, 3, 10, 1, schema_hash=8))
    for _ in range(2):
        with pytest.raises(SchemaMismatch):
            reader.refresh()
    assert learned(reader, [3, 4]) == [3]


def test_a_store_with_no_room_is_refused_with_its_size(tmp_path: Path) -> None:
    huge = Layout((Section("users", "rows", 2**31 - 1, 100_000),), 0, 0, 1, 1)
    with pytest.raises(StoreUnavailable, match=r"wanted \d+ MiB, \d+ MiB are free"):
        Writer.create(tmp_path, huge)
    assert list(tmp_path.glob("shard-*.g*")) == []
    Writer.create(tmp_path, LAYOUT).close()  # the lock was given back


def test_a_writer_that_died_before_it_told_the_readers_is_noticed(tmp_path: Path) -> None:
    old, reader = store(tmp_path, [3])
    version = old.commit(step=1, watermark_us=1)
    old.close()
    with Writer.create(tmp_path, LAYOUT) as new:
        put(new, [4])
        Manifest(2, LAYOUT, ("shard-0-of-1.g2",)).write(tmp_path)  # the first thing that activate does, and no more
    wait_for_a_newer_version(reader, version)
    assert learned(reader, [3, 4]) == [4]


def test_a_shard_moves_to_its_next_generation_alone(tmp_path: Path) -> None:
    layout = Layout(LAYOUT.sections, dense_size=3, pair_slots=0, num_shards=2, schema_hash=7)
    writers = [Writer.create(tmp_path, layout, shard=shard) for shard in range(2)]
    for writer in writers:
        writer.activate()
    reader = Reader(tmp_path)
    reader.attach(0)
    untouched = reader.shards[1]
    writers[0].close()
    Writer.create(tmp_path, layout, shard=0).activate()
    version = reader.state().version
    reader.refresh()
    assert reader.shards[1] is untouched
    assert reader.shards[0].identity != untouched.identity
    assert reader.state().version >= version
