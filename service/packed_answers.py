"""MessagePack and raw bytes out: the same answers as JSON, with numbers as their float32 bits, little-endian.

MessagePack    the members of the JSON answer, but `scores`, `vectors` (row-major), `indices` (uint32) and `status` (a
               byte an id: 0 unknown, 1 learned, 2 default) are binaries
raw bytes      score: B float32; rank: K uint32, then K float32; lookup: N x dim float32, then N status bytes.
               Their counts, and which model answered, are in the headers
"""

import msgspec
import numpy as np
import numpy.typing as npt

from service.answers import UnknownIds, model_of
from service.live_model import Rows, Scores

MSGPACK_TYPE = "application/x-msgpack"


def score_msgpack(scores: Scores, *, request_id: str) -> bytes:
    """Body of `/v1/score`."""
    answer = {
        "scores": score_bytes(scores),
        "request_id": request_id,
        "model": model_of(scores.stamp),
        "unknown": _unknown(scores),
    }
    return msgspec.msgpack.encode(answer)


def rank_msgpack(scores: Scores, best_K: npt.NDArray[np.int64], *, request_id: str) -> bytes:
    """Body of `/v1/rank`."""
    answer = {
        "indices": _indices(best_K),
        "scores": _floats(scores.probabilities_B[best_K]),
        "request_id": request_id,
        "model": model_of(scores.stamp),
        "unknown": _unknown(scores),
    }
    return msgspec.msgpack.encode(answer)


def lookup_msgpack(rows: Rows) -> bytes:
    """Body of `embeddings:lookup`."""
    answer = {
        "vectors": _floats(rows.vectors_ND),
        "dim": rows.table.width,
        "status": rows.status_N.tobytes(),
        "model": model_of(rows.stamp),
    }
    return msgspec.msgpack.encode(answer)


def score_bytes(scores: Scores) -> bytes:
    """B float32."""
    return _floats(scores.probabilities_B)


def rank_bytes(scores: Scores, best_K: npt.NDArray[np.int64]) -> bytes:
    """K uint32, then K float32."""
    return _indices(best_K) + _floats(scores.probabilities_B[best_K])


def lookup_bytes(rows: Rows) -> bytes:
    """N x dim float32, then N status bytes."""
    return _floats(rows.vectors_ND) + rows.status_N.tobytes()


def _floats(values: npt.NDArray[np.float32]) -> bytes:
    return values.astype("<f4", copy=False).tobytes()


def _indices(best_K: npt.NDArray[np.int64]) -> bytes:
    return best_K.astype("<u4").tobytes()


def _unknown(scores: Scores) -> list[UnknownIds]:
    return [UnknownIds(index, features) for index, features in scores.unknown]
