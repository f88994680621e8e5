"""The embedding tables: rows, wide weights and optimizer state by slot, behind the id index.

All tables lie in flat arrays (the layout of fbgemm's fused tables, so that its engine can work on this memory):
global slot g = slot_base_T[t] + local slot, its row starts at weight_base_T[t] + local slot * width_T[t].
Memory is allocated at construction and never grows: `index.py` says which ids get a row, and which lose theirs.

Legend: G all slots, T tables, B rows of a batch, C id columns, K slots touched, E ids evicted, N ids, D row width.
"""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple, Protocol

import numpy as np
import numpy.typing as npt

from trainer import index, sketch
from trainer.hashing import hash_values
from trainer.index import Index, Int64s, Report, UInt8s
from trainer.kernel import kernel
from trainer.probe import EMPTY, REMOVED, WINDOW, mix64
from trainer.schema import Schema, Table
from trainer.settings import ModelSettings, Settings
from trainer.sketch import LINE, aligned

Float32s = npt.NDArray[np.float32]

GOLDEN = np.uint64(0x9E3779B97F4A7C15)
SIXTEEN = np.uint64(0xFFFF)
ADMISSION_KINDS = {"all": index.ALL, "probability": index.PROBABILITY, "count": index.COUNT}
# lfu spares slots used in the last capacity / 16 rows, at most 8192, the largest batch there is: fewer would leave a
# newcomer no time to come again, more would make a small table forget its counts.
GRACE_PART, MOST_GRACE = 16, 8192
FINITE_PART = 2**16  # floats looked at together
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
    evicted_reason_E: UInt8s  # index.PRESSURE or index.EXPIRED
    num_unplaced: int  # ids whose window was full of this batch
    num_new: int
    num_refused: int  # sightings of ids that were not admitted


@dataclass(frozen=True)
class TableRow:
    """One id's state, copied out for inspection."""

    row_D: Float32s
    moments_D: Float32s | None  # Adam's first ones
    accumulator: float
    wide_z: float  # 0 without a wide part, as wide_n
    wide_n: float
    seen_s: int
    count: int  # with lfu as it ages, else of all sightings
    sketch_estimate: int | None  # sightings before it had a row, about; without count admission None


def _report(room: int) -> Report:
    """Room for what one call of the assign kernel reports, kept between calls."""
    return Report(
        touched_K=np.empty(room, np.int64),
        touched_table_K=np.empty(room, np.int64),
        fresh_K=np.empty(room, np.uint8),
        evicted_3E=np.empty((3, room), np.int64),
        reason_E=np.empty(room, np.uint8),
        totals=np.zeros(index.NUM_TOTALS, np.int64),
        homes=np.empty(index.BLOCK, np.int64),
    )


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
        if wide_z_G.shape[0] > 0:
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
        self.schema, self._model = schema, model
        tables = schema.tables
        self.capacity_T = np.array([table.capacity for table in tables], np.int64)
        self.width_T = np.array([table.width for table in tables], np.int64)
        self.slot_base_T = _starts(self.capacity_T)
        self.weight_base_T = _starts(self.capacity_T * self.width_T)
        self.ttl_s_T = np.array([math.ceil(table.ttl_s or 0) for table in tables], np.int64)
        self.num_rows_T = np.zeros(len(tables), np.int64)
        self.sightings_T = np.zeros(len(tables), np.int64)  # see index.Index
        num_slots, num_floats = int(self.capacity_T.sum()), int((self.capacity_T * self.width_T).sum())
        self.keys = np.full(num_slots, EMPTY, np.int64)
        self.stamps, self.seen_s, self.counts = (np.zeros(num_slots, np.uint32) for _ in range(3))
        self.weights = np.zeros(num_floats, np.float32)
        self.moments = np.zeros(num_floats if schema.costs.moments else 0, np.float32)  # Adam's first ones
        self.accumulators = np.zeros(num_slots, np.float32)
        self.wide_z, self.wide_n = (np.zeros(num_slots if model.wide else 0, np.float32) for _ in range(2))
        lines_T = np.array([table.sketch_lines for table in tables], np.int64)
        self.sketches = aligned(LINE * int(lines_T.sum()))
        self.clock = 1  # number of the next row; never-touched slots have stamp 0
        self.sweep_position = 0  # where the next call of `expire` goes on
        self._report = _report(0)
        # By name, so that a table added before this one does not change what its ids start from.
        self._salt_T = hash_values([f"{model.seed}/{table.name}" for table in tables])
        self._policies_TP = _policies(tables, model.seed, self.slot_base_T, self.ttl_s_T, _starts(lines_T) * LINE)
        self._layout_T3 = np.stack([self.slot_base_T, self.weight_base_T, self.width_T], axis=1)
        self._init_T2 = np.array([(t.init_std / SUM_STD, t.initial_accumulator) for t in tables], np.float32)

    @property
    def num_bytes(self) -> int:
        """Bytes of all arrays, fixed at construction."""
        state = (*self.slot_arrays.values(), self.keys, self.weights, self.moments, self.sketches)
        return sum(array.nbytes for array in state)

    def num_not_finite(self) -> int:
        """Numbers of all rows that are NaN or infinite: 15 ms for a million rows of 16."""
        parts = range(0, len(self.weights), FINITE_PART)
        return sum(int((~np.isfinite(self.weights[start : start + FINITE_PART])).sum()) for start in parts)

    def table_bytes(self, table: int) -> int:
        """What one table costs in all, its copy for readers included: never more than its budget."""
        return self.schema.tables[table].num_bytes

    def assign(self, features: HasIds, examples_B: npt.NDArray[np.bool_] | None, now_s: int) -> Assignment:
        """Give every id of a batch a slot, making room where needed; rows that are not examples are skipped.

        Cost at a million slots of 16 floats: 60 ns an id held, 130 a new one, 250 one that evicts.
        """
        ids_BC = features.ids_BC
        B, C = ids_BC.shape
        rows_B = np.ones(B, np.uint8) if examples_B is None else examples_B.view(np.uint8)
        slots_BC = np.empty((B, C), np.int64)
        if len(self._report.touched_K) < B * C:
            self._report = _report(B * C)
        report, first_row, done = self._report, self.clock, 0
        report.totals[:] = 0
        while done < B:
            base = index.stamp_base(self.clock)
            end = min(B, done + base + index.LAST_STAMP - self.clock)  # where stamps would be used up
            index.assign_rows(
                self._index, ids_BC, rows_B, self.schema.column_table_C, done, end, first_row, base, first_row - base,
                now_s, slots_BC, report,
            )  # fmt: skip
            self.clock, done = self.clock + end - done, end
            if index.stamp_base(self.clock) != base:
                index.age_stamps(self.stamps)
        assignment = _assignment(slots_BC, report)
        if assignment.num_new:
            self._reset(assignment)
        return assignment

    @property
    def _index(self) -> Index:
        """The arrays as the kernels take them; anew each time, for a restore may put others in their place."""
        return Index(
            tables_TP=self._policies_TP,
            num_rows_T=self.num_rows_T,
            sightings_T=self.sightings_T,
            keys_G=self.keys,
            stamps_G=self.stamps,
            seen_s_G=self.seen_s,
            counts_G=self.counts,
            sketches=self.sketches,
        )

    def find(self, table: int, ids_N: Int64s) -> Int64s:
        """Global slots of ids, -1 where unknown; changes nothing."""
        slots_N = np.empty(len(ids_N), np.int64)
        index.find_ids(self.keys, self.slot_base_T[table], self.capacity_T[table], ids_N, slots_N)
        return slots_N

    def remove(self, table: int, ids_N: Int64s) -> Int64s:
        """Forget ids, held or not; the global slots freed, to be given to the publisher.

        Nothing of them stays: row, optimizer state, counts. Their counters in the sketch go to 0; ids that share one
        of those lose some sightings, for a sketch cannot forget one id alone.
        """
        removed_N = np.empty(len(ids_N), np.int64)
        base = int(self.slot_base_T[table])
        count = index.remove_ids(self.keys, base, int(self.capacity_T[table]), ids_N, removed_N)
        removed_N = removed_N[:count]
        for array in self.slot_arrays.values():
            if len(array):
                array[removed_N] = 0
        for by_row in self.row_arrays(table).values():
            by_row[removed_N - base] = 0
        at, lines, salt = self._sketch_of(table)
        if lines:
            sketch.clear_ids(self.sketches, at, lines, salt, ids_N)
        self.num_rows_T[table] -= count
        return removed_N

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

    def sketch(self, table: int) -> UInt8s:
        """A table's sketch, a view; of length 0 without count admission."""
        at, lines, _ = self._sketch_of(table)
        return self.sketches[at : at + LINE * lines]

    @property
    def scalars(self) -> dict[str, int]:
        """The numbers that, with all arrays, are the whole state; `load_scalars` puts them back."""
        sightings = {f"sightings/{t.name}": int(self.sightings_T[t.index]) for t in self.schema.tables}
        return {"clock": self.clock, "sweep_position": self.sweep_position, **sightings}

    def load_scalars(self, saved: Mapping[str, int]) -> None:
        """Continue where `scalars` was taken, once the keys are back; tables that are new start from 0."""
        self.clock = saved["clock"]
        self.sweep_position = saved["sweep_position"] % max(1, int(self.capacity_T[self.ttl_s_T > 0].sum()))
        for table in self.schema.tables:
            self.sightings_T[table.index] = saved.get(f"sightings/{table.name}", 0)
            self.num_rows_T[table.index] = len(self.occupied(table.index))

    def resized(self, table: int, capacity: int) -> tuple["Tables", int]:
        """New tables in which one has another capacity, and how many of its ids found no room there.

        Its ids are placed anew, the most useful first: with lru those used last, with lfu those with the highest
        count. The other tables are the same bit for bit, and this object is not changed. Both are in memory at once.

        Raises:
            SettingsError: the capacity is not possible, or more than the table's budget pays for.
        """
        name = self.schema.tables[table].name
        new = Tables(self.schema.with_capacities({name: capacity}), self._model)
        dropped = 0
        for t in range(len(self.schema.tables)):
            if t == table:
                slots_N = self._most_useful_first(t)
                ids_N, placed_N = self.keys[slots_N], np.empty(len(slots_N), np.int64)
                base = int(new.slot_base_T[t])
                dropped = int(index.reinsert(new.keys, base, capacity, ids_N, placed_N))
                self._copy_rows(new, t, slots_N[placed_N >= 0], placed_N[placed_N >= 0])
                if len(self.sketch(t)):
                    lines_L64 = sketch.resized(self.sketch(t).reshape(-1, LINE), len(new.sketch(t)) // LINE)
                    new.sketch(t)[:] = lines_L64.reshape(-1)
            else:
                slots_N = np.arange(self.capacity_T[t], dtype=np.int64)
                here_N, there_N = self.slot_base_T[t] + slots_N, new.slot_base_T[t] + slots_N
                new.keys[there_N] = self.keys[here_N]
                self._copy_rows(new, t, here_N, there_N)
                new.sketch(t)[:] = self.sketch(t)
        new.load_scalars(self.scalars)
        return new, dropped

    def _copy_rows(self, new: "Tables", table: int, here_N: Int64s, there_N: Int64s) -> None:
        """Copy all that is kept of slots but their keys to other slots of other tables."""
        for name, array in self.slot_arrays.items():
            if len(array):
                new.slot_arrays[name][there_N] = array[here_N]
        for name, by_row in self.row_arrays(table).items():
            new.row_arrays(table)[name][there_N - new.slot_base_T[table]] = by_row[here_N - self.slot_base_T[table]]

    def _most_useful_first(self, table: int) -> Int64s:
        """Global slots that hold an id, in the order in which a smaller table would keep them."""
        slots_N: Int64s = self.slot_base_T[table] + self.occupied(table)
        stamps_N = self.stamps[slots_N].astype(np.int64)
        spec = self.schema.tables[table].spec
        order_N = np.argsort(-stamps_N, kind="stable")
        if spec.eviction == "lfu":
            epochs_N = (index.stamp_base(self.clock) + stamps_N) // spec.lfu_half_life
            halvings_N = np.minimum(self.clock // spec.lfu_half_life - epochs_N, 32)
            order_N = np.lexsort((-stamps_N, -(self.counts[slots_N].astype(np.int64) >> halvings_N)))
        return slots_N[order_N]

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
        by_row = {name: rows[slot - self.slot_base_T[table]].copy() for name, rows in self.row_arrays(table).items()}
        return TableRow(
            row_D=by_row["rows"],
            moments_D=by_row.get("moments"),
            accumulator=float(self.accumulators[slot]),
            wide_z=float(self.wide_z[slot]) if len(self.wide_z) else 0.0,
            wide_n=float(self.wide_n[slot]) if len(self.wide_n) else 0.0,
            seen_s=int(self.seen_s[slot]),
            count=int(self.counts[slot]),
            sketch_estimate=self.sketch_estimate(table, key),
        )

    def sketch_estimate(self, table: int, key: int) -> int | None:
        """About how often an id was seen lately while it had no row; None without count admission."""
        at, lines, salt = self._sketch_of(table)
        if not lines:
            return None
        out_1 = np.empty(1, np.uint8)
        sketch.estimates(self.sketches, at, lines, salt, np.array([key], np.int64), out_1)
        return int(out_1[0])

    def _sketch_of(self, table: int) -> tuple[int, int, int]:
        """First byte, lines and salt of a table's sketch."""
        at, lines, salt = self._policies_TP[table, [index.SKETCH_AT, index.SKETCH_LINES, index.SALT]].tolist()
        return at, lines, salt

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


def _policies(tables: Sequence[Table], seed: int, slot_base_T: Int64s, ttl_s_T: Int64s, sketch_at_T: Int64s) -> Int64s:
    """What the index kernels must know of each table, by the columns that `index` names."""
    salt_T = hash_values([f"{seed}/{table.name}/admission" for table in tables])
    policies_TP = np.zeros((len(tables), index.NUM_COLUMNS), np.int64)
    for t, table in enumerate(tables):
        admission = table.spec.admission
        policies_TP[t, index.BASE] = slot_base_T[t]
        policies_TP[t, index.CAPACITY] = table.capacity
        policies_TP[t, index.TTL_S] = ttl_s_T[t]
        policies_TP[t, index.ADMISSION] = ADMISSION_KINDS[admission.kind]
        policies_TP[t, index.MIN_COUNT] = admission.min_count
        policies_TP[t, index.CHANCE] = round(admission.probability * 2**index.CHANCE_BITS)
        policies_TP[t, index.PRESSURE_START] = round(admission.pressure_from * table.capacity)
        policies_TP[t, index.SKETCH_AT] = sketch_at_T[t]
        policies_TP[t, index.SKETCH_LINES] = table.sketch_lines
        policies_TP[t, index.HALVE_EVERY] = table.halve_every
        policies_TP[t, index.SALT] = salt_T[t]
        policies_TP[t, index.LFU] = table.spec.eviction == "lfu"
        policies_TP[t, index.HALF_LIFE] = table.spec.lfu_half_life
        policies_TP[t, index.GRACE] = min(max(table.capacity // GRACE_PART, WINDOW), MOST_GRACE)
    return policies_TP


def _assignment(slots_BC: Int64s, report: Report) -> Assignment:
    """A report's contents, copied out."""
    num_touched, num_evicted, num_unplaced, num_new, num_refused = report.totals.tolist()
    evicted_ids_E, evicted_tables_E, evicted_slots_E = report.evicted_3E[:, :num_evicted].copy()
    return Assignment(
        slots_BC=slots_BC,
        touched_K=report.touched_K[:num_touched].copy(),
        touched_table_K=report.touched_table_K[:num_touched].copy(),
        fresh_K=report.fresh_K[:num_touched].copy(),
        evicted_ids_E=evicted_ids_E,
        evicted_tables_E=evicted_tables_E,
        evicted_slots_E=evicted_slots_E,
        evicted_reason_E=report.reason_E[:num_evicted].copy(),
        num_unplaced=num_unplaced,
        num_new=num_new,
        num_refused=num_refused,
    )


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
    admission = {"kind": "count", "min_count": 1}
    settings = Settings.model_validate(
        {
            "tables": {"a": {"capacity": 64, "ttl_s": 1, "admission": admission}},
            "features": {"a": {"kind": "categorical"}},
        }
    )
    tables = Tables(Schema.from_settings(settings), settings.model)
    tables.assign(Ids(np.zeros((1, 1), np.int64)), None, 0)
    index.age_stamps(np.zeros(1, np.uint32))
    tables.resized(0, 128)
    tables.row_of(0, 0)
    tables.expire(9, 64)
    tables.remove(0, np.zeros(1, np.int64))
