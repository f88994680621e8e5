"""The SDK: events, scores and rows over gRPC. Needs the generated stubs, grpc and numpy, nothing else of ours.

    with Client("127.0.0.1:50051") as client:
        client.publish([{"features": {"user_id": 7, "video_id": "v1"}, "label": 1}])
        client.score([{"video_id": "v1"}, {"video_id": "v2"}], context={"user_id": 7}).scores
        client.lookup("video", ["v1", "v2"]).vectors

Values are what JSON would have: a string or an integer is an id, a float (or integer) a number, a list ids or numbers.
One client serves all threads of a process; it does not survive a fork.
"""

import uuid
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from numbers import Integral, Real
from types import TracebackType
from typing import Any, Self, TypeVar

import grpc
import numpy as np
import numpy.typing as npt
from google.rpc import error_details_pb2, status_pb2

from service.embedding_service_pb2 import (
    METRIC_COSINE,
    METRIC_DOT,
    LookupEmbeddingsRequest,
    LookupEmbeddingsResponse,
    SearchEmbeddingsRequest,
    StreamLookupRequest,
    WatchEmbeddingsRequest,
)
from service.embedding_service_pb2_grpc import EmbeddingServiceStub
from service.event_service_pb2 import (
    Event,
    PublishEventsRequest,
    PublishEventsResponse,
    PublishEventStreamRequest,
)
from service.event_service_pb2_grpc import EventServiceStub
from service.model_service_pb2 import (
    ActivateVersionRequest,
    ActivateVersionResponse,
    CreateCheckpointRequest,
    CreateCheckpointResponse,
    ForgetEmbeddingRequest,
    ForgetEmbeddingResponse,
    GetModelRequest,
    GetModelResponse,
    InspectEmbeddingRequest,
    InspectEmbeddingResponse,
    ListVersionsRequest,
    ListVersionsResponse,
    ReleaseRequest,
    ReleaseResponse,
    ResizeTableRequest,
    ResizeTableResponse,
)
from service.model_service_pb2_grpc import ModelServiceStub
from service.model_stamp_pb2 import ModelStamp
from service.scoring_service_pb2 import RankRequest, ScoreRequest
from service.scoring_service_pb2_grpc import ScoringServiceStub
from service.value_pb2 import Id, IdList, NumberList, Row, Value

Response = TypeVar("Response")
STATUS_NAMES = ("unknown", "learned", "default")
OPERATION_S = 120.0  # saving or rolling back a large model takes its time
METRICS = {"cosine": METRIC_COSINE, "dot": METRIC_DOT}
STATUS_DETAILS = "grpc-status-details-bin"
# A lookup's answer may be larger than gRPC's default of 4 MiB. Pings keep a quiet connection through a NAT; the server
# allows one in 10 s.
OPTIONS = (
    ("grpc.max_receive_message_length", -1),
    ("grpc.max_send_message_length", -1),
    ("grpc.keepalive_time_ms", 30_000),
)


class CallError(Exception):
    """A call that was answered with an error; `code` is the same short one as over HTTP (`too_many`, `not_ready`).

    `errors`: (place, sentence) pairs; `retry_after_s`: None when trying again would not help.
    """

    def __init__(
        self, code: str, detail: str, *, errors: Sequence[tuple[str, str]], retry_after_s: float | None
    ) -> None:
        super().__init__(code, detail)
        self.code = code
        self.detail = detail
        self.errors = tuple(errors)
        self.retry_after_s = retry_after_s

    def __str__(self) -> str:
        """One line for a log."""
        return f"{self.code}: {self.detail}"


@dataclass(frozen=True)
class Tls:
    """TLS in PEM: who signed the service's certificate (None: whom gRPC trusts), and our own for mTLS."""

    root_certificates: bytes | None = None
    private_key: bytes | None = None
    certificate_chain: bytes | None = None


@dataclass(frozen=True)
class Model:
    """Which model answered: every event accepted before `watermark_us` is in it; age_ms is None before the first."""

    version: int
    age_ms: float | None
    watermark_us: int


@dataclass(frozen=True)
class Published:
    """What became of the events; `rejected`: (index, code, sentence); `stream_id` is "" when none was accepted."""

    accepted: int
    duplicates: int
    rejected: tuple[tuple[int, str, str], ...]
    stream_id: str


@dataclass(frozen=True)
class Scored:
    """Probabilities, float32, in the order of the candidates; `unknown`: features without a row, by candidate."""

    scores: npt.NDArray[np.float32]
    unknown: dict[int, list[str]]
    request_id: str
    model: Model


@dataclass(frozen=True)
class Ranked:
    """The best candidates, best first: their places in the request and their probabilities (float32)."""

    indices: npt.NDArray[np.uint32]
    scores: npt.NDArray[np.float32]
    unknown: dict[int, list[str]]
    request_id: str
    model: Model


@dataclass(frozen=True)
class Looked:
    """Rows, float32 (N, dim), in the order of the ids; `status` is a name of STATUS_NAMES for each."""

    vectors: npt.NDArray[np.float32]
    status: list[str]
    model: Model


@dataclass(frozen=True)
class Changed:
    """Hashed ids (int64) whose rows changed or went between two looks; `resync`: some changes may have been missed."""

    changed: npt.NDArray[np.int64]
    removed: npt.NDArray[np.int64]
    resync: bool
    model: Model


@dataclass(frozen=True)
class Index:
    """How a search was answered; rows that changed within `lag_ms` may not be found at their new place (0: exact)."""

    kind: str
    version: int
    lag_ms: float
    rows: int


@dataclass(frozen=True)
class Found:
    """Rows, nearest first. `keys`: hashed ids, int64; `ids`: those of `known_ids` that they belong to, else None."""

    keys: npt.NDArray[np.int64]
    similarities: npt.NDArray[np.float32]
    ids: list[str | int | None]
    model: Model
    index: Index


class Client:
    """Calls one service. Every call raises CallError, and has a deadline."""

    def __init__(
        self, target: str, *, timeout_s: float = 5.0, token: str | None = None, tls: Tls | None = None
    ) -> None:
        """Take the address, `host:port`; the first call connects. A token without TLS is sent in clear text."""
        self._timeout_s = timeout_s
        self._authorization = () if token is None else (("authorization", f"Bearer {token}"),)
        self._channel = _channel(target, tls)
        self._events = EventServiceStub(self._channel)
        self._embeddings = EmbeddingServiceStub(self._channel)
        self._scoring = ScoringServiceStub(self._channel)
        self._models = ModelServiceStub(self._channel)

    def publish(self, events: Iterable[Mapping[str, Any]]) -> Published:
        """Append events to the log: examples (`features`, `label`) or feature events (`entity`, `id`, `features`).

        Each may have an `event_id` and a `time_ms`. Accepted means durable in the log.
        """
        request = PublishEventsRequest(events=[_event(event) for event in events])
        return _published(self._call(self._events.PublishEvents, request))

    def publish_stream(self, batches: Iterable[Iterable[Mapping[str, Any]]]) -> Iterator[Published]:
        """The same for a long-lived producer: one answer for each batch, in order; has no deadline.

        A batch that is refused as a whole raises CallError and ends the stream.
        """
        messages = (
            PublishEventStreamRequest(publish=PublishEventsRequest(events=[_event(event) for event in batch]))
            for batch in batches
        )
        try:
            for answer in self._events.PublishEventStream(messages, metadata=self._authorization):
                if answer.HasField("error"):
                    raise CallError(answer.error.code, answer.error.detail, errors=(), retry_after_s=None)
                yield _published(answer.published)
        except grpc.RpcError as error:
            raise _call_error(error) from None

    def score(
        self,
        candidates: Iterable[Mapping[str, Any]],
        *,
        context: Mapping[str, Any] | None = None,
        time_ms: int | None = None,
    ) -> Scored:
        """Probabilities of candidates; `context` holds what they share, `time_ms` is now unless given."""
        answer = self._call(self._scoring.Score, _score_request(candidates, context, time_ms))
        scores = np.frombuffer(answer.scores, "<f4")
        return Scored(scores, _unknown(answer.unknown), answer.request_id, _model(answer.model))

    def rank(
        self,
        candidates: Iterable[Mapping[str, Any]],
        *,
        context: Mapping[str, Any] | None = None,
        time_ms: int | None = None,
        top_k: int | None = None,
    ) -> Ranked:
        """The best candidates, best first (all of them unless `top_k` is given)."""
        request = RankRequest(score=_score_request(candidates, context, time_ms), top_k=top_k or 0)
        answer = self._call(self._scoring.Rank, request)
        indices, scores = np.frombuffer(answer.indices, "<u4"), np.frombuffer(answer.scores, "<f4")
        return Ranked(indices, scores, _unknown(answer.unknown), answer.request_id, _model(answer.model))

    def lookup(self, table: str, ids: Sequence[str | int]) -> Looked:
        """Rows of ids, in order. An unknown id has the table's default row and says so."""
        return _looked(self._call(self._embeddings.LookupEmbeddings, _lookup_request(table, ids)))

    def lookup_stream(self, table: str, batches: Iterable[Sequence[str | int]]) -> Iterator[Looked]:
        """The same for a long-lived caller: rows for each batch of ids, in order; has no deadline.

        A batch that is refused raises CallError and ends the stream.
        """
        messages = (StreamLookupRequest(lookup=_lookup_request(table, ids)) for ids in batches)
        try:
            for answer in self._embeddings.StreamLookup(messages, metadata=self._authorization):
                if answer.HasField("error"):
                    raise CallError(answer.error.code, answer.error.detail, errors=(), retry_after_s=None)
                yield _looked(answer.rows)
        except grpc.RpcError as error:
            raise _call_error(error) from None

    def watch(self, table: str, *, interval_ms: int = 100) -> Iterator[Changed]:
        """Ids of a table that change, from now on; the first item has none and says that the watch has begun."""
        request = WatchEmbeddingsRequest(table=table, interval_ms=interval_ms)
        try:
            for answer in self._embeddings.WatchEmbeddings(request, metadata=self._authorization):
                changed, removed = np.frombuffer(answer.changed, "<i8"), np.frombuffer(answer.removed, "<i8")
                yield Changed(changed, removed, answer.resync, _model(answer.model))
        except grpc.RpcError as error:
            raise _call_error(error) from None

    def model(self) -> GetModelResponse:
        """State of the live model."""
        return self._call(self._models.GetModel, GetModelRequest())

    def versions(self) -> ListVersionsResponse:
        """Kept checkpoints, and what is served."""
        return self._call(self._models.ListVersions, ListVersionsRequest())

    def activate(self, version: int) -> ActivateVersionResponse:
        """Serve a kept checkpoint; what is learned meanwhile is not shown until `release`."""
        return self._call(self._models.ActivateVersion, ActivateVersionRequest(version=version), OPERATION_S)

    def release(self) -> ReleaseResponse:
        """Show again what is learned."""
        return self._call(self._models.Release, ReleaseRequest(), OPERATION_S)

    def create_checkpoint(self) -> CreateCheckpointResponse:
        """Write a checkpoint; returns when it is on disk."""
        return self._call(self._models.CreateCheckpoint, CreateCheckpointRequest(), OPERATION_S)

    def resize(self, table: str, capacity: int) -> ResizeTableResponse:
        """Give a table another number of slots; done when the trainer comes to its place in the log."""
        return self._call(self._models.ResizeTable, ResizeTableRequest(table=table, capacity=capacity))

    def inspect(self, table: str, id_: str | int) -> InspectEmbeddingResponse:
        """One id: its row, counts and optimizer state."""
        return self._call(self._models.InspectEmbedding, InspectEmbeddingRequest(table=table, id=_id(id_)))

    def forget(self, table: str, id_: str | int) -> ForgetEmbeddingResponse:
        """Forget an id everywhere; done when the trainer comes to its place in the log."""
        return self._call(self._models.ForgetEmbedding, ForgetEmbeddingRequest(table=table, id=_id(id_)))

    def search(
        self,
        table: str,
        *,
        vector: npt.ArrayLike | None = None,
        id: str | int | None = None,
        key: int | None = None,
        k: int = 10,
        metric: str = "cosine",
        known_ids: Sequence[str | int] = (),
    ) -> Found:
        """The rows nearest to a vector, or to the row of an id (or of a key of an earlier answer), which is left out.

        `metric`: "cosine" or "dot".
        """
        if metric not in METRICS:
            raise _invalid(f"a metric is one of {', '.join(METRICS)}; got {metric!r}")
        request = SearchEmbeddingsRequest(
            table=table,
            k=k,
            metric=METRICS[metric],
            known_ids=[_id(value) for value in known_ids],
        )
        if [vector is None, id is None, key is None].count(False) != 1:
            raise _invalid("a search has exactly one of vector, id and key")
        if vector is not None:
            request.vector = np.asarray(vector, "<f4").tobytes()
        elif id is not None:
            request.id.CopyFrom(_id(id))
        elif key is not None:
            request.key = key
        answer = self._call(self._embeddings.SearchEmbeddings, request)
        keys, similarities = np.frombuffer(answer.keys, "<i8"), np.frombuffer(answer.similarities, "<f4")
        places = np.frombuffer(answer.places, "<u4").tolist() or [len(known_ids)] * len(keys)
        ids = [known_ids[place] if place < len(known_ids) else None for place in places]
        index = Index(answer.index.kind, answer.index.version, answer.index.lag_ms, answer.index.rows)
        return Found(keys, similarities, ids, _model(answer.model), index)

    def close(self) -> None:
        """Close the connection."""
        self._channel.close()

    def __enter__(self) -> Self:
        """Return itself; the first call connects."""
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        """Close."""
        self.close()

    def _call(self, method: Callable[..., Response], request: Any, at_least_s: float = 0.0) -> Response:
        timeout_s = max(self._timeout_s, at_least_s)
        try:
            return method(
                request, timeout=timeout_s, metadata=(("x-request-id", uuid.uuid4().hex), *self._authorization)
            )
        except grpc.RpcError as error:
            raise _call_error(error) from None


def _channel(target: str, tls: Tls | None) -> grpc.Channel:
    if tls is None:
        return grpc.insecure_channel(target, options=OPTIONS)
    credentials = grpc.ssl_channel_credentials(tls.root_certificates, tls.private_key, tls.certificate_chain)
    return grpc.secure_channel(target, credentials, options=OPTIONS)


def _lookup_request(table: str, ids: Sequence[str | int]) -> LookupEmbeddingsRequest:
    request = LookupEmbeddingsRequest(table=table)
    for value in ids:
        _id(value)
    if all(isinstance(value, str) for value in ids):
        request.texts.extend(str(value) for value in ids)
    elif any(isinstance(value, str) for value in ids):
        request.texts.extend(map(str, ids))  # an integer is hashed as its decimal text
    else:
        request.integers.extend(int(value) for value in ids)
    return request


def _looked(answer: LookupEmbeddingsResponse) -> Looked:
    vectors = np.frombuffer(answer.values, "<f4").reshape(-1, answer.dim)
    return Looked(vectors, [STATUS_NAMES[status] for status in answer.status], _model(answer.model))


def _score_request(
    candidates: Iterable[Mapping[str, Any]], context: Mapping[str, Any] | None, time_ms: int | None
) -> ScoreRequest:
    return ScoreRequest(
        context=_row(context) if context is not None else None,
        candidates=[_row(candidate) for candidate in candidates],
        time_ms=time_ms or 0,
    )


def _row(values: Mapping[str, Any]) -> Row:
    return Row(values=_values(values))


def _values(values: Mapping[str, Any]) -> dict[str, Value]:
    return {name: _value(value) for name, value in values.items() if value is not None}


def _invalid(detail: str) -> "CallError":
    return CallError("invalid", detail, errors=(), retry_after_s=None)


def _value(value: Any) -> Value:
    if isinstance(value, bool):
        raise _invalid(f"a value is a string, a number or a list of those, got {value!r}")
    if isinstance(value, str):
        return Value(text=value)
    if isinstance(value, Integral):
        return Value(integer=int(value))
    if isinstance(value, Real):
        return Value(number=float(value))
    items = value.tolist() if isinstance(value, np.ndarray) else list(value)
    if any(not isinstance(item, str | Integral) for item in items):
        return Value(numbers=NumberList(numbers=items))
    return Value(ids=IdList(ids=[_id(item) for item in items]))


def _id(value: str | int | Integral) -> Id:
    if isinstance(value, bool) or not isinstance(value, str | Integral):
        raise _invalid(f"an id is a string or an integer, got {value!r}")
    return Id(text=value) if isinstance(value, str) else Id(integer=int(value))


def _event(event: Mapping[str, Any]) -> Event:
    known = {"features", "label", "event_id", "time_ms", "entity", "id"}
    if not known.issuperset(event):
        raise _invalid(f"an event has {', '.join(sorted(known))}; got {', '.join(sorted(set(event) - known))}")
    label, entity_id = event.get("label"), event.get("id")
    return Event(
        features=_values(event.get("features") or {}),
        label=None if label is None else float(label),
        event_id=event.get("event_id") or "",
        time_ms=event.get("time_ms") or 0,
        entity=event.get("entity") or "",
        id=None if entity_id is None else _id(entity_id),
    )


def _published(answer: PublishEventsResponse) -> Published:
    rejected = tuple((one.index, one.code, one.detail) for one in answer.rejected)
    return Published(answer.accepted, answer.duplicates, rejected, answer.stream_id)


def _unknown(rows: Iterable[Any]) -> dict[int, list[str]]:
    return {row.index: list(row.features) for row in rows}


def _model(stamp: ModelStamp) -> Model:
    return Model(stamp.version, stamp.age_ms if stamp.HasField("age_ms") else None, stamp.watermark)


def _call_error(error: Any) -> CallError:
    """An RpcError with what its details say; without details (no connection, a deadline) its status is the code."""
    code, errors, retry_after_s = error.code().name.lower(), [], None
    for name, value in error.trailing_metadata() or ():
        if name != STATUS_DETAILS:
            continue
        for detail in status_pb2.Status.FromString(value).details:
            info, request, retry = (
                error_details_pb2.ErrorInfo(),
                error_details_pb2.BadRequest(),
                error_details_pb2.RetryInfo(),
            )
            if detail.Unpack(info):
                code = info.reason.lower()
            elif detail.Unpack(request):
                errors = [(violation.field, violation.description) for violation in request.field_violations]
            elif detail.Unpack(retry):
                retry_after_s = retry.retry_delay.ToTimedelta().total_seconds()
    return CallError(code, error.details() or "", errors=errors, retry_after_s=retry_after_s)
