"""JSON out: what the service answers, and the types that document it (and that tests hold it to).

Numbers are float32 everywhere inside; JSON prints each as the decimal of the equal float64, so that whoever parses it
gets the same bits as over gRPC. An integer that a double cannot hold is printed as a string.
"""

from typing import Annotated, Any, Literal

import msgspec
import numpy as np
import numpy.typing as npt
import orjson

from service.ingest import Published
from service.live_model import STATUS_NAMES, Rows, Scores, Stamp

JSON_TYPE = "application/json"
BINARY_TYPE = "application/octet-stream"
MAX_SAFE_INTEGER = 2**53 - 1  # beyond, JavaScript and others round
STATUS_OBJECTS = np.array(STATUS_NAMES, object)

Version = int | Annotated[str, msgspec.Meta(pattern="^[0-9]+$")]
Status = Literal["unknown", "learned", "default"]


class Model(msgspec.Struct, forbid_unknown_fields=True):
    """Which model answered. `watermark`: every event accepted before it is in the answer, in us since 1970 UTC."""

    version: Version
    age_ms: float | None
    watermark: int


class UnknownIds(msgspec.Struct, forbid_unknown_fields=True):
    """A candidate with ids that the model has no row for; those features counted as zeros."""

    index: int
    features: list[str]


class ScoreAnswer(msgspec.Struct, forbid_unknown_fields=True):
    """Probabilities in the order of the candidates."""

    scores: list[float]
    request_id: str
    model: Model
    unknown: list[UnknownIds]


class RankAnswer(msgspec.Struct, forbid_unknown_fields=True):
    """The best candidates, best first; `indices` are places in the request, `unknown` speaks of all of it."""

    indices: list[int]
    scores: list[float]
    request_id: str
    model: Model
    unknown: list[UnknownIds]


class LookupAnswer(msgspec.Struct, forbid_unknown_fields=True):
    """Rows in the order of the ids; the row of an id that is not learned is the table's default, zeros."""

    vectors: list[list[float]]
    dim: int
    status: list[Status]
    model: Model


class RejectedEvent(msgspec.Struct, forbid_unknown_fields=True):
    """An event that was refused, by its place in the request."""

    index: int
    code: str
    detail: str


class PublishAnswer(msgspec.Struct, forbid_unknown_fields=True):
    """What became of the events. `stream_id` is their place in the log, null if none was accepted."""

    accepted: int
    duplicates: int
    rejected: list[RejectedEvent]
    stream_id: str | None


class ErrorPlace(msgspec.Struct, forbid_unknown_fields=True):
    """What is wrong at one place of the body."""

    pointer: str
    detail: str


class ExceededLimit(msgspec.Struct, forbid_unknown_fields=True):
    """The limit that the request exceeded."""

    name: str
    value: int


class Problem(msgspec.Struct):
    """Every error (RFC 9457)."""

    type: str
    title: str
    status: int
    detail: str
    instance: str
    code: str
    request_id: str
    errors: list[ErrorPlace]
    limit: ExceededLimit | None = None


def score_json(scores: Scores, *, request_id: str) -> bytes:
    """Body of `/v1/score`."""
    answer = {
        "scores": scores.probabilities_B.astype(np.float64),
        "request_id": request_id,
        "model": model_of(scores.stamp),
        "unknown": _unknown(scores),
    }
    return orjson.dumps(answer, option=orjson.OPT_SERIALIZE_NUMPY)


def rank_json(scores: Scores, best_K: npt.NDArray[np.int64], *, request_id: str) -> bytes:
    """Body of `/v1/rank`."""
    answer = {
        "indices": best_K,
        "scores": scores.probabilities_B[best_K].astype(np.float64),
        "request_id": request_id,
        "model": model_of(scores.stamp),
        "unknown": _unknown(scores),
    }
    return orjson.dumps(answer, option=orjson.OPT_SERIALIZE_NUMPY)


def lookup_json(rows: Rows) -> bytes:
    """Body of `embeddings:lookup`."""
    answer = {
        "vectors": rows.vectors_ND.astype(np.float64),
        "dim": rows.table.width,
        "status": STATUS_OBJECTS[rows.status_N].tolist(),
        "model": model_of(rows.stamp),
    }
    return orjson.dumps(answer, option=orjson.OPT_SERIALIZE_NUMPY)


def publish_json(published: Published) -> bytes:
    """Body of `/v1/events`."""
    answer = {
        "accepted": published.num_accepted,
        "duplicates": published.num_duplicates,
        "rejected": [{"index": r.index, "code": r.code, "detail": r.detail} for r in published.rejected],
        "stream_id": published.stream_id,
    }
    return orjson.dumps(answer)


def model_of(stamp: Stamp) -> dict[str, Any]:
    """The `model` member of an answer."""
    return {"version": safe_integer(stamp.version), "age_ms": stamp.age_ms, "watermark": stamp.watermark_us}


def safe_integer(value: int) -> int | str:
    """The integer, or its decimal text where a double cannot hold it.

    >>> safe_integer(2**53 - 1), safe_integer(2**53)
    (9007199254740991, '9007199254740992')
    """
    return value if value <= MAX_SAFE_INTEGER else str(value)


def _unknown(scores: Scores) -> list[dict[str, Any]]:
    return [{"index": index, "features": features} for index, features in scores.unknown]
