"""Reading a live store by slot instead of by id: the nearest rows of a vector, and which rows changed.

A scan takes slots as they come, each under its seqlock, so what it says of a row is of one whole row and its own id. It
is no snapshot of a table: rows that change while it runs are seen before or after. An id that moves to another slot
meanwhile may be met twice, or not at all.

Legend: G slots of a shard, N slots asked for, D width, K matches wanted.
"""
# ruff: noqa: PLR0917 -- kernels take arrays and offsets one by one: numba unpacks no objects.

import tempfile

import numpy as np
import numpy.typing as npt

from trainer.hashing import MISSING_ID
from trainer.kernel import kernel_hot, kernel_inner
from trainer.live import Layout, Reader, Section, Writer
from trainer.live_atomics import address_of, fence_acquire, load_i64, load_u32, load_u32_acquire, sched_yield
from trainer.live_kernels import CAPACITY, RECORDS, ROW, SEQ, STRIDE, TAGS, record_at, unpack
from trainer.probe import EMPTY, REMOVED

Int64s = npt.NDArray[np.int64]
Uint32s = npt.NDArray[np.uint32]
Uint8s = npt.NDArray[np.uint8]
Float32s = npt.NDArray[np.float32]
Place = tuple[int, int, int, int, int, int, int]

# As in `live_kernels`: past them a writer is taken for dead inside the slot, whose row then counts as absent.
_TIGHT_SPINS, _YIELDS = 256, 1024
NEVER_WRITTEN = 0  # sequence word of a record of a new generation: its key is 0, which may be an id as well
ABSENT, PRESENT, PENDING = 0, 1, 2  # bits of `marks_G`: whether an index has the slot, and whether it is to look again


@kernel_inner
def _similarity(f32: Float32s, row: int, query_D: Float32s, by_angle: bool) -> np.float32:
    """Of a unit-length query and the row from `f32[row]` on; 0 where a cosine is asked of a row of zeros."""
    dot, square = np.float32(0), np.float32(0)
    for d in range(query_D.shape[0]):
        value = f32[row + d]
        dot += value * query_D[d]
        square += value * value
    if not by_angle:
        return dot
    return np.float32(dot / np.sqrt(np.float64(square))) if square > 0 else np.float32(0)


@kernel_inner
def _moved(f32: Float32s, row: int, rows_GD: Float32s, slot: int, tolerance: float) -> bool:
    """Whether a row is further from the one kept than `tolerance` times that one's length."""
    away, square = np.float32(0), np.float32(0)
    for d in range(rows_GD.shape[1]):
        kept = rows_GD[slot, d]
        difference = f32[row + d] - kept
        away += difference * difference
        square += kept * kept
    return bool(away > np.float32(tolerance * tolerance) * square)


@kernel_inner
def _is_id(key: int) -> bool:
    return key not in (EMPTY, REMOVED)


@kernel_inner
def _worse(score: np.float32, key: int, other_score: np.float32, other_key: int) -> bool:
    return bool(score < other_score or (score == other_score and key > other_key))


@kernel_inner
def _offer(scores_K: Float32s, keys_K: Int64s, count: int, score: np.float32, key: int) -> int:
    """Put a match into a heap whose root is the worst one kept; returns how many there are now."""
    size = scores_K.shape[0]
    if count < size:
        at = count
        while at > 0:  # up, from the end
            parent = (at - 1) >> 1
            if not _worse(score, key, scores_K[parent], keys_K[parent]):
                break
            scores_K[at], keys_K[at] = scores_K[parent], keys_K[parent]
            at = parent
        scores_K[at], keys_K[at] = score, key
        return count + 1
    if not _worse(scores_K[0], keys_K[0], score, key):
        return count
    at = 0
    while 2 * at + 1 < size:  # down, in the root's place
        child = 2 * at + 1
        if child + 1 < size and _worse(scores_K[child + 1], keys_K[child + 1], scores_K[child], keys_K[child]):
            child += 1
        if _worse(score, key, scores_K[child], keys_K[child]):
            break
        scores_K[at], keys_K[at] = scores_K[child], keys_K[child]
        at = child
    scores_K[at], keys_K[at] = score, key
    return count


@kernel_inner
def _offer_slot(
    base: int, f32: Float32s, place: Place, slot: int, query_D: Float32s, by_angle: bool, but: int,
    scores_K: Float32s, keys_K: Int64s, count: int,
) -> int:  # fmt: skip
    """Offer the row of a slot, as one write left it; nothing if the slot is free, or holds an id that is left out."""
    record, row = record_at(base, place, slot), place[RECORDS] + slot * place[STRIDE] + ROW
    for spin in range(_TIGHT_SPINS + _YIELDS):
        before = load_u32_acquire(record + 4 * SEQ)
        key = load_i64(record)
        if before & 1 == 0:
            score = _similarity(f32, row, query_D, by_angle)
            fence_acquire()
            if load_u32(record + 4 * SEQ) == before:
                if before != NEVER_WRITTEN and _is_id(key) and key not in (but, MISSING_ID):
                    return _offer(scores_K, keys_K, count, score, key)
                return count
        if spin >= _TIGHT_SPINS:
            sched_yield()
    return count


@kernel_hot
def nearest_of_all(
    u32: Uint32s, f32: Float32s, u8: Uint8s, descriptor_7: Int64s, query_D: Float32s, by_angle: bool, but: int,
    scores_K: Float32s, keys_K: Int64s, count: int,
) -> int:  # fmt: skip
    """Offer every row of a shard's section to a heap of `count` matches; returns how many it then has.

    `query_D` has unit length, so that no product overflows. `but`: the id that is left out (EMPTY: none).
    """
    base, place = address_of(u32), unpack(descriptor_7)
    for slot in range(place[CAPACITY]):
        if u8[place[TAGS] + slot] != 0:
            count = _offer_slot(base, f32, place, slot, query_D, by_angle, but, scores_K, keys_K, count)
    return count


@kernel_hot
def nearest_of_slots(
    u32: Uint32s, f32: Float32s, descriptor_7: Int64s, slots_N: Int64s, query_D: Float32s, by_angle: bool, but: int,
    scores_K: Float32s, keys_K: Int64s, count: int,
) -> int:  # fmt: skip
    """The same for some slots of a shard's section."""
    base, place = address_of(u32), unpack(descriptor_7)
    for i in range(slots_N.shape[0]):
        count = _offer_slot(base, f32, place, slots_N[i], query_D, by_angle, but, scores_K, keys_K, count)
    return count


@kernel_hot
def changed_slots(
    u32: Uint32s, f32: Float32s, u8: Uint8s, descriptor_7: Int64s, first: int, last: int, tolerance: float,
    seen_G: Uint32s, rows_GD: Float32s, marks_G: Uint8s, out_N: Int64s,
) -> int:  # fmt: skip
    """Slots from `first` to before `last` that an index should look at again, in `out_N`; returns how many.

    Those are: rows that the index does not have, rows `tolerance` away from how it has them (`rows_GD`), and slots that
    it has and that are free now. `seen_G`: each slot's sequence word as it was last looked at; only those that differ
    are read. A row that is being written is left to the next call.
    """
    base, place, count = address_of(u32), unpack(descriptor_7), 0
    for slot in range(first, last):
        record = record_at(base, place, slot)
        is_used, mark = u8[place[TAGS] + slot] != 0, marks_G[slot]
        if mark & PENDING != 0 or (not is_used and mark & PRESENT == 0):
            continue
        sequence = load_u32_acquire(record + 4 * SEQ)
        if is_used and (sequence == seen_G[slot] or sequence & 1 != 0):
            continue
        is_wanted = is_used
        if is_used and mark & PRESENT != 0:
            is_wanted = _moved(f32, place[RECORDS] + slot * place[STRIDE] + ROW, rows_GD, slot, tolerance)
            fence_acquire()
            if load_u32(record + 4 * SEQ) != sequence:
                continue
        seen_G[slot] = sequence
        if is_wanted or not is_used:
            marks_G[slot] = mark | PENDING
            out_N[count] = slot
            count += 1
    return count


@kernel_hot
def read_slots(
    u32: Uint32s, f32: Float32s, descriptor_7: Int64s, slots_N: Int64s, keys_N: Int64s, rows_ND: Float32s
) -> None:
    """The id and row that each slot holds now; EMPTY where there is none, or the row of missing values."""
    base, place = address_of(u32), unpack(descriptor_7)
    for i in range(slots_N.shape[0]):
        record, row = record_at(base, place, slots_N[i]), place[RECORDS] + slots_N[i] * place[STRIDE] + ROW
        keys_N[i] = EMPTY
        for spin in range(_TIGHT_SPINS + _YIELDS):
            before = load_u32_acquire(record + 4 * SEQ)
            key = load_i64(record)
            if before & 1 == 0:
                for d in range(rows_ND.shape[1]):
                    rows_ND[i, d] = f32[row + d]
                fence_acquire()
                if load_u32(record + 4 * SEQ) == before:
                    if before != NEVER_WRITTEN and _is_id(key) and key != MISSING_ID:
                        keys_N[i] = key
                    break
            if spin >= _TIGHT_SPINS:
                sched_yield()


def warm() -> None:
    """Compile the kernels for what readers have, or load them from the cache."""
    section = Section("warm", "rows", capacity=64, words=3)
    one, keys_1, row_12 = np.zeros(1, np.int64), np.ones(1, np.int64), np.ones((1, 2), np.float32)
    with tempfile.TemporaryDirectory() as directory:
        with Writer.create(directory, Layout((section,), 0, 0, num_shards=1, schema_hash=1)) as writer:
            writer.activate()
        reader = Reader(directory)
        reader.attach(0)
        view = reader.shards[0]
        u8, descriptor_7, score_1 = view.u32.view(np.uint8), view.descriptors_S7[0], np.ones(1, np.float32)
        nearest_of_all(view.u32, view.f32, u8, descriptor_7, row_12[0], True, EMPTY, score_1, keys_1, 0)
        nearest_of_slots(view.u32, view.f32, descriptor_7, one, row_12[0], True, EMPTY, score_1, keys_1, 0)
        seen_G, rows_GD, marks_G = np.zeros(64, np.uint32), np.ones((64, 2), np.float32), np.zeros(64, np.uint8)
        out_N = np.empty(64, np.int64)
        changed_slots(view.u32, view.f32, u8, descriptor_7, 0, 64, 0.05, seen_G, rows_GD, marks_G, out_N)
        read_slots(view.u32, view.f32, descriptor_7, one, keys_1, row_12)
