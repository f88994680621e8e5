"""The embedding tables: rows, wide weights and optimizer state by slot, behind the id index.

All tables lie in flat arrays (the layout of fbgemm's fused tables, so that its engine can work on this memory):
global slot g = slot_base_T[t] + local slot, its row starts at weight_base_T[t] + local slot * width_T[t].
Memory is allocated at construction and never grows; a full window evicts its least recently used id.

Legend: G all slots, T tables, B rows of a batch, C id columns, K slots touched, E ids evicted, N ids, D row width.
"""

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, NamedTuple, Protocol

import numpy as np
import numpy.typing as npt

from trainer import index
from trainer.hashing import hash_values
from trainer.index import Int64s, UInt8s
from trainer.kernel import kernel
from trainer.probe import EMPTY, REMOVED, mix64
from trainer.schema import Schema
from trainer.settings import ModelSettings, Settings

Float32s = npt.NDArray[np.float32]

GOLDEN = np.uint64(0x9E3779B97F4A7C15)
SIXTEEN = np.uint64(0xFFFF)
SLOT_ARRAYS = ("stamps", "seen_s", "counts", "accumulators", "wide_z", "wide_n")
# Standard deviation of the sum of four uniform integers 0..65535.
SUM_STD = math.sqrt(4 * (65536**2 - 1) / 12)


class HasIds(Protocol):
    """The part of a batch's features that the tables look at."""

    @property
    def ids_BC(self) -> Int64s:
        """Ids, EMPTY where a list has no more."""


class Assignment(NamedTuple):
    """Where the ids of one batch lie, and what that changed. Slots are global."""

    slots_BC: Int64s  # -1: padding, a masked row, or an id for which there was no room
    touched_K: Int64s  # each slot once, in order of first touch
    touched_table_K: Int64s
    fresh_K: UInt8s  # 1: the slot's row and optimizer state started anew in this batch
    evicted_ids_E: Int64s  # in order of eviction; an id evicted and seen again later in the batch is placed anew
    evicted_tables_E: Int64s
    evicted_slots_E: Int64s
    num_unplaced: int
    num_new: int


@dataclass(frozen=True)
class TableRow:
    """One id's state, copied out for inspection."""

    row_D: Float32s
    accumulator: float
    wide_z: float
    wide_n: float
    seen_s: int
    count: int


class _Scratch:
    """Room for what one call of the assign kernel reports, kept between calls."""

    def __init__(self, room: int) -> None:
        self.room = room
        self.touched_K = np.empty(room, np.int64)
        self.touched_table_K = np.empty(room, np.int64)
        self.fresh_K = np.empty(room, np.uint8)
        self.evicted_3E = np.empty((3, room), np.int64)
        self.totals_4 = np.empty(4, np.int64)


@kernel
def reset_rows(  # noqa: PLR0917 -- kernels take arrays one by one: numba unpacks no objects
    touched_K: Int64s,
    touched_table_K: Int64s,
    fresh_K: UInt8s,
    keys_G: Int64s,
    tables_T3: Int64s,
    salt_T: Int64s,
    init_T2: Float32s,
    weights: Float32s,
    moments: Float32s,
    accumulators_G: Float32s,
    wide_z_G: Float32s,
    wide_n_G: Float32s,
) -> None:
    """Start the state of the fresh slots anew, as a function of (seed, table, id) alone.

    Element k of a row is N(0, init_std) as the sum of the four 16-bit fields of mix64(id state + (k + 1) * golden
    ratio), centred and scaled (Irwin-Hall: cut off at 3.46 standard deviations): integers up to the last
    multiplication, so that every machine and every replay makes the same bits. `tables_T3`: slot base, weight base,
    width; `init_T2`: scale of that sum, initial accumulator.
    """
    for i in range(touched_K.shape[0]):
        if fresh_K[i] == 0:
            continue
        slot = touched_K[i]
        t = touched_table_K[i]
        width = tables_T3[t, 2]
        start = tables_T3[t, 1] + (slot - tables_T3[t, 0]) * width
        row = weights[start : start + width]
        state = mix64(keys_G[slot] ^ salt_T[t])
        scale = init_T2[t, 0]
        for k in range(width):
            bits = mix64(int(state + np.uint64(k + 1) * GOLDEN))
            low = (bits & SIXTEEN) + ((bits >> np.uint64(16)) & SIXTEEN)
            high = ((bits >> np.uint64(32)) & SIXTEEN) + (bits >> np.uint64(48))
            row[k] = scale * np.float32(np.int64(low + high) - 131070)
        if moments.shape[0] > 0:
            moments[start : start + width] = 0
        accumulators_G[slot] = init_T2[t, 1]
        wide_z_G[slot] = np.float32(0)
        wide_n_G[slot] = np.float32(0)


class Tables:
    """Rows and optimizer state of all tables of a schema.

    >>> from trainer.settings import Settings
    >>> settings = Settings.model_validate({"tables": {"user": {}}, "features": {"user": {"kind": "categorical"}}})
    >>> tables = Tables(Schema.from_settings(settings), settings.model)
    >>> tables.find(0, np.array([7])).tolist()  # asking creates nothing
    [-1]
    """

    weights: Float32s
    accumulators: Float32s

    def __init__(self, schema: Schema, model: ModelSettings) -> None:
        self.schema = schema
        capacities = [table.capacity for table in schema.tables]
        widths = [table.width for table in schema.tables]
        self.capacity_T = np.array(capacities, np.int64)
        self.width_T = np.array(widths, np.int64)
        self.slot_base_T = _starts(self.capacity_T)
        self.weight_base_T = _starts(self.capacity_T * self.width_T)
        self.ttl_s_T = np.array([math.ceil(table.ttl_s or 0) for table in schema.tables], np.int64)
        self.num_rows_T = np.zeros(len(capacities), np.int64)
        num_slots = sum(capacities)
        self.keys = np.full(num_slots, EMPTY, np.int64)
        self.stamps = np.zeros(num_slots, np.int64)
        self.seen_s = np.zeros(num_slots, np.uint32)
        self.counts = np.zeros(num_slots, np.uint32)
        self.weights = np.zeros(sum(c * d for c, d in zip(capacities, widths, strict=True)), np.float32)
        needs_moments = any(table.spec.optimizer.kind == "adam" for table in schema.tables)
        self.moments = np.zeros(len(self.weights) if needs_moments else 0, np.float32)  # Adam's first ones
        self.accumulators = np.zeros(num_slots, np.float32)
        self.wide_z = np.zeros(num_slots, np.float32)
        self.wide_n = np.zeros(num_slots, np.float32)
        self.clock = 1  # stamp of the next row; never-touched slots hold 0
        self.sweep_position = 0  # where the next call of `expire` goes on
        self._scratch = _Scratch(0)
        self._index_T3 = np.stack([self.slot_base_T, self.capacity_T, self.ttl_s_T], axis=1)
        self._layout_T3 = np.stack([self.slot_base_T, self.weight_base_T, self.width_T], axis=1)
        self._init_T2 = np.array([(t.init_std / SUM_STD, t.initial_accumulator) for t in schema.tables], np.float32)
        # By name, so that a table added before this one does not change what its ids start from.
        self._salt_T = hash_values([f"{model.seed}/{table.name}" for table in schema.tables])

    @property
    def num_bytes(self) -> int:
        """Bytes of all arrays, fixed at construction."""
        state = (self.accumulators, self.wide_z, self.wide_n, self.weights, self.moments)
        return sum(array.nbytes for array in (self.keys, self.stamps, self.seen_s, self.counts, *state))

    def assign(self, features: HasIds, examples_B: npt.NDArray[np.bool_] | None, now_s: int) -> Assignment:
        """Give every id of a batch a slot, making room where needed; rows that are not examples are skipped.

        Cost at a million slots of 16 floats: 60 ns an id held, 130 a new one, 280 one that evicts.
        """
        ids_BC = features.ids_BC
        B, C = ids_BC.shape
        rows_B = np.ones(B, np.uint8) if examples_B is None else examples_B.view(np.uint8)
        slots_BC = np.empty((B, C), np.int64)
        if self._scratch.room < B * C:
            self._scratch = _Scratch(B * C)
        scratch = self._scratch
        index.assign_batch(
            ids_BC, rows_B, self.schema.column_table_C, self._index_T3, self.num_rows_T, self.keys, self.stamps,
            self.seen_s, self.counts, self.clock, now_s, slots_BC, scratch.touched_K, scratch.touched_table_K,
            scratch.fresh_K, scratch.evicted_3E, scratch.totals_4,
        )  # fmt: skip
        self.clock += B
        num_touched, num_evicted, num_unplaced, num_new = scratch.totals_4.tolist()
        evicted_ids_E, evicted_tables_E, evicted_slots_E = scratch.evicted_3E[:, :num_evicted].copy()
        assignment = Assignment(
            slots_BC=slots_BC,
            touched_K=scratch.touched_K[:num_touched].copy(),
            touched_table_K=scratch.touched_table_K[:num_touched].copy(),
            fresh_K=scratch.fresh_K[:num_touched].copy(),
            evicted_ids_E=evicted_ids_E,
            evicted_tables_E=evicted_tables_E,
            evicted_slots_E=evicted_slots_E,
            num_unplaced=num_unplaced,
            num_new=num_new,
        )
        if num_new:
            self._reset(assignment)
        return assignment

    def find(self, table: int, ids_N: Int64s) -> Int64s:
        """Global slots of ids, -1 where unknown; changes nothing."""
        slots_N = np.empty(len(ids_N), np.int64)
        index.find_ids(self.keys, self.slot_base_T[table], self.capacity_T[table], ids_N, slots_N)
        return slots_N

    def remove(self, table: int, ids_N: Int64s) -> Int64s:
        """Forget ids; the global slots freed, to be given to the publisher."""
        removed_N = np.empty(len(ids_N), np.int64)
        count = index.remove_ids(self.keys, self.slot_base_T[table], self.capacity_T[table], ids_N, removed_N)
        self.num_rows_T[table] -= count
        return removed_N[:count]

    def expire(self, now_s: int, max_slots: int) -> Int64s:
        """Look at the next `max_slots` slots of the tables with a TTL and free those that have expired.

        Returns the global slots freed, to be given to the publisher. Small steps bound the pause; an expired id that
        comes back before its turn starts anew all the same.
        """
        with_ttl = np.flatnonzero(self.ttl_s_T)
        total = int(self.capacity_T[with_ttl].sum())
        removed_N = np.empty(min(max_slots, total), np.int64)
        left, count = len(removed_N), 0
        while left > 0:
            t, first = self._sweep_from(with_ttl)
            step = min(left, int(self.capacity_T[t]) - first)
            base = int(self.slot_base_T[t]) + first
            num_expired = index.expire_range(
                self.keys, self.seen_s, base, base + step, now_s, int(self.ttl_s_T[t]), removed_N[count:]
            )
            self.num_rows_T[t] -= num_expired
            count += int(num_expired)
            self.sweep_position = (self.sweep_position + step) % total
            left -= step
        return removed_N[:count]

    @property
    def slot_arrays(self) -> dict[str, npt.NDArray[Any]]:
        """What is kept of each slot beside its key and row, by name, [G]; empty where the settings need it not."""
        return {name: getattr(self, name) for name in SLOT_ARRAYS}

    def row_arrays(self, table: int) -> dict[str, Float32s]:
        """What is kept of each float of a table's rows, by name, [capacity, D]: views."""
        arrays = {"rows": self.rows(table)}
        return arrays | ({"moments": self._by_row(self.moments, table)} if len(self.moments) else {})

    @property
    def scalars(self) -> dict[str, int]:
        """The numbers that, with all arrays, are the whole state; `load_scalars` puts them back."""
        return {"clock": self.clock, "sweep_position": self.sweep_position}

    def load_scalars(self, saved: Mapping[str, int]) -> None:
        """Continue where `scalars` was taken."""
        self.clock, self.sweep_position = saved["clock"], saved["sweep_position"]

    def num_rows(self, table: int) -> int:
        """Number of ids that a table holds."""
        return int(self.num_rows_T[table])

    def occupied(self, table: int) -> Int64s:
        """Local slots that hold an id, ascending."""
        base = self.slot_base_T[table]
        keys = self.keys[base : base + self.capacity_T[table]]
        return np.flatnonzero((keys != EMPTY) & (keys != REMOVED))

    def row_of(self, table: int, key: int) -> TableRow | None:
        """State of one id, or None where it is unknown."""
        slot = int(self.find(table, np.array([key], np.int64))[0])
        if slot < 0:
            return None
        return TableRow(
            row_D=self.rows(table)[slot - self.slot_base_T[table]].copy(),
            accumulator=float(self.accumulators[slot]),
            wide_z=float(self.wide_z[slot]),
            wide_n=float(self.wide_n[slot]),
            seen_s=int(self.seen_s[slot]),
            count=int(self.counts[slot]),
        )

    def rows(self, table: int) -> Float32s:
        """The rows of a table by local slot, [capacity, D]: a view."""
        return self._by_row(self.weights, table)

    def _by_row(self, flat: Float32s, table: int) -> Float32s:
        start, width, capacity = (int(a[table]) for a in (self.weight_base_T, self.width_T, self.capacity_T))
        return flat[start : start + capacity * width].reshape(capacity, width)

    def _sweep_from(self, with_ttl: Int64s) -> tuple[int, int]:
        """Table and local slot at which the sweep stands."""
        ends = np.cumsum(self.capacity_T[with_ttl])
        turn = int(np.searchsorted(ends, self.sweep_position, side="right"))
        t = int(with_ttl[turn])
        return t, self.sweep_position - int(ends[turn] - self.capacity_T[t])

    def _reset(self, assignment: Assignment) -> None:
        reset_rows(
            assignment.touched_K, assignment.touched_table_K, assignment.fresh_K, self.keys, self._layout_T3,
            self._salt_T, self._init_T2, self.weights, self.moments, self.accumulators, self.wide_z, self.wide_n,
        )  # fmt: skip


def _starts(sizes_T: Int64s) -> Int64s:
    """Exclusive running sum: where each table starts."""
    starts_T = np.zeros(len(sizes_T), np.int64)
    np.cumsum(sizes_T[:-1], out=starts_T[1:])
    return starts_T


@dataclass(frozen=True)
class Ids:
    """Id columns alone, where there are no other features."""

    ids_BC: Int64s


def warm() -> None:
    """Compile the kernels."""
    settings = Settings.model_validate(
        {"tables": {"a": {"capacity": 64, "ttl_s": 1}}, "features": {"a": {"kind": "categorical"}}}
    )
    tables = Tables(Schema.from_settings(settings), settings.model)
    tables.assign(Ids(np.zeros((1, 1), np.int64)), None, 0)
    tables.expire(9, 64)
    tables.remove(0, tables.find(0, np.zeros(1, np.int64)))
