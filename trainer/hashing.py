"""Raw value -> id: the one stable hash of Livebed, the same for training, serving and every client.

    id = XXH64(UTF-8 text of the value, seed 0), as a signed 64-bit integer

An integer hashes as its decimal text, so 42 and "42" are the same id, in JSON and in a CSV file alike.
The two ids that mark empty and removed slots (-1 and -2) are moved out of the way by flipping the top bit.
XXH64 (specification: github.com/Cyan4973/xxHash) exists in every language; `hash_values` gives the numbers
of the `xxhash` package, for whole columns.

    >>> hash_values(["42", 42, ""]).tolist()
    [3092213241949450943, 3092213241949450943, -1205034819632174695]
"""

from array import array
from collections.abc import Sequence
from itertools import accumulate

import numpy as np
import numpy.typing as npt

from trainer.kernel import kernel

P1 = np.uint64(0x9E3779B185EBCA87)
P2 = np.uint64(0xC2B2AE3D27D4EB4F)
P3 = np.uint64(0x165667B19E3779F9)
P4 = np.uint64(0x85EBCA77C2B2AE63)
P5 = np.uint64(0x27D4EB2F165667C5)
LANE_1 = np.uint64((0x9E3779B185EBCA87 + 0xC2B2AE3D27D4EB4F) % 2**64)
LANE_4 = np.uint64((-0x9E3779B185EBCA87) % 2**64)
TOP_BIT = np.uint64(1 << 63)
FIRST_RESERVED = np.uint64(2**64 - 2)  # -2 and -1 as unsigned
SEPARATOR = 0  # between texts that are hashed together; texts that hold it take another way

MISSING_ID = -1205034819632174695  # the id of "": what a missing categorical value reads and learns


@kernel
def _rotate(x: np.uint64, r: int) -> np.uint64:
    return (x << np.uint64(r)) | (x >> np.uint64(64 - r))


@kernel
def _word(text: npt.NDArray[np.uint8], at: int, num_bytes: int) -> np.uint64:
    word = np.uint64(0)
    for k in range(num_bytes):
        word |= np.uint64(text[at + k]) << np.uint64(8 * k)
    return word


@kernel
def _round(lane: np.uint64, word: np.uint64) -> np.uint64:
    return _rotate(lane + word * P2, 31) * P1


@kernel
def _stripes(text: npt.NDArray[np.uint8], start: int, length: int) -> np.uint64:
    """Hash state after all whole 32-byte stripes; only for texts of 32 bytes and more."""
    a, b, c, d = LANE_1, P2, np.uint64(0), LANE_4
    at = start
    while at + 32 <= start + length:
        a = _round(a, _word(text, at, 8))
        b = _round(b, _word(text, at + 8, 8))
        c = _round(c, _word(text, at + 16, 8))
        d = _round(d, _word(text, at + 24, 8))
        at += 32
    h = _rotate(a, 1) + _rotate(b, 7) + _rotate(c, 12) + _rotate(d, 18)
    for lane in (a, b, c, d):
        h = (h ^ _round(np.uint64(0), lane)) * P1 + P4
    return h


@kernel
def _xxh64(text: npt.NDArray[np.uint8], start: int, length: int) -> np.uint64:
    end = start + length
    h = _stripes(text, start, length) if length >= 32 else P5
    h += np.uint64(length)
    at = start + length - length % 32
    while at + 8 <= end:
        h = _rotate(h ^ _round(np.uint64(0), _word(text, at, 8)), 27) * P1 + P4
        at += 8
    if at + 4 <= end:
        h = _rotate(h ^ (_word(text, at, 4) * P1), 23) * P2 + P3
        at += 4
    while at < end:
        h = _rotate(h ^ (np.uint64(text[at]) * P5), 11) * P1
        at += 1
    h = (h ^ (h >> np.uint64(33))) * P2
    h = (h ^ (h >> np.uint64(29))) * P3
    return h ^ (h >> np.uint64(32))


@kernel
def _as_id(h: np.uint64) -> np.int64:
    return np.int64(h ^ TOP_BIT) if h >= FIRST_RESERVED else np.int64(h)


@kernel
def _hash_texts(text: npt.NDArray[np.uint8], offsets: npt.NDArray[np.int64], out: npt.NDArray[np.int64]) -> None:
    for i in range(out.shape[0]):
        out[i] = _as_id(_xxh64(text, offsets[i], offsets[i + 1] - offsets[i]))


@kernel
def _hash_separated(text: npt.NDArray[np.uint8], out: npt.NDArray[np.int64]) -> None:
    start = 0
    for i in range(out.shape[0]):
        end = start
        while end < text.shape[0] and text[end] != SEPARATOR:
            end += 1
        out[i] = _as_id(_xxh64(text, start, end - start))
        start = end + 1


@kernel
def _hash_integers(values: npt.NDArray[np.int64], out: npt.NDArray[np.int64]) -> None:
    digits = np.empty(20, np.uint8)
    for i in range(values.shape[0]):
        value = values[i]
        rest = np.uint64(value) if value >= 0 else np.uint64(0) - np.uint64(value)
        at = 20
        while True:
            at -= 1
            tenth = rest // np.uint64(10)
            digits[at] = np.uint8(48) + np.uint8(rest - tenth * np.uint64(10))
            rest = tenth
            if rest == np.uint64(0):
                break
        if value < 0:
            at -= 1
            digits[at] = np.uint8(45)
        out[i] = _as_id(_xxh64(digits, at, 20 - at))


def hash_texts(text: npt.NDArray[np.uint8], offsets: npt.NDArray[np.int64]) -> npt.NDArray[np.int64]:
    """Ids of N texts laid end to end: text k is bytes offsets[k]..offsets[k + 1]; offsets has N + 1 items."""
    out = np.empty(len(offsets) - 1, np.int64)
    _hash_texts(text, offsets, out)
    return out


def hash_integers(values: npt.NDArray[np.int64]) -> npt.NDArray[np.int64]:
    """Ids of N integers, each hashed as its decimal text."""
    out = np.empty(len(values), np.int64)
    _hash_integers(values, out)
    return out


def hash_values(values: Sequence[str | int]) -> npt.NDArray[np.int64]:
    """Ids of N raw values: strings, integers, or both mixed.

    Raises:
        TypeError: an item is neither a string nor an integer.
    """
    if not values:
        return np.empty(0, np.int64)
    integers = integers_of(values)
    if integers is not None:
        return hash_integers(np.frombuffer(integers, np.int64))
    try:
        return _hash_strings(values)  # type: ignore[arg-type]  # join below refuses what is no string
    except TypeError:
        return _hash_strings([value if isinstance(value, str) else _decimal(value) for value in values])


def _decimal(value: object) -> str:
    if not isinstance(value, int):
        raise TypeError(f"an id is a string or an integer, got {type(value).__name__}")
    return str(int(value))


def integers_of(values: Sequence[object]) -> "array[int] | None":
    """All values as 64-bit integers; None if one is none."""
    try:
        return array("q", values)  # type: ignore[arg-type] # it says so itself if they are not
    except (TypeError, OverflowError):
        return None


def hash_together(columns: Sequence["array[int]"]) -> list[npt.NDArray[np.int64]]:
    """Ids of each column of `integers_of`, in one call: one costs 2 us before it begins."""
    hashed = hash_integers(np.frombuffer(bytearray().join(columns), np.int64))
    ends = list(accumulate(map(len, columns)))
    return [hashed[end - len(column) : end] for column, end in zip(columns, ends, strict=True)]


def _hash_strings(texts: Sequence[str]) -> npt.NDArray[np.int64]:
    text = chr(SEPARATOR).join(texts).encode("utf-8", "surrogatepass")
    if text.count(SEPARATOR) == len(texts) - 1:
        out = np.empty(len(texts), np.int64)
        _hash_separated(np.frombuffer(text, np.uint8), out)
        return out
    encoded = [item.encode("utf-8", "surrogatepass") for item in texts]
    offsets = np.array([0, *accumulate(map(len, encoded))], np.int64)
    return hash_texts(np.frombuffer(b"".join(encoded), np.uint8), offsets)


def warm() -> None:
    """Compile the kernels."""
    hash_values(["a"])
    hash_values([1])
    hash_values(["\0"])
    hash_texts(np.zeros(1, np.uint8), np.array([0, 1]))
