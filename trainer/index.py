"""Kernels that map an id to a slot: find, assign (insert, evict, expire), remove, sweep.

An id may lie only in the window of `WINDOW` slots that starts at its home slot (`trainer.probe`, shared with the
readers of the live store). Slots are taken in probe order and never fall back to EMPTY, so a search may stop at the
first EMPTY slot; a removed id leaves REMOVED behind, which a search passes over and an insert reuses.

Legend: G all slots of all tables (table t owns `base .. base + capacity`), B rows of a batch, C id columns, T tables,
K slots touched by the batch, E ids evicted by it, N ids. `stamps` count rows: row b of a batch that starts at `clock`
stamps `clock + b`, so which slot is the least recently used does not depend on where the stream was cut into batches.
"""

from typing import Any

import numpy as np
import numpy.typing as npt
from llvmlite import ir
from numba.core import types
from numba.extending import intrinsic

from trainer.kernel import kernel
from trainer.probe import EMPTY, REMOVED, WINDOW, home_slot

Int64s = npt.NDArray[np.int64]
UInt32s = npt.NDArray[np.uint32]
UInt8s = npt.NDArray[np.uint8]

# What `place` did.
FOUND, INSERTED, EVICTED, EXPIRED, UNPLACED = 0, 1, 2, 3, 4
# Columns of `totals` as `assign_batch` leaves them.
TOUCHED, EVICTIONS, NOT_PLACED, NEW = 0, 1, 2, 3
# Ids looked ahead: their keys and stamps are on the way from memory while the earlier ones are being worked on.
# Far fewer leaves the memory idle; more than the processor can have in flight gains nothing.
BLOCK = 32
NEVER = np.int64(2**63 - 1)
MOST = np.uint32(0xFFFFFFFF)  # counts stop here instead of wrapping


def _prefetch(typing_context: Any, array: Any, position: Any) -> Any:
    """LLVM's prefetch of `array[position]` for reading, to stay in all cache levels."""

    def code(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        view = context.make_array(signature.args[0])(context, builder, arguments[0])
        address = builder.gep(view.data, [arguments[1]])
        pointer, word = ir.PointerType(), ir.IntType(32)
        kind = ir.FunctionType(ir.VoidType(), [pointer, word, word, word])
        function = builder.module.declare_intrinsic("llvm.prefetch", [pointer], kind)
        builder.call(function, [builder.bitcast(address, pointer), word(0), word(3), word(1)])
        return context.get_dummy_value()

    return types.void(array, types.int64), code


prefetch = intrinsic(_prefetch)


@kernel
def is_expired(seen_s: np.uint32, now_s: int, ttl_s: int) -> bool:
    """Whether a slot last seen at `seen_s` is older than `ttl_s` (0: never)."""
    return ttl_s > 0 and now_s - np.int64(seen_s) > ttl_s


@kernel
def locate(keys_G: Int64s, base: int, capacity: int, home: int, key: int) -> int:
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
def oldest(stamps_G: Int64s, first: int, last: int) -> int:
    """Smallest stamp of slots first .. last - 1. Branch-free and unsigned, so that it compiles to vector code."""
    smallest = NEVER
    for slot in range(np.uint64(first), np.uint64(last)):
        smallest = min(smallest, stamps_G[slot])
    return smallest


@kernel
def least_recently_used(stamps_G: Int64s, base: int, capacity: int, home: int, protect_from: int) -> int:
    """Global slot of the window with the smallest stamp, the first of equals; -1 if none is before `protect_from`."""
    first, last = base + home, base + min(home + WINDOW, capacity)
    rest = base + min(max(home + WINDOW - capacity, 0), home)  # where the window ends after wrapping around
    stamp = min(oldest(stamps_G, first, last), oldest(stamps_G, base, rest))
    if stamp >= protect_from:
        return -1
    for slot in range(first, last):
        if stamps_G[slot] == stamp:
            return slot
    for slot in range(base, rest):
        if stamps_G[slot] == stamp:
            return slot
    return -1


@kernel
def vacancy(
    keys_G: Int64s,
    stamps_G: Int64s,
    seen_s_G: UInt32s,
    base: int,
    capacity: int,
    home: int,
    protect_from: int,
    now_s: int,
    ttl_s: int,
) -> int:
    """Global slot that a new id takes: the first free or expired one of its window, else the least recently used.

    A slot whose stamp is `protect_from` or later is not taken; -1 when that leaves none.
    """
    position = home
    for _ in range(min(WINDOW, capacity)):
        slot = base + position
        here = keys_G[slot]
        if here == EMPTY or here == REMOVED:
            return slot
        if ttl_s > 0 and stamps_G[slot] < protect_from and is_expired(seen_s_G[slot], now_s, ttl_s):
            return slot
        position += 1
        if position == capacity:
            position = 0
    return least_recently_used(stamps_G, base, capacity, home, protect_from)


@kernel
def place(
    keys_G: Int64s,
    stamps_G: Int64s,
    seen_s_G: UInt32s,
    base: int,
    capacity: int,
    home: int,
    key: int,
    protect_from: int,
    now_s: int,
    ttl_s: int,
) -> tuple[int, int, int]:
    """Find an id or give it a slot: (global slot or -1, what was done, id that lost the slot or EMPTY)."""
    slot = locate(keys_G, base, capacity, home, key)
    if slot >= 0:
        if stamps_G[slot] < protect_from and is_expired(seen_s_G[slot], now_s, ttl_s):
            return slot, EXPIRED, key
        return slot, FOUND, EMPTY
    slot = vacancy(keys_G, stamps_G, seen_s_G, base, capacity, home, protect_from, now_s, ttl_s)
    if slot < 0:
        return -1, UNPLACED, EMPTY
    victim = keys_G[slot]
    keys_G[slot] = key
    if victim == EMPTY or victim == REMOVED:
        return slot, INSERTED, EMPTY
    return slot, EVICTED, victim


@kernel
def assign_batch(
    ids_BC: Int64s,
    rows_B: UInt8s,
    column_table_C: Int64s,
    tables_T3: Int64s,
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
    this very batch. `tables_T3`: base, capacity, TTL in s. `touched_K`: global slots, each once, in order of first
    touch; `fresh_K`: 1 where the slot changed its owner or its owner had expired, so its state must start anew.
    `evicted_3E`: ids, tables, global slots. The K and E arrays need room for B * C entries.
    """
    B, C = ids_BC.shape
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
            if rows_B[b] != 0 and key != EMPTY and key != REMOVED:
                t = column_table_C[c]
                home = home_slot(key, tables_T3[t, 1])
                near = tables_T3[t, 0] + home
                prefetch(keys_G, near)
                prefetch(stamps_G, near)
                prefetch(seen_s_G, near)
                prefetch(counts_G, near)
            homes[i] = home
            c += 1
            if c == C:
                b, c = b + 1, 0
        b, c = block_b, block_c
        for i in range(count):
            slot = np.int64(-1)
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
                elif tables_T3[t, 2] > 0 and stamps_G[slot] < clock:
                    if is_expired(seen_s_G[slot], now_s, tables_T3[t, 2]):
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
                        if victim != EMPTY and victim != REMOVED:
                            evicted_3E[0, num_evicted] = victim
                            evicted_3E[1, num_evicted] = t
                            evicted_3E[2, num_evicted] = slot
                            num_evicted += 1
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
        if key != EMPTY and key != REMOVED:
            slots_N[i] = locate(keys_G, base, capacity, home_slot(key, capacity), key)


@kernel
def remove_ids(keys_G: Int64s, base: int, capacity: int, ids_N: Int64s, removed_N: Int64s) -> int:
    """Free the slots of ids; writes the global slots freed and returns how many."""
    num_removed = 0
    for i in range(ids_N.shape[0]):
        key = ids_N[i]
        if key != EMPTY and key != REMOVED:
            slot = locate(keys_G, base, capacity, home_slot(key, capacity), key)
            if slot >= 0:
                keys_G[slot] = REMOVED
                removed_N[num_removed] = slot
                num_removed += 1
    return num_removed


@kernel
def expire_range(
    keys_G: Int64s, seen_s_G: UInt32s, first: int, last: int, now_s: int, ttl_s: int, removed_N: Int64s
) -> int:
    """Free the expired slots among global slots first .. last - 1; writes them and returns how many."""
    num_removed = 0
    for slot in range(first, last):
        here = keys_G[slot]
        if here != EMPTY and here != REMOVED and is_expired(seen_s_G[slot], now_s, ttl_s):
            keys_G[slot] = REMOVED
            removed_N[num_removed] = slot
            num_removed += 1
    return num_removed


@kernel
def reinsert(keys_G: Int64s, base: int, capacity: int, ids_N: Int64s, slots_N: Int64s) -> int:
    """Place ids into free slots alone, evicting none: global slots, -1 for those without room (returns how many).

    For a restore into another capacity: give the ids most recently used first, so that what has no room is the oldest.
    """
    num_unplaced = 0
    for i in range(ids_N.shape[0]):
        slots_N[i] = -1
        position = home_slot(ids_N[i], capacity)
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
