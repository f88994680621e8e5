"""Kernels that map an id to a slot: find, assign (admit, insert, evict, expire), remove, sweep.

An id may lie only in the window of `WINDOW` slots that starts at its home slot (`trainer.probe`, shared with the
readers of the live store). Slots are taken in probe order and never fall back to EMPTY, so a search may stop at the
first EMPTY slot; a removed id leaves REMOVED behind, which a search passes over and an insert reuses.

Admission: at each sighting of an id without a slot,

    all          it is admitted
    probability  it is, with this probability: a hash of (seed, table, id, row number) decides
    count        it is counted in the table's sketch (`trainer.sketch`), and admitted if that estimates at least
                 `needed` sightings, this one among them

    pressure     above `pressure_from` of the capacity, needed = min_count + ceil(min_count * x / 2) and the probability
                 is p * (1 - x / 2): x goes from 0 there to 1 at the last row. `all` stays all.

An admitted id takes the first free or expired slot of its window. In a full one there is a victim,

    lru  the slot used longest ago; but where more than an eighth of the window was seen only once, the oldest of those
         (not used in the last `grace` rows), so that ids that never come again push out each other and not the
         regulars: a segmented LRU, by window
    lfu  among the slots not used in the last `grace` rows the one with the lowest count, the oldest of equals; if all
         were used since, lru's. A slot's count halves at every multiple of `half_life` rows (lazily); with `count`
         admission the id takes its slot only if the sketch's estimate is above the victim's count

and otherwise it is refused, as one not admitted is: slot -1. (Under lru no counts are compared: that the newcomer was
seen `min_count` times lately, and the victim was not, is what lru goes by; trainer/README.md has the figures.) An
expired id that comes back to its own slot starts anew there without being asked again.

Batches: all this is a function of the sequence of rows, not of where it was cut into batches, but for two things. A
slot used in a batch is not given away in it, for its row is promised to the engine; so if a whole window belongs to
the batch, a newcomer finds no room (`NOT_PLACED`; that is all for batches of up to `grace` rows). And `now_s`
is the batch's.

Legend: G all slots of all tables (table t owns `base .. base + capacity`), B rows of a batch, C id columns, T tables,
P the columns of `tables_TP`, K slots touched by the batch, E ids evicted by it, N ids. `stamps` count rows, from
`stamp_base` on: row number r stamps r - stamp_base, and 0 is as old as can be.
"""
# ruff: noqa: PLR0917 -- kernels take arrays and places one by one: numba unpacks no objects.

from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from trainer.kernel import kernel_hot
from trainer.live_atomics import address_of, prefetch
from trainer.probe import EMPTY, REMOVED, WINDOW, home_slot, mix64
from trainer.sketch import add, halve, prefetch_line, spread

Int64s = npt.NDArray[np.int64]
UInt32s = npt.NDArray[np.uint32]
UInt8s = npt.NDArray[np.uint8]
Int = int | np.int64  # what numba takes for int64

# Columns of `tables_TP`: where a table lies, and its policies.
BASE, CAPACITY, TTL_S, ADMISSION, MIN_COUNT, CHANCE, PRESSURE_START = range(7)
SKETCH_AT, SKETCH_LINES, HALVE_EVERY, SALT, LFU, HALF_LIFE, GRACE, NUM_COLUMNS = range(7, 15)
ALL, PROBABILITY, COUNT = range(3)  # ADMISSION
CHANCE_BITS = 30  # CHANCE is a probability times 2^30

# Columns of `totals` as `assign_rows` leaves them.
TOUCHED, EVICTIONS, NOT_PLACED, NEW, NOT_ADMITTED, NUM_TOTALS = range(6)
PRESSURE, EXPIRED = np.uint8(0), np.uint8(1)  # why an id was evicted
# Ids looked ahead: their keys and stamps are on the way from memory while the earlier ones are being worked on.
# Far fewer leaves the memory idle; more than the processor can have in flight gains nothing.
BLOCK = 32
KEYS_A_LINE, STAMPS_A_LINE = 8, 16  # in a cache line
HIGHEST_SCORE = 2**30 - 1  # counts above it are equal to lfu
MOST = np.uint32(0xFFFFFFFF)  # counts stop here instead of wrapping
REFUSED, ALWAYS = -1, 2**62  # what an id is worth that is not admitted; that any victim gives way to
ON_PROBATION = 8  # one part in so many of a window is left to ids seen once; 4 keeps too few regulars, 16 gains no more
STAMP_STEP, LAST_STAMP = 2**31, 2**32 - 1
GOLDEN = np.uint64(0x9E3779B97F4A7C15)


class Index(NamedTuple):
    """All tables' ids, their scores and the state of admission; changed in place."""

    tables_TP: Int64s
    num_rows_T: Int64s
    sightings_T: Int64s  # of ids without a slot, since the table's sketch was halved
    keys_G: Int64s
    stamps_G: UInt32s
    seen_s_G: UInt32s
    counts_G: UInt32s
    sketches: UInt8s


class Report(NamedTuple):
    """What a batch changed, in order. The K and E arrays need room for B * C entries, `homes` for BLOCK."""

    touched_K: Int64s  # global slots, each once, in order of first touch
    touched_table_K: Int64s
    fresh_K: UInt8s  # 1 where the slot changed its owner, or its owner had expired
    evicted_3E: Int64s  # ids, tables, global slots
    reason_E: UInt8s
    totals: Int64s
    homes: Int64s  # scratch


def stamp_base(clock: int) -> int:
    """What stamps count from when row number `clock` is next: moved on by half their range before they are used up."""
    return max(0, (clock - LAST_STAMP) // STAMP_STEP + 1) * STAMP_STEP


@kernel_hot
def age_stamps(stamps_G: UInt32s) -> None:
    """Make all stamps STAMP_STEP smaller; those of rows longer ago than that become 0, equally old."""
    step = np.uint32(STAMP_STEP)
    for slot in range(stamps_G.shape[0]):
        stamps_G[slot] = stamps_G[slot] - step if stamps_G[slot] > step else np.uint32(0)


@kernel_hot
def is_expired(seen_s: np.uint32, now_s: int, ttl_s: int) -> bool | np.bool_:
    """Whether a slot last seen at `seen_s` is older than `ttl_s` (0: never)."""
    return ttl_s > 0 and now_s - np.int64(seen_s) > ttl_s


@kernel_hot
def fresh_from(row: Int, half_life: Int, stamp_zero: int) -> Int:
    """The first stamp at which a count is up to date at a row: that of the last multiple of `half_life`."""
    return row // half_life * half_life - stamp_zero


@kernel_hot
def aged(count: np.uint32, stamp: Int, fresh: Int, half_life: Int) -> np.uint32:
    """A count brought up to date: halved for each multiple of `half_life` after its stamp, down from `fresh_from`.

    The same as halving all counts at every multiple, without touching them. (Dividing for the number of halvings took
    three times as long where a whole window is looked at.)
    """
    while stamp < fresh and count > 0:
        count >>= np.uint32(1)
        fresh -= half_life
    return count


@kernel_hot
def locate(keys_G: Int64s, base: int, capacity: int, home: Int, key: int) -> Int:
    """Global slot of an id, or -1."""
    position = home
    for _ in range(min(WINDOW, capacity)):
        here = keys_G[base + position]
        if here == key:
            return base + position
        if here == EMPTY:
            return -1
        position += 1
        if position == capacity:
            position = 0
    return -1


@kernel_hot
def place(keys_G: Int64s, stamps_G: Int64s, base: int, capacity: int, home: Int, key: int) -> tuple[Int, bool]:
    """Find an id, or give it the first free slot or the one used longest ago: (global slot, whether the id is new).

    For entities, which have neither admission nor a TTL. `stamps_G` is int64 and counts from 0.
    """
    slot = locate(keys_G, base, capacity, home, key)
    if slot >= 0:
        return slot, False
    slot, position = base + home, home
    for _ in range(min(WINDOW, capacity)):
        if keys_G[base + position] in (EMPTY, REMOVED):
            slot = base + position
            break
        if stamps_G[base + position] < stamps_G[slot]:
            slot = base + position
        position += 1
        if position == capacity:
            position = 0
    keys_G[slot] = key
    return slot, True


@kernel_hot
def worth_of(
    tables_TP: Int64s, t: Int, num_rows: int, sketches: UInt8s, sightings_T: Int64s, key: int, row: int
) -> Int:
    """What an id without a slot is worth at this sighting, as a count; REFUSED if it is not admitted.

    For tables that do not admit all.
    """
    start, hashed = tables_TP[t, PRESSURE_START], spread(key, tables_TP[t, SALT])
    above, room = max(num_rows - start, 0), max(tables_TP[t, CAPACITY] - start, 1)
    if tables_TP[t, ADMISSION] == PROBABILITY:
        chance = tables_TP[t, CHANCE] - tables_TP[t, CHANCE] * above // (2 * room)
        drawn = np.int64(mix64(int(hashed + np.uint64(row) * GOLDEN)) >> np.uint64(64 - CHANCE_BITS))
        return ALWAYS if drawn < chance else REFUSED
    at, lines = tables_TP[t, SKETCH_AT], tables_TP[t, SKETCH_LINES]
    seen = add(sketches, at, lines, hashed)
    sightings_T[t] += 1
    if sightings_T[t] >= tables_TP[t, HALVE_EVERY]:
        sightings_T[t] = 0
        halve(sketches, at, lines)
    needed = tables_TP[t, MIN_COUNT] + (tables_TP[t, MIN_COUNT] * above + 2 * room - 1) // (2 * room)
    return seen if seen >= needed else REFUSED


@kernel_hot
def vacancy(
    keys_G: Int64s,
    stamps_G: UInt32s,
    seen_s_G: UInt32s,
    counts_G: UInt32s,
    base: int,
    capacity: int,
    home: Int,
    protect_from: int,
    spare_from: Int,
    now_s: int,
    ttl_s: int,
) -> Int:
    """Global slot that a new id takes: the first free or expired one of its window, else lru's victim.

    A slot whose stamp is `protect_from` or later is not taken; -1 when that leaves none.
    """
    oldest: Int = -1
    once: Int = -1
    oldest_stamp: Int = protect_from
    once_stamp: Int = spare_from
    num_once = 0
    position = home
    for _ in range(min(WINDOW, capacity)):
        slot = base + position
        here = keys_G[slot]
        if here in (EMPTY, REMOVED):
            return slot
        stamp = np.int64(stamps_G[slot])
        if ttl_s > 0 and stamp < protect_from and is_expired(seen_s_G[slot], now_s, ttl_s):
            return slot
        seen_once = counts_G[slot] == 1
        num_once += seen_once
        if seen_once and stamp < once_stamp:
            once, once_stamp = slot, stamp
        if stamp < oldest_stamp:
            oldest, oldest_stamp = slot, stamp
        position += 1
        if position == capacity:
            position = 0
    return once if once >= 0 and num_once * ON_PROBATION > min(WINDOW, capacity) else oldest


@kernel_hot
def rarest(
    stamps_G: UInt32s,
    counts_G: UInt32s,
    base: int,
    capacity: int,
    home: Int,
    spare_from: Int,
    fresh: Int,
    half_life: Int,
) -> Int:
    """Of a full window the slot with the lowest count, the oldest of equals, among those older than `spare_from`; -1.

    Counts as they are by now, see `aged`.
    """
    found: Int = -1
    lowest = np.int64(2**62)
    position = home
    for _ in range(min(WINDOW, capacity)):
        slot = base + position
        stamp = np.int64(stamps_G[slot])
        count = np.int64(aged(counts_G[slot], stamp, fresh, half_life))
        score = ((count if count < HIGHEST_SCORE else np.int64(HIGHEST_SCORE)) << 32) | stamp
        if stamp < spare_from and score < lowest:
            found, lowest = slot, score
        position += 1
        if position == capacity:
            position = 0
    return found


@kernel_hot
def ask_for_window(keys_at: int, stamps_at: int, seen_at: int, counts_at: int, near: int) -> None:
    """Start fetching what a search, and then mostly a hit, reads of the window that starts at slot `near`."""
    for slot in range(near, near + WINDOW, KEYS_A_LINE):
        prefetch(keys_at + 8 * slot)
    for slot in range(near, near + WINDOW, STAMPS_A_LINE):
        prefetch(stamps_at + 4 * slot)
    prefetch(seen_at + 4 * near)
    prefetch(counts_at + 4 * near)


@kernel_hot
def assign_rows(  # noqa: PLR0912, PLR0915 -- in one piece: handing all these arrays to a function costs 100 ns
    index: Index,
    ids_BC: Int64s,
    rows_B: UInt8s,
    column_table_C: Int64s,
    first: int,
    last: int,
    row_0: int,
    stamp_zero: int,
    protect_from: int,
    now_s: int,
    slots_BC: Int64s,
    report: Report,
) -> None:
    """Give every id of the batch's rows first .. last - 1 its slot. Row b has number row_0 + b.

    Rows with `rows_B` 0 and reserved ids (padding) get slot -1, as does an id that is refused, or whose whole window
    belongs to ids of this very batch, whose stamps are `protect_from` and later. The report goes on from its totals.
    """
    tables_TP, keys_G, stamps_G, seen_s_G = index.tables_TP, index.keys_G, index.stamps_G, index.seen_s_G
    counts_G, sketches, homes, totals = index.counts_G, index.sketches, report.homes, report.totals
    keys_at, stamps_at = address_of(keys_G), address_of(stamps_G)
    seen_at, counts_at = address_of(seen_s_G), address_of(counts_G)
    C = ids_BC.shape[1]
    total = last * C
    block_b, block_c = first, 0
    for start in range(first * C, total, BLOCK):
        count = min(BLOCK, total - start)
        b, c = block_b, block_c
        for i in range(count):
            key = ids_BC[b, c]
            home = np.int64(-1)
            if rows_B[b] != 0 and key not in (EMPTY, REMOVED):
                t = column_table_C[c]
                home = home_slot(key, tables_TP[t, CAPACITY])
                ask_for_window(keys_at, stamps_at, seen_at, counts_at, tables_TP[t, BASE] + home)
                prefetch(counts_at + 4 * (tables_TP[t, BASE] + home + WINDOW - 1))
                if tables_TP[t, ADMISSION] == COUNT:
                    hashed = spread(key, tables_TP[t, SALT])
                    prefetch_line(sketches, tables_TP[t, SKETCH_AT], tables_TP[t, SKETCH_LINES], hashed)
            homes[i] = home
            c += 1
            if c == C:
                b, c = b + 1, 0
        b, c = block_b, block_c
        for i in range(count):
            slot: Int = np.int64(-1)
            home = homes[i]
            if home >= 0:
                t, key, row = column_table_C[c], ids_BC[b, c], row_0 + b
                base, capacity, ttl_s = tables_TP[t, BASE], tables_TP[t, CAPACITY], tables_TP[t, TTL_S]
                is_lfu, half_life = tables_TP[t, LFU] != 0, tables_TP[t, HALF_LIFE]
                slot = locate(keys_G, base, capacity, home, key)
                is_new = False
                reason = EXPIRED
                victim = np.int64(EMPTY)
                if slot >= 0:
                    if ttl_s > 0 and stamps_G[slot] < protect_from and is_expired(seen_s_G[slot], now_s, ttl_s):
                        victim = key
                        is_new = True
                else:
                    worth: Int = ALWAYS
                    if tables_TP[t, ADMISSION] != ALL:
                        worth = worth_of(tables_TP, t, index.num_rows_T[t], sketches, index.sightings_T, key, row)
                    if worth == REFUSED:
                        totals[NOT_ADMITTED] += 1
                    else:
                        spare_from = min(row - stamp_zero - tables_TP[t, GRACE], protect_from)
                        slot = vacancy(
                            keys_G, stamps_G, seen_s_G, counts_G, base, capacity, home, protect_from, spare_from,
                            now_s, ttl_s,
                        )  # fmt: skip
                        totals[NOT_PLACED] += slot < 0
                    if slot >= 0:
                        victim = keys_G[slot]
                        if victim not in (EMPTY, REMOVED) and not is_expired(seen_s_G[slot], now_s, ttl_s):
                            reason = PRESSURE
                            if is_lfu:
                                fresh = fresh_from(row, half_life, stamp_zero)
                                rare = rarest(stamps_G, counts_G, base, capacity, home, spare_from, fresh, half_life)
                                slot = rare if rare >= 0 else slot
                                victim = keys_G[slot]
                                if worth != ALWAYS and worth <= aged(counts_G[slot], stamps_G[slot], fresh, half_life):
                                    totals[NOT_ADMITTED] += 1
                                    slot = np.int64(-1)
                    if slot >= 0:
                        keys_G[slot] = key
                        is_new = True
                if slot >= 0:
                    if stamps_G[slot] < protect_from:
                        report.touched_K[totals[TOUCHED]] = slot
                        report.touched_table_K[totals[TOUCHED]] = t
                        report.fresh_K[totals[TOUCHED]] = is_new
                        totals[TOUCHED] += 1
                    if is_new:
                        totals[NEW] += 1
                        counts_G[slot] = 0
                        if victim not in (EMPTY, REMOVED):
                            report.evicted_3E[0, totals[EVICTIONS]] = victim
                            report.evicted_3E[1, totals[EVICTIONS]] = t
                            report.evicted_3E[2, totals[EVICTIONS]] = slot
                            report.reason_E[totals[EVICTIONS]] = reason
                            totals[EVICTIONS] += 1
                        else:
                            index.num_rows_T[t] += 1
                    elif is_lfu:
                        fresh = fresh_from(row, half_life, stamp_zero)
                        counts_G[slot] = aged(counts_G[slot], stamps_G[slot], fresh, half_life)
                    stamps_G[slot] = row - stamp_zero
                    seen_s_G[slot] = now_s
                    if counts_G[slot] != MOST:
                        counts_G[slot] += np.uint32(1)
            slots_BC[b, c] = slot
            c += 1
            if c == C:
                b, c = b + 1, 0
        block_b, block_c = b, c


@kernel_hot
def find_ids(keys_G: Int64s, base: int, capacity: int, ids_N: Int64s, slots_N: Int64s) -> None:
    """Global slot of each id, or -1; changes nothing."""
    for i in range(ids_N.shape[0]):
        key = ids_N[i]
        slots_N[i] = -1
        if key not in (EMPTY, REMOVED):
            slots_N[i] = locate(keys_G, base, capacity, home_slot(key, capacity), key)


@kernel_hot
def remove_ids(keys_G: Int64s, base: int, capacity: int, ids_N: Int64s, removed_N: Int64s) -> Int:
    """Free the slots of ids; writes the global slots freed and returns how many."""
    num_removed = 0
    for i in range(ids_N.shape[0]):
        key = ids_N[i]
        if key not in (EMPTY, REMOVED):
            slot = locate(keys_G, base, capacity, home_slot(key, capacity), key)
            if slot >= 0:
                keys_G[slot] = REMOVED
                removed_N[num_removed] = slot
                num_removed += 1
    return num_removed


@kernel_hot
def expire_range(
    keys_G: Int64s, seen_s_G: UInt32s, first: int, last: int, now_s: int, ttl_s: int, removed_N: Int64s
) -> Int:
    """Free the expired slots among global slots first .. last - 1; writes them and returns how many."""
    num_removed = 0
    for slot in range(first, last):
        here = keys_G[slot]
        if here not in (EMPTY, REMOVED) and is_expired(seen_s_G[slot], now_s, ttl_s):
            keys_G[slot] = REMOVED
            removed_N[num_removed] = slot
            num_removed += 1
    return num_removed


@kernel_hot
def reinsert(keys_G: Int64s, base: int, capacity: int, ids_N: Int64s, slots_N: Int64s) -> Int:
    """Place ids into free slots alone, evicting none: global slots, -1 for those without room (returns how many).

    For a restore into another capacity: give the ids most recently used first, so that what has no room is the oldest.
    """
    num_unplaced = 0
    for i in range(ids_N.shape[0]):
        slots_N[i] = -1
        position: Int = home_slot(ids_N[i], capacity)
        for _ in range(min(WINDOW, capacity)):
            if keys_G[base + position] == EMPTY:
                slots_N[i] = base + position
                keys_G[base + position] = ids_N[i]
                break
            position += 1
            if position == capacity:
                position = 0
        num_unplaced += slots_N[i] < 0
    return num_unplaced
