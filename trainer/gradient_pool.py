"""Gradients collected by slot, so that a row gets one update however often an event or a micro-batch names it.

A hash table from key to entry, with room for every id of a micro-batch: nothing grows, nothing is allocated while
learning. It also lists which hashed pairs have been touched since the list was last emptied, for the publisher.

Legend: E entries, H cells of the hash table, D row width.
"""

from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from trainer.kernel import kernel_hot, kernel_inner

Float32s = npt.NDArray[np.float32]
Int32s = npt.NDArray[np.int32]
Int64s = npt.NDArray[np.int64]

ENTRIES, TOUCHED = 0, 1  # places in `count`
SPREAD = np.uint64(0x9E3779B97F4A7C15)  # 2^64 / golden ratio: neighbouring slots go to distant cells


class Pool(NamedTuple):
    """Keys are global slots, then (from the number of slots on) indexes of hashed pairs."""

    cells_H: Int32s  # entry + 1; 0: free
    count: Int64s  # type: ignore[assignment] # entries in use, touched pairs; shadows a method of tuples
    key_E: Int64s
    cell_E: Int64s
    feature_E: Int64s
    wide_E: Float32s
    row_ED: Float32s
    dense: Float32s  # summed gradients of the dense parameters; empty when events are learned one by one
    peak: Float32s  # [1], the largest squared gradient of a row since it was last set to zero
    touched_pairs: Int64s
    is_touched: npt.NDArray[np.uint64]  # a bit per pair


def make_pool(*, entries: int, width: int, dense: int, touched_pairs: int, pair_slots: int) -> Pool:
    """An empty pool with room for so many entries, of rows of at most `width`, and so many touched pairs."""
    cells = 1 << (2 * max(entries, 8)).bit_length()  # never more than half full: searches stay short, and end
    return Pool(
        cells_H=np.zeros(cells, np.int32),
        count=np.zeros(2, np.int64),
        key_E=np.zeros(entries, np.int64),
        cell_E=np.zeros(entries, np.int64),
        feature_E=np.zeros(entries, np.int64),
        wide_E=np.zeros(entries, np.float32),
        row_ED=np.zeros((entries, width), np.float32),
        dense=np.zeros(dense, np.float32),
        peak=np.zeros(1, np.float32),
        touched_pairs=np.zeros(touched_pairs, np.int64),
        is_touched=np.zeros(pair_slots // 64 + 1, np.uint64),
    )


@kernel_inner
def entry_of(pool: Pool, key: int, feature: int, width: int) -> np.int64:
    """The entry of a key; new ones start with zero gradients (`width` floats of a row)."""
    mask = pool.cells_H.shape[0] - 1
    cell = np.int64((np.uint64(key) * SPREAD) >> np.uint64(32)) & mask
    while pool.cells_H[cell] != 0:
        entry = np.int64(pool.cells_H[cell]) - 1
        if pool.key_E[entry] == key:
            return entry
        cell = (cell + 1) & mask
    entry = np.int64(pool.count[ENTRIES])
    pool.count[ENTRIES] += 1
    pool.cells_H[cell] = entry + 1
    pool.key_E[entry] = key
    pool.cell_E[entry] = cell
    pool.feature_E[entry] = feature
    pool.wide_E[entry] = np.float32(0)
    for k in range(width):
        pool.row_ED[entry, k] = np.float32(0)
    return entry


@kernel_inner
def empty_entries(pool: Pool) -> None:
    """Forget all entries."""
    for entry in range(pool.count[ENTRIES]):
        pool.cells_H[pool.cell_E[entry]] = 0
    pool.count[ENTRIES] = 0


@kernel_inner
def mark_touched(pool: Pool, pair_slot: int) -> None:
    """Put a hashed pair on the list of touched ones, once."""
    bit = np.uint64(1) << np.uint64(pair_slot & 63)
    if pool.is_touched[pair_slot >> 6] & bit == np.uint64(0):
        pool.is_touched[pair_slot >> 6] |= bit
        pool.touched_pairs[pool.count[TOUCHED]] = pair_slot
        pool.count[TOUCHED] += 1


@kernel_hot
def empty_touched(pool: Pool) -> None:
    """Empty the list of touched pairs."""
    for i in range(pool.count[TOUCHED]):
        pool.is_touched[pool.touched_pairs[i] >> 6] = np.uint64(0)
    pool.count[TOUCHED] = 0
