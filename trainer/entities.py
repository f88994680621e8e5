"""What is now true of each user or item: fixed-width records, changed by feature events in log order.

An example reads the records as they were at its place in the log, so training sees what serving would have seen.
A feature event changes only the features it gives; values that an example carries itself win over the record.
The record layout is `schema.Entity`; the service fills requests with the same `fill_row`, from the live store.

Legend: A all features, B rows of a batch, C id columns, F id features, M float columns, E entities, X features of
all entities one after the other, G slots of all entities, W words of a record, K slots written.
"""
# ruff: noqa: PLR0917 -- kernels take arrays and places one by one: numba unpacks no objects.

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from trainer import index
from trainer.events import EventBatch, Features
from trainer.index import Int64s, UInt8s, UInt32s
from trainer.kernel import kernel
from trainer.probe import EMPTY, REMOVED, home_slot
from trainer.schema import Entity, Schema
from trainer.settings import Settings

LOW_32 = np.int64(0xFFFFFFFF)
ONE = np.uint32(1)
US_PER_S = 1_000_000

# Columns of `columns_A4` and `entities_E8`.
IS_ID, FIRST, SPAN, ID_INDEX = 0, 1, 2, 3
KEY_FEATURE, KEY_COLUMN, SLOT_BASE, CAPACITY, WORD_BASE, WORDS, FIRST_X, END_X = range(8)


@kernel
def fill_row(
    b: int,
    ids_BC: Int64s,
    lengths_BF: npt.NDArray[np.int32],
    floats_BM: UInt32s,
    present_BA: UInt8s,
    columns_A4: Int64s,
    own_X2: Int64s,
    first_x: int,
    end_x: int,
    records: UInt32s,
    at: int,
) -> None:
    """Copy what the record at word `at` knows into row b, where the row does not say it itself.

    `own_X2`: (feature, its word in the record). Floats are passed as their bits. A feature that was filled in counts
    as given from there on, so an entity declared later may have it as its key.
    """
    for x in range(first_x, end_x):
        a = own_X2[x, 0]
        bit = x - first_x
        known = (records[at + bit // 32] >> np.uint32(bit % 32)) & ONE
        if known == 0 or present_BA[b, a] != 0:
            continue
        present_BA[b, a] = 1
        word = at + own_X2[x, 1]
        first, span = columns_A4[a, FIRST], columns_A4[a, SPAN]
        if columns_A4[a, IS_ID] != 0:
            lengths_BF[b, columns_A4[a, ID_INDEX]] = np.int32(records[word])
            for k in range(span):
                low, high = records[word + 1 + 2 * k], records[word + 2 + 2 * k]
                ids_BC[b, first + k] = (np.int64(high) << np.int64(32)) | np.int64(low)
        else:
            for k in range(span):
                floats_BM[b, first + k] = records[word + k]


@kernel
def merge_row(
    b: int,
    ids_BC: Int64s,
    lengths_BF: npt.NDArray[np.int32],
    floats_BM: UInt32s,
    present_BA: UInt8s,
    columns_A4: Int64s,
    own_X2: Int64s,
    first_x: int,
    end_x: int,
    records: UInt32s,
    at: int,
) -> None:
    """Write what row b gives into the record at word `at`; everything else in it stays."""
    for x in range(first_x, end_x):
        a = own_X2[x, 0]
        if present_BA[b, a] == 0:
            continue
        bit = x - first_x
        records[at + bit // 32] |= ONE << np.uint32(bit % 32)
        word = at + own_X2[x, 1]
        first, span = columns_A4[a, FIRST], columns_A4[a, SPAN]
        if columns_A4[a, IS_ID] != 0:
            records[word] = np.uint32(lengths_BF[b, columns_A4[a, ID_INDEX]])
            for k in range(span):
                key = ids_BC[b, first + k]
                records[word + 1 + 2 * k] = np.uint32(key & LOW_32)
                records[word + 2 + 2 * k] = np.uint32((key >> np.int64(32)) & LOW_32)
        else:
            for k in range(span):
                records[word + k] = floats_BM[b, first + k]


@kernel
def apply_batch(
    ids_BC: Int64s,
    lengths_BF: npt.NDArray[np.int32],
    floats_BM: UInt32s,
    present_BA: UInt8s,
    entity_B: npt.NDArray[np.int16],
    entity_id_B: Int64s,
    accepted_us_B: Int64s,
    columns_A4: Int64s,
    entities_E8: Int64s,
    own_X2: Int64s,
    keys_G: Int64s,
    stamps_G: Int64s,
    seen_s_G: UInt32s,
    counts_G: UInt32s,
    records: UInt32s,
    clock: int,
    written_K2: Int64s,
) -> int:
    """Go through the rows in order: merge feature events, fill examples. Returns the number of slots written.

    `written_K2`: (global slot, entity), in log order, with repetitions; needs room for B.
    """
    num_written = 0
    for b in range(entity_B.shape[0]):
        now_s = accepted_us_B[b] // US_PER_S
        of = np.int64(entity_B[b])
        for e in range(entities_E8.shape[0]):
            if of >= 0 and of != e:
                continue
            base, capacity = entities_E8[e, SLOT_BASE], entities_E8[e, CAPACITY]
            first_x, end_x, words = entities_E8[e, FIRST_X], entities_E8[e, END_X], entities_E8[e, WORDS]
            if of == e:
                key = entity_id_B[b]
                if key in (EMPTY, REMOVED):
                    continue
                # Records are copied at once, so even a slot used a row ago may be taken.
                slot, is_new = index.place(keys_G, stamps_G, base, capacity, home_slot(key, capacity), key)
                at = entities_E8[e, WORD_BASE] + (slot - base) * words
                if is_new:
                    counts_G[slot] = 0
                    for w in range(words):
                        records[at + w] = 0
                merge_row(
                    b, ids_BC, lengths_BF, floats_BM, present_BA, columns_A4, own_X2, first_x, end_x, records, at
                )  # fmt: skip
                written_K2[num_written, 0] = slot
                written_K2[num_written, 1] = e
                num_written += 1
            else:
                if present_BA[b, entities_E8[e, KEY_FEATURE]] == 0:
                    continue
                key = ids_BC[b, entities_E8[e, KEY_COLUMN]]
                slot = index.locate(keys_G, base, capacity, home_slot(key, capacity), key)
                if slot < 0:
                    continue
                at = entities_E8[e, WORD_BASE] + (slot - base) * words
                fill_row(
                    b, ids_BC, lengths_BF, floats_BM, present_BA, columns_A4, own_X2, first_x, end_x, records, at
                )  # fmt: skip
            stamps_G[slot] = clock + b
            seen_s_G[slot] = now_s
            if counts_G[slot] != index.MOST:
                counts_G[slot] += ONE
    return num_written


@kernel
def fill_rows(
    ids_BC: Int64s,
    lengths_BF: npt.NDArray[np.int32],
    floats_BM: UInt32s,
    present_BA: UInt8s,
    columns_A4: Int64s,
    own_X2: Int64s,
    first_x: int,
    end_x: int,
    records: UInt32s,
    words: int,
    known_B: UInt8s,
) -> None:
    """Fill each row whose record is known from its record; `records` is [B, W] laid flat."""
    for b in range(known_B.shape[0]):
        if known_B[b] != 0:
            fill_row(
                b, ids_BC, lengths_BF, floats_BM, present_BA, columns_A4, own_X2, first_x, end_x, records, b * words
            )


@dataclass(frozen=True)
class EntityChanges:
    """Records that feature events wrote: each global slot once, ascending, and its entity."""

    slots_K: Int64s
    entities_K: Int64s


class RecordLayout:
    """Where each feature lies in its entity's record; all that a service needs to fill in requests."""

    def __init__(self, schema: Schema) -> None:
        self.entities: tuple[Entity, ...] = schema.entities
        self.columns_A4 = np.stack([schema.kind_A, schema.first_A, schema.span_A, schema.id_index_A], axis=1)
        own = [np.stack([entity.feature_E, entity.word_E], axis=1) for entity in schema.entities]
        self.own_X2 = np.concatenate([np.zeros((0, 2), np.int64), *own])
        self.entities_E8 = np.zeros((len(own), 8), np.int64)
        slots, words, x = 0, 0, 0
        for row, entity in zip(self.entities_E8, schema.entities, strict=True):
            end_x = x + len(entity.feature_E)
            row[:] = (entity.key_feature, entity.key_column, slots, entity.capacity, words, entity.words, x, end_x)
            slots, words, x = slots + entity.capacity, words + entity.capacity * entity.words, end_x
        self.num_slots = slots
        self.num_words = words

    def keys_of(self, features: Features, entity: int) -> Int64s:
        """The id by which each row names an entity; EMPTY where it names none."""
        key_feature, key_column = self.entities_E8[entity, :2].tolist()
        return np.where(features.present_BA[:, key_feature] != 0, features.ids_BC[:, key_column], EMPTY)

    def fill(self, features: Features, entity: int, records_BW: UInt32s, known_B: UInt8s) -> None:
        """Fill each row's missing features of one entity from its record, in place (rows with `known_B` 0 stay).

        With several entities, go in the order of their index: what one fills in may be the key of a later one.
        """
        first_x, end_x = self.entities_E8[entity, FIRST_X:].tolist()
        fill_rows(
            features.ids_BC, features.lengths_BF, features.floats_BM.view(np.uint32), features.present_BA,
            self.columns_A4, self.own_X2, first_x, end_x, records_BW.reshape(-1), records_BW.shape[1], known_B,
        )  # fmt: skip


class Entities:
    """The trainer's records of all entities of a schema; fixed memory, the least recently used id is forgotten.

    >>> from trainer.settings import Settings
    >>> settings = Settings.model_validate({
    ...     "tables": {"user": {}, "city": {}}, "entities": {"user": {"key": "user"}},
    ...     "features": {"user": {"kind": "categorical"}, "city": {"kind": "categorical", "entity": "user"}}})
    >>> Entities(Schema.from_settings(settings)).layout.entities[0].words  # mask, length, id
    4
    """

    def __init__(self, schema: Schema) -> None:
        self.layout = RecordLayout(schema)
        self.keys = np.full(self.layout.num_slots, EMPTY, np.int64)
        self.stamps = np.zeros(self.layout.num_slots, np.int64)
        self.seen_s = np.zeros(self.layout.num_slots, np.uint32)
        self.counts = np.zeros(self.layout.num_slots, np.uint32)
        self.words = np.zeros(self.layout.num_words, np.uint32)
        self.clock = 1  # stamp of the next row

    @property
    def num_bytes(self) -> int:
        """Bytes of all arrays, fixed at construction."""
        arrays = (self.keys, self.stamps, self.seen_s, self.counts, self.words)
        return sum(array.nbytes for array in arrays)

    def apply(self, batch: EventBatch) -> EntityChanges:
        """Merge the batch's feature events and fill its examples, in log order; `batch.features` changes in place.

        An id is created by a feature event only. Cost: 0.2 to 0.6 us an event and entity.
        """
        if not self.layout.entities:
            nothing = np.empty(0, np.int64)
            return EntityChanges(nothing, nothing)
        features = batch.features
        # What came over the wire may be read-only, which would be another type to numba, and another compilation.
        entity_B = np.require(batch.entity_B, requirements="W")
        entity_id_B = np.require(batch.entity_id_B, requirements="W")
        accepted_us_B = np.require(batch.accepted_us_B, requirements="W")
        written_K2 = np.empty((len(batch), 2), np.int64)
        count = apply_batch(
            features.ids_BC, features.lengths_BF, features.floats_BM.view(np.uint32), features.present_BA,
            entity_B, entity_id_B, accepted_us_B, self.layout.columns_A4, self.layout.entities_E8,
            self.layout.own_X2, self.keys, self.stamps, self.seen_s, self.counts, self.words, self.clock, written_K2,
        )  # fmt: skip
        self.clock += len(batch)
        slots_K, first_K = np.unique(written_K2[:count, 0], return_index=True)
        return EntityChanges(slots_K, written_K2[first_K, 1])

    def find(self, entity: int, ids_N: Int64s) -> Int64s:
        """Local slots of ids, -1 where unknown; changes nothing."""
        base, capacity = self.layout.entities_E8[entity, [SLOT_BASE, CAPACITY]].tolist()
        slots_N = np.empty(len(ids_N), np.int64)
        index.find_ids(self.keys, base, capacity, ids_N, slots_N)
        return np.where(slots_N < 0, -1, slots_N - base)

    def remove(self, entity: int, ids_N: Int64s) -> Int64s:
        """Forget ids: nothing of their records stays. The global slots freed, to be given to the publisher."""
        base, capacity = self.layout.entities_E8[entity, [SLOT_BASE, CAPACITY]].tolist()
        removed_N = np.empty(len(ids_N), np.int64)
        removed_N = removed_N[: index.remove_ids(self.keys, base, capacity, ids_N, removed_N)]
        for array in (self.stamps, self.seen_s, self.counts):
            array[removed_N] = 0
        self.records(entity)[removed_N - base] = 0
        return removed_N

    def occupied(self, entity: int) -> Int64s:
        """Local slots that hold an id, ascending."""
        base, capacity = self.layout.entities_E8[entity, [SLOT_BASE, CAPACITY]].tolist()
        keys = self.keys[base : base + capacity]
        return np.flatnonzero((keys != EMPTY) & (keys != REMOVED))

    def records(self, entity: int) -> UInt32s:
        """Records of one entity by local slot, [capacity, W]: a view."""
        start, words = self.layout.entities_E8[entity, [WORD_BASE, WORDS]].tolist()
        capacity = int(self.layout.entities_E8[entity, CAPACITY])
        return self.words[start : start + capacity * words].reshape(capacity, words)


def warm() -> None:
    """Compile the kernels."""
    settings = Settings.model_validate(
        {
            "tables": {"a": {"capacity": 64}},
            "entities": {"e": {"key": "a", "capacity": 64}},
            "features": {"a": {"kind": "categorical"}, "x": {"kind": "numeric", "entity": "e"}},
        }
    )
    schema = Schema.from_settings(settings)
    features = Features(
        ids_BC=np.zeros((1, 1), np.int64),
        lengths_BF=np.ones((1, 1), np.int32),
        floats_BM=np.zeros((1, 1), np.float32),
        present_BA=np.ones((1, 2), np.uint8),
    )
    zero_B = np.zeros(1, np.int64)
    batch = EventBatch(
        features, np.zeros(1, np.float32), zero_B, zero_B, zero_B.view(np.uint64), zero_B.astype(np.int16), zero_B
    )
    entities = Entities(schema)
    entities.apply(batch)
    entities.find(0, zero_B)
    entities.layout.fill(features, 0, entities.records(0)[:1], np.ones(1, np.uint8))
