"""Scores from the live store: gather rows, pool them into x, and the same forward pass as in training (`forward.py`).

Needs numpy and numba only. An id that the store does not know reads as zeros, as one without a slot does in training.

Legend: B rows (candidates), C id columns, F id features, M float columns, T tables, N ids to look up, S shards,
n network input, L lanes (rows that the net is evaluated for at once).
"""
# ruff: noqa: PLR0917 -- kernels take arrays one by one: numba unpacks no objects.

import tempfile
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from trainer.dense import DenseLayout
from trainer.engine_event import plain
from trainer.event_kernels import pair_index
from trainer.events import Features
from trainer.forward import Net, build_net, sigmoid
from trainer.forward_lanes import add_net_logits, lane_activations
from trainer.kernel import kernel_hot
from trainer.lanes import LANES
from trainer.live import Layout, Reader, Section, Writer
from trainer.live_kernels import WORDS, gather_records
from trainer.schema import Schema
from trainer.settings import ModelSettings, Settings

Float32s = npt.NDArray[np.float32]
Int32s = npt.NDArray[np.int32]
Int64s = npt.NDArray[np.int64]
UInt8s = npt.NDArray[np.uint8]
UInt32s = npt.NDArray[np.uint32]

COLUMN, LENGTH, MEAN, WIDTH, X, TABLE = range(6)  # columns of `features_F6`


@dataclass(frozen=True)
class Scored:
    """Answers for B rows. status_BC: per id column 1 learned, 0 unknown (and beyond a list's length)."""

    probabilities_B: Float32s
    logits_B: Float32s
    status_BC: UInt8s


@kernel_hot
def length_in(lengths_BF: Int32s, b: int, features_F6: Int64s, f: int) -> np.int64:
    """Number of ids of a row's feature; never more than it has columns."""
    return min(np.int64(lengths_BF[b, f]), features_F6[f, LENGTH])


@kernel_hot
def list_ids(
    table: int, ids_BC: Int64s, lengths_BF: Int32s, features_F6: Int64s, ids_N: Int64s, place_BC: Int64s
) -> int:
    """Write one table's ids to look up, and where among them each column's comes to lie; returns their number.

    An id that the row above has in the same column, as all candidates of one user have the user's, is looked up once:
    it saves the time, and they all see the same row.
    """
    num = 0
    for f in range(features_F6.shape[0]):
        if features_F6[f, TABLE] != table:
            continue
        first, above = features_F6[f, COLUMN], np.int64(0)
        for b in range(ids_BC.shape[0]):
            length = length_in(lengths_BF, b, features_F6, f)
            for k in range(length):
                c = first + k
                if k < above and ids_BC[b, c] == ids_BC[b - 1, c]:
                    place_BC[b, c] = place_BC[b - 1, c]
                    continue
                place_BC[b, c] = num
                ids_N[num] = ids_BC[b, c]
                num += 1
            above = length
    return num


@kernel_hot
def pool_rows(
    table: int,
    rows: Float32s,
    row_words: int,
    status_N: UInt8s,
    place_BC: Int64s,
    lengths_BF: Int32s,
    features_F6: Int64s,
    x_Bn: Float32s,
    wide_B: Float32s,
    status_BC: UInt8s,
) -> None:
    """Add one table's rows (vector, then wide weight; end to end) to x and the wide sum."""
    for f in range(features_F6.shape[0]):
        if features_F6[f, TABLE] != table:
            continue
        first, width, at = features_F6[f, COLUMN], features_F6[f, WIDTH], features_F6[f, X]
        for b in range(place_BC.shape[0]):
            length = length_in(lengths_BF, b, features_F6, f)
            scale = np.float32(1)
            if features_F6[f, MEAN] and length > 1:
                scale /= np.float32(length)
            pooled = x_Bn[b, at : at + width]
            for c in range(first, first + length):
                place = place_BC[b, c]
                row = rows[place * row_words : (place + 1) * row_words]
                status_BC[b, c] = status_N[place]
                for k in range(width):
                    pooled[k] += scale * row[k]
                wide_B[b] += row[width]


@kernel_hot
def gather_rows(
    bases_S: Int64s,
    rows_T7: Int64s,
    ids_BC: Int64s,
    lengths_BF: Int32s,
    features_F6: Int64s,
    ids_N: Int64s,
    place_BC: Int64s,
    rows_u32: UInt32s,
    rows_f32: Float32s,
    status_N: UInt8s,
    x_Bn: Float32s,
    wide_B: Float32s,
    status_BC: UInt8s,
) -> None:
    """Rows of all tables into x, the wide sum and the statuses; `rows_u32` and `rows_f32` are the same memory."""
    for table in range(rows_T7.shape[0]):
        num = list_ids(table, ids_BC, lengths_BF, features_F6, ids_N, place_BC)
        gather_records(bases_S, rows_T7[table], ids_N[:num], rows_u32, status_N)
        words = rows_T7[table, WORDS]
        pool_rows(table, rows_f32, words, status_N, place_BC, lengths_BF, features_F6, x_Bn, wide_B, status_BC)


@kernel_hot
def add_pairs(
    shard_f32: Float32s, pairs_off: int, shard: int, shape_2: Int64s, ids_BC: Int64s, pairs_P2: Int64s, wide_B: Float32s
) -> None:
    """Add the hashed pairs that lie in one shard; shape_2: number of shards, pair slots of the whole store."""
    num_shards, num_slots = shape_2[0], shape_2[1]
    for b in range(ids_BC.shape[0]):
        for p in range(pairs_P2.shape[0]):
            index = pair_index(ids_BC[b, pairs_P2[p, 0]], ids_BC[b, pairs_P2[p, 1]], p, num_slots)
            if index % num_shards == shard:
                wide_B[b] += shard_f32[pairs_off + index // num_shards]


@kernel_hot
def score_rows(
    net: Net,
    dense: Float32s,
    x_Bn: Float32s,
    floats_BM: Float32s,
    float_x_M: Int64s,
    wide_B: Float32s,
    act_AL: Float32s,
    logits_B: Float32s,
    probabilities_B: Float32s,
) -> None:
    """The net, LANES rows at a time: the same bits for a row alone and in any company."""
    offset, logit = dense[dense.shape[0] - 1], net.act_size
    for start in range(0, x_Bn.shape[0], LANES):
        num = min(LANES, x_Bn.shape[0] - start)  # the lanes past them hold what they held before
        for lane in range(num):
            b = start + lane
            for k in range(x_Bn.shape[1]):
                act_AL[k, lane] = x_Bn[b, k]
            for m in range(float_x_M.shape[0]):
                act_AL[float_x_M[m], lane] = floats_BM[b, m]
            act_AL[logit, lane] = offset + wide_B[b]
        add_net_logits(net, dense, act_AL)
        # All of them: of fewer, the compiler would do some as a vector and the rest one by one, with other bits.
        for lane in range(LANES):
            act_AL[logit + 1, lane] = sigmoid(act_AL[logit, lane])
        for lane in range(num):
            logits_B[start + lane], probabilities_B[start + lane] = act_AL[logit, lane], act_AL[logit + 1, lane]


class Scorer:
    """Scores candidates from a reader's store; one thread at a time. The caller attaches and refreshes the reader.

    Raises:
        UnsupportedByEventEngine: the model is not of the family that the kernels know.
    """

    def __init__(self, schema: Schema, model: ModelSettings, reader: Reader) -> None:
        self._reader = reader
        self._net = build_net(schema, model)
        self._act_AL = lane_activations(self._net)
        self._features_F6 = np.stack(
            [
                schema.feature_column_F,
                schema.feature_length_F,
                schema.feature_mean_F,
                schema.feature_width_F,
                schema.feature_x_F,
                schema.feature_table_F,
            ],
            axis=1,
        )
        num_columns_T = np.bincount(schema.column_table_C, minlength=len(schema.tables)).tolist()
        # What one candidate's rows of a table take at most: words of the scratch that the tables share.
        self._row_words = max((num_columns_T[table.index] * (table.width + 1) for table in schema.tables), default=0)
        self._float_x_M, self._pairs_P2, self._x_width = schema.float_x_M, schema.pairs_P2, schema.x_width

    def score(self, features: Features) -> Scored:
        """Probabilities of B rows, whose entity state has been filled in. Creates and learns nothing."""
        dense, _ = self._reader.dense()
        ids_BC, lengths_BF = plain(features.ids_BC), plain(features.lengths_BF)
        B = len(ids_BC)
        x_Bn, wide_B = np.zeros((B, self._x_width), np.float32), np.zeros(B, np.float32)
        status_BC = np.zeros(ids_BC.shape, np.uint8)
        self._gather(ids_BC, lengths_BF, x_Bn, wide_B, status_BC)
        if len(self._pairs_P2):
            self._add_pairs(ids_BC, wide_B)
        logits_B, probabilities_B = np.empty(B, np.float32), np.empty(B, np.float32)
        floats_BM = plain(features.floats_BM)
        score_rows(self._net, dense, x_Bn, floats_BM, self._float_x_M, wide_B, self._act_AL, logits_B, probabilities_B)
        return Scored(probabilities_B, logits_B, status_BC)

    def _gather(self, ids_BC: Int64s, lengths_BF: Int32s, x_Bn: Float32s, wide_B: Float32s, status_BC: UInt8s) -> None:
        """Rows of all tables into x, the wide sum and the statuses."""
        bases_S, rows_T7 = self._reader.row_places()
        ids_N, place_BC = np.empty(ids_BC.size, np.int64), np.empty(ids_BC.shape, np.int64)
        rows, status_N = np.empty(len(ids_BC) * self._row_words, np.uint32), np.empty(ids_BC.size, np.uint8)
        gather_rows(
            bases_S, rows_T7, ids_BC, lengths_BF, self._features_F6, ids_N, place_BC, rows, rows.view(np.float32),
            status_N, x_Bn, wide_B, status_BC,
        )  # fmt: skip

    def _add_pairs(self, ids_BC: Int64s, wide_B: Float32s) -> None:
        layout = self._reader.layout
        shape_2 = np.array([layout.num_shards, layout.pair_slots])
        for shard, view in enumerate(self._reader.shards):
            add_pairs(view.f32, view.pairs_off, shard, shape_2, ids_BC, self._pairs_P2, wide_B)


def warm() -> None:
    """Compile the kernels, or load them from the cache, for the types that a reader hands out."""
    tables, features = (
        {"a": {"capacity": 64}},
        {"a": {"kind": "categorical"}, "b": {"kind": "categorical", "table": "a"}},
    )
    settings = Settings.model_validate(
        {"tables": tables, "features": features, "model": {"pairs": "all", "pair_bits": 8}}
    )
    schema = Schema.from_settings(settings)
    size = DenseLayout(schema, settings.model).size + 1
    rows = Section("a", "rows", capacity=64, words=schema.tables[0].width + 1)
    layout = Layout((rows,), dense_size=size, pair_slots=256, num_shards=1, schema_hash=schema.layout_hash)
    with tempfile.TemporaryDirectory() as directory, Writer.create(directory, layout) as writer:
        writer.put_dense(np.zeros(size, np.float32))
        writer.activate()
        reader = Reader(directory)
        reader.attach(0)
        one = Features(
            ids_BC=np.zeros((1, 2), np.int64),
            lengths_BF=np.ones((1, 2), np.int32),
            floats_BM=np.zeros((1, 0), np.float32),
            present_BA=np.ones((1, 2), np.uint8),
        )
        Scorer(schema, settings.model, reader).score(one)
