"""Protobuf in and out: messages <-> the same domain objects, under the same checks and limits, as JSON.

Rows of typed values take the way of JSON (the same types check them); columns take the way of the log's own codec.
"""

import math
from collections.abc import Iterable, Mapping
from typing import Any

import numpy as np
import numpy.typing as npt
import orjson

from service.embedding_service_pb2 import LookupEmbeddingsRequest, LookupEmbeddingsResponse
from service.errors import ServiceError, Violation, too_many
from service.event_service_pb2 import Event, PublishEventsRequest, PublishEventsResponse
from service.event_service_pb2 import Rejection as RejectionMessage
from service.ingest import Published
from service.live_model import Candidates, Rows, Scores, Stamp
from service.model_stamp_pb2 import ModelStamp
from service.scoring_service_pb2 import RankResponse, ScoreRequest, ScoreResponse, UnknownIds
from service.value_pb2 import Id, Row, Value
from service.wire import Requests
from trainer.codec import EntryDecoder
from trainer.event_pb2 import EventBatch, InputColumn
from trainer.events import Inputs, RawEvents, Rejection
from trainer.hashing import FIRST_RESERVED, hash_values


class Messages:
    """Reads the request messages of one schema."""

    def __init__(self, requests: Requests) -> None:
        self.requests = requests
        self.limits = requests.limits
        self._decoder = EntryDecoder(requests.schema)

    def candidates(self, request: ScoreRequest) -> Candidates:
        """What to score. Raises ServiceError or BadEvent, like everything here."""
        if not request.HasField("columns"):
            values: dict[str, Any] = {"candidates": [_row(row) for row in request.candidates]}
            if request.HasField("context"):
                values["context"] = _row(request.context)
            if request.time_ms:
                values["time_ms"] = request.time_ms
            return self.requests.convert(values)
        if request.candidates:
            raise _invalid("columns", "candidates come as `candidates` or as `columns`, not both")
        count = request.columns.count
        if count > self.limits.candidates:
            raise too_many("candidates", count, self.limits.candidates)
        context = _row(request.context) if request.HasField("context") else None
        rest = self.requests.convert({"context": context, "candidates": [], "time_ms": request.time_ms or None})
        inputs = self._inputs(count, request.columns.columns)
        return self.requests.checked(Candidates(inputs, rest.context, rest.time_ms))

    def events(self, request: PublishEventsRequest, accepted_us: int) -> tuple[RawEvents, list[Rejection]]:
        """The valid events of a request, and why the others were refused."""
        if not request.HasField("batch"):
            return self._events(request.events, accepted_us)
        if request.events:
            raise _invalid("batch", "events come as `events` or as `batch`, not both")
        if request.batch.count > self.limits.events:
            raise too_many("events", request.batch.count, self.limits.events)
        self._check_strings(request.batch.columns)
        return self._decoder.decode(request.batch.SerializeToString(), accepted_us)

    def ids(self, request: LookupEmbeddingsRequest) -> npt.NDArray[np.int64]:
        """Hashed ids of a lookup."""
        texts, integers = request.texts[:], request.integers[:]  # lists: quicker to go through than views
        given = [name for name, some in (("texts", texts), ("integers", integers), ("ids", request.ids)) if some]
        if len(given) > 1:
            raise _invalid(given[1], f"ids come as `texts`, `integers` or `ids`, got {' and '.join(given)}")
        count = len(texts) or len(integers) or len(request.ids) // 8
        if count > self.limits.ids:
            raise too_many("ids", count, self.limits.ids)
        if not request.ids:
            self._check_texts("texts", texts)
            return hash_values(texts or integers)
        if len(request.ids) % 8:
            raise _invalid("ids", f"{len(request.ids)} bytes are no whole number of int64")
        ids = np.frombuffer(bytearray(request.ids), np.int64)  # writable: numba compiles read-only arrays apart
        if ids.view(np.uint64).max() >= FIRST_RESERVED:
            raise _invalid("ids", "-1 and -2 are reserved and no value's hash")
        return ids

    def _inputs(self, count: int, columns: Iterable[InputColumn]) -> Inputs:
        if count == 0:
            return Inputs(0, {})
        self._check_strings(columns)
        labels = bytes(4 * count)  # the codec reads events: these are examples with a label of 0
        raw, rejected = self._decoder.decode(
            EventBatch(count=count, columns=columns, labels=labels).SerializeToString(), 0
        )
        if rejected:
            first = rejected[0]
            raise _invalid(f"columns/{first.index}", first.detail)
        return raw.inputs

    def _events(self, events: Iterable[Event], accepted_us: int) -> tuple[RawEvents, list[Rejection]]:
        """Through JSON, but for what JSON cannot say."""
        values = [_event(event) for event in events]
        if len(values) > self.limits.events:
            raise too_many("events", len(values), self.limits.events)
        rejected = [
            Rejection(index, "not_finite", "a number is NaN or infinite")
            for index, value in enumerate(values)
            if not _all_finite(value)
        ]
        refused = {rejection.index for rejection in rejected}
        places = [index for index in range(len(values)) if index not in refused]
        body = orjson.dumps([values[index] for index in places])
        raw, more = self.requests.parser.parse(body, accepted_us=accepted_us)
        rejected += [Rejection(places[r.index], r.code, r.detail) for r in more]
        return raw, sorted(rejected, key=lambda rejection: rejection.index)

    def _check_strings(self, columns: Iterable[InputColumn]) -> None:
        for column in columns:
            self._check_texts(column.name, column.strings)

    def _check_texts(self, name: str, texts: Iterable[str]) -> None:
        longest = max(map(len, texts), default=0)
        if longest > self.limits.string_chars:
            raise _invalid(name, f"a text of {longest} characters, at most {self.limits.string_chars}")


def score_response(scores: Scores, *, request_id: str) -> ScoreResponse:
    """Answer of `Score`."""
    return ScoreResponse(
        scores=scores.probabilities_B.astype("<f4", copy=False).tobytes(),
        request_id=request_id,
        model=stamp_message(scores.stamp),
        unknown=_unknown(scores),
    )


def rank_response(scores: Scores, best_K: npt.NDArray[np.int64], *, request_id: str) -> RankResponse:
    """Answer of `Rank`."""
    return RankResponse(
        indices=best_K.astype("<u4").tobytes(),
        scores=scores.probabilities_B[best_K].astype("<f4", copy=False).tobytes(),
        request_id=request_id,
        model=stamp_message(scores.stamp),
        unknown=_unknown(scores),
    )


def lookup_response(rows: Rows) -> LookupEmbeddingsResponse:
    """Answer of `LookupEmbeddings`."""
    return LookupEmbeddingsResponse(
        values=rows.vectors_ND.astype("<f4", copy=False).tobytes(),
        dim=rows.table.width,
        status=rows.status_N.tobytes(),
        model=stamp_message(rows.stamp),
    )


def publish_response(published: Published) -> PublishEventsResponse:
    """Answer of `PublishEvents`."""
    return PublishEventsResponse(
        accepted=published.num_accepted,
        duplicates=published.num_duplicates,
        rejected=[RejectionMessage(index=r.index, code=r.code, detail=r.detail) for r in published.rejected],
        stream_id=published.stream_id or "",
    )


def stamp_message(stamp: Stamp) -> ModelStamp:
    """The `model` member of an answer."""
    return ModelStamp(version=stamp.version, age_ms=stamp.age_ms, watermark=stamp.watermark_us)


def _unknown(scores: Scores) -> list[UnknownIds]:
    return [UnknownIds(index=index, features=features) for index, features in scores.unknown]


def _row(row: Row) -> dict[str, Any]:
    return _values(row.values)


def _values(values: Mapping[str, Value]) -> dict[str, Any]:
    return {name: _value(value) for name, value in values.items()}


def _value(value: Value) -> Any:
    kind = value.WhichOneof("kind")
    if kind == "ids":
        return [_id(item) for item in value.ids.ids]
    if kind == "numbers":
        return list(value.numbers.numbers)
    return getattr(value, kind) if kind is not None else None


def _id(value: Id) -> str | int | None:
    kind = value.WhichOneof("kind")
    return getattr(value, kind) if kind is not None else None


def _event(event: Event) -> dict[str, Any]:
    """An event as its JSON object; what proto3 leaves at its zero was not given."""
    values: dict[str, Any] = {"features": _values(event.features)}
    if event.HasField("label"):
        values["label"] = event.label
    if event.HasField("id"):
        values["id"] = _id(event.id)
    for name in ("event_id", "time_ms", "entity"):
        if getattr(event, name):
            values[name] = getattr(event, name)
    return values


def _all_finite(event: dict[str, Any]) -> bool:
    numbers = [event.get("label", 0.0)]
    for value in event["features"].values():
        numbers += value if isinstance(value, list) else [value]
    return all(math.isfinite(number) for number in numbers if isinstance(number, float))


def _invalid(field: str, detail: str) -> ServiceError:
    return ServiceError("invalid", detail, violations=[Violation(field, detail)])
