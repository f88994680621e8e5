"""What is here: the model's state, the tables, the inputs and limits of the configuration (`GET /v1/...`)."""

import math
import time
from importlib.metadata import PackageNotFoundError, version

import msgspec

from service.answers import Version, safe_integer
from service.health import MAX_HEARTBEAT_AGE_S
from service.parts import Parts
from trainer import board
from trainer.errors import LivebedError
from trainer.schema import Entity, Table


class TrainerState(msgspec.Struct, forbid_unknown_fields=True):
    """Whether the model is being trained; reads go on when it is not."""

    alive: bool
    heartbeat_age_ms: float


class ModelAnswer(msgspec.Struct, forbid_unknown_fields=True):
    """State of the live model. `step`: examples learned; `watermark`: us since 1970, all accepted before it is in.

    `publishing`: `live`, or `held` while readers do not get what is learned (`/v1/model/versions` says why).
    """

    name: str
    family: str
    version: Version
    generation: int
    step: int
    watermark: int
    age_ms: float | None
    schema_hash: str
    publishing: str
    trainer: TrainerState


class TableState(msgspec.Struct, forbid_unknown_fields=True):
    """One table. `rows` and `bytes` (training and live copy together) are null while the trainer has not said."""

    name: str
    width: int
    capacity: int
    rows: int | None
    bytes: int | None
    ttl_s: float | None
    admission: str
    eviction: str
    features: list[str]


class TablesAnswer(msgspec.Struct, forbid_unknown_fields=True):
    """All tables."""

    tables: list[TableState]


class InputInfo(msgspec.Struct, forbid_unknown_fields=True):
    """A named raw value that events and requests may give. `size`: most ids of a list, or numbers of a vector."""

    name: str
    kind: str
    size: int


class EntityInfo(msgspec.Struct, forbid_unknown_fields=True):
    """A user or item whose features are kept: `key` is the feature that names it, `features` what is filled in."""

    name: str
    key: str
    features: list[str]


class LimitsInfo(msgspec.Struct, forbid_unknown_fields=True):
    """What one request may ask for; `reply_bytes` is the largest reply that this allows."""

    body_bytes: int
    ids: int
    candidates: int
    events: int
    features: int
    string_chars: int
    top_k: int
    reply_bytes: int


class InfoAnswer(msgspec.Struct, forbid_unknown_fields=True):
    """What this service is and takes."""

    name: str
    version: str
    id_hash: str
    inputs: list[InputInfo]
    entities: list[EntityInfo]
    limits: LimitsInfo


class Readiness(msgspec.Struct, omit_defaults=True):
    """Whether this worker answers: `ok`, or `degraded` (reads go on). `checks` with `?verbose`."""

    status: str
    checks: list[dict[str, str | bool]] = []


def package_version() -> str:
    """Version of the installed distribution."""
    try:
        return version("livebed")
    except PackageNotFoundError:  # run from a source tree that is not installed
        return "0"


def model_answer(parts: Parts) -> ModelAnswer:
    """Body of `/v1/model`. Raises StoreUnavailable."""
    state, stamp = parts.model.state(), parts.model.stamp()
    heartbeat_age_ms = max(0.0, time.time() * 1000 - state.heartbeat_us / 1000)
    alive = not state.stopped and heartbeat_age_ms <= MAX_HEARTBEAT_AGE_S * 1000
    return ModelAnswer(
        name=parts.settings.name,
        family=parts.settings.model.family,
        version=safe_integer(stamp.version),
        generation=state.generation,
        step=state.step,
        watermark=stamp.watermark_us,
        age_ms=stamp.age_ms,
        schema_hash=f"{parts.schema.layout_hash:016x}",
        publishing="held" if is_held(parts) else "live",
        trainer=TrainerState(alive, round(heartbeat_age_ms, 3)),
    )


def is_held(parts: Parts) -> bool:
    """Whether the trainer says that readers do not get what it learns."""
    return board.read(parts.settings.metrics_path).value("livebed_publishing_held") == 1


def tables_answer(parts: Parts, counted: board.Snapshot | None = None) -> TablesAnswer:
    """Body of `/v1/tables`; reads the trainer's metrics, some hundred microseconds, unless they are at hand."""
    if counted is None:
        counted = board.read(parts.settings.metrics_path)
    return TablesAnswer([_table_state(parts, table, counted) for table in parts.schema.tables])


def _table_state(parts: Parts, table: Table, counted: board.Snapshot) -> TableState:
    rows = counted.value("livebed_table_rows", table=table.name)
    table_F = parts.schema.feature_table_F.tolist()
    features = [f.name for f, of in zip(parts.schema.id_features, table_F, strict=True) if of == table.index]
    known = None if math.isnan(rows) else int(rows)
    num_bytes = counted.value("livebed_table_bytes", table=table.name)
    spec = table.spec
    return TableState(
        name=table.name,
        width=table.width,
        capacity=_capacity(parts, table),
        rows=known,
        bytes=None if math.isnan(num_bytes) else int(num_bytes),
        ttl_s=table.ttl_s,
        admission=spec.admission.kind,
        eviction=spec.eviction,
        features=features,
    )


def _capacity(parts: Parts, table: Table) -> int:
    """In force, or as configured while there is no store."""
    try:
        return parts.model.capacity(table)
    except LivebedError:
        return table.capacity


def info_answer(parts: Parts) -> InfoAnswer:
    """Body of `/v1/info`."""
    limits = parts.limits
    widest = max(table.width for table in parts.schema.tables)
    return InfoAnswer(
        name=parts.settings.name,
        version=package_version(),
        id_hash="xxh64 of the UTF-8 text, seed 0; an integer is hashed as its decimal text",
        inputs=[InputInfo(spec.name, spec.kind, spec.size) for spec in parts.schema.inputs],
        entities=[_entity_info(parts, entity) for entity in parts.schema.entities],
        limits=LimitsInfo(
            body_bytes=int(limits.body_bytes),
            ids=limits.ids,
            candidates=limits.candidates,
            events=limits.events,
            features=limits.features,
            string_chars=limits.string_chars,
            top_k=limits.top_k,
            reply_bytes=limits.ids * (4 * widest + 1),
        ),
    )


def _entity_info(parts: Parts, entity: Entity) -> EntityInfo:
    names = [feature.name for feature in parts.schema.features]
    return EntityInfo(entity.name, names[entity.key_feature], [names[a] for a in entity.feature_E.tolist()])
