"""Tensors as the Open Inference Protocol writes them: a name, a datatype, a shape, and values end to end.

Whatever form values arrive in (little-endian bytes, JSON, protobuf), they become one array, or `Texts`: BYTES.
"""

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from service.errors import ServiceError, Violation
from trainer.hashing import hash_texts
from trainer.kernel import kernel

UInt8s = npt.NDArray[np.uint8]
Int64s = npt.NDArray[np.int64]

BYTES = "BYTES"
# Datatypes that are taken, and how their values lie in bytes; BYTES are a length (uint32) and so many bytes each.
DTYPES: dict[str, str] = {"INT32": "<i4", "INT64": "<i8", "FP32": "<f4", "FP64": "<f8"}
MAX_DIMENSIONS = 8  # of a shape; none here needs more than two
LENGTH_BYTES = 4


@dataclass(frozen=True)
class Texts:
    """N texts (UTF-8, unchecked) laid end to end: lengths_N int64, in bytes. `text` is writable, as kernels want it."""

    text: UInt8s
    lengths_N: Int64s

    def __len__(self) -> int:
        """Number of texts."""
        return len(self.lengths_N)

    @classmethod
    def of(cls, texts: Sequence[bytes]) -> "Texts":
        """Texts that are one object each."""
        lengths_N = np.fromiter(map(len, texts), np.int64, len(texts))
        return cls(np.frombuffer(bytearray(b"".join(texts)), np.uint8), lengths_N)

    @property
    def offsets(self) -> Int64s:
        """Where each text begins, and where the last one ends: N + 1 items."""
        offsets = np.zeros(len(self) + 1, np.int64)
        np.cumsum(self.lengths_N, out=offsets[1:])
        return offsets

    def ids_N(self) -> Int64s:
        """Their hashes."""
        return hash_texts(self.text, self.offsets)

    def problem(self, max_chars: int) -> str | None:
        """What is wrong with one of them, if anything is: not UTF-8, or too long."""
        starts = self.offsets[:-1]
        continues = (self.text & 0xC0) == 0x80  # bytes that do not begin a character
        try:
            self.text.tobytes().decode()
        except UnicodeDecodeError:
            return "a value is not UTF-8"
        if continues[starts[self.lengths_N > 0]].any():  # a character that lies across two texts
            return "a value is not UTF-8"
        for n in np.flatnonzero(self.lengths_N > max_chars):
            end = starts[n] + self.lengths_N[n]
            num_chars = int(self.lengths_N[n]) - int(np.count_nonzero(continues[starts[n] : end]))
            if num_chars > max_chars:
                return f"a text of {num_chars} characters, at most {max_chars}"
        return None


@dataclass(frozen=True)
class Tensor:
    """One tensor: values in row-major order, as many as its shape says."""

    name: str
    datatype: str
    shape: tuple[int, ...]
    values: npt.NDArray[Any] | Texts


def num_values(name: str, datatype: str, shape: Sequence[int]) -> int:
    """How many values a shape asks for. Raises ServiceError if the datatype is not taken, or it is no shape."""
    if datatype != BYTES and datatype not in DTYPES:
        raise invalid(name, f"datatype is {datatype[:32]!r}, wanted one of {BYTES}, {', '.join(DTYPES)}")
    if not 1 <= len(shape) <= MAX_DIMENSIONS or min(shape) < 0:
        raise invalid(name, f"shape is {list(shape[:MAX_DIMENSIONS])}, wanted one or two dimensions of 0 or more")
    return math.prod(shape)


def raw_tensor(name: str, datatype: str, shape: Sequence[int], raw: bytes | memoryview) -> Tensor:
    """A tensor whose values are bytes. Raises ServiceError."""
    count = num_values(name, datatype, shape)
    if datatype == BYTES:
        return Tensor(name, datatype, tuple(shape), _split(name, raw, count))
    wanted = count * np.dtype(DTYPES[datatype]).itemsize
    if len(raw) != wanted:
        raise invalid(name, f"{len(raw)} bytes of values, wanted {wanted} for {datatype} {list(shape)}")
    return Tensor(name, datatype, tuple(shape), np.frombuffer(raw, DTYPES[datatype]))


def listed_tensor(name: str, datatype: str, shape: Sequence[int], values: Iterable[Any]) -> Tensor:
    """A tensor whose values are Python's: numbers, or bytes. Raises ServiceError."""
    count = num_values(name, datatype, shape)
    listed = list(values)
    if len(listed) != count:
        raise invalid(name, f"{len(listed)} values, wanted {count} for shape {list(shape)}")
    if datatype == BYTES:
        return Tensor(name, datatype, tuple(shape), Texts.of(listed))
    try:
        return Tensor(name, datatype, tuple(shape), np.array(listed, DTYPES[datatype]))
    except OverflowError:
        raise invalid(name, f"a value does not fit into {datatype}") from None


def invalid(name: str, detail: str) -> ServiceError:
    """What is wrong with one tensor."""
    sentence = f"tensor {name[:64]!r}: {detail}"
    return ServiceError("invalid", sentence, violations=[Violation(f"/inputs/{name[:64]}", detail)])


def _split(name: str, raw: bytes | memoryview, count: int) -> Texts:
    if LENGTH_BYTES * count > len(raw):  # before anything of that size is allocated
        raise invalid(name, f"{len(raw)} bytes cannot hold {count} texts and their lengths")
    text, lengths_N = np.empty(len(raw) - LENGTH_BYTES * count, np.uint8), np.empty(count, np.int64)
    if not _split_texts(np.frombuffer(raw, np.uint8), text, lengths_N):
        raise invalid(name, f"{len(raw)} bytes are not {count} texts with a length of {LENGTH_BYTES} bytes before each")
    return Texts(text, lengths_N)


@kernel
def _split_texts(raw: UInt8s, text: UInt8s, lengths_N: Int64s) -> bool:
    """Take the lengths out from between the texts; false if they do not add up to all there is."""
    at, to = np.int64(0), np.int64(0)
    for n in range(lengths_N.shape[0]):
        if at + 4 > raw.shape[0]:
            return False
        low, high = np.int64(raw[at]) | np.int64(raw[at + 1]) << 8, np.int64(raw[at + 2]) | np.int64(raw[at + 3]) << 8
        length = low | high << 16
        at += 4
        if length > raw.shape[0] - at or length > text.shape[0] - to:
            return False
        for k in range(length):
            text[to + k] = raw[at + k]
        lengths_N[n] = length
        at += length
        to += length
    return bool(at == raw.shape[0])


def warm() -> None:
    """Compile the kernel."""
    raw_tensor("", BYTES, [1], b"\x01\x00\x00\x00a")
