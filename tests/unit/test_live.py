"""The live store within one process: what is written is what is read, generations, shards, refusals."""

import gc
import shutil
from pathlib import Path
from typing import Any

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
    Section,
    Writer,
    read_record,
    warm,
)
from trainer.live_kernels import gather_records, put_records, read_double
from trainer.live_memory import map_file
from trainer.probe import EMPTY, REMOVED, WINDOW, home_slot

CAPACITY, WORDS = 100, 5
LAYOUT = Layout((Section("users", "rows", CAPACITY, WORDS),), dense_size=3, pair_slots=10, num_shards=1, schema_hash=7)


Int64s = npt.NDArray[np.int64]
UInt32s = npt.NDArray[np.uint32]


def int64s(*values: int) -> Int64s:
    return np.array(values, np.int64)


def row_of(id_: int, words: int = WORDS) -> npt.NDArray[np.uint32]:
    return (np.arange(words) + 10 * id_).astype(np.uint32)


def put(
    writer: Writer, ids: list[int], *, section: str = "users", words: int = WORDS, capacity: int = CAPACITY
) -> None:
    """Rows of `ids` at their home slots, which must differ."""
    slots = int64s(*(int(home_slot(id_, capacity)) for id_ in ids))
    rows = np.array([row_of(id_, words) for id_ in ids], np.uint32).reshape(-1, words)
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
    assert rows_NW[status_N == LEARNED].tolist() == [row_of(id_).tolist() for id_ in found]
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
def sum_rows(u32: UInt32s, i64: Int64s, descriptor_7: Int64s, ids_N: Int64s, row: UInt32s) -> int:
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
    with pytest.raises(ValueError, match=r"got|wanted"):
        Layout(**{**good, **bad})  # type: ignore[arg-type]


def times_mapped(path: Path) -> int:
    return Path("/proc/self/maps").read_text().count(f"{path}")


def test_a_file_stays_mapped_as_long_as_anything_refers_to_it(tmp_path: Path) -> None:
    path = tmp_path / "file"
    path.write_bytes(bytes(range(256)) * 64)
    with path.open("rb") as file:
        words = np.frombuffer(map_file(file.fileno(), 1000, writable=False), np.uint8)[3:]
    gc.collect()
    assert times_mapped(path) == 1
    assert words[:2].tolist() == [3, 4]
    with pytest.raises(ValueError, match="WRITEABLE"):
        words.base.setflags(write=True)  # type: ignore[union-attr] # numpy's base may be None, not here
    del words
    gc.collect()
    assert times_mapped(path) == 0


def test_what_cannot_be_mapped_is_an_error_and_leaves_nothing_mapped(tmp_path: Path) -> None:
    before = len(Path("/proc/self/maps").read_text().splitlines())
    with (tmp_path / "file").open("wb") as file, pytest.raises(OSError, match="denied"):
        map_file(file.fileno(), 1 << 30, writable=False)
    assert len(Path("/proc/self/maps").read_text().splitlines()) <= before + 1


def num_compiled() -> list[int]:
    kernels: list[Any] = [gather_records, put_records, read_double]
    return [len(compiled.signatures) for compiled in kernels]


def test_warming_leaves_nothing_to_compile(tmp_path: Path) -> None:
    warm()
    compiled = num_compiled()
    _, reader = store(tmp_path, [3])
    reader.gather("users", np.frombuffer(int64s(3).tobytes(), np.int64))
    reader.state()
    assert num_compiled() == compiled
