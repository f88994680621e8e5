"""JSON or MessagePack -> RawEvents: one object, an array, NDJSON lines, or columns; each bad event is refused alone.

The schema becomes msgspec types once, so that names, types, lengths and unknown fields are checked in C while
parsing. A body that is not well-formed raises BadEvent("malformed"); an event that is not valid becomes a Rejection.

    {"features": {"user_id": 7, "video_id": "v1"}, "label": 1, "event_id": "e1", "time_ms": 1650000000000}
    {"entity": "video", "id": "v1", "features": {"duration_ms": 15000}}
    {"columns": {"user_id": [7, 8], "video_id": ["v1", "v2"]}, "labels": [1, 0]}
"""

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Annotated, Any

import msgspec
import numpy as np
import numpy.typing as npt

from trainer.errors import BadEvent
from trainer.events import InputColumn, Inputs, RawEvents, Rejection
from trainer.hashing import hash_together, hash_values, integers_of
from trainer.schema import Input, Schema

MAX_STRING = 256  # characters
MAX_MAGNITUDE = 1e18  # a number past this is a mistake; times in microseconds still fit
MIN_INTEGER, MAX_INTEGER = -(2**63), 2**63 - 1
MAX_TIME_MS = 253_402_300_799_999  # the year 9999
UNREADABLE = (msgspec.DecodeError, UnicodeDecodeError, RecursionError)  # the last: nested too deep
# What a MessagePack map begins with: fixmap, map 16, map 32.
MSGPACK_MAPS = bytes([*range(0x80, 0x90), 0xDE, 0xDF])
PATH = re.compile(r" - at `\$?(.*)`$", re.DOTALL)

Text = Annotated[str, msgspec.Meta(max_length=MAX_STRING)]
Integer = Annotated[int, msgspec.Meta(ge=MIN_INTEGER, le=MAX_INTEGER)]
Number = Annotated[float, msgspec.Meta(ge=-MAX_MAGNITUDE, le=MAX_MAGNITUDE)]
TimeMs = Annotated[int, msgspec.Meta(ge=0, le=MAX_TIME_MS)]


def id_type(max_string: int) -> Any:
    """The msgspec type of an id: a 64-bit integer, or text of so many characters."""
    return Integer | Annotated[str, msgspec.Meta(max_length=max_string)]


def value_type(spec: Input, id_: Any) -> Any:
    """The msgspec type of one input's value."""
    if spec.kind == "ids":
        return Annotated[list[id_], msgspec.Meta(max_length=spec.size)]
    if spec.kind == "vector":
        return Annotated[list[Number], msgspec.Meta(min_length=spec.size, max_length=spec.size)]
    return id_ if spec.kind == "id" else Number


@dataclass(frozen=True)
class Codec:
    """Decoders of one format; `map_bytes`: what an object may begin with."""

    name: str
    map_bytes: bytes
    event: Any
    events: Any
    table: Any
    raw: Any
    raws: Any
    members: Any

    @classmethod
    def of(cls, name: str, module: Any, map_bytes: bytes, *, event: Any, table: Any) -> "Codec":
        """Of a module of msgspec."""
        types = (event, list[event], table, msgspec.Raw, list[msgspec.Raw], dict[str, msgspec.Raw])
        return cls(name, map_bytes, *(module.Decoder(kind) for kind in types))


class EventParser:
    """Parses events of one schema. msgspec types: `Row`, of a row of inputs (None: not given), and `Id`, of an id."""

    def __init__(self, schema: Schema, *, max_string: int = MAX_STRING) -> None:
        self.schema = schema
        self.Id = id_type(max_string)
        self._attributes = [f"f{k}" for k in range(len(schema.inputs))]
        self._entity_inputs = {
            entity.name: {
                attribute: spec.name
                for attribute, spec in zip(self._attributes, schema.inputs, strict=True)
                if spec.name in {schema.features[f].source for f in entity.feature_E}
            }
            for entity in schema.entities
        }
        rename = {a: spec.name for a, spec in zip(self._attributes, schema.inputs, strict=True)}
        options: dict[str, Any] = {"forbid_unknown_fields": True, "gc": False}
        types = [value_type(spec, self.Id) for spec in schema.inputs]
        self.Row: Any = msgspec.defstruct(
            "Row", [(a, t | None, None) for a, t in zip(self._attributes, types, strict=True)], rename=rename, **options
        )
        column_types: list[Any] = [(a, _list_of(t) | None, None) for a, t in zip(self._attributes, types, strict=True)]
        columns = msgspec.defstruct("Columns", column_types, rename=rename, **options)
        event_type: Any = msgspec.defstruct("Event", _event_fields(self.Row, self.Id), **options)
        table_type: Any = msgspec.defstruct("Table", _table_fields(columns), **options)
        self._json = Codec.of("JSON", msgspec.json, b"{", event=event_type, table=table_type)
        self._msgpack = Codec.of("MessagePack", msgspec.msgpack, MSGPACK_MAPS, event=event_type, table=table_type)

    def parse(
        self, body: bytes, *, accepted_us: int, max_events: int | None = None, msgpack: bool = False
    ) -> tuple[RawEvents, list[Rejection]]:
        """All valid events of a body, and why the others were refused.

        Raises:
            BadEvent: `malformed` (not well-formed), `invalid` (columns that do not fit), `too_many` (over max_events).
        """
        codec, text = (self._msgpack, body) if msgpack else (self._json, body.strip())
        if not text:
            raise BadEvent("malformed", "the body is empty")
        if text[0] in codec.map_bytes and b"columns" in text and _is_table(codec, text):
            raw = self._parse_table(codec, text, accepted_us)
            _check_count(raw.inputs.count, max_events)
            return raw, []
        events, places, rejected = _parse_events(codec, text, max_events)
        return self._raw_events(events, places, rejected, accepted_us)

    def inputs(self, rows: Sequence[Any]) -> Inputs:
        """Rows (of type `Row`) -> columns."""
        values = zip(*map(msgspec.structs.astuple, rows), strict=True)
        return Inputs(len(rows), _columns(dict(zip(self.schema.inputs, values, strict=False))))

    def _parse_table(self, codec: Codec, text: bytes, accepted_us: int) -> RawEvents:
        try:
            table = codec.table.decode(text)
        except msgspec.ValidationError as error:
            raise BadEvent(*describe(error)) from None
        except UNREADABLE as error:
            raise _malformed(codec, error) from None
        count = len(table.labels)
        given = {
            spec: values
            for spec, values in zip(self.schema.inputs, msgspec.structs.astuple(table.columns), strict=True)
            if values is not None
        }
        for spec, values in given.items():
            _check_length(f"columns.{spec.name}", values, count)
        for name in ("event_ids", "times_ms"):
            _check_length(name, getattr(table, name) or table.labels, count)
        labels = self._labels([float(label) for label in table.labels])
        if np.isnan(labels).any():
            raise BadEvent("bad_label", _label_sentence(table.labels[int(np.isnan(labels).argmax())]))
        times = np.array(table.times_ms or [0] * count, np.int64)
        return _examples(Inputs(count, _columns(given)), labels, times, table.event_ids or [None] * count, accepted_us)

    def _raw_events(
        self, events: list[Any], places: list[int], rejected: list[Rejection], accepted_us: int
    ) -> tuple[RawEvents, list[Rejection]]:
        reasons: list[tuple[str, str] | None] = [self._refuse(event) for event in events]
        if any(reasons):
            rejected = rejected + [Rejection(p, *r) for p, r in zip(places, reasons, strict=True) if r is not None]
            rejected.sort(key=lambda rejection: rejection.index)
            events = [event for event, reason in zip(events, reasons, strict=True) if reason is None]
        empty = self.Row()
        raw = _examples(
            self.inputs([event.features or empty for event in events]),
            self._labels([float("nan") if event.label is None else float(event.label) for event in events]),
            np.array([event.time_ms or 0 for event in events], np.int64),
            [event.event_id for event in events],
            accepted_us,
        )
        for b, event in enumerate(events):
            if event.entity is not None:
                entity = self.schema.entity(event.entity)
                raw.entity_B[b] = -1 if entity is None else entity.index
                raw.entity_id_B[b] = hash_values([event.id])[0]
        return raw, rejected

    def _refuse(self, event: Any) -> tuple[str, str] | None:
        """Why an event that parses cannot be learned from, or None."""
        if event.entity is not None:
            return self._refuse_feature_event(event)
        if event.id is not None:
            return "invalid", "`id` belongs to a feature event, which also names its `entity`"
        if event.label is None:
            return "missing_label", "an example needs `label`; a feature event needs `entity` and `id`"
        if self.schema.label_threshold is None and event.label not in {0, 1}:
            return "bad_label", _label_sentence(event.label)
        return None

    def _refuse_feature_event(self, event: Any) -> tuple[str, str] | None:
        if self.schema.entity(event.entity) is None:
            known = ", ".join(entity.name for entity in self.schema.entities) or "none declared"
            return "unknown_entity", f"entity {event.entity!r} is unknown; entities: {known}"
        if event.id is None:
            return "invalid", "a feature event needs `id`, the id of its entity"
        if event.label is not None:
            return "invalid", "a feature event has no label"
        own = self._entity_inputs[event.entity]
        given = [a for a in self._attributes if event.features is not None and getattr(event.features, a) is not None]
        if given and own.keys().isdisjoint(given):  # one that gives nothing only says that there is such an entity
            wanted = ", ".join(own.values()) or "none declared"
            return "invalid", f"`features` has nothing of entity {event.entity!r}; its features: {wanted}"
        return None

    def _labels(self, labels: list[float]) -> npt.NDArray[np.float32]:
        """float32 labels, 0 or 1; NaN where a label is no outcome."""
        threshold = self.schema.label_threshold
        values = np.array(labels, np.float64)
        if threshold is not None:
            return np.where(np.isnan(values), np.nan, values >= threshold).astype(np.float32)
        return np.where((values == 0) | (values == 1), values, np.nan).astype(np.float32)


def _is_table(codec: Codec, text: bytes) -> bool:
    try:
        return "columns" in codec.members.decode(text)
    except UNREADABLE:
        return False


def _parse_events(codec: Codec, text: bytes, max_events: int | None) -> tuple[list[Any], list[int], list[Rejection]]:
    """Valid events with their places, and the refused ones. The fast way first: all at once, all valid."""
    try:
        if codec.name == "JSON" and not text.startswith(b"["):
            events = codec.event.decode_lines(text)
        elif text[0] in codec.map_bytes:
            events = [codec.event.decode(text)]
        else:
            events = codec.events.decode(text)
    except UNREADABLE:
        return _parse_one_by_one(codec, text, max_events)
    _check_count(len(events), max_events)
    return events, list(range(len(events))), []


def _parse_one_by_one(
    codec: Codec, text: bytes, max_events: int | None
) -> tuple[list[Any], list[int], list[Rejection]]:
    items = _split(codec, text)
    _check_count(len(items), max_events)
    events, places, rejected = [], [], []
    for index, item in enumerate(items):
        try:
            events.append(codec.event.decode(item))
            places.append(index)
        except UNREADABLE as error:
            rejected.append(Rejection(index, *describe(error)))
    return events, places, rejected


def _split(codec: Codec, text: bytes) -> Sequence[bytes | msgspec.Raw]:
    """The items of an array, or the lines; one that is not well-formed at all is the body's fault, not an event's."""
    is_lines = codec.name == "JSON" and not text.startswith(b"[")
    lines = [line for line in text.split(b"\n") if line.strip()] if is_lines else []
    try:
        if not is_lines and text[0] not in codec.map_bytes:
            raws: list[msgspec.Raw] = codec.raws.decode(text)
            return raws
        if len(lines) <= 1:
            codec.raw.decode(text)
    except UNREADABLE as error:
        raise _malformed(codec, error) from None
    return lines or [text]


def _malformed(codec: Codec, error: Exception) -> BadEvent:
    return BadEvent("malformed", f"the body is not valid {codec.name}: {error}")


def _list_of(item: Any) -> Any:
    return list[item | None]


def _event_fields(row: Any, id_: Any) -> list[tuple[str, Any, Any]]:
    return [
        ("features", row | None, None),
        ("label", bool | Number | None, None),
        ("event_id", Text | None, None),
        ("time_ms", TimeMs | None, None),
        ("entity", Text | None, None),
        ("id", id_ | None, None),
    ]


def _table_fields(columns: Any) -> list[Any]:
    return [
        ("columns", columns),
        ("labels", list[bool | Number]),
        ("event_ids", list[Text | None] | None, None),
        ("times_ms", list[TimeMs] | None, None),
    ]


def _examples(
    inputs: Inputs,
    labels_B: npt.NDArray[np.float32],
    times: npt.NDArray[np.int64],
    event_ids: list[str | None],
    accepted_us: int,
) -> RawEvents:
    count = inputs.count
    keys = np.zeros(count, np.uint64)
    if any(event_id is not None for event_id in event_ids):
        hashed = hash_values([event_id or "" for event_id in event_ids]).view(np.uint64)
        keys = np.where([event_id is not None for event_id in event_ids], hashed, np.uint64(0))
    return RawEvents(
        inputs=inputs,
        labels_B=labels_B,
        event_time_ms_B=times,
        accepted_us_B=np.full(count, accepted_us, np.int64),
        event_key_B=keys,
        entity_B=np.full(count, -1, np.int16),
        entity_id_B=np.zeros(count, np.int64),
    )


def _columns(given: Mapping[Input, Sequence[Any]]) -> dict[str, InputColumn]:
    """Inputs' values (None: not given) as columns, without those that no row gives."""
    # Most columns are integers and given by every row: these are taken at once, with no look at each value before.
    integers = {spec: integers_of(values) if spec.kind == "id" else None for spec, values in given.items()}
    whole = {spec: column for spec, column in integers.items() if column is not None}
    hashed = dict(zip(whole, hash_together(list(whole.values())), strict=True)) if whole else {}
    columns = {}
    for spec, values in given.items():
        column = InputColumn(None, hashed[spec]) if spec in hashed else _column(spec, values)
        if column is not None:
            columns[spec.name] = column
    return columns


def _column(spec: Input, values: Sequence[Any]) -> InputColumn | None:
    """One input's values (None: not given) as a column; None when no row gives it."""
    given, num_missing = None, values.count(None)
    if num_missing:
        if num_missing == len(values):
            return None
        given = np.array([value is not None for value in values], np.bool_)
        values = [value for value in values if value is not None]
    if spec.kind == "id":
        return InputColumn(given, ids=hash_values(values))
    if spec.kind == "ids":
        lengths = np.fromiter(map(len, values), np.int32, len(values))
        return InputColumn(given, ids=hash_values([item for value in values for item in value]), lengths=lengths)
    return InputColumn(given, numbers=np.array(values, np.float64).ravel())


def describe(error: Exception) -> tuple[str, str]:
    """A msgspec error as (code, sentence); the sentence ends in the JSON path of the value."""
    text = str(error)
    if not isinstance(error, msgspec.ValidationError):
        return "malformed", f"not valid JSON: {text}"
    path = PATH.search(text)
    where = path.group(1).lstrip(".") if path else ""
    sentence = PATH.sub("", text)
    if "unknown field" in sentence:
        return "unknown_feature", f"{sentence}" + (f" in {where}" if where else "")
    return "invalid", f"{where}: {sentence}" if where else sentence


def _label_sentence(label: object) -> str:
    return f"label is {label!r}, wanted 0 or 1 (set label.threshold for other numbers)"


def _check_count(count: int, max_events: int | None) -> None:
    if max_events is not None and count > max_events:
        raise BadEvent("too_many", f"{count} events, at most {max_events} a request")


def _check_length(name: str, values: Sequence[Any], count: int) -> None:
    if len(values) != count:
        raise BadEvent("invalid", f"{name} has {len(values)} values, labels has {count}")
