"""The schema: tables, features and entities of one configuration, compiled once into flat descriptor arrays.

Suffixes used here and by every kernel: A all features, F id features (categorical and list), C id columns
(a list feature owns `max_length` adjacent ones), M float columns, P hashed pairs, T tables, E features of an entity.

Words: an *input* is a named raw value on the wire ("duration_ms"); a *feature* is what the model sees of it.
Several features may read one input; an input that no feature reads is unknown, and refused.
"""

import json
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Literal

import numpy as np
import numpy.typing as npt
import xxhash

from trainer.budget import (
    Costs,
    available_bytes,
    capacity_for,
    check_capacity,
    sketch_lines,
    table_bytes,
    training_bytes,
)
from trainer.errors import SettingsError
from trainer.settings import (
    TIME_INPUT,
    CategoricalFeature,
    FeatureSettings,
    ListFeature,
    Settings,
    TableSettings,
    VectorFeature,
)

Int64s = npt.NDArray[np.int64]
InputKind = Literal["id", "ids", "number", "vector"]

DEFAULT_CAPACITY = 100_000
# A sketch that is not told when to halve does so after a sighting for every four counters: see trainer/README.md.
SIGHTINGS_A_LINE = 16


@dataclass(frozen=True)
class Table:
    """An embedding table as the kernels know it; `index` is its place in all T-sized arrays."""

    name: str
    index: int
    width: int
    capacity: int
    init_std: float
    ttl_s: float | None
    lr: float
    initial_accumulator: float
    eps: float
    spec: TableSettings  # as configured; its capacity may be none, and `capacity` above is the one in force
    sketch_lines: int  # of count admission, 0 without
    halve_every: int  # sightings after which the sketch's counters are halved
    training_bytes: int  # rows, optimizer state, index and sketch
    num_bytes: int  # all that and the copy that readers see: what `budget_bytes` bounds


@dataclass(frozen=True)
class Input:
    """A named raw value as it comes over the wire: `max_length` for ids, `width` for a vector."""

    name: str
    kind: InputKind
    size: int = 1


@dataclass(frozen=True)
class Feature:
    """What the model sees of one input. `first`: its first id column (id features) or float column (others)."""

    name: str
    index: int
    spec: FeatureSettings
    source: str
    is_id: bool
    first: int
    span: int
    id_index: int  # place in the F-sized arrays, -1 for float features
    entity: int  # index of the entity that may fill it in, -1 for none


@dataclass(frozen=True)
class Entity:
    """A user or item whose features are kept: one record of `words` 32-bit words an id.

    Record: a mask of ceil(E / 32) words (bit e: feature e is known), then per feature at `word_E[e]`:
    an id feature has one length word and two words an id (low, high); a float feature one word a number.
    """

    name: str
    index: int
    key_feature: int  # the feature whose value names the entity
    key_column: int  # that feature's id column
    capacity: int
    feature_E: Int64s
    word_E: Int64s
    words: int


@dataclass(frozen=True)
class Schema:
    """Everything the kernels need to know of a configuration. Arrays are int64 and contiguous."""

    tables: tuple[Table, ...]
    features: tuple[Feature, ...]
    inputs: tuple[Input, ...]
    entities: tuple[Entity, ...]
    pairs_P2: Int64s
    num_id_columns: int
    num_floats: int
    x_width: int
    label_threshold: float | None
    layout_hash: int
    costs: Costs

    @classmethod
    def from_settings(cls, settings: Settings) -> "Schema":
        """Compile and cross-check; raises SettingsError naming the field."""
        costs = Costs.of(settings)
        tables = tuple(
            _table(index, name, spec, _capacity(name, spec, costs), costs)
            for index, (name, spec) in enumerate(settings.tables.items())
        )
        features = _features(settings, {table.name: table.index for table in tables})
        id_columns = sum(f.span for f in features if f.is_id)
        schema = cls(
            tables=tables,
            features=features,
            inputs=_inputs(features),
            entities=_entities(settings, features),
            pairs_P2=_pairs(settings, features),
            num_id_columns=id_columns,
            num_floats=sum(f.span for f in features if not f.is_id),
            x_width=sum(tables[_table_of(settings, f)].width if f.is_id else f.span for f in features),
            label_threshold=settings.label.threshold,
            layout_hash=_layout_hash(settings),
            costs=costs,
        )
        _check_used(schema)
        return schema

    def with_capacities(self, capacities: Mapping[str, int]) -> "Schema":
        """The same schema with other numbers of rows for the tables named.

        Raises SettingsError if there is no such table, or its budget does not pay for so many.
        """
        for name, capacity in capacities.items():
            known = self.table(name)
            if known is None:
                names = ", ".join(table.name for table in self.tables)
                raise SettingsError(f"tables.{name}", got=name, wanted=f"one of the tables {names}")
            check_capacity(name, known.spec, capacity, self.costs)
        tables = tuple(
            _table(table.index, table.name, table.spec, capacities.get(table.name, table.capacity), self.costs)
            for table in self.tables
        )
        return replace(self, tables=tables)

    @property
    def num_bytes(self) -> int:
        """What all tables cost, their copies for readers included."""
        return sum(table.num_bytes for table in self.tables)

    @cached_property
    def id_features(self) -> tuple[Feature, ...]:
        """The F features that look up rows, in order."""
        return tuple(f for f in self.features if f.is_id)

    @cached_property
    def feature_column_F(self) -> Int64s:
        """First id column of each id feature."""
        return _int64s(f.first for f in self.id_features)

    @cached_property
    def feature_length_F(self) -> Int64s:
        """Most ids of each id feature: 1, or a list's max_length."""
        return _int64s(f.span for f in self.id_features)

    @cached_property
    def feature_list_F(self) -> Int64s:
        """1 where the id feature is a list."""
        return _int64s(int(isinstance(f.spec, ListFeature)) for f in self.id_features)

    @cached_property
    def feature_mean_F(self) -> Int64s:
        """1 where a list is pooled by its mean, 0 by its sum."""
        return _int64s(int(isinstance(f.spec, ListFeature) and f.spec.pooling == "mean") for f in self.id_features)

    @cached_property
    def feature_table_F(self) -> Int64s:
        """Table of each id feature."""
        index = {table.name: table.index for table in self.tables}
        return _int64s(index[_table_name(f)] for f in self.id_features)

    @cached_property
    def feature_width_F(self) -> Int64s:
        """Row width of each id feature."""
        return _int64s(self.tables[t].width for t in self.feature_table_F)

    @cached_property
    def feature_x_F(self) -> Int64s:
        """Where each id feature's pooled row starts in the network's input x."""
        return _int64s(self._x_offsets[f.index] for f in self.id_features)

    @cached_property
    def float_x_M(self) -> Int64s:
        """Where each float column lies in x."""
        return _int64s(self._x_offsets[f.index] + k for f in self.features if not f.is_id for k in range(f.span))

    @cached_property
    def column_table_C(self) -> Int64s:
        """Table of each id column."""
        return np.repeat(self.feature_table_F, self.feature_length_F)

    @cached_property
    def kind_A(self) -> Int64s:
        """1 where a feature is an id feature, 0 where it is floats."""
        return _int64s(int(f.is_id) for f in self.features)

    @cached_property
    def first_A(self) -> Int64s:
        """First id or float column of each feature."""
        return _int64s(f.first for f in self.features)

    @cached_property
    def span_A(self) -> Int64s:
        """Number of id or float columns of each feature."""
        return _int64s(f.span for f in self.features)

    @cached_property
    def id_index_A(self) -> Int64s:
        """Place of each feature among the id features, -1 for floats."""
        return _int64s(f.id_index for f in self.features)

    @cached_property
    def _x_offsets(self) -> list[int]:
        offsets, at = [], 0
        for feature in self.features:
            offsets.append(at)
            at += int(self.feature_width_F[feature.id_index]) if feature.is_id else feature.span
        return offsets

    def table(self, name: str) -> Table | None:
        """The table of that name, if there is one."""
        return next((table for table in self.tables if table.name == name), None)

    def entity(self, name: str) -> Entity | None:
        """The entity of that name, if there is one."""
        return next((entity for entity in self.entities if entity.name == name), None)


def _int64s(values: Iterable[int]) -> Int64s:
    return np.array(list(values), np.int64)


def _capacity(name: str, spec: TableSettings, costs: Costs) -> int:
    return capacity_for(name, spec, costs) if spec.budget_bytes is not None else spec.capacity or DEFAULT_CAPACITY


def _table(index: int, name: str, spec: TableSettings, capacity: int, costs: Costs) -> Table:
    optimizer, lines = spec.optimizer, sketch_lines(spec.admission, capacity)
    return Table(
        name=name,
        index=index,
        width=spec.width,
        capacity=capacity,
        init_std=spec.init_std,
        ttl_s=spec.ttl_s,
        lr=optimizer.lr,
        initial_accumulator=optimizer.initial_accumulator if optimizer.kind == "adagrad" else 0.0,
        eps=optimizer.eps,
        spec=spec,
        sketch_lines=lines,
        halve_every=spec.admission.halve_every or max(1, SIGHTINGS_A_LINE * lines),
        training_bytes=training_bytes(spec, capacity, costs),
        num_bytes=table_bytes(spec, capacity, costs),
    )


def _table_name(feature: Feature) -> str:
    spec = feature.spec
    return (spec.table if isinstance(spec, CategoricalFeature | ListFeature) else None) or feature.name


def _table_of(settings: Settings, feature: Feature) -> int:
    return list(settings.tables).index(_table_name(feature))


def _span(spec: FeatureSettings) -> int:
    if isinstance(spec, ListFeature):
        return spec.max_length
    return spec.width if isinstance(spec, VectorFeature) else 1


def _features(settings: Settings, tables: dict[str, int]) -> tuple[Feature, ...]:
    entities = list(settings.entities)
    features: list[Feature] = []
    columns = {True: 0, False: 0}
    num_ids = 0
    for index, (name, spec) in enumerate(settings.features.items()):
        is_id = isinstance(spec, CategoricalFeature | ListFeature)
        span = _span(spec)
        table = getattr(spec, "table", None) or name
        if is_id and table not in tables:
            raise SettingsError(f"features.{name}.table", got=table, wanted=f"one of the tables {', '.join(tables)}")
        if spec.entity is not None and spec.entity not in entities:
            wanted = f"one of the entities {', '.join(entities) or '(none declared)'}"
            raise SettingsError(f"features.{name}.entity", got=spec.entity, wanted=wanted)
        features.append(
            Feature(
                name=name,
                index=index,
                spec=spec,
                source=spec.source or name,
                is_id=is_id,
                first=columns[is_id],
                span=span,
                id_index=num_ids if is_id else -1,
                entity=entities.index(spec.entity) if spec.entity is not None else -1,
            )
        )
        columns[is_id] += span
        num_ids += is_id
    return tuple(features)


def input_of(feature: Feature) -> Input:
    """The raw value that a feature reads."""
    spec = feature.spec
    if isinstance(spec, ListFeature):
        return Input(feature.source, "ids", spec.max_length)
    if isinstance(spec, VectorFeature):
        return Input(feature.source, "vector", spec.width)
    if isinstance(spec, CategoricalFeature) and spec.transform == "none":
        return Input(feature.source, "id")
    return Input(feature.source, "number")


def _inputs(features: tuple[Feature, ...]) -> tuple[Input, ...]:
    inputs: dict[str, Input] = {}
    for feature in features:
        wanted = input_of(feature)
        if feature.source == TIME_INPUT:
            if wanted.kind != "number":
                field, got = f"features.{feature.name}.transform", getattr(feature.spec, "transform", feature.spec.kind)
                raise SettingsError(field, got=got, wanted=f"a transform of a number, for {TIME_INPUT} is one")
            continue
        known = inputs.setdefault(feature.source, wanted)
        if known != wanted:
            raise SettingsError(
                f"features.{feature.name}.source",
                got=f"{feature.source} as {wanted.kind} of size {wanted.size}",
                wanted=f"the same kind and size as its other features, {known.kind} of size {known.size}",
            )
    return tuple(inputs.values())


def _entities(settings: Settings, features: tuple[Feature, ...]) -> tuple[Entity, ...]:
    by_name = {feature.name: feature for feature in features}
    entities = []
    for index, (name, spec) in enumerate(settings.entities.items()):
        key = by_name.get(spec.key)
        if key is None or not isinstance(key.spec, CategoricalFeature):
            raise SettingsError(f"entities.{name}.key", got=spec.key, wanted="the name of a categorical feature")
        if key.entity == index:
            raise SettingsError(f"features.{spec.key}.entity", got=name, wanted="no entity, for it is that one's key")
        own = [feature for feature in features if feature.entity == index]
        words, offsets = (len(own) + 31) // 32, []
        for feature in own:
            offsets.append(words)
            words += 1 + 2 * feature.span if feature.is_id else feature.span
        entities.append(
            Entity(
                name=name,
                index=index,
                key_feature=key.index,
                key_column=key.first,
                capacity=spec.capacity,
                feature_E=_int64s(feature.index for feature in own),
                word_E=_int64s(offsets),
                words=max(words, 1),
            )
        )
    return tuple(entities)


def _pairs(settings: Settings, features: tuple[Feature, ...]) -> Int64s:
    single = {f.name: f.first for f in features if isinstance(f.spec, CategoricalFeature)}
    if settings.model.pairs == "all":
        names = list(single)
        pairs = [(a, b) for i, a in enumerate(names) for b in names[i + 1 :]]
    else:
        pairs = list(settings.model.pairs)
    for pair in pairs:
        for name in pair:
            if name not in single:
                raise SettingsError("model.pairs", got=name, wanted=f"categorical features: {', '.join(single)}")
    return np.array([(single[a], single[b]) for a, b in pairs], np.int64).reshape(-1, 2)


def _check_used(schema: Schema) -> None:
    used = set(schema.feature_table_F.tolist())
    for table in schema.tables:
        if table.index not in used:
            raise SettingsError(f"tables.{table.name}", got="no feature that reads it", wanted="at least one")
    if schema.x_width == 0:
        raise SettingsError("features", got="none", wanted="at least one feature")


def _layout_hash(settings: Settings) -> int:
    """Hash of what decides where things lie; two processes with equal hashes may share a store."""
    model = settings.model
    parts = {
        "tables": {n: t.width for n, t in settings.tables.items()},  # capacities change while all runs
        "features": {n: f.model_dump(mode="json") for n, f in settings.features.items()},
        "entities": {n: e.model_dump(mode="json") for n, e in settings.entities.items()},
        "model": model.model_dump(mode="json", exclude={"optimizer", "wide_optimizer", "bias_lr", "seed"}),
        "num_shards": settings.store.num_shards,
    }
    return xxhash.xxh64_intdigest(json.dumps(parts, sort_keys=False).encode())


def check_memory(schema: Schema, field: str) -> None:
    """Refuse tables that this machine has no memory for beside what it holds now. Raises SettingsError."""
    available = available_bytes()
    if available is not None and schema.num_bytes > available:
        wanted = f"at most {available / 1e9:,.1f} GB, which is the memory that is available"
        raise SettingsError(field, got=f"tables of {schema.num_bytes / 1e9:,.1f} GB", wanted=wanted)
