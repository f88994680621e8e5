"""The live store's kernels: seqlocked records, double-buffered state and dense weights, in memory shared by processes.

A shard's file is seen as one memory from `base`, the address of its first byte. A section of it is described by seven
int64 (`descriptor_7`; as a tuple: `place`):

    CAPACITY, WINDOW | KEYS (where its keys start, in int64) | SEQ (where its first record starts, in uint32)
    META = SEQ + 1, ROWS = SEQ + 3 | WORDS of a row

and a record is `seq | last seen | count | row`, SEQ_WORDS + META_WORDS + WORDS uint32 long: the seqlock lies beside
what it protects, so a hit costs one cache miss for the key and one for the record.

Rows are copied plainly between fences: a copy that raced with a write is thrown away.
"""
# ruff: noqa: PLR0917 -- kernels take arrays and offsets one by one: numba unpacks no objects.

import numpy as np
import numpy.typing as npt

from trainer.kernel import kernel
from trainer.live_atomics import (
    LANES,
    address_of,
    copy_words,
    fence_acquire,
    fence_release,
    first_bit,
    load_i64,
    load_i64_acquire,
    load_u32,
    load_u32_acquire,
    match_line,
    prefetch,
    sched_yield,
    store_i64,
    store_i64_release,
    store_u32,
    store_u32_release,
)
from trainer.probe import EMPTY, REMOVED, home_slot, shard_of

Uint32s = npt.NDArray[np.uint32]
Int64s = npt.NDArray[np.int64]
Float32s = npt.NDArray[np.float32]
Uint8s = npt.NDArray[np.uint8]
Place = tuple[int, int, int, int, int, int, int]

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
_LINE_BYTES = 64
_NO_SLOT = 0xFFFFFFFF  # as uint32; capacities end below 2^31


@kernel
def unpack(descriptor_7: Int64s) -> Place:
    """A descriptor as a tuple, which inner functions take at no cost."""
    d = descriptor_7
    return d[0], d[1], d[2], d[3], d[4], d[5], d[6]


@kernel
def record_at(base: int, place: Place, slot: int) -> int:
    """Address of a record, which is that of its seqlock."""
    return base + 4 * (place[SEQ] + slot * (SEQ_WORDS + META_WORDS + place[WORDS]))


@kernel
def key_at(base: int, place: Place, slot: int) -> int:
    """Address of a slot's key."""
    return base + 8 * (place[KEYS] + slot)


@kernel
def locate(base: int, place: Place, id_: int) -> int:
    """Slot whose key is `id_`, or -1. A free slot at or after the id's home ends the search.

    Keys are compared a cache line at a time, from the line that holds the home slot; so the slots looked at may begin
    before the window and end after it, where the id is not. Past the last slot, a line is filled with REMOVED.
    """
    if id_ in (EMPTY, REMOVED):  # no ids: they would be found in free slots
        return -1
    home = int(home_slot(id_, place[CAPACITY]))
    first, skipped = home & -LANES, home & (LANES - 1)
    for _ in range((place[WINDOW_SLOTS] >> 3) + 2):
        line = key_at(base, place, first)
        hits = match_line(line, id_)
        if hits != 0:
            return first + first_bit(hits)
        if match_line(line, EMPTY) >> skipped != 0:
            break
        first, skipped = first + LANES, 0
        if first >= place[CAPACITY]:
            first = 0
    return -1


@kernel
def try_copy(base: int, place: Place, slot: int, id_: int, part: int, num_words: int, target: int) -> int:
    """Copy `num_words` of a record's META or ROWS `part`, once: LEARNED if whole and of this id, else it is junk."""
    seq = record_at(base, place, slot)
    before = load_u32_acquire(seq)
    if before & 1 != 0:
        return _BUSY
    copy_words(target, seq + 4 * (place[part] - place[SEQ]), num_words)
    fence_acquire()
    if load_i64(key_at(base, place, slot)) != id_:
        return _MOVED
    return LEARNED if load_u32(seq) == before else _BUSY


@kernel
def read_part(base: int, place: Place, id_: int, part: int, num_words: int, target: int) -> int:
    """LEARNED and the words of an id's META or ROWS; or UNKNOWN and zeros."""
    outcome = _MOVED
    for _ in range(_RESTARTS):
        slot = locate(base, place, id_)
        if slot < 0:
            break
        for spin in range(_TIGHT_SPINS + _YIELDS):
            outcome = try_copy(base, place, slot, id_, part, num_words, target)
            if outcome != _BUSY:
                break
            if spin >= _TIGHT_SPINS:
                sched_yield()
        if outcome == LEARNED:
            return LEARNED
        if outcome == _BUSY:
            break
    for w in range(num_words):
        store_u32(target + 4 * w, 0)
    return UNKNOWN


@kernel
def read_record(u32: Uint32s, i64: Int64s, descriptor_7: Int64s, id_: int, out_u32: Uint32s, out_off: int) -> int:
    """Copy an id's row to `out_u32[out_off:]`: LEARNED, or UNKNOWN and zeros; never half a row, nor another id's.

    For kernels that read a row or two. For many, `gather_records` is three times as fast.
    """
    place, target = unpack(descriptor_7), address_of(out_u32) + 4 * out_off
    return read_part(address_of(u32), place, id_, ROWS, place[WORDS], target)


@kernel
def read_meta(u32: Uint32s, descriptor_7: Int64s, id_: int, out_u32: Uint32s) -> int:
    """Copy an id's last seen (s) and count: LEARNED, or UNKNOWN and zeros."""
    return read_part(address_of(u32), unpack(descriptor_7), id_, META, META_WORDS, address_of(out_u32))


@kernel
def prefetch_keys(base: int, place: Place, id_: int) -> None:
    """Ask for the line of an id's home slot, and for the next one if a short probe may end there."""
    key = key_at(base, place, int(home_slot(id_, place[CAPACITY])))
    prefetch(key)
    prefetch(key + 16)


@kernel
def prefetch_record(base: int, place: Place, slot: int) -> None:
    """Ask for a record's cache lines."""
    for line in range(record_at(base, place, slot) & -_LINE_BYTES, record_at(base, place, slot + 1), _LINE_BYTES):
        prefetch(line)


@kernel
def gather_records(
    u32: Uint32s, i64: Int64s, descriptor_7: Int64s, ids_N: Int64s, out_u32: Uint32s, status_N: Uint8s
) -> None:
    """`read_record` of many ids, WORDS apart in `out_u32`, with the cache misses of `_CHUNK` ids overlapped.

    1. ask for the keys of the next chunk   2. find this chunk's slots and ask for its records   3. copy its rows
    """
    base, place, out, num = address_of(u32), unpack(descriptor_7), address_of(out_u32), ids_N.shape[0]
    row_bytes = 4 * place[WORDS]
    for i in range(min(_CHUNK, num)):
        prefetch_keys(base, place, ids_N[i])
    for start in range(0, num, _CHUNK):
        stop = min(start + _CHUNK, num)
        for i in range(start, stop):
            if i + _CHUNK < num:
                prefetch_keys(base, place, ids_N[i + _CHUNK])  # 1
            slot = locate(base, place, ids_N[i])  # 2
            store_u32(out + i * row_bytes, slot)  # kept where the row will be
            prefetch_record(base, place, max(slot, 0))
        for i in range(start, stop):
            target = out + i * row_bytes
            slot, outcome = load_u32(target), _MOVED
            if slot != _NO_SLOT:
                outcome = try_copy(base, place, slot, ids_N[i], ROWS, place[WORDS], target)  # 3
            if outcome != LEARNED:
                outcome = read_part(base, place, ids_N[i], ROWS, place[WORDS], target)
            status_N[i] = outcome


@kernel
def shards_of(ids_N: Int64s, num_shards: int, out_N: Int64s) -> None:
    """`shard_of` of many ids."""
    for i in range(ids_N.shape[0]):
        out_N[i] = shard_of(ids_N[i], num_shards)


@kernel
def first_misplaced(descriptor_7: Int64s, slots_N: Int64s, keys_N: Int64s) -> int:
    """Position of the first (slot, key) that no reader could find, or -1."""
    capacity, window = descriptor_7[CAPACITY], descriptor_7[WINDOW_SLOTS]
    for i in range(slots_N.shape[0]):
        slot, key = slots_N[i], keys_N[i]
        if slot < 0 or slot >= capacity or key in (EMPTY, REMOVED):
            return i
        distance = slot - int(home_slot(key, capacity))
        if distance < 0:
            distance += capacity
        if distance >= window:
            return i
    return -1


@kernel
def close_gaps(base: int, place: Place, slot: int, key: int) -> None:
    """Mark free slots between a key's home and its slot as removed: a probe must not end before it.

    The trainer's slots on the way are taken, but a row that is held back, or not written yet, leaves one free here.
    """
    probed = int(home_slot(key, place[CAPACITY]))
    while probed != slot:
        if load_i64(key_at(base, place, probed)) == EMPTY:
            store_i64(key_at(base, place, probed), REMOVED)
        probed = probed + 1 if probed + 1 < place[CAPACITY] else 0


@kernel
def put_records(
    u32: Uint32s,
    descriptor_7: Int64s,
    slots_N: Int64s,
    keys_N: Int64s,
    words_NW: Uint32s,
    seen_s_N: Uint32s,
    counts_N: Uint32s,
) -> None:
    """Write whole records at known slots, each under its seqlock: odd seq, key, meta, row, even seq."""
    base, place, words = address_of(u32), unpack(descriptor_7), address_of(words_NW)
    for i in range(slots_N.shape[0]):
        ahead = i + _CHUNK // 2
        if ahead < slots_N.shape[0]:
            prefetch(key_at(base, place, slots_N[ahead]))
            prefetch_record(base, place, slots_N[ahead])
        key, seq = key_at(base, place, slots_N[i]), record_at(base, place, slots_N[i])
        if load_i64(key) != keys_N[i]:
            close_gaps(base, place, slots_N[i], keys_N[i])
        odd = load_u32(seq) | 1
        store_u32(seq, odd)
        fence_release()
        store_i64(key, keys_N[i])
        store_u32(seq + 4, seen_s_N[i])
        store_u32(seq + 8, counts_N[i])
        copy_words(seq + 4 * (place[ROWS] - place[SEQ]), words + 4 * place[WORDS] * i, place[WORDS])
        store_u32_release(seq, odd + 1)


@kernel
def remove_keys(u32: Uint32s, descriptor_7: Int64s, slots_N: Int64s) -> bool:
    """Tombstones: readers of these ids miss from here on. False, and nothing done, if a slot is out of range.

    The record is left as it is: a reader in the middle of it looks at the key again before it answers.
    """
    base, place = address_of(u32), unpack(descriptor_7)
    for i in range(slots_N.shape[0]):
        if slots_N[i] < 0 or slots_N[i] >= place[CAPACITY]:
            return False
    for i in range(slots_N.shape[0]):
        store_i64_release(key_at(base, place, slots_N[i]), REMOVED)
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


# Two buffers and two counters, for what must change as one: a writer announces version n (at `begun`), fills buffer
# n % 2, then publishes it (at `begun` + 1). A copy of buffer n % 2 is whole unless version n + 2 was begun meanwhile. A
# writer that dies at any point leaves the last published version untouched, so readers never wait for it.


@kernel
def put_double(i64: Int64s, begun: int, first_off: int, values: Int64s) -> None:
    """Publish `values` as the next version; both buffers, of their size, lie from `first_off` on."""
    counters, size = address_of(i64) + 8 * begun, values.shape[0]
    version = load_i64(counters + 8) + 1
    store_i64(counters, version)
    fence_release()
    copy_words(address_of(i64) + 8 * (first_off + (version & 1) * size), address_of(values), 2 * size)
    store_i64_release(counters + 8, version)


@kernel
def read_double(i64: Int64s, begun: int, first_off: int, out: Int64s) -> int:
    """Copy the newest published version to `out`, which has its size; returns its number (0: none yet)."""
    counters, size = address_of(i64) + 8 * begun, out.shape[0]
    while True:
        version = load_i64_acquire(counters + 8)
        copy_words(address_of(out), address_of(i64) + 8 * (first_off + (version & 1) * size), 2 * size)
        fence_acquire()
        if load_i64(counters) <= version + 1:
            return version
