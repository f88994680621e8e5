"""Which event ids were seen lately, so that an event that was sent twice is learned once.

The window is the last so many sightings of an id, repeated ones included, in the order of the log: what is fresh is a
function of the log alone, wherever batches are cut. The sightings lie in a ring; a hash set of places in that ring
(linear probing, at most a quarter full, removal by shifting back) finds an id's last one.

Legend: B events of a batch, W sightings in the window, S slots of the set.
"""
# ruff: noqa: PLR0917 -- kernels take arrays and places one by one: numba unpacks no objects.

from collections.abc import Mapping
from typing import Any

import numpy as np
import numpy.typing as npt

from trainer.index import Int
from trainer.kernel import kernel_hot
from trainer.live_atomics import address_of, prefetch
from trainer.probe import mix64

UInt64s = npt.NDArray[np.uint64]

NOTHING = np.uint64(0)  # an empty slot; any other holds the mix's high 32 bits, and the place in the ring plus one
LOW_32 = np.uint64(0xFFFFFFFF)
HIGH_32 = np.uint64(0xFFFFFFFF00000000)
AHEAD = 16  # ids whose cache lines are on their way while one is looked at


@kernel_hot
def home(entry: np.uint64, shift: int) -> Int:
    """First slot that an id may lie in, from its mix or its entry: their highest bits are the same."""
    return np.int64(entry >> np.uint64(shift))


@kernel_hot
def mix(key: np.uint64) -> np.uint64:
    """Spread an id's bits."""
    return mix64(int(key))


@kernel_hot
def last_place(key: np.uint64, ring_W: UInt64s, set_S: UInt64s, shift: int) -> Int:
    """The slot that holds an id, or the empty one where it would go."""
    mixed, mask = mix(key), set_S.shape[0] - 1
    slot = home(mixed, shift)
    while set_S[slot] != NOTHING:
        if (set_S[slot] ^ mixed) & HIGH_32 == NOTHING and ring_W[np.int64(set_S[slot] & LOW_32) - 1] == key:
            break
        slot = (slot + 1) & mask
    return slot


@kernel_hot
def leave(key: np.uint64, at: int, set_S: UInt64s, shift: int) -> None:
    """Take out an id whose last sighting is the one at place `at` of the ring; one seen again since stays."""
    mixed, mask = mix(key), set_S.shape[0] - 1
    gone = (mixed & HIGH_32) | np.uint64(at + 1)
    slot = home(mixed, shift)
    while set_S[slot] not in (NOTHING, gone):
        slot = (slot + 1) & mask
    if set_S[slot] == NOTHING:
        return
    hole = slot
    slot = (slot + 1) & mask
    while set_S[slot] != NOTHING:
        # An entry may move back to the hole unless its home lies after it.
        if ((slot - home(set_S[slot], shift)) & mask) >= ((slot - hole) & mask):
            set_S[hole] = set_S[slot]
            hole = slot
        slot = (slot + 1) & mask
    set_S[hole] = NOTHING


@kernel_hot
def see(
    keys_B: UInt64s, ring_W: UInt64s, set_S: UInt64s, shift: int, num_seen: int, fresh_B: npt.NDArray[np.bool_]
) -> int:
    """Say of each id whether the window lacks it, and move the window on; the new number of sightings."""
    W, B = ring_W.shape[0], keys_B.shape[0]
    set_at = address_of(set_S)
    at = num_seen % W
    for b in range(B):
        if b + AHEAD < B:
            prefetch(int(set_at + 8 * home(mix(keys_B[b + AHEAD]), shift)))
            leaving = at + AHEAD
            if leaving < W:  # the few at the ring's end are not worth a division
                prefetch(int(set_at + 8 * home(mix(ring_W[leaving]), shift)))
        key = keys_B[b]
        fresh_B[b] = True
        if key == 0:
            continue
        leaving_key = ring_W[at]
        if num_seen >= W:
            leave(leaving_key, at, set_S, shift)
        slot = last_place(key, ring_W, set_S, shift)
        fresh_B[b] = set_S[slot] == NOTHING and leaving_key != key  # 0 while the ring is not full
        set_S[slot] = (mix(key) & HIGH_32) | np.uint64(at + 1)
        ring_W[at] = key
        num_seen += 1
        at += 1
        if at == W:
            at = 0
    return num_seen


class Dedup:
    """The ids among the last `window` sightings; fixed memory, 40 to 72 bytes a sighting. A window of 0 knows none.

    >>> dedup = Dedup(2)
    >>> dedup.fresh(np.array([7, 7, 8, 9, 7, 0, 0], np.uint64)).tolist()
    [True, False, True, True, True, True, True]
    """

    def __init__(self, window: int) -> None:
        num_slots = 1 << (4 * window - 1).bit_length() if window else 0
        self._ring_W = np.zeros(window, np.uint64)
        self._set_S = np.zeros(num_slots, np.uint64)
        self._shift = 64 - (num_slots.bit_length() - 1)
        self._num_seen = 0

    @property
    def num_bytes(self) -> int:
        """Bytes of all arrays, fixed at construction."""
        return self._ring_W.nbytes + self._set_S.nbytes

    def fresh(self, keys_B: UInt64s) -> npt.NDArray[np.bool_]:
        """Whether each id is the first sighting within the window, in order; 0 is no id, always fresh, never kept.

        Cost: 45 ns an id in batches of 256 and the default window, 140 in batches of 16.
        """
        if keys_B.dtype != np.uint64:
            raise TypeError(f"got ids of type {keys_B.dtype}, wanted uint64")
        if len(self._ring_W) == 0:
            return np.ones(len(keys_B), np.bool_)
        fresh_B = np.empty(len(keys_B), np.bool_)
        if not (keys_B.flags.c_contiguous and keys_B.flags.writeable):
            keys_B = keys_B.copy()  # another kind of array would be compiled anew
        self._num_seen = see(keys_B, self._ring_W, self._set_S, self._shift, self._num_seen, fresh_B)
        return fresh_B

    @property
    def arrays(self) -> dict[str, npt.NDArray[Any]]:
        """Everything, for a checkpoint: the window's sightings, the oldest first."""
        begin = self._num_seen % max(len(self._ring_W), 1)
        if self._num_seen <= len(self._ring_W):
            return {"keys": self._ring_W[: self._num_seen].copy()}
        return {"keys": np.concatenate([self._ring_W[begin:], self._ring_W[:begin]])}

    def load(self, arrays: Mapping[str, npt.NDArray[Any]]) -> None:
        """Continue from a checkpoint's arrays, or from nothing; of a longer window the newest sightings are kept."""
        self._set_S[:] = NOTHING
        self._ring_W[:] = 0
        self._num_seen = 0
        keys = arrays.get("keys", np.zeros(0, np.uint64))
        self.fresh(keys[max(len(keys) - len(self._ring_W), 0) :].copy())


def warm() -> None:
    """Compile the kernel."""
    Dedup(1).fresh(np.ones(2, np.uint64))
