"""The live store within one process: what is written is what is read, generations, shards, refusals."""

import json
import shutil
import time
from pathlib import Path

import numpy as np
import numpy.typing as npt
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from trainer.kernel import kernel
from trainer.live import (
    LEARNED,
    UNKNOWN,
    Layout,
    Reader,
    SchemaMismatch,
    Section,
    StoreUnavailable,
    Writer,
    read_record,
    warm,
)
from trainer.live_kernels import RECORDS, SEQ, STRIDE, gather_records, put_records, read_double
from trainer.probe import EMPTY, REMOVED, WINDOW, home_slot, shard_of

CAPACITY, WORDS = 100, 5
LAYOUT = Layout((Section("users", "rows", CAPACITY, WORDS),), dense_size=3, pair_slots=10, num_shards=1, schema_hash=7)


def int64s(*values: int) -> npt.NDArray[np.int64]:
    return np.array(values, np.int64)


def row_of(id_: int, words: int = WORDS) -> npt.NDArray[np.uint32]:
    return (np.arange(words) + 10 * id_).astype(np.uint32)


def put(
    writer: Writer, ids: list[int], *, section: str = "users", words: int = WORDS, capacity: int = CAPACITY
) -> None:
    """Rows of `ids` at their home slots, which must differ."""
    slots = int64s(*(int(home_slot(id_, capacity)) for id_ in ids))
    rows = np.array([row_of(id_, words) for id_ in ids])
    writer.put(section, slots, int64s(*ids), rows, np.full(len(ids), 50, np.uint32), np.full(len(ids), 2, np.uint32))


def store(directory: Path, ids: list[int], *, layout: Layout = LAYOUT) -> tuple[Writer, Reader]:
    """A store with rows of `ids`, and a reader of it."""
    writer = Writer.create(directory, layout)
    put(writer, ids)
    writer.activate()
    reader = Reader(directory)
    reader.attach(0)
    return writer, reader


def learned(reader: Reader, ids: list[int]) -> list[int]:
    """Those of `ids` that have a row; it is theirs."""
    rows_NW, status_N = reader.gather("users", int64s(*ids))
    found = [id_ for id_, status in zip(ids, status_N, strict=True) if status == LEARNED]
    assert (rows_NW[status_N == LEARNED] == [row_of(id_) for id_ in found]).all()
    assert not rows_NW[status_N == UNKNOWN].any()
    return found


@settings(max_examples=60, deadline=None)
@given(
    capacity=st.sampled_from([1, 2, 31, 32, 33, 70, 512]),
    words=st.sampled_from([1, 2, 17, 33]),
    steps=st.lists(st.tuples(st.booleans(), st.integers(-40, 40), st.integers(0, WINDOW - 1)), max_size=80),
)
def test_a_store_answers_like_a_dictionary(
    tmp_path_factory: pytest.TempPathFactory, capacity: int, words: int, steps: list[tuple[bool, int, int]]
) -> None:
    directory = tmp_path_factory.mktemp("store")
    writer = Writer.create(directory, Layout((Section("t", "rows", capacity, words),), 0, 0, 1, 1))
    writer.activate()
    reader = Reader(directory)
    reader.attach(0)
    id_at: dict[int, int] = {}
    one, ids = np.ones(1, np.uint32), int64s(*range(-42, 42))
    for puts, id_, shift in steps:
        slot = (int(home_slot(id_, capacity)) + shift % capacity) % capacity
        if not puts:
            writer.remove("t", int64s(slot))
            id_at.pop(slot, None)
        elif id_ not in (EMPTY, REMOVED):
            id_at = {at: other for at, other in id_at.items() if other != id_}
            writer.remove("t", int64s(*(at for at in range(capacity) if at not in id_at)))
            id_at[slot] = id_
            writer.put("t", int64s(slot), int64s(id_), row_of(id_, words)[None], one, one)
    rows_NW, status_N = reader.gather("t", ids)
    known = [int(id_ in id_at.values()) for id_ in ids.tolist()]
    assert status_N.tolist() == known
    assert (rows_NW == [row_of(id_, words) * (id_ in id_at.values()) for id_ in ids.tolist()]).all()
    shutil.rmtree(directory)


def test_the_newest_row_of_an_id_is_read_and_a_removed_one_is_unknown(tmp_path: Path) -> None:
    writer, reader = store(tmp_path, [3, 4])
    slot, one = int64s(int(home_slot(3, CAPACITY))), np.ones(1, np.uint32)
    writer.put("users", slot, int64s(3), np.full((1, WORDS), 9, np.uint32), one, one)
    assert reader.gather("users", int64s(3))[0].tolist() == [[9] * WORDS]
    writer.remove("users", slot)
    assert learned(reader, [3, 4]) == [4]


def test_more_ids_than_a_chunk_and_none_at_all(tmp_path: Path) -> None:
    _, reader = store(tmp_path, [3, 4])
    assert learned(reader, [3, 99, 4] * 50) == [3, 4] * 50
    rows_NW, status_N = reader.gather("users", int64s())
    assert (rows_NW.shape, status_N.shape) == ((0, WORDS), (0,))


def test_reserved_values_are_no_ids(tmp_path: Path) -> None:
    writer, reader = store(tmp_path, [3])
    writer.remove("users", int64s(*range(CAPACITY)))
    assert learned(reader, [EMPTY, REMOVED, 0, 3]) == []
    with pytest.raises(ValueError, match="window of id -1"):
        put(writer, [EMPTY])


@kernel
def sum_rows(u32, i64, descriptor_7, ids_N, row):  # type: ignore[no-untyped-def]
    total = 0
    for i in range(ids_N.shape[0]):
        if read_record(u32, i64, descriptor_7, ids_N[i], row, 1) == LEARNED:
            total += row[1:].sum()
    return total


def test_a_kernel_reads_rows_itself(tmp_path: Path) -> None:
    _, reader = store(tmp_path, [3, 4])
    view, row = reader.shards[0], np.full(1 + WORDS, 77, np.uint32)
    total = sum_rows(view.u32, view.i64, view.descriptors_S7[0], int64s(3, 99, 4), row)
    assert total == row_of(3).sum() + row_of(4).sum()
    assert row[0] == 77


def test_peek_tells_last_seen_and_count(tmp_path: Path) -> None:
    _, reader = store(tmp_path, [3])
    assert reader.peek("users", 3) == (50, 2)
    assert reader.peek("users", 4) is None


def test_a_reader_cannot_write(tmp_path: Path) -> None:
    _, reader = store(tmp_path, [3])
    with pytest.raises(ValueError, match="read-only"):
        reader.shards[0].u32[0] = 1
    with pytest.raises(ValueError, match="read-only"):
        reader.dense()[0][0] = 1


def test_what_no_reader_could_find_is_refused_and_nothing_written(tmp_path: Path) -> None:
    writer, reader = store(tmp_path, [3])
    home, two = int(home_slot(8, CAPACITY)), np.ones(2, np.uint32)
    rows, ids = np.array([row_of(3), row_of(8)]), int64s(3, 8)
    for slot in (-1, CAPACITY, (home + WINDOW) % CAPACITY, (home - 1) % CAPACITY):
        with pytest.raises(ValueError, match="not in the window"):
            writer.put("users", int64s(int(home_slot(3, CAPACITY)), slot), ids, rows + 1, two, two)
    with pytest.raises(ValueError, match="words_NW: got float32"):
        writer.put("users", ids, ids, rows.astype(np.float32), two, two)
    with pytest.raises(ValueError, match="outside 0 to 99"):
        writer.remove("users", int64s(int(home_slot(3, CAPACITY)), CAPACITY))
    with pytest.raises(ValueError, match="ids_N: got int32"):
        reader.gather("users", np.arange(3, dtype=np.int32))
    assert learned(reader, [3, 8]) == [3]


def test_dense_weights_are_replaced_as_one_and_copies_stay(tmp_path: Path) -> None:
    writer, reader = store(tmp_path, [])
    assert reader.dense()[1] == 0
    writer.put_dense(np.array([1, 2, 3], np.float32))
    first, number = reader.dense()
    assert reader.dense()[0] is first
    for value in range(5):
        writer.put_dense(np.full(3, value, np.float32))
    second, later = reader.dense()
    assert (first.tolist(), second.tolist()) == ([1, 2, 3], [4, 4, 4])
    assert later == number + 5


def test_pairs_are_read_at_their_place(tmp_path: Path) -> None:
    writer, reader = store(tmp_path, [])
    writer.put_pairs(int64s(9, 0), np.array([0.5, 0.25], np.float32))
    view = reader.shards[0]
    pairs = view.f32[view.pairs_off : view.pairs_off + view.pair_slots]
    assert pairs.tolist() == [0.25] + [0] * 8 + [0.5]
    with pytest.raises(ValueError, match="pair index"):
        writer.put_pairs(int64s(10), np.ones(1, np.float32))


def test_a_commit_is_a_version_with_its_step_and_watermark(tmp_path: Path) -> None:
    writer, reader = store(tmp_path, [])
    began = reader.state()
    assert writer.commit(step=5, watermark_us=60) == reader.state().version == began.version + 1
    writer.heartbeat(1234, 70)
    state = reader.state()
    assert (state.step, state.watermark_us, state.heartbeat_us, state.stopped) == (5, 70, 1234, False)
    writer.close()
    assert reader.state().stopped


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
    with pytest.raises(SchemaMismatch, match="0000000000000007.*0000000000000008"):
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


@pytest.mark.parametrize(
    "bad",
    [
        {"num_shards": 0},
        {"dense_size": -1},
        {"sections": (Section("a", "rows", 1, 1), Section("a", "rows", 1, 1))},
        {"sections": (Section("a", "rows", 2**31, 1),)},
        {"sections": (Section("a", "rows", 1, 0),)},
    ],
)
def test_a_layout_that_no_file_can_hold_is_refused(bad: dict[str, object]) -> None:
    good = {"sections": LAYOUT.sections, "dense_size": 0, "pair_slots": 0, "num_shards": 1, "schema_hash": 1}
    with pytest.raises(ValueError, match="got|wanted"):
        Layout(**{**good, **bad})  # type: ignore[arg-type]


def test_warming_leaves_nothing_to_compile(tmp_path: Path) -> None:
    warm()
    compiled = [len(kernel_.signatures) for kernel_ in (gather_records, put_records, read_double)]  # type: ignore[attr-defined]
    _, reader = store(tmp_path, [3])
    reader.gather("users", np.frombuffer(int64s(3).tobytes(), np.int64))
    reader.state()
    after = [len(kernel_.signatures) for kernel_ in (gather_records, put_records, read_double)]  # type: ignore[attr-defined]
    assert after == compiled
