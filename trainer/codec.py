"""The log's entries: RawEvents <-> protobuf, and any entry (ours, or a plain XADD) -> RawEvents.

An entry has one field: `proto`, an EventBatch (proto/trainer/event.proto), which is what the service writes; or
`json`, what `event_json` reads, for any other producer. Decoding a 64-event batch of 10 features costs well under
2 us an event (tests/bench/events.py prints it).
"""

from collections.abc import Mapping
from typing import Any

import numpy as np
import numpy.typing as npt
from google.protobuf.message import DecodeError

from trainer.errors import BadEvent
from trainer.event_json import MAX_MAGNITUDE, EventParser
from trainer.event_pb2 import EventBatch as EventBatchMessage
from trainer.event_pb2 import InputColumn as InputColumnMessage
from trainer.events import InputColumn, Inputs, RawEvents, Rejection, select
from trainer.hashing import hash_values
from trainer.schema import Input, Schema

MAX_SKEW_US = 60_000_000  # clocks of producer and broker may differ by this much
MAX_ENTRY_EVENTS = 65_536  # one entry is one decode; a larger one would hold up the loop


def encode(schema: Schema, raw: RawEvents) -> bytes:
    """RawEvents -> the bytes of an EventBatch message."""
    message = EventBatchMessage(
        count=raw.inputs.count,
        columns=[_encode_column(name, column) for name, column in raw.inputs.columns.items()],
        labels=raw.labels_B.tobytes(),
        accepted_times_us=raw.accepted_us_B.tobytes(),
    )
    if raw.event_time_ms_B.any():
        message.event_times_ms = raw.event_time_ms_B.tobytes()
    if raw.event_key_B.any():
        message.event_keys = raw.event_key_B.tobytes()
    if (raw.entity_B >= 0).any():
        message.entity_names.extend(entity.name for entity in schema.entities)
        message.entities = (raw.entity_B + 1).astype(np.uint8).tobytes()
        message.entity_ids = raw.entity_id_B.tobytes()
    return message.SerializeToString()


def _encode_column(name: str, column: InputColumn) -> InputColumnMessage:
    message = InputColumnMessage(name=name)
    if column.given_B is not None:
        message.given = column.given_B.tobytes()
    if column.lengths is not None:
        message.lengths = column.lengths.tobytes()
    if column.ids is not None:
        message.ids = column.ids.tobytes()
    if column.numbers is not None:
        message.numbers = column.numbers.tobytes()
    return message


class EntryDecoder:
    """Decodes log entries of one schema."""

    def __init__(self, schema: Schema) -> None:
        self.schema = schema
        self.parser = EventParser(schema)
        self._inputs = {spec.name: spec for spec in schema.inputs}
        self._entities = {entity.name: entity.index for entity in schema.entities}

    def decode_entry(self, entry: Mapping[bytes, bytes], accepted_us: int) -> tuple[RawEvents, list[Rejection]]:
        """An entry's valid events, and why its others were refused; `accepted_us` where the entry names no time.

        Raises:
            BadEvent: nothing of the entry can be used.
        """
        if b"proto" in entry:
            return self.decode(entry[b"proto"], accepted_us)
        if b"json" in entry:
            return self.parser.parse(entry[b"json"], accepted_us=accepted_us, max_events=MAX_ENTRY_EVENTS)
        names = ", ".join(sorted(name.decode("utf-8", "replace")[:64] for name in entry)[:8])
        raise BadEvent("no_payload", f"an entry needs the field `proto` or `json`, got {names or 'no field'}")

    def decode(self, payload: bytes, accepted_us: int) -> tuple[RawEvents, list[Rejection]]:
        """The bytes of an EventBatch message -> its valid events and the refused ones."""
        try:
            message = EventBatchMessage.FromString(payload)
        except DecodeError:
            raise BadEvent("malformed", "the entry is no EventBatch message") from None
        count = message.count
        if not 0 < count <= MAX_ENTRY_EVENTS:
            raise BadEvent("invalid", f"count is {count}, wanted 1 to {MAX_ENTRY_EVENTS}")
        columns = {column.name: self._column(column, count) for column in message.columns}
        if len(columns) != len(message.columns):
            raise BadEvent("invalid", "columns: the same input is given twice")
        entity, entity_id = self._decode_entities(message, count)
        raw = RawEvents(
            inputs=Inputs(count, columns),
            labels_B=_array("labels", message.labels, np.float32, count, np.nan),
            event_time_ms_B=_array("event_times_ms", message.event_times_ms, np.int64, count, 0),
            accepted_us_B=_believable(
                _array("accepted_times_us", message.accepted_times_us, np.int64, count, accepted_us), accepted_us
            ),
            event_key_B=_array("event_keys", message.event_keys, np.uint64, count, 0),
            entity_B=entity,
            entity_id_B=entity_id,
        )
        return self._refuse_rows(raw)

    def _column(self, message: InputColumnMessage, count: int) -> InputColumn:
        spec = self._inputs.get(message.name)
        if spec is None:
            raise BadEvent("unknown_feature", f"{message.name[:64]!r} is no input; inputs: {', '.join(self._inputs)}")
        given, num_given = None, count
        if message.given:
            given = _array(f"{spec.name}.given", message.given, np.uint8, count, None).astype(np.bool_)
            num_given = int(np.count_nonzero(given))
        if spec.kind in {"number", "vector"}:
            numbers = _array(f"{spec.name}.numbers", message.numbers, np.float64, num_given * spec.size, None)
            return InputColumn(given, numbers=numbers)
        if spec.kind == "id":
            return InputColumn(given, ids=_ids(spec, message, num_given))
        lengths = _array(f"{spec.name}.lengths", message.lengths, np.int32, num_given, None)
        if num_given and not 0 <= lengths.min() <= lengths.max() <= spec.size:
            raise BadEvent("invalid", f"{spec.name}: a list of {lengths.max()} items, at most {spec.size}")
        return InputColumn(given, ids=_ids(spec, message, int(lengths.sum())), lengths=lengths)

    def _decode_entities(
        self, message: EventBatchMessage, count: int
    ) -> tuple[npt.NDArray[np.int16], npt.NDArray[np.int64]]:
        if not message.entities:
            return np.full(count, -1, np.int16), np.zeros(count, np.int64)
        places = _array("entities", message.entities, np.uint8, count, 0)
        known = [self._entities.get(name, -2) for name in message.entity_names]
        if places.max() > len(known):
            raise BadEvent("invalid", f"entities points to name {places.max()} of {len(known)}")
        entity = np.array([-1, *known], np.int16)[places]
        return entity, _array("entity_ids", message.entity_ids, np.int64, count, None)

    def _refuse_rows(self, raw: RawEvents) -> tuple[RawEvents, list[Rejection]]:
        """Take out the events that are well-formed but must not reach a table."""
        labels = raw.labels_B
        example = raw.entity_B == -1
        reasons: dict[int, tuple[str, str]] = {}
        for b in np.flatnonzero(example & ~((labels == 0) | (labels == 1))):
            reasons[int(b)] = (
                "bad_label",
                f"label is {labels[b]}, wanted the outcome, 0 or 1: label.threshold is the encoder's",
            )
        for b in np.flatnonzero(raw.entity_B == -2):
            reasons[int(b)] = ("unknown_entity", f"entities: {', '.join(self._entities) or 'none declared'}")
        for name, column in raw.inputs.columns.items():
            if column.numbers is None or np.abs(column.numbers).max(initial=0.0) <= MAX_MAGNITUDE:
                continue  # the comparison is false for NaN too
            bad = ~(np.abs(column.numbers.reshape(-1, self._inputs[name].size)) <= MAX_MAGNITUDE).all(axis=1)
            for b in np.flatnonzero(_given(column, raw.inputs.count))[bad]:
                reasons[int(b)] = ("not_finite", f"{name}: a number is not finite, or past {MAX_MAGNITUDE:g}")
        if not reasons:
            return raw, []
        keep = np.ones(raw.inputs.count, np.bool_)
        keep[list(reasons)] = False
        return select(raw, keep), [Rejection(b, *reasons[b]) for b in sorted(reasons)]


def _believable(claimed_us_B: npt.NDArray[np.int64], entry_us: int) -> npt.NDArray[np.int64]:
    """When events were accepted, as their producer says; the entry's own time (0: not known) where that cannot be."""
    latest_us = entry_us + MAX_SKEW_US
    if entry_us <= 0 or 0 < claimed_us_B.min() <= claimed_us_B.max() <= latest_us:
        return claimed_us_B
    is_odd_B = (claimed_us_B <= 0) | (claimed_us_B > latest_us)
    return np.where(is_odd_B, entry_us, claimed_us_B)


def _array(name: str, values: bytes, dtype: Any, count: int, default: float | None) -> Any:
    """`count` little-endian values, or the default repeated when the field is absent (None: it must be there)."""
    if not values and default is not None:
        return np.full(count, default, dtype)
    wanted = count * np.dtype(dtype).itemsize
    if len(values) != wanted:
        raise BadEvent("invalid", f"{name} has {len(values)} bytes, wanted {wanted}")
    return np.frombuffer(bytearray(values), dtype)  # writable: numba compiles read-only arrays as another type


def _ids(spec: Input, message: InputColumnMessage, count: int) -> npt.NDArray[np.int64]:
    """Ids as they are, or hashed here. The two reserved ids need no check: everywhere they are no id at all."""
    if message.ids:
        ids: npt.NDArray[np.int64] = _array(f"{spec.name}.ids", message.ids, np.int64, count, None)
        return ids
    values: list[Any] = list(message.strings) or list(message.integers)
    if len(values) != count:
        raise BadEvent("invalid", f"{spec.name} has {len(values)} values, wanted {count}")
    return hash_values(values)


def _given(column: InputColumn, count: int) -> npt.NDArray[np.bool_]:
    return np.ones(count, np.bool_) if column.given_B is None else column.given_B
