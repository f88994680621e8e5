"""Searches in and out, as JSON and as protobuf: the same query and the same bits either way."""

from collections.abc import Sequence
from typing import Annotated, Any, Literal

import msgspec
import numpy as np
import numpy.typing as npt
import orjson

from service.answers import Model, Version, model_of, safe_integer
from service.embedding_service_pb2 import (
    METRIC_DOT,
    Metric,
    SearchEmbeddingsRequest,
    SearchEmbeddingsResponse,
    SearchIndex,
)
from service.errors import ServiceError, Violation, too_many
from service.proto_wire import stamp_message
from service.search import Matches, Query
from service.value_pb2 import Id
from service.wire import Requests, TopK, decoded, list_of
from trainer.hashing import FIRST_RESERVED, hash_values

DEFAULT_K = 10
NO_PLACE = 0xFFFFFFFF  # of a row that is none of the known ids
KEY_BYTES = 8

Key = Annotated[str, msgspec.Meta(pattern="^-?[0-9]{1,19}$", description="A hashed id: a signed 64-bit integer")]
KnownIds = Sequence[str | int]


class IndexUsed(msgspec.Struct, forbid_unknown_fields=True):
    """How a search was answered: `exact` compares every row, `hnsw` those that a graph proposes or that just changed.

    `version`: the newest model version whose changes have all been seen. Rows that changed within `lag_ms` may not be
    found at their new place; similarities are always those of `model.version` or newer. `rows`: rows of the table.
    """

    kind: Literal["exact", "hnsw"]
    version: Version
    lag_ms: float
    rows: int


class SearchAnswer(msgspec.Struct, forbid_unknown_fields=True):
    """Rows, nearest first. `keys`: their hashed ids; `ids`: those of `known_ids` that they belong to, else null."""

    keys: list[Key]
    similarities: list[float]
    ids: list[str | int | None]
    model: Model
    index: IndexUsed


class Searches:
    """Reads the search requests of one schema."""

    def __init__(self, requests: Requests) -> None:
        self._limits = requests.limits
        id_type: Any = requests.parser.Id
        fields: list[Any] = [
            ("vector", list[float] | None, None),
            ("id", id_type | None, None),
            ("key", Key | None, None),
            ("k", TopK, DEFAULT_K),
            ("metric", Literal["cosine", "dot"], "cosine"),
            ("known_ids", list_of(id_type), []),
        ]
        self.SearchRequest: Any = msgspec.defstruct("SearchRequest", fields, forbid_unknown_fields=True, gc=False)
        self._decoder = msgspec.json.Decoder(self.SearchRequest)

    def read(self, body: bytes) -> tuple[Query, KnownIds]:
        """A query and the ids that the caller knows, of a JSON body. Raises ServiceError, like everything here."""
        return self._query(decoded(self._decoder.decode, body, "JSON"))

    def read_message(self, request: SearchEmbeddingsRequest) -> tuple[Query, KnownIds]:
        """The same of a message."""
        values: dict[str, Any] = {"metric": "dot" if request.metric == METRIC_DOT else "cosine"}
        if request.metric not in Metric.values():
            raise _invalid("metric", f"{request.metric} is no metric")
        values |= {"k": request.k or DEFAULT_K, "known_ids": [_raw(id_) for id_ in request.known_ids]}
        kind = request.WhichOneof("query")
        vector_D: npt.NDArray[np.float32] | None = None
        if kind == "vector":
            if len(request.vector) % 4:
                raise _invalid("vector", f"{len(request.vector)} bytes are no whole number of float32")
            vector_D = np.frombuffer(request.vector, "<f4").astype(np.float32)
        elif kind is not None:
            values[kind] = _raw(request.id) if kind == "id" else str(request.key)
        converted = decoded(lambda given: msgspec.convert(given, self.SearchRequest), values, "a request")
        return self._query(converted, vector_D)

    def _query(self, request: Any, vector_D: npt.NDArray[np.float32] | None = None) -> tuple[Query, KnownIds]:
        if vector_D is None and request.vector is not None:
            with np.errstate(over="ignore"):  # infinite then, and refused for it
                vector_D = np.array(request.vector, np.float32)
        if [vector_D is None, request.id is None, request.key is None].count(False) != 1:
            raise _invalid("", "a search has exactly one of `vector`, `id` and `key`")
        if request.k > self._limits.top_k:
            raise too_many("top_k", request.k, self._limits.top_k)
        if len(request.known_ids) > self._limits.ids:
            raise too_many("ids", len(request.known_ids), self._limits.ids)
        key = None if request.key is None else _key(request.key)
        if request.id is not None:
            key = int(hash_values([request.id])[0])
        return Query(vector_D, key, request.k, request.metric), request.known_ids


def search_json(matches: Matches, known_ids: KnownIds) -> bytes:
    """Body of `embeddings:search`."""
    places_K = places_of(matches, known_ids).tolist()
    index = matches.index
    answer = {
        "keys": list(map(str, matches.keys_K.tolist())),
        "similarities": matches.similarities_K.astype(np.float64),
        "ids": [None if place == NO_PLACE else known_ids[place] for place in places_K],
        "model": model_of(matches.stamp),
        "index": {
            "kind": index.kind,
            "version": safe_integer(index.version),
            "lag_ms": index.lag_ms,
            "rows": index.rows,
        },
    }
    return orjson.dumps(answer, option=orjson.OPT_SERIALIZE_NUMPY)


def search_response(matches: Matches, known_ids: KnownIds) -> SearchEmbeddingsResponse:
    """Answer of `SearchEmbeddings`."""
    index = matches.index
    return SearchEmbeddingsResponse(
        keys=matches.keys_K.astype("<i8", copy=False).tobytes(),
        similarities=matches.similarities_K.astype("<f4", copy=False).tobytes(),
        places=places_of(matches, known_ids).astype("<u4", copy=False).tobytes() if known_ids else b"",
        model=stamp_message(matches.stamp),
        index=SearchIndex(kind=index.kind, version=index.version, lag_ms=index.lag_ms, rows=index.rows),
    )


def places_of(matches: Matches, known_ids: KnownIds) -> npt.NDArray[np.uint32]:
    """The place of each match in the known ids, the first one of equals; NO_PLACE where it is none of them."""
    places = dict(zip(reversed(hash_values(known_ids).tolist()), reversed(range(len(known_ids))), strict=True))
    return np.array([places.get(key, NO_PLACE) for key in matches.keys_K.tolist()], np.uint32)


def _key(text: str) -> int:
    key = int(text)
    if not -(2**63) <= key < 2**63 or key % 2**64 >= int(FIRST_RESERVED):
        raise _invalid("/key", f"{text} is no value's hash")
    return key


def _raw(id_: Id) -> str | int | None:
    kind = id_.WhichOneof("kind")
    return getattr(id_, kind) if kind is not None else None


def _invalid(pointer: str, detail: str) -> ServiceError:
    return ServiceError("invalid", detail, violations=[Violation(pointer, detail)])
