"""The reader of a live store: read-only and lock-free, in any process, from generation to generation."""

import contextlib
import os
import time
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from trainer import live_kernels as kernels
from trainer import live_layout as at
from trainer.errors import SchemaMismatch, StoreUnavailable
from trainer.live_kernels import LEARNED
from trainer.live_layout import Array, Layout, Manifest, Places, check_array, views
from trainer.live_memory import map_file
from trainer.probe import shard_of

CHECK_S = 1.0  # between looks at the manifest: how long a reader may follow a store whose directory was removed
_POLL_S = 0.01  # between attempts to attach


class StoreState(NamedTuple):
    """Where a store stands; times in microseconds since 1970. Of several shards, what all of them have reached."""

    version: int
    generation: int
    step: int
    watermark_us: int
    heartbeat_us: int
    writer_pid: int
    stopped: bool


@dataclass(frozen=True)
class ShardView:
    """One shard's file, mapped read-only: three views of the same bytes, and where its parts start in them."""

    u32: npt.NDArray[np.uint32]
    i64: npt.NDArray[np.int64]
    f32: npt.NDArray[np.float32]
    descriptors_S7: npt.NDArray[np.int64]
    pairs_off: int
    pair_slots: int
    places: Places
    identity: tuple[int, int]  # device and inode of the file


class _Attached:
    """One generation as a reader has it mapped; replaced as a whole."""

    def __init__(self, layout: Layout, views: list[ShardView]) -> None:
        self.layout, self.views = layout, views
        first = views[0]
        self.sections = {section.name: first.descriptors_S7[s] for s, section in enumerate(layout.sections)}
        kinds = [section.kind for section in layout.sections]
        self.rows_T7 = first.descriptors_S7[[s for s, kind in enumerate(kinds) if kind == "rows"]]
        self.rows_T7.setflags(write=False)  # as all descriptors are: numba would compile for others apart
        self.bases_S = np.array([view.u32.ctypes.data for view in views], np.int64)
        self.superseded = [view.i64[at.SUPERSEDED_AT : at.SUPERSEDED_AT + 1] for view in views]
        self.writer_pid = int(first.i64[at.PID_AT])
        self.lift = 0  # added to the generation, see Reader._adopt
        self.dense: tuple[npt.NDArray[np.float32], int] = (np.zeros(layout.dense_size, np.float32), 0)
        self.dense[0].setflags(write=False)

    def state(self) -> StoreState:
        state, stopped = _read_state(self.views[0])
        for view in self.views[1:]:
            other, other_stopped = _read_state(view)
            state, stopped = np.minimum(state, other), stopped or other_stopped
        version, step, watermark_us, heartbeat_us = state.tolist()
        version += self.lift << at.COMMIT_BITS
        generation = version >> at.COMMIT_BITS
        return StoreState(version, generation, step, watermark_us, heartbeat_us, self.writer_pid, stopped)


def _read_state(view: ShardView) -> tuple[npt.NDArray[np.int64], bool]:
    state = np.empty(at.STATE_SIZE, np.int64)
    kernels.read_double(view.i64, at.STATE_BEGUN, at.STATE_FIRST, state)
    return state, bool(view.i64[at.STOPPED_AT])


class Reader:
    """Reads a live store from any process, without locks, and never writes to it.

    Call `refresh` once before each answer: it moves the reader to the writer's next generation and costs one load.
    While the writer is dead, or its directory gone, the last generation stays readable.
    """

    def __init__(self, directory: Path | str, *, schema_hash: int | None = None) -> None:
        """`schema_hash`: the schema the store must have been written under; None takes any."""
        self._directory = Path(directory)
        self._schema_hash = schema_hash
        self._attached: _Attached | None = None
        self._seen: tuple[int, int, int] | None = None  # the manifest last looked at
        self._refusal: SchemaMismatch | None = None  # why that manifest was not adopted
        self._next_check_s = 0.0

    def attach(self, deadline_s: float) -> None:
        """Map the current generation, waiting up to `deadline_s` for one. Raises StoreUnavailable or SchemaMismatch."""
        give_up_s = time.monotonic() + deadline_s
        while True:
            try:
                self._adopt()
            except (StoreUnavailable, SchemaMismatch):
                if time.monotonic() >= give_up_s:
                    raise
                time.sleep(_POLL_S)
            else:
                return

    def refresh(self) -> None:
        """Move to a newer generation if there is one. Raises SchemaMismatch if it has another schema: restart.

        After either error the generation at hand stays attached and readable.
        """
        attached = self._now()
        now_s = time.monotonic()
        if now_s < self._next_check_s and not any(flag[0] for flag in attached.superseded):
            return
        self._next_check_s = now_s + CHECK_S
        seen = _signature(self._directory / at.MANIFEST)
        if seen is not None and seen != self._seen:
            with contextlib.suppress(StoreUnavailable):  # incomplete, or being replaced: stay with what we have
                self._adopt()
        if self._refusal:
            raise self._refusal

    def _adopt(self) -> None:
        """Attach to what the manifest names. Versions go on from where this reader was, whatever the store's say.

        (A store made anew with no memory of the old one starts at generation 1: its generations are lifted above.)
        """
        seen = _signature(self._directory / at.MANIFEST)
        manifest = Manifest.read(self._directory)
        try:
            at.check_schema(self._directory, manifest.layout, self._schema_hash)
        except SchemaMismatch as refusal:
            self._seen, self._refusal = seen, refusal
            raise
        old = self._attached
        attached = _Attached(manifest.layout, _map_files(self._directory, manifest, old))
        if old is not None:
            reached = old.state()
            for lift in (0, old.lift, reached.generation + 1 - attached.state().generation):
                attached.lift = lift
                if attached.state().version >= reached.version:
                    break
        self._attached, self._seen, self._refusal = attached, seen, None
        self._next_check_s = time.monotonic() + CHECK_S

    def _now(self) -> _Attached:
        if self._attached is None:
            raise StoreUnavailable(f"not attached to {self._directory}: call attach(deadline_s) first")
        return self._attached

    @property
    def layout(self) -> Layout:
        """Layout of the attached generation."""
        return self._now().layout

    @property
    def shards(self) -> list[ShardView]:
        """The attached generation's files, for kernels that read rows themselves (`read_record`); read-only arrays."""
        return self._now().views

    def state(self) -> StoreState:
        """Version, step and times, from one publish. Versions never go back for one reader, over generations too."""
        return self._now().state()

    def gather(self, section: str, ids_N: Array) -> tuple[npt.NDArray[np.uint32], npt.NDArray[np.uint8]]:
        """Rows of int64 ids: words (N, W) and status (N), LEARNED or UNKNOWN; the words of an unknown id are 0.

        About 2.5 us and 30 ns an id (tests/bench/store.py). Creates nothing, and waits only for a writer at work on the
        very row, at most a millisecond.
        """
        attached = self._now()
        descriptor_7 = attached.sections[section]
        num, words = len(ids_N), int(descriptor_7[kernels.WORDS])
        check_array("ids_N", ids_N, np.int64, (num,))
        rows, status_N = np.empty(num * words, np.uint32), np.empty(num, np.uint8)
        kernels.gather_records(attached.bases_S, descriptor_7, ids_N, rows, status_N)
        return rows.reshape(num, words), status_N

    def row_places(self) -> tuple[npt.NDArray[np.int64], npt.NDArray[np.int64]]:
        """For kernels that gather from several sections: addresses of the shards' memory, and the descriptors (T, 7) of
        the sections of rows, in order. Valid until the next `refresh`.
        """
        attached = self._now()
        return attached.bases_S, attached.rows_T7

    def dense(self) -> tuple[npt.NDArray[np.float32], int]:
        """The dense weights (P) of one publish, read-only, and its number (0: none yet); copied on change."""
        attached = self._now()
        view = attached.views[0]
        cached = attached.dense
        if int(view.i64[at.DENSE_BEGUN + 1]) == cached[1] & ((1 << at.COMMIT_BITS) - 1):
            return cached
        words = np.empty(view.places.dense_words, np.int64)
        number = kernels.read_double(view.i64, at.DENSE_BEGUN, view.places.dense_off, words)
        params_P = words.view(np.float32)[: attached.layout.dense_size]
        params_P.setflags(write=False)
        generation = int(view.i64[at.GENERATION_AT]) + attached.lift
        attached.dense = (params_P, generation << at.COMMIT_BITS | number)
        return attached.dense

    def peek(self, section: str, id_: int) -> tuple[int, int] | None:
        """When an id was last seen (s) and how often; None if it is unknown. Changes nothing."""
        attached = self._now()
        descriptor_7 = attached.sections[section]
        shard = int(shard_of(id_, len(attached.views)))
        view, meta = attached.views[shard], np.empty(kernels.META_WORDS, np.uint32)
        status = kernels.read_meta(view.u32, descriptor_7, id_, meta)
        return (int(meta[0]), int(meta[1])) if status == LEARNED else None


def _signature(path: Path) -> tuple[int, int, int] | None:
    """What changes whenever the manifest is replaced; None while there is none."""
    try:
        stat = path.stat()
    except OSError:
        return None
    return stat.st_dev, stat.st_ino, stat.st_mtime_ns


def _map_files(directory: Path, manifest: Manifest, old: _Attached | None) -> list[ShardView]:
    """Map every shard's file; those already mapped are taken over."""
    mapped = {view.identity: view for view in old.views} if old and old.layout == manifest.layout else {}
    shards = []
    for shard, name in enumerate(manifest.files):
        if name is None:
            raise StoreUnavailable(
                f"shard {shard} of {len(manifest.files)} in {directory} is missing: start its writer"
            )
        try:
            stat = (directory / name).stat()
            view = mapped.get((stat.st_dev, stat.st_ino))
            shards.append(view or _map_file(directory / name, manifest.layout, shard))
        except OSError as error:
            raise StoreUnavailable(f"{directory / name}: {error.strerror}: restart the trainer") from error
    return shards


def _map_file(path: Path, layout: Layout, shard: int) -> ShardView:
    places = Places.of(layout, shard)
    with path.open("rb") as file:
        stat = os.fstat(file.fileno())
        if stat.st_size != places.num_bytes:
            raise StoreUnavailable(f"{path} has {stat.st_size} bytes, wanted {places.num_bytes}: restart the trainer")
        memory = map_file(file.fileno(), stat.st_size, writable=False)
    u32, i64, f32 = views(memory)
    at.check_header(path, i64, layout, shard)
    identity = (stat.st_dev, stat.st_ino)
    return ShardView(u32, i64, f32, places.descriptors_S7, places.pairs_off, places.pair_slots, places, identity)
