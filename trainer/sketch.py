"""A count-min sketch that ages: about how often an id without a row was seen lately, in one cache line an id.

An id has four counters (uint8), one in each quarter of one line of 64. A sighting raises only those of them that are
at the lowest value (conservative update), which is the estimate: never below the true count since the last halving,
above it where all four are shared. Every `halve_every` sightings of a table all its counters are halved, at exactly
that sighting, so old sightings fade and what the sketch holds is a function of the sequence of sightings alone.

Legend: one sketch is `lines` lines of LINE bytes that start at byte `at` of an array that holds those of all tables.
"""
# ruff: noqa: PLR0917 -- kernels take arrays and places one by one: numba unpacks no objects.

import numpy as np
import numpy.typing as npt

from trainer.kernel import kernel_hot
from trainer.live_atomics import address_of, prefetch
from trainer.probe import mix64

UInt8s = npt.NDArray[np.uint8]

LINE = 64  # bytes of a cache line: an id's counters cost one miss
DEPTH, QUARTER = 4, 16  # counters of an id, and how many it is one of; 4 x 16 = LINE
FULL = np.uint8(255)  # a counter stops here


@kernel_hot
def spread(key: int, salt: int) -> np.uint64:
    """Where an id's counters lie, as bits: its line from the high 32, its place in each quarter from 4 low ones."""
    return mix64(key ^ salt)


@kernel_hot
def line_at(hashed: np.uint64, at: int, lines: int) -> np.int64:
    """First byte of an id's line; any number of lines."""
    return at + LINE * np.int64(((hashed >> np.uint64(32)) * np.uint64(lines)) >> np.uint64(32))


@kernel_hot
def counter_at(line: np.int64, hashed: np.uint64, quarter: int) -> np.int64:
    """Byte of an id's counter in one quarter of its line."""
    return line + QUARTER * quarter + np.int64((hashed >> np.uint64(4 * quarter)) & np.uint64(QUARTER - 1))


@kernel_hot
def estimate(sketch: UInt8s, at: int, lines: int, hashed: np.uint64) -> np.int64:
    """How often an id was seen, at most and about."""
    line = line_at(hashed, at, lines)
    lowest = FULL
    for quarter in range(DEPTH):
        lowest = min(lowest, sketch[counter_at(line, hashed, quarter)])
    return np.int64(lowest)


@kernel_hot
def add(sketch: UInt8s, at: int, lines: int, hashed: np.uint64) -> np.int64:
    """Count one sighting; the estimate with it."""
    lowest = estimate(sketch, at, lines, hashed)
    if lowest == FULL:
        return lowest
    line = line_at(hashed, at, lines)
    for quarter in range(DEPTH):
        place = counter_at(line, hashed, quarter)
        if sketch[place] == lowest:
            sketch[place] = np.uint8(lowest + 1)
    return lowest + 1


@kernel_hot
def halve(sketch: UInt8s, at: int, lines: int) -> None:
    """Halve all counters of one sketch, rounding down: 20 us for the 800 kB of 100,000 slots."""
    for place in range(at, at + LINE * lines):
        sketch[place] >>= np.uint8(1)


@kernel_hot
def clear(sketch: UInt8s, at: int, lines: int, hashed: np.uint64) -> None:
    """Bring an id's estimate to 0. A sketch cannot forget one id alone: those that share a counter lose with it."""
    line = line_at(hashed, at, lines)
    for quarter in range(DEPTH):
        sketch[counter_at(line, hashed, quarter)] = np.uint8(0)


@kernel_hot
def prefetch_line(sketch: UInt8s, at: int, lines: int, hashed: np.uint64) -> None:
    """Ask for an id's line."""
    prefetch(address_of(sketch) + int(line_at(hashed, at, lines)))


@kernel_hot
def estimates(sketch: UInt8s, at: int, lines: int, salt: int, ids_N: npt.NDArray[np.int64], out_N: UInt8s) -> None:
    """`estimate` of many ids."""
    for i in range(ids_N.shape[0]):
        out_N[i] = np.uint8(estimate(sketch, at, lines, spread(ids_N[i], salt)))


@kernel_hot
def clear_ids(sketch: UInt8s, at: int, lines: int, salt: int, ids_N: npt.NDArray[np.int64]) -> None:
    """`clear` of many ids."""
    for i in range(ids_N.shape[0]):
        clear(sketch, at, lines, spread(ids_N[i], salt))


def resized(lines_L64: UInt8s, num_lines: int) -> UInt8s:
    """The same sketch on another number of lines, [lines, 64]; no id's estimate falls.

    A line holds the ids whose hash lies in one stretch of the range, so a new line takes, counter by counter, the most
    of the old lines that its stretch meets.
    """
    num_old = len(lines_L64)
    first_L = np.arange(num_lines, dtype=np.int64) * num_old // num_lines
    last_L = ((np.arange(num_lines, dtype=np.int64) + 1) * num_old - 1) // num_lines
    new_L64 = lines_L64[first_L]
    for ahead in range(1, int((last_L - first_L).max(initial=0)) + 1):
        np.maximum(new_L64, lines_L64[np.minimum(first_L + ahead, last_L)], out=new_L64)
    return new_L64


def aligned(num_bytes: int) -> UInt8s:
    """Zeros that start on a cache line; they take `num_bytes` + LINE of memory."""
    if num_bytes == 0:
        return np.zeros(0, np.uint8)
    memory = np.zeros(num_bytes + LINE, np.uint8)
    start = -memory.ctypes.data % LINE
    return memory[start : start + num_bytes]
