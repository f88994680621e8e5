"""Events by column, twice: `RawEvents` as they lie in the log, `EventBatch` as the kernels want them.

    JSON, gRPC, XADD --> RawEvents (inputs, hashed but not transformed) --> log --> EventBatch (features in matrices)

The log keeps raw inputs, so a transform can change without rewriting it. `derive` is the only way from inputs to
features, for training and serving alike. Suffixes as in `schema.py`; B events (or candidates).
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, fields
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from trainer.hashing import MISSING_ID, hash_integers
from trainer.kernel import kernel
from trainer.probe import EMPTY
from trainer.schema import Feature, Schema
from trainer.settings import TIME_INPUT, CategoricalFeature, ListFeature, NumericFeature

Int64s = npt.NDArray[np.int64]
Floats = npt.NDArray[np.float32]
MS_PER_HOUR = 3_600_000
# Beyond this a number says nothing more to a network, and its square would leave float32 within two cross layers.
CLIP = 1e6


@dataclass(frozen=True)
class Rejection:
    """One event that was refused: its place in the request, a short code and a sentence."""

    index: int
    code: str
    detail: str


class InputColumn(NamedTuple):
    """One input of B events; values only for those that give it, end to end.

    `given_B` bool, or None when all give it; `ids` for ids (int64, hashed) with `lengths` (int32, one for each event
    that gives it) when the input is a list; `numbers` (float64; a vector's lie end to end) otherwise.
    """

    given_B: npt.NDArray[np.bool_] | None = None
    ids: Int64s | None = None
    lengths: npt.NDArray[np.int32] | None = None
    numbers: npt.NDArray[np.float64] | None = None


@dataclass(frozen=True)
class Inputs:
    """Raw named values of B events."""

    count: int
    columns: dict[str, InputColumn]


@dataclass(frozen=True)
class RawEvents:
    """B events as they lie in the log. Arrays as in `EventBatch`."""

    inputs: Inputs
    labels_B: Floats
    event_time_ms_B: Int64s
    accepted_us_B: Int64s
    event_key_B: npt.NDArray[np.uint64]
    entity_B: npt.NDArray[np.int16]
    entity_id_B: Int64s


@dataclass(frozen=True)
class Features:
    """Model inputs of B rows.

    ids_BC int64 (EMPTY beyond a list's length, MISSING_ID for a missing categorical), lengths_BF int32,
    floats_BM float32 (transformed), present_BA uint8 (1: given; 0: entity state may fill it in).
    """

    ids_BC: Int64s
    lengths_BF: npt.NDArray[np.int32]
    floats_BM: Floats
    present_BA: npt.NDArray[np.uint8]

    def __len__(self) -> int:
        """Number of rows."""
        return len(self.present_BA)

    def rows(self, start: int, stop: int) -> "Features":
        """Rows start..stop, as views."""
        return Features(*(getattr(self, field.name)[start:stop] for field in fields(Features)))


@dataclass(frozen=True)
class EventBatch:
    """B events ready to learn from.

    labels_B float32 (NaN for a feature event); event_time_ms_B int64 (0 unknown); accepted_us_B int64;
    event_key_B uint64 (hash of the event id, 0 none); entity_B int16 (-1 for an example, else the entity's index);
    entity_id_B int64.
    """

    features: Features
    labels_B: Floats
    event_time_ms_B: Int64s
    accepted_us_B: Int64s
    event_key_B: npt.NDArray[np.uint64]
    entity_B: npt.NDArray[np.int16]
    entity_id_B: Int64s

    def __len__(self) -> int:
        """Number of events."""
        return len(self.labels_B)

    @staticmethod
    def concatenate(batches: Sequence["EventBatch"]) -> "EventBatch":
        """One batch of all events, in order."""
        if len(batches) == 1:
            return batches[0]
        features = Features(
            *(np.concatenate([getattr(batch.features, f.name) for batch in batches]) for f in fields(Features))
        )
        rest = (np.concatenate([getattr(batch, f.name) for batch in batches]) for f in fields(EventBatch)[1:])
        return EventBatch(features, *rest)

    def split(self, size: int) -> Iterator["EventBatch"]:
        """The events in order, at most `size` at a time, as views."""
        return (self.rows(start, start + size) for start in range(0, len(self), size))

    def only(self, keep_B: npt.NDArray[np.bool_]) -> "EventBatch":
        """The events where keep_B is true, in order: copies."""
        features = Features(*(getattr(self.features, field.name)[keep_B] for field in fields(Features)))
        return EventBatch(features, *(getattr(self, field.name)[keep_B] for field in fields(EventBatch)[1:]))

    def rows(self, start: int, stop: int) -> "EventBatch":
        """Events start..stop, as views."""
        rest = (getattr(self, field.name)[start:stop] for field in fields(EventBatch)[1:])
        return EventBatch(self.features.rows(start, stop), *rest)


def derive_batch(schema: Schema, raw: RawEvents) -> EventBatch:
    """Raw events -> what the kernels learn from; one that names no time happened when it was accepted."""
    time_ms_B = raw.event_time_ms_B
    if not time_ms_B.all():
        time_ms_B = np.where(time_ms_B > 0, time_ms_B, raw.accepted_us_B // 1000)
    return EventBatch(
        features=derive(schema, raw.inputs, time_ms_B),
        labels_B=raw.labels_B,
        event_time_ms_B=raw.event_time_ms_B,
        accepted_us_B=raw.accepted_us_B,
        event_key_B=raw.event_key_B,
        entity_B=raw.entity_B,
        entity_id_B=raw.entity_id_B,
    )


def derive(schema: Schema, inputs: Inputs, time_ms_B: Int64s) -> Features:
    """Inputs -> features in matrices: transforms, buckets, padding, defaults of what is missing."""
    count = inputs.count
    features = Features(
        ids_BC=np.full((count, schema.num_id_columns), EMPTY, np.int64),
        lengths_BF=np.ones((count, len(schema.id_features)), np.int32),
        floats_BM=np.zeros((count, schema.num_floats), np.float32),
        present_BA=np.ones((count, len(schema.features)), np.uint8),
    )
    missing = InputColumn(given_B=np.zeros(count, np.bool_))
    time = InputColumn(given_B=time_ms_B > 0, numbers=time_ms_B[time_ms_B > 0].astype(np.float64))
    for feature in schema.features:
        column = time if feature.source == TIME_INPUT else inputs.columns.get(feature.source, missing)
        if column.given_B is not None:
            features.present_BA[:, feature.index] = column.given_B
        if isinstance(feature.spec, ListFeature):
            _derive_list(features, feature, column)
        elif feature.is_id:
            _derive_id(features, feature, column)
        else:
            _derive_floats(features, feature, column)
    return features


def _derive_id(features: Features, feature: Feature, column: InputColumn) -> None:
    ids = features.ids_BC[:, feature.first]
    values = column.ids
    if column.numbers is not None and isinstance(feature.spec, CategoricalFeature):
        values = hash_integers(bucket(feature.spec, column.numbers))
    if values is not None and len(values) == len(ids):
        ids[:] = values
        return
    ids[:] = MISSING_ID
    if values is not None and column.given_B is not None:
        ids[column.given_B] = values


def bucket(spec: CategoricalFeature, numbers: npt.NDArray[np.float64]) -> Int64s:
    """The declared transform of a number into a category."""
    if spec.transform == "log2":
        buckets = np.rint(np.log2(np.maximum(numbers, 1.0)))
    elif spec.transform == "bucket":
        buckets = np.floor(numbers / spec.bucket_width)
    elif spec.transform == "hour":
        buckets = np.floor(numbers / MS_PER_HOUR) % 24
    else:  # weekday: 1970-01-01 was a Thursday, day 3 counting from Monday
        buckets = (np.floor(numbers / (24 * MS_PER_HOUR)) + 3) % 7
    return np.clip(buckets, -(2.0**62), 2.0**62).astype(np.int64)


def _derive_floats(features: Features, feature: Feature, column: InputColumn) -> None:
    target = features.floats_BM[:, feature.first : feature.first + feature.span]
    spec = feature.spec
    if isinstance(spec, NumericFeature):
        target[:] = transform(spec, np.array([spec.default]))
    if column.numbers is None:
        return
    numbers = column.numbers.reshape(-1, feature.span)
    if isinstance(spec, NumericFeature):
        numbers = transform(spec, numbers)
    target[slice(None) if column.given_B is None else column.given_B] = np.clip(numbers, -CLIP, CLIP)


def transform(spec: NumericFeature, numbers: npt.NDArray[np.float64]) -> npt.NDArray[np.float64]:
    """The declared transform of a number."""
    if spec.transform == "log1p":
        return np.copysign(np.log1p(np.abs(numbers)), numbers)
    if spec.transform == "standard":
        return (numbers - spec.mean) / spec.std
    return numbers


def _derive_list(features: Features, feature: Feature, column: InputColumn) -> None:
    features.lengths_BF[:, feature.id_index] = 0
    if column.ids is not None and column.lengths is not None:
        lengths = features.lengths_BF[:, feature.id_index]
        lengths[slice(None) if column.given_B is None else column.given_B] = column.lengths
        _scatter_list(column.ids, features.lengths_BF, feature.id_index, features.ids_BC, feature.first)


@kernel
def _scatter_list(ids: Int64s, lengths_BF: npt.NDArray[np.int32], f: int, ids_BC: Int64s, first: int) -> None:
    at = 0
    for b in range(ids_BC.shape[0]):
        for k in range(lengths_BF[b, f]):
            ids_BC[b, first + k] = ids[at]
            at += 1


def select(raw: RawEvents, keep_B: npt.NDArray[np.bool_]) -> RawEvents:
    """The events where keep_B is true, in order."""
    columns = {name: _select_column(column, keep_B) for name, column in raw.inputs.columns.items()}
    rest = (getattr(raw, field.name)[keep_B] for field in fields(RawEvents)[1:])
    return RawEvents(Inputs(int(np.count_nonzero(keep_B)), columns), *rest)


def _select_column(column: InputColumn, keep_B: npt.NDArray[np.bool_]) -> InputColumn:
    given_B = None if column.given_B is None else column.given_B[keep_B]
    keep = keep_B if column.given_B is None else keep_B[column.given_B]  # of those that give it
    if column.numbers is not None:
        size = len(column.numbers) // max(len(keep), 1)
        return InputColumn(given_B, numbers=column.numbers.reshape(len(keep), size)[keep].ravel())
    if column.ids is None:
        return InputColumn(given_B)
    if column.lengths is None:
        return InputColumn(given_B, ids=column.ids[keep])
    return InputColumn(given_B, ids=column.ids[np.repeat(keep, column.lengths)], lengths=column.lengths[keep])


def merge_context(schema: Schema, features: Features, context: Features) -> None:
    """Give every row what it lacks of the one row `context`, in place: candidates that share a user, for instance."""
    _merge_context(
        features.ids_BC, features.lengths_BF, features.floats_BM, features.present_BA,
        context.ids_BC, context.lengths_BF, context.floats_BM, context.present_BA,
        schema.kind_A, schema.first_A, schema.span_A, schema.id_index_A,
    )  # fmt: skip


@kernel
def _merge_context(  # noqa: PLR0917 -- kernels take arrays one by one: numba unpacks no objects
    ids_BC: Int64s,
    lengths_BF: npt.NDArray[np.int32],
    floats_BM: Floats,
    present_BA: npt.NDArray[np.uint8],
    ids_1C: Int64s,
    lengths_1F: npt.NDArray[np.int32],
    floats_1M: Floats,
    present_1A: npt.NDArray[np.uint8],
    kind_A: Int64s,
    first_A: Int64s,
    span_A: Int64s,
    id_index_A: Int64s,
) -> None:
    for b in range(present_BA.shape[0]):
        for a in range(present_BA.shape[1]):
            if present_BA[b, a] != 0 or present_1A[0, a] == 0:
                continue
            present_BA[b, a] = 1
            for k in range(first_A[a], first_A[a] + span_A[a]):
                if kind_A[a] != 0:
                    ids_BC[b, k] = ids_1C[0, k]
                else:
                    floats_BM[b, k] = floats_1M[0, k]
            if kind_A[a] != 0:
                lengths_BF[b, id_index_A[a]] = lengths_1F[0, id_index_A[a]]


def warm() -> None:
    """Compile the kernels."""
    ids, lengths, floats = np.zeros((1, 1), np.int64), np.ones((1, 1), np.int32), np.zeros((1, 1), np.float32)
    _scatter_list(np.zeros(1, np.int64), lengths, 0, ids, 0)
    row, columns = (ids, lengths, floats, np.zeros((1, 1), np.uint8)), np.zeros((4, 1), np.int64)
    _merge_context(*row, *row, *columns)
