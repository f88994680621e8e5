"""The publisher's kernels: lists of changed slots, and the guarded copy of their state into a staging buffer.

Legend: G all slots, T groups (tables or entities), K slots touched, N slots of one group, D row width, W = D + 1.
"""
# ruff: noqa: PLR0917 -- kernels take arrays and places one by one: numba unpacks no objects.

import numpy as np
import numpy.typing as npt

from trainer.index import Int64s, UInt8s, UInt32s
from trainer.kernel import kernel
from trainer.live_atomics import address_of, prefetch
from trainer.optim import ftrl_weight
from trainer.probe import EMPTY, REMOVED

Float32s = npt.NDArray[np.float32]

CHANGED, NEW_OWNER = np.uint8(1), np.uint8(2)  # bits of a slot's mark
PUT, TAKEN_OUT, HELD = 0, 1, 2  # places in `totals`
EXPONENT = np.uint32(0x7F800000)  # all ones in infinities and NaNs alone; as bits, because fast math forgets both
AHEAD = 16  # rows asked for in advance: their cache lines arrive while the ones before are copied
LINE_BYTES = 64


@kernel
def mark_slots(
    slots_K: Int64s,
    groups_K: Int64s,
    fresh_K: UInt8s,
    base_T: Int64s,
    marks_G: UInt8s,
    queue_G: Int64s,
    count_T: Int64s,
) -> None:
    """Put slots on their group's list, each once, and remember those that have changed their owner."""
    for i in range(slots_K.shape[0]):
        slot, t = slots_K[i], groups_K[i]
        if marks_G[slot] == 0:
            queue_G[base_T[t] + count_T[t]] = slot
            count_T[t] += 1
        marks_G[slot] |= CHANGED | NEW_OWNER if fresh_K[i] != 0 else CHANGED


@kernel
def clear_marks(base_T: Int64s, marks_G: UInt8s, queue_G: Int64s, count_T: Int64s) -> None:
    """Empty all lists."""
    for t in range(count_T.shape[0]):
        for i in range(base_T[t], base_T[t] + count_T[t]):
            marks_G[queue_G[i]] = 0
        count_T[t] = 0


@kernel
def gather_rows(
    slots_N: Int64s,
    base: int,
    weight_base: int,
    keys_G: Int64s,
    seen_s_G: UInt32s,
    counts_G: UInt32s,
    weights: UInt32s,
    wide_z_G: Float32s,
    wide_n_G: Float32s,
    ftrl_4: Float32s,
    marks_G: UInt8s,
    local_N: Int64s,
    keys_N: Int64s,
    seen_s_N: UInt32s,
    counts_N: UInt32s,
    words_NW: UInt32s,
    wide_NW: Float32s,
    taken_out_N: Int64s,
    totals_3: Int64s,
) -> None:
    """Copy one table's slots to the first PUT places of the N arrays: row, then wide weight, as bits.

    `wide_NW` is the same memory as `words_NW`; the wide weight is 0 where the wide arrays are empty. Slots without an
    id, and rows that are not finite in slots that changed their owner, go to `taken_out_N` as local slots; other rows
    that are not finite are only counted (HELD counts both).
    """
    width, wide = words_NW.shape[1] - 1, wide_z_G.shape[0] > 0
    weights_at, keys_at = address_of(weights), address_of(keys_G)
    wide_z_at, wide_n_at = address_of(wide_z_G), address_of(wide_n_G)
    seen_at, counts_at = address_of(seen_s_G), address_of(counts_G)
    num_put, num_out, num_held = 0, 0, 0
    for i in range(slots_N.shape[0]):
        if i + AHEAD < slots_N.shape[0]:
            ahead = slots_N[i + AHEAD]
            row_at = weights_at + 4 * (weight_base + (ahead - base) * width)
            for at in range(row_at, row_at + 4 * width, LINE_BYTES):
                prefetch(at)
            prefetch(row_at + 4 * width - 1)
            prefetch(keys_at + 8 * ahead)
            if wide:
                prefetch(wide_z_at + 4 * ahead)
                prefetch(wide_n_at + 4 * ahead)
            prefetch(seen_at + 4 * ahead)
            prefetch(counts_at + 4 * ahead)
        slot = slots_N[i]
        key = keys_G[slot]
        if key in (EMPTY, REMOVED):
            taken_out_N[num_out] = slot - base
            num_out += 1
            continue
        start = weight_base + (slot - base) * width
        source = weights[start : start + width]
        target = words_NW[num_put]
        unsafe = wide and not (np.isfinite(wide_z_G[slot]) and np.isfinite(wide_n_G[slot]))
        for k in range(width):
            target[k] = source[k]
            unsafe |= (source[k] & EXPONENT) == EXPONENT
        wide_NW[num_put, width] = np.float32(0)
        if wide and not unsafe:
            wide_NW[num_put, width] = ftrl_weight(
                wide_z_G[slot], wide_n_G[slot], ftrl_4[0], ftrl_4[1], ftrl_4[2], ftrl_4[3]
            )
            unsafe = (target[width] & EXPONENT) == EXPONENT
        if unsafe:
            num_held += 1
            if marks_G[slot] & NEW_OWNER:
                taken_out_N[num_out] = slot - base
                num_out += 1
            continue
        local_N[num_put] = slot - base
        keys_N[num_put] = key
        seen_s_N[num_put] = seen_s_G[slot]
        counts_N[num_put] = counts_G[slot]
        num_put += 1
    totals_3[PUT], totals_3[TAKEN_OUT], totals_3[HELD] = num_put, num_out, num_held


@kernel
def gather_pairs(
    slots_N: Int64s, pair_z: Float32s, pair_n: Float32s, ftrl_4: Float32s, index_N: Int64s, weights_N: Float32s
) -> int:
    """Weights of hashed pairs; those that are not finite are left out. Returns how many there are."""
    bits_N = weights_N.view(np.uint32)
    count = 0
    for i in range(slots_N.shape[0]):
        z, n = pair_z[slots_N[i]], pair_n[slots_N[i]]
        if np.isfinite(z) and np.isfinite(n):
            weights_N[count] = ftrl_weight(z, n, ftrl_4[0], ftrl_4[1], ftrl_4[2], ftrl_4[3])
            index_N[count] = slots_N[i]
            count += (bits_N[count] & EXPONENT) != EXPONENT
    return count
