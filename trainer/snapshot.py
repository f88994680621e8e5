"""The whole state of a trainer at one place in the log, as tensors: captured, and put back by id.

    progress           where the trainer stands: step, log position, version and watermark of the live store
    table-<name>       ids, slots; removed (slots); all slot and row arrays of `trainer.tables`; sketch
    entity-<name>      ids, slots, stamps, seen_s, counts, records
    learner            all arrays of `LearnerState`; pair_slots, pair_z, pair_n (only those ever touched)
    metrics, dedup, guard   as given; `join` is kept free for events that wait for their label

An array that the configuration does not need has length 0 and is left out; where a save lacks one that is needed, it
starts anew. Rows are stored with both id and slot: into tables of the same capacity everything returns to its slot, so
that the run goes on bit for bit as if it had never stopped; into another capacity each id is placed anew, and what has
no room is what was least useful.
"""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any
from urllib.parse import urlsplit

import numpy as np
import numpy.typing as npt

from trainer import index
from trainer.dense import DenseLayout, LearnerState
from trainer.entities import CAPACITY, SLOT_BASE, Entities
from trainer.errors import SchemaMismatch
from trainer.index import Int64s
from trainer.probe import REMOVED
from trainer.schema import Schema, Table
from trainer.settings import ModelSettings, Settings
from trainer.tables import Tables

Tensors = dict[str, npt.NDArray[Any]]
ENTITY_STATE = ("stamps", "seen_s", "counts")
# What means something to one optimizer only; under another one it starts anew.
ROW_OPTIMIZER_STATE = ("accumulators", "moments")
# Of the learner: what is no optimizer's state.
WEIGHTS = ("params", "offset")
SWEEP = "sweep_position"  # a place among slots, so it means nothing among others


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
    """Tensors by group, and `about`: what they were (scalars, widths, signatures), as plain JSON values.

    `settings` is the whole configuration, for people: a restore goes by `about` alone.
    """

    progress: Progress
    about: dict[str, Any]
    tensors: dict[str, Tensors]
    settings: dict[str, Any]


def capture(
    tables: Tables,
    entities: Entities,
    learner: LearnerState,
    settings: Settings,
    *,
    progress: Progress,
    groups: Mapping[str, Mapping[str, npt.NDArray[Any]]],
) -> Snapshot:
    """Copy the state out; what is learned afterwards does not change the snapshot.

    `groups`: arrays of other parts by name ("metrics", "dedup", "guard"), given back as `snapshot.tensors[name]`.
    """
    schema = tables.schema
    tensors = {f"table-{table.name}": _capture_table(tables, table) for table in schema.tables}
    for entity in schema.entities:
        tensors[f"entity-{entity.name}"] = _capture_entity(entities, entity.index)
    tensors["learner"] = _capture_learner(learner)
    if taken := tensors.keys() & groups.keys():
        raise ValueError(f"got groups called {', '.join(sorted(taken))}, which this module writes itself")
    tensors |= {
        group: {name: np.array(values, order="C") for name, values in arrays.items()}
        for group, arrays in groups.items()
    }
    about = {
        "schema_hash": f"{schema.layout_hash:016x}",
        "scalars": dict(tables.scalars),
        "entity_clock": entities.clock,
        "tables": _table_signatures(schema, settings),
        "entities": _entity_signatures(schema),
        "dense": _dense_signature(schema, settings.model),
        "dense_optimizer": settings.model.optimizer.kind,
        "pairs": _pair_signature(schema, settings.model),
    }
    return Snapshot(progress, about, tensors, _without_password(settings))


def saved_capacities(snapshot: Snapshot) -> dict[str, tuple[int, int]]:
    """Slots of each saved table: (in force, as configured); they differ after a table was resized while running."""
    return {name: (saved["capacity"], saved["configured"]) for name, saved in snapshot.about["tables"].items()}


def restore(
    snapshot: Snapshot, tables: Tables, entities: Entities, learner: LearnerState, model: ModelSettings
) -> list[str]:
    """Put a snapshot into newly made tables, entities and learner state; returns what could not be kept, in sentences.

    Tables are matched by name and width: a new one starts empty, one that is gone is dropped. Entity records, dense
    weights, optimizer state and pairs are kept where they mean the same, else they start anew.

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
    same_slots = {n: saved["capacity"] for n, saved in about["tables"].items()} == {
        table.name: table.capacity for table in schema.tables
    }
    scalars = {name: value for name, value in about["scalars"].items() if same_slots or name != SWEEP}
    first_scalars = tables.scalars  # for numbers that the save does not know
    entities.clock = about["entity_clock"]
    for table in schema.tables:
        if table.name in about["tables"]:
            notes += _restore_table(snapshot.tensors[f"table-{table.name}"], tables, table, about["tables"][table.name])
    tables.load_scalars(first_scalars | scalars)
    signatures = _entity_signatures(schema)
    for entity in schema.entities:
        saved = about["entities"].get(entity.name)
        if saved is not None and saved["layout"] == signatures[entity.name]["layout"]:
            same_size = saved["capacity"] == entity.capacity
            notes += _restore_entity(snapshot.tensors[f"entity-{entity.name}"], entities, entity.index, same_size)
    return notes + _restore_learner(snapshot, learner, schema, model)


def _capture_table(tables: Tables, table: Table) -> Tensors:
    local_N = tables.occupied(table.index)
    base = int(tables.slot_base_T[table.index])
    slots_N = base + local_N
    keys = tables.keys[base : base + table.capacity]
    tensors: Tensors = {"ids": tables.keys[slots_N], "slots": local_N, "removed": np.flatnonzero(keys == REMOVED)}
    tensors |= {name: array[slots_N] for name, array in tables.slot_arrays.items() if len(array)}
    tensors |= {name: array[local_N] for name, array in tables.row_arrays(table.index).items() if len(array)}
    sketch = tables.sketch(table.index)
    return tensors | ({"sketch": sketch.copy()} if len(sketch) else {})


def _capture_entity(entities: Entities, entity: int) -> Tensors:
    local_N = entities.occupied(entity)
    base, capacity = entities.layout.entities_E8[entity, [SLOT_BASE, CAPACITY]].tolist()
    slots_N, keys = base + local_N, entities.keys[base : base + capacity]
    tensors: Tensors = {"ids": entities.keys[slots_N], "slots": local_N, "removed": np.flatnonzero(keys == REMOVED)}
    tensors |= {name: getattr(entities, name)[slots_N] for name in ENTITY_STATE}
    return tensors | {"records": entities.records(entity)[local_N]}


def _capture_learner(learner: LearnerState) -> Tensors:
    # By bits, not by value: a state of -0.0 has been touched.
    touched = (learner.pair_z.view(np.uint32) | learner.pair_n.view(np.uint32)) != 0
    slots_N = np.flatnonzero(touched)
    tensors: Tensors = {name: array.copy() for name, array in learner.arrays.items() if len(array)}
    return tensors | {"pair_slots": slots_N, "pair_z": learner.pair_z[slots_N], "pair_n": learner.pair_n[slots_N]}


def _restore_table(tensors: Tensors, tables: Tables, table: Table, saved: dict[str, Any]) -> list[str]:
    base = int(tables.slot_base_T[table.index])
    same_size = saved["capacity"] == table.capacity
    if same_size:
        tables.keys[base + tensors["removed"]] = REMOVED
    order_N = None if same_size else _most_useful_first(tensors, table)
    kept_N, slots_N = _slots(tensors, tables.keys, base, table.capacity, order_N)
    same_optimizer = saved["optimizer"] == table.spec.optimizer.kind
    places: dict[str, tuple[npt.NDArray[Any], Int64s]]
    places = {name: (array, slots_N) for name, array in tables.slot_arrays.items() if len(array)}
    places |= {name: (array, slots_N - base) for name, array in tables.row_arrays(table.index).items() if len(array)}
    lacking = []
    for name, (array, at_N) in places.items():
        if name in tensors and (same_optimizer or name not in ROW_OPTIMIZER_STATE):
            array[at_N] = tensors[name][kept_N]
            continue
        array[at_N] = table.initial_accumulator if name == "accumulators" else 0
        if name not in ROW_OPTIMIZER_STATE:  # of those, the optimizer's note speaks
            lacking.append(name)
    sketch = tables.sketch(table.index)
    saved_sketch = tensors.get("sketch", sketch[:0])
    if len(sketch) == len(saved_sketch):
        sketch[:] = saved_sketch
    elif len(sketch):
        lacking.append("sketch")
    tables.num_rows_T[table.index] = len(slots_N)
    return _dropped(f"table {table.name}", len(tensors["ids"]) - len(slots_N), table.capacity) + [
        f"table {table.name}: the checkpoint has no {name} that fits, it starts anew" for name in lacking
    ]


def _restore_entity(tensors: Tensors, entities: Entities, entity: int, same_size: bool) -> list[str]:
    base, capacity = entities.layout.entities_E8[entity, [SLOT_BASE, CAPACITY]].tolist()
    order_N = None if same_size else _latest_first(tensors["stamps"])
    if same_size and "removed" in tensors:  # a save of format 1 has none
        entities.keys[base + tensors["removed"]] = REMOVED
    kept_N, slots_N = _slots(tensors, entities.keys, base, capacity, order_N)
    for name in ENTITY_STATE:
        getattr(entities, name)[slots_N] = tensors[name][kept_N]
    entities.records(entity)[slots_N - base] = tensors["records"][kept_N]
    name = entities.layout.entities[entity].name
    return _dropped(f"entity {name}", len(tensors["ids"]) - len(slots_N), capacity)


def _slots(
    tensors: Tensors, keys: Int64s, base: int, capacity: int, order_N: Int64s | None
) -> tuple[Int64s | slice, Int64s]:
    """Give the saved ids their own slots, or new ones in the order given: (which of them, their global slots)."""
    ids_N = tensors["ids"]
    if order_N is None:
        slots_N = base + tensors["slots"]
        keys[slots_N] = ids_N
        return slice(None), slots_N
    slots_in_order_N, slots_N = np.empty((2, len(ids_N)), np.int64)
    index.reinsert(keys, base, capacity, ids_N[order_N], slots_in_order_N)
    slots_N[order_N] = slots_in_order_N
    # As saved, which is by slot: home slots of every capacity lie in one order, so copying runs through memory.
    kept_N = np.flatnonzero(slots_N >= 0)
    return kept_N, slots_N[kept_N]


def _most_useful_first(tensors: Tensors, table: Table) -> Int64s:
    """The order in which eviction would take them, turned round."""
    stamps_N = tensors["stamps"]
    if table.spec.eviction == "lru":
        return _latest_first(stamps_N)
    # log2 of a count that halves every `lfu_half_life` rows, up to the same constant for all.
    return _latest_first(np.log2(tensors["counts"] + 1.0) + stamps_N / table.spec.lfu_half_life)


def _latest_first(scores_N: npt.NDArray[Any]) -> Int64s:
    """Descending; of equal ones the first comes last, which is as good as any and always the same."""
    return np.argsort(scores_N, kind="stable")[::-1]


def _restore_learner(snapshot: Snapshot, learner: LearnerState, schema: Schema, model: ModelSettings) -> list[str]:
    tensors, about = snapshot.tensors["learner"], snapshot.about
    notes = []
    same_network = about["dense"] == _dense_signature(schema, model)
    same_optimizer = about["dense_optimizer"] == model.optimizer.kind
    for name, array in learner.arrays.items():
        kept = name == "offset" or (same_network and (same_optimizer or name in WEIGHTS))
        if not kept or len(array) == 0:
            continue
        if name in tensors and tensors[name].shape == array.shape:
            array[:] = tensors[name]
        else:
            notes.append(f"the network: the checkpoint has no {name} that fits, it starts anew")
    if about["pairs"] == _pair_signature(schema, model):
        learner.pair_z[tensors["pair_slots"]] = tensors["pair_z"]
        learner.pair_n[tensors["pair_slots"]] = tensors["pair_n"]
    return notes


def _differences(about: dict[str, Any], schema: Schema, model: ModelSettings) -> list[str]:
    """What of a save cannot be used under this schema."""
    notes = [f"table {name} is new and starts empty" for name in _missing(about["tables"], schema.tables)]
    known = {table.name: table for table in schema.tables}
    notes += [f"table {name} is no longer configured and is dropped" for name in about["tables"] if name not in known]
    for name, saved in about["tables"].items():
        if name in known and (kind := known[name].spec.optimizer.kind) != saved["optimizer"]:
            notes.append(f"table {name}: its optimizer was {saved['optimizer']} and is {kind}: its state starts anew")
    signatures = _entity_signatures(schema)
    for name, saved in about["entities"].items():
        if signatures.get(name, {}).get("layout") != saved["layout"]:
            notes.append(f"entity {name} has other features now: its records start anew")
    if about["dense"] != _dense_signature(schema, model):
        notes.append("the network has other inputs or layers now: its dense weights start anew")
    elif about["dense_optimizer"] != model.optimizer.kind:
        was, now = about["dense_optimizer"], model.optimizer.kind
        notes.append(f"the network: its optimizer was {was} and is {now}: its state starts anew")
    if about["pairs"] != _pair_signature(schema, model):
        notes.append("the hashed pairs are others now: their weights start anew")
    return notes


def _missing(saved: dict[str, Any], tables: Iterable[Table]) -> list[str]:
    return [table.name for table in tables if table.name not in saved]


def _dropped(what: str, count: int, capacity: int) -> list[str]:
    return [f"{what}: no room for {count} ids in {capacity} slots, the least useful are dropped"] * (count > 0)


def _without_password(settings: Settings) -> dict[str, Any]:
    """The configuration as JSON values; checkpoints are copied about, so the broker's password is left out."""
    values = settings.model_dump(mode="json")
    password = urlsplit(settings.stream.url or "").password
    if password:
        values["stream"]["url"] = values["stream"]["url"].replace(f":{password}@", ":***@")
    return values


def _table_signatures(schema: Schema, settings: Settings) -> dict[str, Any]:
    """Per table: its width, the optimizer whose state it holds, its capacity in force and the configured one."""
    configured = {table.name: table.capacity for table in Schema.from_settings(settings).tables}
    return {
        table.name: {
            "width": table.width,
            "optimizer": table.spec.optimizer.kind,
            "capacity": table.capacity,
            "configured": configured[table.name],
        }
        for table in schema.tables
    }


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
