"""The writer of a live store's shard: makes a generation, publishes into it, and is alone."""

import contextlib
import fcntl
import os
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from types import TracebackType
from typing import Self

import numpy as np

from trainer import live_kernels as kernels
from trainer import live_layout as at
from trainer.errors import StoreUnavailable
from trainer.live_layout import Array, Layout, Manifest, Places, check_array, views
from trainer.live_memory import map_file
from trainer.probe import WINDOW, home_slot


class Writer:
    """The one writer of one shard: makes a new generation, fills it, `activate`s it, then publishes into it.

    A section's slots are the trainer's own (table-local), so that nothing is probed here. Its methods belong to one
    thread, except `heartbeat`, which may come from another.
    """

    def __init__(self, directory: Path, layout: Layout, *, shard: int, lock: int, generation: int) -> None:
        """Use `Writer.create`."""
        self.layout, self.shard, self.generation = layout, shard, generation
        self._directory, self._lock = directory, lock
        self._places = Places.of(layout, shard)
        self._path = directory / at.file_name(shard, layout.num_shards, generation)
        memory = _make_file(self._path, self._places.num_bytes)
        self._u32, self._i64, self._f32 = views(memory)
        self._sections = {section.name: self._places.descriptors_S7[s] for s, section in enumerate(layout.sections)}
        self._state = np.array([generation << at.COMMIT_BITS, 0, 0, 0], np.int64)  # version, step, watermark, heartbeat
        self._state_lock = threading.Lock()
        self._dense = np.zeros(2 * self._places.dense_words, np.float32)  # padded to whole int64
        self._fill_header()

    @classmethod
    def create(cls, directory: Path | str, layout: Layout, *, shard: int = 0, after_version: int = 0) -> Self:
        """A new generation, empty and not yet visible, above `after_version` and every one of this shard so far.

        Raises StoreUnavailable if a live process writes this shard, or if the directory has no room for the file.
        """
        if not 0 <= shard < layout.num_shards:
            raise ValueError(f"shard: got {shard}, wanted 0 to {layout.num_shards - 1}")
        directory = Path(directory)
        directory.mkdir(parents=True, exist_ok=True)
        lock = _lock(directory / f"shard-{shard}.lock")
        try:
            newest = _newest_generation(directory, shard, layout.num_shards)
            generation = 1 + max(newest, after_version >> at.COMMIT_BITS)
            return cls(directory, layout, shard=shard, lock=lock, generation=generation)
        except BaseException:
            os.close(lock)
            raise

    def succeed(self, layout: Layout) -> "Writer":
        """The next generation, empty and not yet visible; this writer's own stays readable and is written no more.

        Raises StoreUnavailable if there is no room beside the old one, which then goes on being written.
        """
        generation = 1 + max(_newest_generation(self._directory, self.shard, layout.num_shards), self.generation)
        successor = type(self)(self._directory, layout, shard=self.shard, lock=self._lock, generation=generation)
        self._lock = -1
        return successor

    def _fill_header(self) -> None:
        header = {
            at.MAGIC_AT: at.MAGIC,
            at.FORMAT_AT: at.FORMAT,
            at.SCHEMA_AT: at.signed(self.layout.schema_hash),
            at.GENERATION_AT: self.generation,
            at.SHARD_AT: self.shard,
            at.SHARDS_AT: self.layout.num_shards,
            at.BYTES_AT: self._places.num_bytes,
            at.WINDOW_AT: WINDOW,
            at.PID_AT: os.getpid(),
            at.CREATED_US_AT: _now_us(),
        }
        for word, value in header.items():
            self._i64[word] = value
        self.heartbeat(_now_us(), None)

    @property
    def version(self) -> int:
        """The version last committed; `generation << 40` before the first commit."""
        return int(self._state[0])

    def put(  # noqa: PLR0917 -- one argument a column
        self, section: str, slots_N: Array, keys_N: Array, words_NW: Array, seen_s_N: Array, counts_N: Array
    ) -> None:
        """Write whole records at known slots: int64 slots and ids, uint32 words, last seen (s) and counts.

        Raises ValueError, having written nothing, for a slot outside the id's window, where no reader would look.
        """
        descriptor_7 = self._sections[section]
        num, words = len(slots_N), int(descriptor_7[kernels.WORDS])
        check_array("slots_N", slots_N, np.int64, (num,))
        check_array("keys_N", keys_N, np.int64, (num,))
        check_array("words_NW", words_NW, np.uint32, (num, words))
        check_array("seen_s_N", seen_s_N, np.uint32, (num,))
        check_array("counts_N", counts_N, np.uint32, (num,))
        bad = kernels.first_misplaced(descriptor_7, slots_N, keys_N)
        if bad >= 0:
            raise ValueError(f"{section}: slot {slots_N[bad]} is not in the window of id {keys_N[bad]}")
        kernels.put_records(self._u32, descriptor_7, slots_N, keys_N, words_NW, seen_s_N, counts_N)

    def remove(self, section: str, slots_N: Array) -> None:
        """Free int64 slots: whatever ids were there are unknown from now on."""
        check_array("slots_N", slots_N, np.int64, (len(slots_N),))
        if not kernels.remove_records(self._u32, self._sections[section], slots_N):
            raise ValueError(f"{section}: a slot is outside 0 to {self._sections[section][kernels.CAPACITY] - 1}")

    def remove_id(self, section: str, id_: int) -> bool:
        """Make one id unknown, wherever it lies; whether it was there."""
        descriptor_7 = self._sections[section]
        capacity, stride, first = (int(descriptor_7[k]) for k in (kernels.CAPACITY, kernels.STRIDE, kernels.RECORDS))
        slots_W = (int(home_slot(id_, capacity)) + np.arange(descriptor_7[kernels.WINDOW_SLOTS])) % capacity
        keys_W = self._i64[first // 2 + slots_W * (stride // 2)]
        self.remove(section, slots_W[keys_W == id_])
        return bool((keys_W == id_).any())

    def put_pairs(self, index_N: Array, values_N: Array) -> None:
        """Write float32 pair weights at int64 indexes of the whole store; shard k owns index % num_shards = k."""
        check_array("index_N", index_N, np.int64, (len(index_N),))
        check_array("values_N", values_N, np.float32, (len(index_N),))
        shape = (self._places.pairs_off, self.shard, self.layout.num_shards, self.layout.pair_slots)
        if not kernels.put_pairs(self._f32, *shape, index_N, values_N):
            raise ValueError(f"a pair index is not one of shard {self.shard}'s below {self.layout.pair_slots}")

    def put_dense(self, params_P: Array) -> None:
        """Replace the dense weights (float32) as one: readers get all of these or all of those before. Shard 0 only."""
        if self.shard != 0:
            raise ValueError(f"dense weights live in shard 0, this is the writer of shard {self.shard}")
        check_array("params_P", params_P, np.float32, (self.layout.dense_size,))
        self._dense[: self.layout.dense_size] = params_P
        kernels.put_double(self._i64, at.DENSE_BEGUN, self._places.dense_off, self._dense.view(np.int64))

    def commit(self, *, step: int, watermark_us: int) -> int:
        """Make everything put since the last commit one version: the last act of a publish. Returns the version."""
        with self._state_lock:
            self._state[:] = self._state[0] + 1, step, watermark_us, _now_us()
            self._publish_state()
            return int(self._state[0])

    def heartbeat(self, now_us: int, watermark_us: int | None) -> None:
        """Say that the writer lives; with a watermark, that events up to it left nothing to publish."""
        with self._state_lock:
            self._state[3] = now_us
            if watermark_us is not None:
                self._state[2] = watermark_us
            self._publish_state()

    def _publish_state(self) -> None:
        kernels.put_double(self._i64, at.STATE_BEGUN, at.STATE_FIRST, self._state)

    def activate(self) -> None:
        """Make this generation the one that readers attach to, complete as it is now.

        1. the manifest names the new file   2. readers of the files it replaces are told   3. those files are unlinked
        (who has them mapped keeps them). A death after 1 costs readers up to CHECK_S until they notice by themselves.
        """
        with _locked(self._directory / f"{at.MANIFEST}.lock"):
            files = self._files_of_others()
            files[self.shard] = self._path.name
            generation = max(at.generation_of(name) for name in files if name)
            Manifest(generation, self.layout, tuple(files)).write(self._directory)  # 1
        for path in self._directory.iterdir():
            if at.replaced_by(path.name, self._path.name):
                with contextlib.suppress(FileNotFoundError):  # another shard's writer was faster
                    _mark_superseded(path)  # 2
                    path.unlink()  # 3

    def _files_of_others(self) -> list[str | None]:
        """Files of the other shards, where they have this generation's layout."""
        with contextlib.suppress(StoreUnavailable):
            manifest = Manifest.read(self._directory)
            if manifest.layout == self.layout:
                return list(manifest.files)
        return [None] * self.layout.num_shards

    def close(self) -> None:
        """Say that the writer stopped in good order, and let another one in. Readers go on."""
        if self._lock >= 0:
            self._i64[at.STOPPED_AT] = 1
            os.close(self._lock)
            self._lock = -1

    def __enter__(self) -> Self:
        """Close it at the end of a `with` block."""
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        """Close it, whatever happened."""
        self.close()


def _now_us() -> int:
    return time.time_ns() // 1000


def _make_file(path: Path, num_bytes: int) -> memoryview:
    """A new file of zeros, its space reserved: running out of memory later would kill the process (SIGBUS)."""
    room = os.statvfs(path.parent)
    free_bytes = room.f_bavail * room.f_frsize
    if free_bytes < num_bytes:
        raise _no_room(path, num_bytes, free_bytes)
    descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_EXCL, 0o600)
    try:
        os.posix_fallocate(descriptor, 0, num_bytes)
        return map_file(descriptor, num_bytes, writable=True)
    except OSError as error:
        path.unlink()
        raise _no_room(path, num_bytes, free_bytes) from error
    finally:
        os.close(descriptor)


def _no_room(path: Path, num_bytes: int, free_bytes: int) -> StoreUnavailable:
    return StoreUnavailable(
        f"no room for the live store in {path.parent}: wanted {num_bytes >> 20} MiB, {free_bytes >> 20} MiB are free: "
        "lower the tables' capacity, or keep the store elsewhere"
    )


def _lock(path: Path) -> int:
    """Take a lock that ends with this process; its file descriptor. Raises StoreUnavailable if another has it."""
    descriptor = os.open(path, os.O_RDWR | os.O_CREAT, 0o600)
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        owner = os.pread(descriptor, 32, 0).decode().strip() or "unknown"
        os.close(descriptor)
        raise StoreUnavailable(
            f"{path.parent} is being written by process {owner}: stop that trainer, or use another directory"
        ) from None
    os.ftruncate(descriptor, 0)
    os.pwrite(descriptor, f"{os.getpid()}\n".encode(), 0)
    return descriptor


@contextlib.contextmanager
def _locked(path: Path) -> Iterator[None]:
    """Wait for a lock that writers of other shards hold for microseconds."""
    descriptor = os.open(path, os.O_RDWR | os.O_CREAT, 0o600)
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX)
        yield
    finally:
        os.close(descriptor)


def _newest_generation(directory: Path, shard: int, num_shards: int) -> int:
    """Newest generation among the files that a new one of this shard will replace; each shard counts for itself."""
    names: list[str | None] = [path.name for path in directory.iterdir()]
    with contextlib.suppress(StoreUnavailable):
        names += Manifest.read(directory).files
    new = at.file_name(shard, num_shards, 0)
    return max((at.generation_of(name) for name in names if name and at.replaced_by(name, new)), default=0)


def _mark_superseded(path: Path) -> None:
    """Set the flag that readers of a replaced file poll; a file too short for it has no readers."""
    with path.open("r+b") as file:
        if path.stat().st_size >= at.HEADER_BYTES:
            os.pwrite(file.fileno(), (1).to_bytes(8, "little"), 8 * at.SUPERSEDED_AT)
