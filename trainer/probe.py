"""Where an id may lie: the one probing rule that the trainer's index and every reader of the live store share.

A table of `capacity` slots is probed linearly over WINDOW slots from the id's home slot, wrapping around at the end.
"""

import numpy as np

from trainer.kernel import kernel

EMPTY = -1  # a slot that was never used: a probe that comes here has missed
REMOVED = -2  # a slot that was emptied: a probe goes on past it
WINDOW = 32  # smaller evicts useful rows earlier; larger makes a miss in a full table cost more cache lines


@kernel
def mix64(x: int) -> np.uint64:
    """Spread the bits of an id (the finaliser of SplitMix64): ids need not be well hashed."""
    z = np.uint64(x)
    z = (z ^ (z >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    z = (z ^ (z >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return z ^ (z >> np.uint64(31))


@kernel
def home_slot(id_: int, capacity: int) -> np.int64:
    """First slot of an id's window: the mix's high 32 bits scaled to the capacity (< 2^31, any number)."""
    return np.int64(((mix64(id_) >> np.uint64(32)) * np.uint64(capacity)) >> np.uint64(32))


@kernel
def shard_of(id_: int, num_shards: int) -> np.int64:
    """Shard of an id, from the mix's low 32 bits, which `home_slot` does not use."""
    low = mix64(id_) & np.uint64(0xFFFFFFFF)
    return np.int64((low * np.uint64(num_shards)) >> np.uint64(32))
