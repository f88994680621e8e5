"""The live store's kernels: seqlocked records, double-buffered state and dense weights, over memory shared by processes.

Everything here works on whole-file views of one shard: `u32`, `i64` and `f32` are the same bytes, three ways. Readers map
the file read-only, so their views are read-only arrays: kernels that only read get that numba type, everywhere.

A section is described by seven int64 (`descriptor_7`):

    CAPACITY, WINDOW | KEYS (where its keys start, in int64) | SEQ (where its first record starts, in uint32)
    META = SEQ + 1, ROWS = SEQ + 3 | WORDS of a row

and a record is `seq | last seen | count | row`, SEQ_WORDS + META_WORDS + WORDS uint32 long: the seqlock lies beside what
it protects, so a hit costs one cache miss for the key and one for the record.

Rows are copied with plain loads between fences (`live_atomics`): a copy that raced with a write is thrown away.
"""

import numpy as np
import numpy.typing as npt

from trainer.kernel import kernel
from trainer.live_atomics import (
    fence_acquire,
    fence_release,
    load,
    load_acquire,
    prefetch,
    sched_yield,
    store,
    store_release,
)
from trainer.probe import EMPTY, REMOVED, home_slot, shard_of

Uint32s = npt.NDArray[np.uint32]
Int64s = npt.NDArray[np.int64]
Float32s = npt.NDArray[np.float32]
Uint8s = npt.NDArray[np.uint8]

CAPACITY, WINDOW_SLOTS, KEYS, SEQ, META, ROWS, WORDS = range(7)  # fields of a descriptor
SEQ_WORDS, META_WORDS = 1, 2

UNKNOWN, LEARNED, DEFAULT = 0, 1, 2  # status of a row; DEFAULT (not admitted, a table's default row) is never set here
_MOVED, _BUSY = -1, -2  # a slot that no longer holds the id; one whose writer does not finish

# A write holds a slot for about 100 ns. Tight spins cover that; yields cover a writer that lost its core; past them the
# writer is taken for dead inside the slot, and the id is unknown until the next generation (about a millisecond, once a
# lookup). More yields would make lookups of such an id slower, fewer would call live rows unknown on a busy machine.
_TIGHT_SPINS, _YIELDS = 256, 1024
_RESTARTS = 64  # probes begun again because the id's slot went to another id; each needs an eviction inside the copy
_CHUNK = 32  # ids whose cache misses overlap: too few leave the memory idle, too many are evicted before use
_LINE_WORDS = 16  # uint32 of a cache line

@kernel
def locate(i64: Int64s, descriptor_7: Int64s, id_: int) -> int:
    """Slot whose key is `id_` (not a reserved value), or -1; a free slot ends the search."""
    keys, capacity = descriptor_7[KEYS], descriptor_7[CAPACITY]
    slot = home_slot(id_, capacity)
    for _ in range(descriptor_7[WINDOW_SLOTS]):
        key = load(i64, keys + slot)
        if key == id_:
            return slot
        if key == EMPTY:
            return -1
        slot += 1
        if slot == capacity:
            slot = 0
    return -1


@kernel
def copy_slot(
    u32: Uint32s,
    i64: Int64s,
    descriptor_7: Int64s,
    slot: int,
    id_: int,
    part: int,
    num_words: int,
    out_u32: Uint32s,
    out_off: int,
) -> int:
    """Copy `num_words` of a record's META or ROWS `part`; LEARNED means whole and of this id, else `out_u32` is junk."""
    stride = descriptor_7[WORDS] + SEQ_WORDS + META_WORDS
    seq = descriptor_7[SEQ] + slot * stride
    start = descriptor_7[part] + slot * stride
    for spin in range(_TIGHT_SPINS + _YIELDS):
        before = load_acquire(u32, seq)
        if before & np.uint32(1) == 0:
            for w in range(num_words):
                out_u32[out_off + w] = u32[start + w]
            fence_acquire()
            if load(i64, descriptor_7[KEYS] + slot) != id_:
                return _MOVED
            if load(u32, seq) == before:
                return LEARNED
        elif spin >= _TIGHT_SPINS:
            sched_yield()
    return _BUSY


@kernel
def read_part(
    u32: Uint32s, i64: Int64s, descriptor_7: Int64s, id_: int, part: int, num_words: int, out_u32: Uint32s, out_off: int
) -> int:
    """LEARNED and the words of an id's META or ROWS; or UNKNOWN and zeros."""
    if id_ != EMPTY and id_ != REMOVED:
        for _ in range(_RESTARTS):
            slot = locate(i64, descriptor_7, id_)
            if slot < 0:
                break
            outcome = copy_slot(u32, i64, descriptor_7, slot, id_, part, num_words, out_u32, out_off)
            if outcome == LEARNED:
                return LEARNED
            if outcome == _BUSY:
                break
    for w in range(num_words):
        out_u32[out_off + w] = np.uint32(0)
    return UNKNOWN


@kernel
def read_record(
    u32: Uint32s, i64: Int64s, descriptor_7: Int64s, id_: int, out_u32: Uint32s, out_off: int
) -> int:
    """Copy an id's row to `out_u32[out_off:]`, lock-free: LEARNED, or UNKNOWN and zeros. Never half a row or another's."""
    return read_part(u32, i64, descriptor_7, id_, ROWS, descriptor_7[WORDS], out_u32, out_off)


@kernel
def prefetch_record(u32: Uint32s, descriptor_7: Int64s, slot: int) -> None:
    """Ask for a record's cache lines."""
    stride = descriptor_7[WORDS] + SEQ_WORDS + META_WORDS
    start = descriptor_7[SEQ] + slot * stride
    for w in range(0, stride - 1, _LINE_WORDS):
        prefetch(u32, start + w)
    prefetch(u32, start + stride - 1)


@kernel
def gather_records(
    u32: Uint32s, i64: Int64s, descriptor_7: Int64s, ids_N: Int64s, out_u32: Uint32s, status_N: Uint8s
) -> None:
    """`read_record` of many ids, WORDS apart in `out_u32`, with the cache misses of `_CHUNK` ids overlapped."""
    num_words = descriptor_7[WORDS]
    none = np.uint32(0xFFFFFFFF)  # no slot: capacities end below 2^31
    for start in range(0, ids_N.shape[0], _CHUNK):
        stop = min(start + _CHUNK, ids_N.shape[0])
        for i in range(start, stop):
            prefetch(i64, descriptor_7[KEYS] + home_slot(ids_N[i], descriptor_7[CAPACITY]))
        for i in range(start, stop):
            slot = -1
            if ids_N[i] != EMPTY and ids_N[i] != REMOVED:
                slot = locate(i64, descriptor_7, ids_N[i])
            out_u32[i * num_words] = np.uint32(slot) if slot >= 0 else none  # kept where the row will be written
            if slot >= 0:
                prefetch_record(u32, descriptor_7, slot)
        for i in range(start, stop):
            outcome, slot_found = _MOVED, out_u32[i * num_words]
            if slot_found != none:
                slot = np.int64(slot_found)
                outcome = copy_slot(u32, i64, descriptor_7, slot, ids_N[i], ROWS, num_words, out_u32, i * num_words)
            if outcome != LEARNED:
                outcome = read_record(u32, i64, descriptor_7, ids_N[i], out_u32, i * num_words)
            status_N[i] = outcome


@kernel
def shards_of(ids_N: Int64s, num_shards: int, out_N: Int64s) -> None:
    """`shard_of` of many ids."""
    for i in range(ids_N.shape[0]):
        out_N[i] = shard_of(ids_N[i], num_shards)


@kernel
def first_misplaced(descriptor_7: Int64s, slots_N: Int64s, keys_N: Int64s) -> int:
    """Position of the first (slot, key) that no reader could find, or -1."""
    capacity = descriptor_7[CAPACITY]
    for i in range(slots_N.shape[0]):
        slot, key = slots_N[i], keys_N[i]
        if slot < 0 or slot >= capacity or key == EMPTY or key == REMOVED:
            return i
        distance = slot - home_slot(key, capacity)
        if distance < 0:
            distance += capacity
        if distance >= descriptor_7[WINDOW_SLOTS]:
            return i
    return -1


@kernel
def _close_gaps(i64: Int64s, descriptor_7: Int64s, slot: int, key: int) -> None:
    """Mark free slots between a key's home and its slot as removed: a probe must not end before it.

    The trainer's slots on the way are taken, but a row that is held back, or not written yet, leaves one free here.
    """
    keys, capacity = descriptor_7[KEYS], descriptor_7[CAPACITY]
    probed = home_slot(key, capacity)
    while probed != slot:
        if i64[keys + probed] == EMPTY:
            store(i64, keys + probed, REMOVED)
        probed += 1
        if probed == capacity:
            probed = 0


@kernel
def put_records(
    u32: Uint32s,
    i64: Int64s,
    descriptor_7: Int64s,
    slots_N: Int64s,
    keys_N: Int64s,
    words_NW: Uint32s,
    seen_s_N: Uint32s,
    counts_N: Uint32s,
) -> None:
    """Write whole records at known slots, each under its seqlock: odd seq, key, meta, row, even seq."""
    num_words, stride = descriptor_7[WORDS], descriptor_7[WORDS] + SEQ_WORDS + META_WORDS
    for i in range(slots_N.shape[0]):
        ahead = i + _CHUNK // 2
        if ahead < slots_N.shape[0]:
            prefetch(i64, descriptor_7[KEYS] + slots_N[ahead])
            prefetch_record(u32, descriptor_7, slots_N[ahead])
        slot, key = slots_N[i], keys_N[i]
        if i64[descriptor_7[KEYS] + slot] != key:
            _close_gaps(i64, descriptor_7, slot, key)
        seq = descriptor_7[SEQ] + slot * stride
        odd = u32[seq] | np.uint32(1)
        store(u32, seq, odd)
        fence_release()
        store(i64, descriptor_7[KEYS] + slot, key)
        meta, row = descriptor_7[META] + slot * stride, descriptor_7[ROWS] + slot * stride
        u32[meta] = seen_s_N[i]
        u32[meta + 1] = counts_N[i]
        for w in range(num_words):
            u32[row + w] = words_NW[i, w]
        store_release(u32, seq, odd + np.uint32(1))


@kernel
def remove_keys(i64: Int64s, descriptor_7: Int64s, slots_N: Int64s) -> bool:
    """Tombstones: readers of these ids miss from here on. False, and nothing done, if a slot is out of range.

    The record is left as it is: a reader in the middle of it looks at the key again before it answers.
    """
    for i in range(slots_N.shape[0]):
        if slots_N[i] < 0 or slots_N[i] >= descriptor_7[CAPACITY]:
            return False
    for i in range(slots_N.shape[0]):
        store_release(i64, descriptor_7[KEYS] + slots_N[i], REMOVED)
    return True


@kernel
def put_pairs(
    f32: Float32s, pairs_off: int, shard: int, num_shards: int, num_pairs: int, index_N: Int64s, values_N: Float32s
) -> bool:
    """Write pair weights by global index. False, and nothing done, if one is out of range or another shard's.

    Aligned 4-byte stores are atomic, and a weight stands alone: no lock.
    """
    for i in range(index_N.shape[0]):
        if index_N[i] < 0 or index_N[i] >= num_pairs or index_N[i] % num_shards != shard:
            return False
    for i in range(index_N.shape[0]):
        f32[pairs_off + index_N[i] // num_shards] = values_N[i]
    return True


# Two buffers and two counters, for what must change as one: a writer announces version n (BEGUN), fills buffer n % 2, then
# publishes it (DONE). A copy of buffer n % 2 is whole unless version n + 2 was begun meanwhile. A writer that dies at any
# point leaves the last published version untouched, so readers never wait for it.


@kernel
def put_double(i64: Int64s, begun: int, first_off: int, size: int, values: Int64s) -> None:
    """Publish `values[:size]` as the next version; counters at `begun` and `begun + 1`, buffers from `first_off`."""
    version = i64[begun + 1] + 1
    store(i64, begun, version)
    fence_release()
    start = first_off + (version & 1) * size
    for k in range(size):
        i64[start + k] = values[k]
    store_release(i64, begun + 1, version)


@kernel
def read_double(i64: Int64s, begun: int, first_off: int, size: int, out: Int64s) -> int:
    """Copy the newest published version to `out[:size]`; returns its number (0: none yet)."""
    while True:
        version = load_acquire(i64, begun + 1)
        start = first_off + (version & 1) * size
        for k in range(size):
            out[k] = i64[start + k]
        fence_acquire()
        if load(i64, begun) <= version + 1:
            return version
