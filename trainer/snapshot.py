"""The whole state of a trainer at one place in the log, as tensors: captured, and put back by id.

    progress           where the trainer stands: step, log position, version and watermark of the live store
    table-<name>       ids, slots, stamps, seen_s, counts, rows, accumulators, wide_z, wide_n; removed (slots)
    entity-<name>      ids, slots, stamps, seen_s, counts, records
    learner            params, accumulators, offset; pair_slots, pair_z, pair_n (only those ever touched)
    metrics            as given

Rows are stored with both id and slot: into tables of the same capacity everything returns to its slot, so that the
run goes on bit for bit as if it had never stopped; into another capacity each id is placed anew, and what has no
room is what was used least recently.
"""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from trainer import index
from trainer.dense import DenseLayout, LearnerState
from trainer.entities import CAPACITY, SLOT_BASE, Entities
from trainer.errors import SchemaMismatch
from trainer.index import Int64s
from trainer.probe import REMOVED
from trainer.schema import Schema, Table
from trainer.settings import ModelSettings
from trainer.tables import Tables

Tensors = dict[str, npt.NDArray[Any]]
SLOT_STATE = ("stamps", "seen_s", "counts")  # arrays that tables and entities have in common
ROW_STATE = ("accumulators", "wide_z", "wide_n")


@dataclass(frozen=True)
class Progress:
    """Where the trainer stands.

    `position`: id of the last log entry applied; `num_read`: entries ever added to the log up to it, None where that
    is not known; `watermark_us`: every event acknowledged before it is learned.
    """

    step: int
    position: str
    store_version: int
    watermark_us: int
    num_read: int | None = None


@dataclass(frozen=True)
class Snapshot:
    """Tensors by group, and `about`: what they were (clocks, widths, signatures), as plain JSON values."""

    progress: Progress
    about: dict[str, Any]
    tensors: dict[str, Tensors]

    @property
    def metrics(self) -> Tensors:
        """State of the progressive metrics, as it was given to `capture`."""
        return self.tensors["metrics"]


def capture(
    tables: Tables,
    entities: Entities,
    learner: LearnerState,
    model: ModelSettings,
    *,
    progress: Progress,
    metrics: Mapping[str, npt.NDArray[Any]],
) -> Snapshot:
    """Copy the state out; what is learned afterwards does not change the snapshot."""
    schema = tables.schema
    tensors = {f"table-{table.name}": _capture_table(tables, table) for table in schema.tables}
    for entity in schema.entities:
        tensors[f"entity-{entity.name}"] = _capture_entity(entities, entity.index)
    tensors["learner"] = _capture_learner(learner)
    tensors["metrics"] = {name: np.array(values) for name, values in metrics.items()}
    about = {
        "schema_hash": f"{schema.layout_hash:016x}",
        "table_clock": tables.clock,
        "sweep_position": tables.sweep_position,
        "entity_clock": entities.clock,
        "tables": {table.name: {"width": table.width, "capacity": table.capacity} for table in schema.tables},
        "entities": _entity_signatures(schema),
        "dense": _dense_signature(schema, model),
        "pairs": _pair_signature(schema, model),
    }
    return Snapshot(progress, about, tensors)


def restore(
    snapshot: Snapshot, tables: Tables, entities: Entities, learner: LearnerState, model: ModelSettings
) -> list[str]:
    """Put a snapshot into newly made tables, entities and learner state; returns what could not be kept, in sentences.

    Tables are matched by name and width: a new one starts empty, one that is gone is dropped. Entity records, dense
    weights and pairs are kept where their layout is the same, else they start anew.

    Raises:
        SchemaMismatch: a table has another width than the saved one.
    """
    schema, about = tables.schema, snapshot.about
    for table in schema.tables:
        saved = about["tables"].get(table.name)
        if saved is not None and saved["width"] != table.width:
            raise SchemaMismatch(
                f"tables.{table.name}.width is {table.width}, the checkpoint's is {saved['width']}: "
                "give it the old width, or the table a new name to start it empty"
            )
    notes = _differences(about, schema, model)
    same_size = all(about["tables"].get(t.name, {}).get("capacity") == t.capacity for t in schema.tables)
    tables.clock = about["table_clock"]
    tables.sweep_position = about["sweep_position"] if same_size else 0
    entities.clock = about["entity_clock"]
    for table in schema.tables:
        if table.name in about["tables"]:
            notes += _restore_table(snapshot.tensors[f"table-{table.name}"], tables, table, about["tables"][table.name])
    signatures = _entity_signatures(schema)
    for entity in schema.entities:
        saved = about["entities"].get(entity.name)
        if saved is not None and saved["layout"] == signatures[entity.name]["layout"]:
            same_size = saved["capacity"] == entity.capacity
            notes += _restore_entity(snapshot.tensors[f"entity-{entity.name}"], entities, entity.index, same_size)
    _restore_learner(snapshot, learner, schema, model)
    return notes


def _capture_table(tables: Tables, table: Table) -> Tensors:
    local_N = tables.occupied(table.index)
    base = int(tables.slot_base_T[table.index])
    slots_N = base + local_N
    keys = tables.keys[base : base + table.capacity]
    tensors = {"ids": tables.keys[slots_N], "slots": local_N, "removed": np.flatnonzero(keys == REMOVED)}
    tensors |= {name: getattr(tables, name)[slots_N] for name in SLOT_STATE + ROW_STATE}
    return tensors | {"rows": tables.rows(table.index)[local_N]}


def _capture_entity(entities: Entities, entity: int) -> Tensors:
    local_N = entities.occupied(entity)
    slots_N = int(entities.layout.entities_E8[entity, SLOT_BASE]) + local_N
    tensors = {"ids": entities.keys[slots_N], "slots": local_N}
    tensors |= {name: getattr(entities, name)[slots_N] for name in SLOT_STATE}
    return tensors | {"records": entities.records(entity)[local_N]}


def _capture_learner(learner: LearnerState) -> Tensors:
    # By bits, not by value: a state of -0.0 has been touched.
    touched = (learner.pair_z.view(np.uint32) | learner.pair_n.view(np.uint32)) != 0
    slots_N = np.flatnonzero(touched)
    return {
        "params": learner.params.copy(),
        "accumulators": learner.accumulators.copy(),
        "offset": learner.offset.copy(),
        "pair_slots": slots_N,
        "pair_z": learner.pair_z[slots_N],
        "pair_n": learner.pair_n[slots_N],
    }


def _restore_table(tensors: Tensors, tables: Tables, table: Table, saved: dict[str, int]) -> list[str]:
    base = int(tables.slot_base_T[table.index])
    same_size = saved["capacity"] == table.capacity
    if same_size:
        tables.keys[base + tensors["removed"]] = REMOVED
    kept_N, slots_N = _slots(tensors, tables.keys, base, table.capacity, same_size=same_size)
    for name in SLOT_STATE + ROW_STATE:
        getattr(tables, name)[slots_N] = tensors[name][kept_N]
    tables.rows(table.index)[slots_N - base] = tensors["rows"][kept_N]
    tables.num_rows_T[table.index] = len(kept_N)
    return _dropped(f"table {table.name}", len(tensors["ids"]) - len(kept_N), table.capacity)


def _restore_entity(tensors: Tensors, entities: Entities, entity: int, same_size: bool) -> list[str]:
    base, capacity = entities.layout.entities_E8[entity, [SLOT_BASE, CAPACITY]].tolist()
    kept_N, slots_N = _slots(tensors, entities.keys, base, capacity, same_size=same_size)
    for name in SLOT_STATE:
        getattr(entities, name)[slots_N] = tensors[name][kept_N]
    entities.records(entity)[slots_N - base] = tensors["records"][kept_N]
    name = entities.layout.entities[entity].name
    return _dropped(f"entity {name}", len(tensors["ids"]) - len(kept_N), capacity)


def _slots(tensors: Tensors, keys: Int64s, base: int, capacity: int, *, same_size: bool) -> tuple[Int64s, Int64s]:
    """Give the saved ids their slots: (which of them, their global slots)."""
    ids_N = tensors["ids"]
    if same_size:
        slots_N = base + tensors["slots"]
        keys[slots_N] = ids_N
        return np.arange(len(ids_N)), slots_N
    newest_first_N = np.argsort(-tensors["stamps"], kind="stable")
    slots_N = np.empty(len(ids_N), np.int64)
    index.reinsert(keys, base, capacity, ids_N[newest_first_N], slots_N)
    placed = slots_N >= 0
    return newest_first_N[placed], slots_N[placed]


def _restore_learner(snapshot: Snapshot, learner: LearnerState, schema: Schema, model: ModelSettings) -> None:
    tensors, about = snapshot.tensors["learner"], snapshot.about
    learner.offset[:] = tensors["offset"]
    if about["dense"] == _dense_signature(schema, model):
        learner.params[:] = tensors["params"]
        learner.accumulators[:] = tensors["accumulators"]
    if about["pairs"] == _pair_signature(schema, model):
        learner.pair_z[tensors["pair_slots"]] = tensors["pair_z"]
        learner.pair_n[tensors["pair_slots"]] = tensors["pair_n"]


def _differences(about: dict[str, Any], schema: Schema, model: ModelSettings) -> list[str]:
    """What of a save cannot be used under this schema."""
    notes = [f"table {name} is new and starts empty" for name in _missing(about["tables"], schema.tables)]
    known = {table.name for table in schema.tables}
    notes += [f"table {name} is no longer configured and is dropped" for name in about["tables"] if name not in known]
    signatures = _entity_signatures(schema)
    for name, saved in about["entities"].items():
        if signatures.get(name, {}).get("layout") != saved["layout"]:
            notes.append(f"entity {name} has other features now: its records start anew")
    if about["dense"] != _dense_signature(schema, model):
        notes.append("the network has other inputs or layers now: its dense weights start anew")
    if about["pairs"] != _pair_signature(schema, model):
        notes.append("the hashed pairs are others now: their weights start anew")
    return notes


def _missing(saved: dict[str, Any], tables: Iterable[Table]) -> list[str]:
    return [table.name for table in tables if table.name not in saved]


def _dropped(what: str, count: int, capacity: int) -> list[str]:
    return [f"{what}: no room for {count} ids in {capacity} slots, the least recently used are dropped"] * (count > 0)


def _entity_signatures(schema: Schema) -> dict[str, Any]:
    """Per entity: its capacity and what lies where in its records."""
    return {
        entity.name: {
            "capacity": entity.capacity,
            "layout": [
                [schema.features[a].name, schema.features[a].spec.kind, schema.features[a].span, int(word)]
                for a, word in zip(entity.feature_E, entity.word_E, strict=True)
            ],
        }
        for entity in schema.entities
    }


def _dense_signature(schema: Schema, model: ModelSettings) -> dict[str, Any]:
    """What the dense weights mean: the network's inputs in order, and every parameter's shape."""
    widths = {f.name: int(schema.feature_width_F[f.id_index]) if f.is_id else f.span for f in schema.features}
    parameters = [[entry.name, *entry.shape] for entry in DenseLayout(schema, model).entries]
    return {"inputs": [[name, width] for name, width in widths.items()], "parameters": parameters}


def _pair_signature(schema: Schema, model: ModelSettings) -> dict[str, Any]:
    """What the pairs' slots mean: a pair hashes its ids together with its place in the list."""
    names = {feature.first: feature.name for feature in schema.id_features}
    pairs = [[names[a], names[b]] for a, b in schema.pairs_P2.tolist()]
    return {"pairs": pairs, "bits": model.pair_bits if pairs else 0}
