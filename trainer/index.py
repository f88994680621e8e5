"""Kernels that map an id to a slot: find, assign (insert, evict, expire), remove, sweep.

An id may lie only in the window of `WINDOW` slots that starts at its home slot (`trainer.probe`, shared with the
readers of the live store). Slots are taken in probe order and never fall back to EMPTY, so a search may stop at the
first EMPTY slot; a removed id leaves REMOVED behind, which a search passes over and an insert reuses.

Legend: G all slots of all tables (table t owns `base .. base + capacity`), B rows of a batch, C id columns, T tables,
K slots touched by the batch, E ids evicted by it, N ids. `stamps` count rows: row b of a batch that starts at `clock`
stamps `clock + b`, so which slot is the least recently used does not depend on where the stream was cut into batches.
"""
# ruff: noqa: PLR0917 -- kernels take arrays and places one by one: numba unpacks no objects.

import numpy as np
import numpy.typing as npt

from trainer.kernel import kernel
from trainer.live_atomics import address_of, prefetch
from trainer.probe import EMPTY, REMOVED, WINDOW, home_slot

Int64s = npt.NDArray[np.int64]
UInt32s = npt.NDArray[np.uint32]
UInt8s = npt.NDArray[np.uint8]
Int = int | np.int64  # what numba takes for int64

# Columns of `totals` as `assign_batch` leaves them.
TOUCHED, EVICTIONS, NOT_PLACED, NEW = 0, 1, 2, 3
# Ids looked ahead: their keys and stamps are on the way from memory while the earlier ones are being worked on.
# Far fewer leaves the memory idle; more than the processor can have in flight gains nothing.
BLOCK = 32
LINE = 8  # keys or stamps in a cache line
NOTHING_IS_PROTECTED = 2**62  # a stamp that no row reaches
MOST = np.uint32(0xFFFFFFFF)  # counts stop here instead of wrapping


@kernel
def is_expired(seen_s: np.uint32, now_s: int, ttl_s: int) -> bool | np.bool_:
    """Whether a slot last seen at `seen_s` is older than `ttl_s` (0: never)."""
    return ttl_s > 0 and now_s - np.int64(seen_s) > ttl_s


@kernel
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


@kernel
def vacancy(
    keys_G: Int64s,
    stamps_G: Int64s,
    seen_s_G: UInt32s,
    base: int,
    capacity: int,
    home: Int,
    protect_from: int,
    now_s: int,
    ttl_s: int,
) -> Int:
    """Global slot that a new id takes: the first free or expired one of its window, else the least recently used.

    A slot whose stamp is `protect_from` or later is not taken; -1 when that leaves none.
    """
    oldest: Int = -1
    oldest_stamp = protect_from
    position = home
    for _ in range(min(WINDOW, capacity)):
        slot = base + position
        here = keys_G[slot]
        if here in (EMPTY, REMOVED):
            return slot
        stamp = stamps_G[slot]
        if stamp < protect_from and is_expired(seen_s_G[slot], now_s, ttl_s):
            return slot
        if stamp < oldest_stamp:
            oldest, oldest_stamp = slot, stamp
        position += 1
        if position == capacity:
            position = 0
    return oldest


@kernel
def place(
    keys_G: Int64s, stamps_G: Int64s, seen_s_G: UInt32s, base: int, capacity: int, home: Int, key: int
) -> tuple[Int, bool]:
    """Find an id or give it a slot, whichever was used last: (global slot, whether the id is new)."""
    slot = locate(keys_G, base, capacity, home, key)
    if slot >= 0:
        return slot, False
    slot = vacancy(keys_G, stamps_G, seen_s_G, base, capacity, home, NOTHING_IS_PROTECTED, 0, 0)
    keys_G[slot] = key
    return slot, True


@kernel
def assign_batch(  # noqa: PLR0912, PLR0915 -- in one piece, for the reason given in it
    ids_BC: Int64s,
    rows_B: UInt8s,
    column_table_C: Int64s,
    tables_T3: Int64s,
    num_rows_T: Int64s,
    keys_G: Int64s,
    stamps_G: Int64s,
    seen_s_G: UInt32s,
    counts_G: UInt32s,
    clock: int,
    now_s: int,
    slots_BC: Int64s,
    touched_K: Int64s,
    touched_table_K: Int64s,
    fresh_K: UInt8s,
    evicted_3E: Int64s,
    totals_4: Int64s,
) -> None:
    """Give every id of a batch its slot; the whole batch in one call.

    Rows with `rows_B` 0 and reserved ids (padding) get slot -1, as does an id whose whole window belongs to ids of
    this very batch. `tables_T3`: base, capacity, TTL in s; `num_rows_T` is kept. `touched_K`: global slots, each once,
    in order of first touch; `fresh_K`: 1 where the slot changed its owner, or its owner had expired.
    `evicted_3E`: ids, tables, global slots. The K and E arrays need room for B * C entries.
    """
    B, C = ids_BC.shape
    keys_at, stamps_at = address_of(keys_G), address_of(stamps_G)
    seen_at, counts_at = address_of(seen_s_G), address_of(counts_G)
    homes = np.empty(BLOCK, np.int64)
    num_touched, num_evicted, num_unplaced, num_new = 0, 0, 0, 0
    total = B * C
    block_b, block_c = 0, 0
    for start in range(0, total, BLOCK):
        count = min(BLOCK, total - start)
        b, c = block_b, block_c
        for i in range(count):
            key = ids_BC[b, c]
            home = np.int64(-1)
            if rows_B[b] != 0 and key not in (EMPTY, REMOVED):
                t = column_table_C[c]
                home = home_slot(key, tables_T3[t, 1])
                near = int(tables_T3[t, 0] + home)
                for line in range(near, near + WINDOW, LINE):
                    prefetch(keys_at + 8 * line)
                    prefetch(stamps_at + 8 * line)
                prefetch(seen_at + 4 * near)
                prefetch(counts_at + 4 * near)
            homes[i] = home
            c += 1
            if c == C:
                b, c = b + 1, 0
        b, c = block_b, block_c
        for i in range(count):
            slot: Int = np.int64(-1)
            home = homes[i]
            if home >= 0:
                t = column_table_C[c]
                key = ids_BC[b, c]
                base, capacity = tables_T3[t, 0], tables_T3[t, 1]
                # `locate`, written out: a call would count references to its arrays up and down, atomically, at
                # three times the cost of the search itself.
                position = home
                for _ in range(min(WINDOW, capacity)):
                    here = keys_G[base + position]
                    if here == key:
                        slot = base + position
                        break
                    if here == EMPTY:
                        break
                    position += 1
                    if position == capacity:
                        position = 0
                is_new = False
                victim = np.int64(EMPTY)
                if slot < 0:
                    slot = vacancy(
                        keys_G, stamps_G, seen_s_G, base, capacity, home, clock, now_s, tables_T3[t, 2]
                    )  # fmt: skip
                    if slot >= 0:
                        victim = keys_G[slot]
                        keys_G[slot] = key
                        is_new = True
                elif stamps_G[slot] < clock and is_expired(seen_s_G[slot], now_s, tables_T3[t, 2]):
                    victim = key
                    is_new = True
                if slot < 0:
                    num_unplaced += 1
                else:
                    if stamps_G[slot] < clock:
                        touched_K[num_touched] = slot
                        touched_table_K[num_touched] = t
                        fresh_K[num_touched] = is_new
                        num_touched += 1
                    if is_new:
                        num_new += 1
                        counts_G[slot] = 0
                        if victim not in (EMPTY, REMOVED):
                            evicted_3E[0, num_evicted] = victim
                            evicted_3E[1, num_evicted] = t
                            evicted_3E[2, num_evicted] = slot
                            num_evicted += 1
                        else:
                            num_rows_T[t] += 1
                    stamps_G[slot] = clock + b
                    seen_s_G[slot] = now_s
                    if counts_G[slot] != MOST:
                        counts_G[slot] += np.uint32(1)
            slots_BC[b, c] = slot
            c += 1
            if c == C:
                b, c = b + 1, 0
        block_b, block_c = b, c
    totals_4[TOUCHED] = num_touched
    totals_4[EVICTIONS] = num_evicted
    totals_4[NOT_PLACED] = num_unplaced
    totals_4[NEW] = num_new


@kernel
def find_ids(keys_G: Int64s, base: int, capacity: int, ids_N: Int64s, slots_N: Int64s) -> None:
    """Global slot of each id, or -1; changes nothing."""
    for i in range(ids_N.shape[0]):
        key = ids_N[i]
        slots_N[i] = -1
        if key not in (EMPTY, REMOVED):
            slots_N[i] = locate(keys_G, base, capacity, home_slot(key, capacity), key)


@kernel
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


@kernel
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


@kernel
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
