"""Where everything lies in a live store: its sections, the bytes of a shard's file, the manifest that names the files.

A store is a directory: `CURRENT` (the manifest, JSON, replaced atomically) and a file per shard and generation:

    header (4 KiB) | per section: tags uint8, records | pairs float32 | dense float32, twice

Header words are int64. Those that change lie on cache lines of their own, away from those that readers poll.
"""

import json
import re
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Literal, Self

import numpy as np
import numpy.typing as npt

from trainer.errors import SchemaMismatch, StoreUnavailable
from trainer.live_atomics import LANES
from trainer.live_kernels import META_WORDS, ROW
from trainer.probe import WINDOW

FORMAT = 1  # of files and manifest; another number is refused
MAGIC = int.from_bytes(b"LIVEBED\0", "little")
HEADER_BYTES = 4096  # a page, so that sections start aligned

# Header words, written once.
MAGIC_AT, FORMAT_AT, SCHEMA_AT, GENERATION_AT, SHARD_AT = range(5)
SHARDS_AT, BYTES_AT, WINDOW_AT, PID_AT, CREATED_US_AT = range(5, 10)
# Header words that change: two flags, then the counters and buffers of `live_kernels.put_double`.
SUPERSEDED_AT, STOPPED_AT = 16, 24
STATE_BEGUN, STATE_FIRST, STATE_SIZE = 32, 40, 4  # version, step, watermark, heartbeat
DENSE_BEGUN = 56

MANIFEST = "CURRENT"
COMMIT_BITS = 40  # version = generation << 40 | commits: 30 years at 1,000 commits a second
Array = npt.NDArray[Any]

_FILE_NAME = re.compile(r"shard-(\d+)-of-(\d+)\.g(\d+)")
_PAGE_WORDS = 512  # int64 of a page


@dataclass(frozen=True)
class Section:
    """One hash table of a store: `capacity` slots in *each* shard, rows of `words` uint32 (tables: D + wide weight)."""

    name: str
    kind: Literal["rows", "entity"]
    capacity: int
    words: int


@dataclass(frozen=True)
class Layout:
    """What a store holds. `dense_size` and `pair_slots` count float32 of the whole store; `schema_hash` is a uint64."""

    sections: tuple[Section, ...]
    dense_size: int
    pair_slots: int
    num_shards: int
    schema_hash: int

    def __post_init__(self) -> None:
        """Refuse what no file can hold."""
        if self.num_shards < 1 or self.dense_size < 0 or self.pair_slots < 0:
            raise ValueError(f"{self}: wanted at least one shard, and no negative size")
        if len({section.name for section in self.sections}) < len(self.sections):
            raise ValueError(f"section names must differ, got {[section.name for section in self.sections]}")
        for section in self.sections:
            if not 1 <= section.capacity < 2**31 or section.words < 1:
                raise ValueError(f"{section}: wanted capacity in [1, 2^31) and at least one word")


@dataclass(frozen=True)
class Places:
    """Where a shard's parts start in its file; a function of the layout and the shard alone."""

    descriptors_S7: npt.NDArray[np.int64]
    pairs_off: int  # in float32
    pair_slots: int  # of this shard: pair i lies in shard i % num_shards at i // num_shards
    dense_off: int  # in int64
    dense_words: int  # int64 of one buffer; 0 in every shard but the first, which holds the dense weights
    num_bytes: int

    @classmethod
    def of(cls, layout: Layout, shard: int) -> Self:
        """Lay the parts out one after the other, each from a page's start."""
        at = HEADER_BYTES // 8
        descriptors_S7 = np.zeros((len(layout.sections), 7), np.int64)
        for s, section in enumerate(layout.sections):
            tags, window, stride = at, min(WINDOW, section.capacity), _stride(section)
            at += _tag_words(section)
            descriptors_S7[s] = section.capacity, window, 8 * tags, 2 * at, stride, ROW + section.words, section.words
            at += _record_words(section)
        descriptors_S7.setflags(write=False)
        pairs, pair_slots = at, (layout.pair_slots - shard + layout.num_shards - 1) // layout.num_shards
        dense = _page_up(pairs + (pair_slots + 1) // 2)
        dense_words = (layout.dense_size + 1) // 2 if shard == 0 else 0
        num_bytes = 8 * _page_up(dense + 2 * dense_words)
        return cls(descriptors_S7, 2 * pairs, pair_slots, dense, dense_words, num_bytes)


def section_bytes(section: Section) -> int:
    """What a section takes of each shard's file: tags and records, each to the end of a page."""
    return 8 * (_tag_words(section) + _record_words(section))


def _stride(section: Section) -> int:
    stride = ROW + section.words + META_WORDS
    return stride + stride % 2  # keys are int64


def _tag_words(section: Section) -> int:
    return _page_up((section.capacity + LANES) // 8 + 1)


def _record_words(section: Section) -> int:
    return _page_up(section.capacity * _stride(section) // 2)


def _page_up(words: int) -> int:
    return -(-words // _PAGE_WORDS) * _PAGE_WORDS


@dataclass(frozen=True)
class Manifest:
    """What `CURRENT` says: the newest generation, its layout and each shard's file (None: not published yet)."""

    generation: int
    layout: Layout
    files: tuple[str | None, ...]

    def write(self, directory: Path) -> None:
        """Replace the directory's manifest in one step: a reader sees the old one or this one."""
        content = {"format": FORMAT, **asdict(self)}
        temporary = directory / f"{MANIFEST}.tmp"
        temporary.write_text(json.dumps(content, indent=1) + "\n", encoding="utf-8")
        temporary.replace(directory / MANIFEST)

    @classmethod
    def read(cls, directory: Path) -> Self:
        """Raises StoreUnavailable if there is none, or none that this code understands."""
        path = directory / MANIFEST
        try:
            text = path.read_text(encoding="utf-8")
        except (FileNotFoundError, NotADirectoryError):
            raise StoreUnavailable(f"no live store in {directory}: start the trainer, or point to its store") from None
        except (OSError, UnicodeDecodeError) as error:
            raise _corrupt(path, error) from error
        try:
            content = json.loads(text)
            if content["format"] != FORMAT:
                raise StoreUnavailable(
                    f"{path} has format {content['format']}, this version reads {FORMAT}: "
                    "run trainer and service from one version"
                )
            return cls(int(content["generation"]), _layout(content["layout"]), _files(content))
        except (ValueError, KeyError, TypeError) as error:
            raise _corrupt(path, error) from error


def _layout(content: dict[str, Any]) -> Layout:
    sections = tuple(Section(**section) for section in content["sections"])
    return Layout(**{**content, "sections": sections})


def _files(content: dict[str, Any]) -> tuple[str | None, ...]:
    files = tuple(content["files"])
    if len(files) != content["layout"]["num_shards"]:
        raise ValueError(f"{len(files)} files for {content['layout']['num_shards']} shards")
    for name in files:
        if name is not None and not _FILE_NAME.fullmatch(name):
            raise ValueError(f"{name!r} is not a shard's file")
    return files


def _corrupt(path: Path, error: Exception) -> StoreUnavailable:
    why = f"{type(error).__name__}: {error}"
    return StoreUnavailable(f"{path} is not a manifest of a live store ({why}): restart the trainer to write a new one")


def file_name(shard: int, num_shards: int, generation: int) -> str:
    """Name of one shard's file in one generation."""
    return f"shard-{shard}-of-{num_shards}.g{generation}"


def generation_of(name: str) -> int:
    """Generation of a shard's file; 0 if it is another file."""
    match = _FILE_NAME.fullmatch(name)
    return int(match[3]) if match else 0


def replaced_by(name: str, new: str) -> bool:
    """Whether the shard file `name` has no use once `new` is current: same shard, or another number of shards."""
    old_match, new_match = _FILE_NAME.fullmatch(name), _FILE_NAME.fullmatch(new)
    if not old_match or not new_match or name == new:
        return False
    return old_match[1] == new_match[1] or old_match[2] != new_match[2]


def check_header(path: Path, header: npt.NDArray[np.int64], layout: Layout, shard: int) -> None:
    """Refuse a file that is not the one its manifest speaks of. Raises StoreUnavailable."""
    wanted = {
        "magic": (MAGIC_AT, MAGIC),
        "format": (FORMAT_AT, FORMAT),
        "schema hash": (SCHEMA_AT, signed(layout.schema_hash)),
        "generation": (GENERATION_AT, generation_of(path.name)),
        "shard": (SHARD_AT, shard),
        "number of shards": (SHARDS_AT, layout.num_shards),
        "window": (WINDOW_AT, WINDOW),
        "size": (BYTES_AT, Places.of(layout, shard).num_bytes),
    }
    for what, (at, value) in wanted.items():
        if int(header[at]) != value:
            raise StoreUnavailable(f"{path}: {what} is {header[at]}, wanted {value}: restart the trainer")


def check_schema(directory: Path, layout: Layout, schema_hash: int | None) -> None:
    """Raises SchemaMismatch if the store was written under another schema than `schema_hash` (None: any will do)."""
    if schema_hash is not None and layout.schema_hash != schema_hash:
        raise SchemaMismatch(
            f"the store in {directory} was written under schema {layout.schema_hash:016x}, this process was configured "
            f"with {schema_hash:016x}: start trainer and service with the same configuration"
        )


def signed(value: int) -> int:
    """A uint64 as the int64 with the same bits."""
    return value - 2**64 if value >= 2**63 else value


def check_array(name: str, array: Array, dtype: type, shape: tuple[int, ...]) -> None:
    """Kernels read the bytes as they are: another type or layout would be another value."""
    if array.dtype != dtype or array.shape != shape or not array.flags.c_contiguous:
        wanted = f"C-contiguous {np.dtype(dtype)} {shape}"
        raise ValueError(f"{name}: got {array.dtype} {array.shape}, wanted {wanted}")


def views(memory: memoryview) -> tuple[npt.NDArray[np.uint32], npt.NDArray[np.int64], npt.NDArray[np.float32]]:
    """The same bytes as uint32, int64 and float32; read-only if the mapping is."""
    return np.frombuffer(memory, np.uint32), np.frombuffer(memory, np.int64), np.frombuffer(memory, np.float32)
