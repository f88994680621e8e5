"""From the trainer's tables to the live store: what a step changed, looked at by the guard, made visible as a whole.

The order at a publish (`trainer.live` says what readers make of it):

    0. the guard looks at the dense weights: if one is not finite nothing at all becomes visible
    1. rows and records; rows that are not finite are held back   2. pairs   3. dense weights   4. commit

What a held publish would have shown is kept as a list of slots and goes out with the next good one. A row held back
leaves the id's last good row in place; where the slot belonged to another id before, that one is taken out.

Legend: G all slots, T groups (tables or entities), K slots touched, N slots of one group.
"""

import tempfile
from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np

from trainer.dense import DenseLayout, LearnerState, num_pair_slots
from trainer.entities import SLOT_BASE, Entities, EntityChanges
from trainer.index import Int64s, UInt8s
from trainer.live import DEFAULT, UNKNOWN, Layout, Section, Writer
from trainer.probe import REMOVED
from trainer.publish_kernels import clear_marks, gather_pairs, gather_rows, mark_slots
from trainer.schema import Entity, Schema, Table
from trainer.settings import ModelSettings, Settings
from trainer.tables import Assignment, Ids, Tables

CHUNK = 4096  # rows gathered before they are put: large enough that calls cost nothing, small enough for the cache


def row_section(table: Table) -> str:
    """Name of a table's section in the live store."""
    return f"table/{table.name}"


def missing_status(table: Table) -> int:
    """What to say of an id that a table's section does not hold; it reads the table's default row, zeros.

    UNKNOWN where every id gets a row: this one was never seen, or is gone (evicted, expired, forgotten). DEFAULT where
    not all are admitted: it may have been seen all the same, and readers cannot tell; `Tables.sketch_estimate` can.
    """
    return UNKNOWN if table.spec.admission.kind == "all" else DEFAULT


def entity_section(entity: Entity) -> str:
    """Name of an entity's section in the live store."""
    return f"entity/{entity.name}"


def layout_for(schema: Schema, model: ModelSettings, num_shards: int) -> Layout:
    """The live store of a configuration: tables (row, then wide weight), entities; the dense weights end in the offset.

    Capacities are per shard, so shards share each table's.
    """
    rows = [Section(row_section(t), "rows", -(-t.capacity // num_shards), t.width + 1) for t in schema.tables]
    records = [Section(entity_section(e), "entity", -(-e.capacity // num_shards), e.words) for e in schema.entities]
    return Layout(
        sections=(*rows, *records),
        dense_size=DenseLayout(schema, model).size + 1,
        pair_slots=num_pair_slots(schema, model),
        num_shards=num_shards,
        schema_hash=schema.layout_hash,
    )


@dataclass(frozen=True)
class PublishReport:
    """What one publish did. `held_dense`: nothing became visible, `version` is still the one before."""

    version: int
    rows: int = 0
    removed: int = 0
    records: int = 0
    pairs: int = 0
    held_rows: int = 0
    held_pairs: int = 0
    held_dense: bool = False


class Changed:
    """Slots whose present state readers have not seen, by group; its memory is fixed and mostly never touched."""

    def __init__(self, base_T: Int64s, num_slots: int) -> None:
        self.marks_G = np.zeros(num_slots, np.uint8)
        self._base_T = base_T
        self._queue_G = np.empty(num_slots, np.int64)
        self._count_T = np.zeros(len(base_T), np.int64)

    def mark(self, slots_K: Int64s, groups_K: Int64s, fresh_K: UInt8s) -> None:
        """Add slots; `fresh_K`: 1 where the slot's record is no longer of the id that readers may see there."""
        mark_slots(slots_K, groups_K, fresh_K, self._base_T, self.marks_G, self._queue_G, self._count_T)

    def chunks(self, group: int) -> Iterator[Int64s]:
        """The group's slots, CHUNK at a time: views that are valid until `clear`."""
        base, count = int(self._base_T[group]), int(self._count_T[group])
        for start in range(base, base + count, CHUNK):
            yield self._queue_G[start : min(start + CHUNK, base + count)]

    def clear(self) -> None:
        """Readers have seen it all."""
        clear_marks(self._base_T, self.marks_G, self._queue_G, self._count_T)


class Publisher:
    """Publishes one trainer's steps into one writer's generation, and owns what has not been published yet."""

    def __init__(
        self, writer: Writer, tables: Tables, entities: Entities, learner: LearnerState, model: ModelSettings
    ) -> None:
        self._writer, self._tables, self._entities, self._learner = writer, tables, entities, learner
        self._schema = tables.schema
        wide = model.wide_optimizer
        self._ftrl_4 = np.array([wide.alpha, wide.beta, wide.l1, wide.l2], np.float32)
        self._rows = Changed(tables.slot_base_T, len(tables.keys))
        entity_base_E = np.ascontiguousarray(entities.layout.entities_E8[:, SLOT_BASE])
        self._records = Changed(entity_base_E, len(entities.keys))
        self._pairs = Changed(np.zeros(1, np.int64), len(learner.pair_z))
        self._staging = np.empty(CHUNK * (1 + max(tables.width_T.tolist())), np.uint32)
        self._local_N, self._keys_N, self._taken_out_N = np.empty((3, CHUNK), np.int64)
        self._seen_s_N, self._counts_N = np.empty((2, CHUNK), np.uint32)
        self._pair_weights_N = np.empty(CHUNK, np.float32)
        self._totals_3 = np.zeros(3, np.int64)

    def publish(
        self,
        assignment: Assignment,
        changes: EntityChanges,
        touched_pairs: Int64s,
        *,
        step: int,
        watermark_us: int,
    ) -> PublishReport:
        """Make a step visible: the rows its assignment touched, the records and pairs it changed, the dense weights."""
        self._rows.mark(assignment.touched_K, assignment.touched_table_K, assignment.fresh_K)
        self._records.mark(changes.slots_K, changes.entities_K, np.zeros(len(changes.slots_K), np.uint8))
        self._mark_pairs(touched_pairs)
        return self._publish(step, watermark_us)

    def remove(self, slots_N: Int64s, *, step: int, watermark_us: int) -> PublishReport:
        """Take out what `Tables.remove` or `Tables.expire` freed (global slots)."""
        tables_N = np.searchsorted(self._tables.slot_base_T, slots_N, side="right") - 1
        self._rows.mark(slots_N, tables_N, np.zeros(len(slots_N), np.uint8))
        return self._publish(step, watermark_us)

    def remove_records(self, records: EntityChanges, *, step: int, watermark_us: int) -> PublishReport:
        """Take out what `Entities.remove` freed."""
        self._records.mark(records.slots_K, records.entities_K, np.zeros(len(records.slots_K), np.uint8))
        return self._publish(step, watermark_us)

    def publish_all(self, *, step: int, watermark_us: int) -> PublishReport:
        """Fill a new generation with everything there is, before it is activated."""
        for table in self._schema.tables:
            slots_N = self._tables.slot_base_T[table.index] + self._tables.occupied(table.index)
            self._rows.mark(slots_N, np.full(len(slots_N), table.index), np.ones(len(slots_N), np.uint8))
        for entity in self._schema.entities:
            base = self._entities.layout.entities_E8[entity.index, SLOT_BASE]
            slots_N = base + self._entities.occupied(entity.index)
            self._records.mark(slots_N, np.full(len(slots_N), entity.index), np.ones(len(slots_N), np.uint8))
        self._mark_pairs(np.flatnonzero(self._learner.pair_z))  # z = 0 stands for the weight 0, which is there already
        return self._publish(step, watermark_us)

    def _mark_pairs(self, slots_N: Int64s) -> None:
        self._pairs.mark(slots_N, np.zeros(len(slots_N), np.int64), np.zeros(len(slots_N), np.uint8))

    def _publish(self, step: int, watermark_us: int) -> PublishReport:
        dense = self._learner.live_dense()
        if not np.isfinite(dense).all():
            return PublishReport(version=self._writer.version, held_dense=True)
        rows, removed, held_rows = map(sum, zip(*map(self._put_table, self._schema.tables), strict=True))
        records = sum(self._put_entity(entity) for entity in self._schema.entities)
        pairs, held_pairs = self._put_pairs()
        self._writer.put_dense(dense)
        for changed in (self._rows, self._records, self._pairs):
            changed.clear()
        return PublishReport(
            version=self._writer.commit(step=step, watermark_us=watermark_us),
            rows=rows,
            removed=removed,
            records=records,
            pairs=pairs,
            held_rows=held_rows,
            held_pairs=held_pairs,
        )

    def _put_table(self, table: Table) -> tuple[int, int, int]:
        """Returns the numbers of rows put, taken out, and held."""
        tables, section = self._tables, row_section(table)
        base, weight_base = int(tables.slot_base_T[table.index]), int(tables.weight_base_T[table.index])
        staging_NW = self._staging[: CHUNK * (table.width + 1)].reshape(CHUNK, table.width + 1)
        rows, removed, held = 0, 0, 0
        for slots_N in self._rows.chunks(table.index):
            gather_rows(
                slots_N, base, weight_base, tables.keys, tables.seen_s, tables.counts, tables.weights.view(np.uint32),
                tables.wide_z, tables.wide_n, self._ftrl_4, self._rows.marks_G, self._local_N, self._keys_N,
                self._seen_s_N, self._counts_N, staging_NW, staging_NW.view(np.float32), self._taken_out_N,
                self._totals_3,
            )  # fmt: skip
            put, taken_out, num_held = self._totals_3.tolist()
            if taken_out:
                self._writer.remove(section, self._taken_out_N[:taken_out])
            self._writer.put(
                section, self._local_N[:put], self._keys_N[:put], staging_NW[:put], self._seen_s_N[:put],
                self._counts_N[:put],
            )  # fmt: skip
            rows, removed, held = rows + put, removed + taken_out, held + num_held
        return rows, removed, held

    def _put_entity(self, entity: Entity) -> int:
        entities = self._entities
        base, records = int(entities.layout.entities_E8[entity.index, SLOT_BASE]), entities.records(entity.index)
        count = 0
        for changed_N in self._records.chunks(entity.index):
            freed = entities.keys[changed_N] == REMOVED
            if freed.any():
                self._writer.remove(entity_section(entity), changed_N[freed] - base)
            slots_N = changed_N[~freed] if freed.any() else changed_N
            local_N = slots_N - base
            self._writer.put(
                entity_section(entity), local_N, entities.keys[slots_N], records[local_N], entities.seen_s[slots_N],
                entities.counts[slots_N],
            )  # fmt: skip
            count += len(slots_N)
        return count

    def _put_pairs(self) -> tuple[int, int]:
        """Returns the numbers of pairs put and held."""
        put, held = 0, 0
        for slots_N in self._pairs.chunks(0):
            count = gather_pairs(
                slots_N, self._learner.pair_z, self._learner.pair_n, self._ftrl_4, self._keys_N, self._pair_weights_N
            )
            self._writer.put_pairs(self._keys_N[:count], self._pair_weights_N[:count])
            put, held = put + count, held + len(slots_N) - count
        return put, held


def warm() -> None:
    """Compile the kernels."""
    settings = Settings.model_validate(
        {"tables": {"a": {"capacity": 64}}, "features": {"a": {"kind": "categorical"}}, "model": {"hidden": []}}
    )
    schema = Schema.from_settings(settings)
    tables, entities = Tables(schema, settings.model), Entities(schema)
    learner = LearnerState.initial(schema, settings.model)
    assignment = tables.assign(Ids(np.zeros((1, 1), np.int64)), None, 0)
    nothing = np.empty(0, np.int64)
    with (
        tempfile.TemporaryDirectory() as directory,
        Writer.create(directory, layout_for(schema, settings.model, 1)) as writer,
    ):
        publisher = Publisher(writer, tables, entities, learner, settings.model)
        publisher.publish(assignment, EntityChanges(nothing, nothing), nothing, step=1, watermark_us=0)
    gather_pairs(nothing, learner.pair_z, learner.pair_n, np.ones(4, np.float32), nothing, np.empty(0, np.float32))
