"""The live store's kernels: seqlocked records, double-buffered state and dense weights, in memory shared by processes.

A shard's file is one memory from `base`, the address of its first byte. A section of it is described by seven int64
(`descriptor_7`; as a tuple: `place`):

    CAPACITY, WINDOW | TAGS (where its tags start, in bytes) | RECORDS (where its records start, in uint32)
    STRIDE of a record, META (where last seen and count lie in it), WORDS of its row; all in uint32

and a slot by a record `key (int64) | seq (uint32) | row | last seen | count` and a tag, one byte of the id's hash, 0 in
a free slot. A reader compares the tags of an id's whole window with one instruction, then reads the record, mostly the
right one at once. Against probing an array of int64 keys, a read touches two cache lines instead of three, since the
tags of a million slots fit into a core's own cache; a miss touches none instead of up to five; and no free slot ends a
probe, so a row that is held back or not written yet hides no other. (Tried, ns a row at random over 1M rows of 16: keys
40, tags 35, tags on huge pages (`live_memory`) 30, numpy's take 21.)

Rows are copied plainly between fences, under a seqlock a record: a copy that raced with a write is thrown away.
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
    match_bytes,
    prefetch,
    sched_yield,
    store_i64,
    store_i64_release,
    store_u8_release,
    store_u32,
    store_u32_release,
)
from trainer.probe import EMPTY, REMOVED, home_slot, mix64, shard_of

Uint32s = npt.NDArray[np.uint32]
Int64s = npt.NDArray[np.int64]
Float32s = npt.NDArray[np.float32]
Uint8s = npt.NDArray[np.uint8]
Place = tuple[int, int, int, int, int, int, int]

CAPACITY, WINDOW_SLOTS, TAGS, RECORDS, STRIDE, META, WORDS = range(7)  # fields of a descriptor
SEQ, ROW, META_WORDS = 2, 3, 2  # where a record's seqlock and row lie in it, and the size of its end; in uint32

UNKNOWN, LEARNED, DEFAULT = 0, 1, 2  # status of a row; DEFAULT is never set here: see `publish.missing_status`
_OTHER, _BUSY = -1, -2  # a slot that holds another id; one whose writer is at work

# A write holds a slot for about 100 ns. Tight spins cover that; yields cover a writer that lost its core; past them the
# writer is taken for dead inside the slot, and the id is unknown until the next generation (about a millisecond, once a
# lookup). More yields would make lookups of such an id slower, fewer would call live rows unknown on a busy machine.
_TIGHT_SPINS, _YIELDS = 256, 1024
_AHEAD = (
    16  # records whose cache misses overlap: too few leave the memory idle, more than a core's buffers gain nothing
)
_LINE_BYTES = 64
_NO_SLOT = 0xFFFFFFFF  # as uint32; capacities end below 2^31


@kernel
def unpack(descriptor_7: Int64s) -> Place:
    """A descriptor as a tuple, which inner functions take at no cost."""
    d = descriptor_7
    return d[0], d[1], d[2], d[3], d[4], d[5], d[6]


@kernel
def record_at(base: int, place: Place, slot: int) -> int:
    """Address of a record."""
    return base + 4 * (place[RECORDS] + slot * place[STRIDE])


@kernel
def tag_of(id_: int) -> np.uint8:
    """The byte of an id's hash that marks its slot; never 0, which marks a free one."""
    tag = np.uint8(mix64(id_) & np.uint64(0xFF))
    return tag if tag != 0 else np.uint8(1)


@kernel
def candidates(base: int, place: Place, id_: int) -> int:
    """Bit k: the slot k after the id's home has its tag. Tags of the first slots are repeated after the last one's."""
    home = int(home_slot(id_, place[CAPACITY]))
    return match_bytes(base + place[TAGS] + home, tag_of(id_)) & ((1 << place[WINDOW_SLOTS]) - 1)


@kernel
def candidate_slot(place: Place, id_: int, hits: int) -> int:
    """Slot of the lowest bit of `candidates`."""
    slot = int(home_slot(id_, place[CAPACITY])) + first_bit(hits)
    return slot if slot < place[CAPACITY] else slot - place[CAPACITY]


@kernel
def try_copy(base: int, place: Place, slot: int, id_: int, part: int, num_words: int, target: int) -> int:
    """Copy `num_words` from word `part` of a record, once: LEARNED if whole and of this id, else the target is junk."""
    record = record_at(base, place, slot)
    before = load_u32_acquire(record + 4 * SEQ)
    if load_i64(record) != id_:
        return _OTHER
    if before & 1 != 0:
        return _BUSY
    copy_words(target, record + 4 * part, num_words)
    fence_acquire()
    return LEARNED if load_u32(record + 4 * SEQ) == before else _BUSY


@kernel
def read_part(base: int, place: Place, id_: int, part: int, num_words: int, target: int) -> int:
    """LEARNED and `num_words` from word `part` of an id's record; or UNKNOWN and zeros."""
    hits = candidates(base, place, id_)
    while hits != 0:
        slot = candidate_slot(place, id_, hits)
        for spin in range(_TIGHT_SPINS + _YIELDS):
            outcome = try_copy(base, place, slot, id_, part, num_words, target)
            if outcome == LEARNED:
                return LEARNED
            if outcome == _OTHER:
                break
            if spin >= _TIGHT_SPINS:
                sched_yield()
        hits &= hits - 1
    for w in range(num_words):
        store_u32(target + 4 * w, 0)
    return UNKNOWN


@kernel
def read_record(u32: Uint32s, i64: Int64s, descriptor_7: Int64s, id_: int, out_u32: Uint32s, out_off: int) -> int:
    """Copy an id's row to `out_u32[out_off:]`: LEARNED, or UNKNOWN and zeros; never half a row, nor another id's.

    For kernels that read a row or two. For many, `gather_records` is three times as fast.
    """
    place, target = unpack(descriptor_7), address_of(out_u32) + 4 * out_off
    return read_part(address_of(u32), place, id_, ROW, place[WORDS], target)


@kernel
def read_meta(u32: Uint32s, descriptor_7: Int64s, id_: int, out_u32: Uint32s) -> int:
    """Copy an id's last seen (s) and count: LEARNED, or UNKNOWN and zeros."""
    place = unpack(descriptor_7)
    return read_part(address_of(u32), place, id_, place[META], META_WORDS, address_of(out_u32))


@kernel
def prefetch_tags(base: int, place: Place, id_: int) -> None:
    """Ask for the one or two cache lines of a window's tags."""
    tags = base + place[TAGS] + int(home_slot(id_, place[CAPACITY]))
    prefetch(tags)
    prefetch(tags + LANES - 1)


@kernel
def prefetch_record(base: int, place: Place, slot: int) -> None:
    """Ask for the cache lines of a record's key, seqlock and row."""
    record = record_at(base, place, slot)
    line = record & -_LINE_BYTES
    while line < record + 4 * place[META]:
        prefetch(line)
        line += _LINE_BYTES


@kernel
def base_of(bases: int, num_shards: int, id_: int) -> int:
    """Address of the memory of an id's shard; the shards' addresses lie at `bases`."""
    return load_i64(bases) if num_shards == 1 else load_i64(bases + 8 * int(shard_of(id_, num_shards)))


@kernel
def gather_records(bases_S: Int64s, descriptor_7: Int64s, ids_N: Int64s, out_u32: Uint32s, status_N: Uint8s) -> None:
    """`read_record` of many ids, WORDS apart in `out_u32`, as a pipeline that overlaps `_AHEAD` ids' cache misses.

    1. ask for the tags of an id far ahead   2. find the slot of one ahead, ask for its record   3. copy a row
    `bases_S`: addresses of the shards' memory.
    """
    bases, shards, num = address_of(bases_S), bases_S.shape[0], ids_N.shape[0]
    place, out = unpack(descriptor_7), address_of(out_u32)
    row_bytes = 4 * place[WORDS]
    for i in range(min(_AHEAD, num)):
        prefetch_tags(base_of(bases, shards, ids_N[i]), place, ids_N[i])
    for i in range(num + _AHEAD):
        if i + _AHEAD < num:
            prefetch_tags(base_of(bases, shards, ids_N[i + _AHEAD]), place, ids_N[i + _AHEAD])  # 1
        if i < num:
            base = base_of(bases, shards, ids_N[i])
            hits = candidates(base, place, ids_N[i])  # 2
            slot = candidate_slot(place, ids_N[i], hits) if hits != 0 else -1
            store_u32(out + i * row_bytes, slot)  # kept where the row will be
            prefetch_record(base, place, max(slot, 0))
        if i >= _AHEAD:
            n = i - _AHEAD
            base, target = base_of(bases, shards, ids_N[n]), out + n * row_bytes
            slot, outcome = load_u32(target), _OTHER
            if slot != _NO_SLOT:
                outcome = try_copy(base, place, slot, ids_N[n], ROW, place[WORDS], target)  # 3
            if outcome != LEARNED:
                outcome = read_part(base, place, ids_N[n], ROW, place[WORDS], target)
            status_N[n] = outcome


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
def store_tag(base: int, place: Place, slot: int, tag: np.uint8) -> None:
    """Write a slot's tag, and its copy past the last slot, which a window that wraps around reads."""
    store_u8_release(base + place[TAGS] + slot, tag)
    if slot < LANES:
        store_u8_release(base + place[TAGS] + place[CAPACITY] + slot, tag)


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
    """Write whole records at known slots, each under its seqlock: odd seq, key, row, meta, tag, even seq."""
    base, place, words = address_of(u32), unpack(descriptor_7), address_of(words_NW)
    for i in range(slots_N.shape[0]):
        if i + _AHEAD < slots_N.shape[0]:
            prefetch_record(base, place, slots_N[i + _AHEAD])
        record = record_at(base, place, slots_N[i])
        meta = record + 4 * place[META]
        odd = load_u32(record + 4 * SEQ) | 1
        store_u32(record + 4 * SEQ, odd)
        fence_release()
        store_i64(record, keys_N[i])
        copy_words(record + 4 * ROW, words + 4 * place[WORDS] * i, place[WORDS])
        store_u32(meta, seen_s_N[i])
        store_u32(meta + 4, counts_N[i])
        store_tag(base, place, slots_N[i], tag_of(keys_N[i]))
        store_u32_release(record + 4 * SEQ, odd + 1)


@kernel
def remove_records(u32: Uint32s, descriptor_7: Int64s, slots_N: Int64s) -> bool:
    """Free slots and blank their records: readers of these ids miss from here on, and nothing of them stays in memory.

    False, and nothing done, if a slot is out of range.
    """
    base, place = address_of(u32), unpack(descriptor_7)
    for i in range(slots_N.shape[0]):
        if slots_N[i] < 0 or slots_N[i] >= place[CAPACITY]:
            return False
    for i in range(slots_N.shape[0]):
        store_tag(base, place, slots_N[i], np.uint8(0))
        record = record_at(base, place, slots_N[i])
        odd = load_u32(record + 4 * SEQ) | 1
        store_u32(record + 4 * SEQ, odd)
        fence_release()
        store_i64(record, EMPTY)
        for w in range(ROW, place[META] + META_WORDS):
            store_u32(record + 4 * w, 0)
        store_u32_release(record + 4 * SEQ, odd + 1)
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
