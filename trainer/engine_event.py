"""The event engine: one kernel call learns from a batch event by event, on one core, in float32.

For each event: gather its rows, forward, and with the prediction made: backward, row-wise Adagrad on the rows, FTRL on
the wide weights, Adagrad on the dense ones. The next event is predicted by what this one taught, so the size of the
batch that I/O hands over costs no quality. Gradients of weight matrices are products of two vectors and are never
formed: each row of weights is read once, passed through to dx and updated in the same sweep (`optim.py`).

With `micro_batch` k, k events are predicted with the same weights and their summed gradients applied once, per slot;
this is what the torchrec engine does with a whole batch, and how the two are held together.

An id that one event names twice (a list, or two features over one table) gets one update of its summed gradient:
the `Pool` collects gradients by slot. Features that cannot repeat skip it when events are learned one by one.

Legend: B rows, N rows to run, C id columns, F id features, M float columns, P pairs, D row width, G all slots,
E entries of the pool, H cells of its hash table.
"""

from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from trainer.dense import BIAS, BIAS_ACCUMULATOR, COUNT, POSITIVES, LearnerState
from trainer.forward import Net, build_net, net_backward, net_logit, sigmoid
from trainer.index import prefetch
from trainer.kernel import kernel, kernel_fast
from trainer.optim import ACCUMULATE, ADAGRAD, SGD, dense_step, ftrl_step, ftrl_weight, row_step
from trainer.schema import Schema
from trainer.settings import ModelSettings
from trainer.tables import Tables
from trainer.events import Features

Float32s = npt.NDArray[np.float32]
Float64s = npt.NDArray[np.float64]
Int32s = npt.NDArray[np.int32]
Int64s = npt.NDArray[np.int64]

ZERO, ONE = np.float32(0), np.float32(1)
SPREAD = np.uint64(0x9E3779B97F4A7C15)
PAIR_A, PAIR_B = np.uint64(0x9FB21C651E98DF25), np.uint64(0xD6E8FEB86659FD93)


class Plan(NamedTuple):
    """Where each feature's ids lie in the columns, its rows in the tables and its pooled row in x."""

    column_F: Int64s
    list_F: Int64s
    mean_F: Int64s
    width_F: Int64s
    x_F: Int64s
    shift_F: Int64s  # the row of global slot g starts at g * width + shift
    alone_F: Int64s  # 1: no other id of an event can have this feature's slot
    lr_F: Float32s
    eps_F: Float32s
    float_x_M: Int64s
    pairs_P2: Int64s
    wide: int
    deep: int  # 0: nothing reads x


class Rules(NamedTuple):
    """Optimizer settings."""

    dense: int
    lr: np.float32
    eps: np.float32
    alpha: np.float32
    beta: np.float32
    l1: np.float32
    l2: np.float32
    bias_lr: np.float64


class Memory(NamedTuple):
    """All that is learned; the kernels change it in place. See `tables.Tables` and `dense.LearnerState`."""

    weights: Float32s
    accumulators: Float32s
    wide_z: Float32s
    wide_n: Float32s
    params: Float32s
    state: Float32s
    offset: Float64s
    pair_z: Float32s
    pair_n: Float32s


class Batch(NamedTuple):
    """One call's rows."""

    rows_N: Int64s
    slots_BC: Int64s
    ids_BC: Int64s
    lengths_BF: Int32s
    floats_BM: Float32s
    labels_B: Float32s
    logits_B: Float32s


class Pool(NamedTuple):
    """Gradients by slot, until they are applied. Keys: global slots, then G + index of a hashed pair."""

    cells_H: Int32s  # entry + 1, 0: free
    count: Int64s  # [entries in use, touched pairs]
    key_E: Int64s
    cell_E: Int64s
    feature_E: Int64s
    wide_E: Float32s
    row_ED: Float32s
    dense: Float32s  # gradients of the dense parameters (micro-batches only)
    touched_pairs: Int64s
    is_touched: npt.NDArray[np.uint64]  # one bit a pair slot


class Scratch(NamedTuple):
    """Activations and their gradients of one event, see `forward.py`."""

    act: Float32s
    back: Float32s


@kernel
def pair_index(a: int, b: int, pair: int, num_slots: int) -> int:
    """Slot of a hashed pair: (a * A + b * B + pair), mixed (xor-shift, multiply, twice), its top bits; num_slots = 2^k.

    Ids are hashes already; the mix makes order and the pair's number matter. Overflow wraps around.
    """
    h = np.uint64(a) * PAIR_A + np.uint64(b) * PAIR_B + np.uint64(pair)
    h = (h ^ (h >> np.uint64(32))) * PAIR_A
    h = (h ^ (h >> np.uint64(29))) * PAIR_B
    return np.int64((h >> np.uint64(32)) & np.uint64(num_slots - 1))


@kernel_fast
def wide_of(slot: int, z: Float32s, n: Float32s, rules: Rules) -> np.float32:
    """Wide weight at a slot."""
    return ftrl_weight(z[slot], n[slot], rules.alpha, rules.beta, rules.l1, rules.l2)


@kernel
def base_logit(offset: Float64s) -> np.float32:
    """Same as `dense.offset_logit`."""
    odds = (offset[POSITIVES] + 1.0) / (offset[COUNT] - offset[POSITIVES] + 1.0)
    return np.float32(np.log(odds) + offset[BIAS])


@kernel_fast
def gather(batch: Batch, b: int, plan: Plan, rules: Rules, memory: Memory, act: Float32s) -> np.float32:
    """Fill x from the tables and the floats; returns the sum of the wide weights. Slots of -1 count as zeros."""
    wide = ZERO
    weights = memory.weights
    for f in range(plan.column_F.shape[0]):
        first, width, at = plan.column_F[f], plan.width_F[f], plan.x_F[f]
        length = np.int64(batch.lengths_BF[b, f]) if plan.list_F[f] else 1
        pooled = act[at : at + width]
        pooled[:] = ZERO
        for c in range(first, first + length):
            slot = batch.slots_BC[b, c]
            if slot < 0:
                continue
            if plan.deep:
                start = slot * width + plan.shift_F[f]
                row = weights[start : start + width]
                for k in range(width):
                    pooled[k] += row[k]
            if plan.wide:
                wide += wide_of(slot, memory.wide_z, memory.wide_n, rules)
        if plan.mean_F[f] and length > 1:
            scale = ONE / np.float32(length)
            for k in range(width):
                pooled[k] *= scale
    for m in range(plan.float_x_M.shape[0]):
        act[plan.float_x_M[m]] = batch.floats_BM[b, m]
    return wide


@kernel_fast
def gather_pairs(batch: Batch, b: int, plan: Plan, rules: Rules, memory: Memory) -> np.float32:
    """Sum of the hashed pairs' weights."""
    wide = ZERO
    num_slots = memory.pair_z.shape[0]
    for p in range(plan.pairs_P2.shape[0]):
        slot = pair_index(batch.ids_BC[b, plan.pairs_P2[p, 0]], batch.ids_BC[b, plan.pairs_P2[p, 1]], p, num_slots)
        wide += wide_of(slot, memory.pair_z, memory.pair_n, rules)
    return wide


@kernel
def entry_of(pool: Pool, key: int, feature: int, width: int) -> int:
    """The pool's entry for a key, new (zeros) if need be. The cells outnumber the entries, so the search ends."""
    mask = pool.cells_H.shape[0] - 1
    cell = np.int64((np.uint64(key) * SPREAD) >> np.uint64(32)) & mask
    while pool.cells_H[cell] != 0:
        entry = np.int64(pool.cells_H[cell]) - 1
        if pool.key_E[entry] == key:
            return entry
        cell = (cell + 1) & mask
    entry = pool.count[0]
    pool.count[0] += 1
    pool.cells_H[cell] = entry + 1
    pool.key_E[entry] = key
    pool.cell_E[entry] = cell
    pool.feature_E[entry] = feature
    pool.wide_E[entry] = ZERO
    for k in range(width):
        pool.row_ED[entry, k] = ZERO
    return entry


@kernel_fast
def learn_ids(
    batch: Batch, b: int, plan: Plan, rules: Rules, memory: Memory, dx: Float32s, g: np.float32, pool: Pool, pooled: int
) -> None:
    """Update the rows and wide weights of one event, or collect their gradients where a slot may come again."""
    for f in range(plan.column_F.shape[0]):
        first, width, at = plan.column_F[f], plan.width_F[f], plan.x_F[f]
        length = np.int64(batch.lengths_BF[b, f]) if plan.list_F[f] else 1
        scale = ONE / np.float32(length) if plan.mean_F[f] and length > 1 else ONE
        gradient = dx[at : at + width]
        for c in range(first, first + length):
            slot = batch.slots_BC[b, c]
            if slot < 0:
                continue
            if plan.alone_F[f] and not pooled:
                update_slot(slot, f, gradient, g, plan, rules, memory)
                continue
            entry = entry_of(pool, slot, f, width)
            pool.wide_E[entry] += g
            row = pool.row_ED[entry]
            for k in range(width):
                row[k] += scale * gradient[k]


@kernel_fast
def update_slot(
    slot: int, f: int, gradient: Float32s, g: np.float32, plan: Plan, rules: Rules, memory: Memory
) -> None:
    """One update of a row (gradient: its D floats) and of its wide weight (g)."""
    if plan.deep:
        width = plan.width_F[f]
        start = slot * width + plan.shift_F[f]
        row = memory.weights[start : start + width]
        row_step(row, memory.accumulators, slot, gradient, plan.lr_F[f], plan.eps_F[f])
    if plan.wide:
        weight = wide_of(slot, memory.wide_z, memory.wide_n, rules)
        ftrl_step(memory.wide_z, memory.wide_n, slot, weight, g, rules.alpha)


@kernel_fast
def collect_pairs(batch: Batch, b: int, plan: Plan, memory: Memory, g: np.float32, pool: Pool) -> None:
    """Add one event's gradient to its hashed pairs; two pairs may share a slot."""
    num_slots, first_key = memory.pair_z.shape[0], memory.accumulators.shape[0]
    for p in range(plan.pairs_P2.shape[0]):
        slot = pair_index(batch.ids_BC[b, plan.pairs_P2[p, 0]], batch.ids_BC[b, plan.pairs_P2[p, 1]], p, num_slots)
        pool.wide_E[entry_of(pool, first_key + slot, 0, 0)] += g


@kernel
def mark_touched(pool: Pool, slot: int) -> None:
    """Put a pair on the list of touched ones, once."""
    bit = np.uint64(1) << np.uint64(slot & 63)
    if pool.is_touched[slot >> 6] & bit == np.uint64(0):
        pool.is_touched[slot >> 6] |= bit
        pool.touched_pairs[pool.count[1]] = slot
        pool.count[1] += 1


@kernel
def forget_touched(pool: Pool) -> None:
    """Empty the list of touched pairs."""
    for i in range(pool.count[1]):
        pool.is_touched[pool.touched_pairs[i] >> 6] = np.uint64(0)
    pool.count[1] = 0


@kernel_fast
def apply_pool(pool: Pool, plan: Plan, rules: Rules, memory: Memory) -> None:
    """Apply the collected gradients, one update a slot, and empty the pool."""
    num_slots = memory.accumulators.shape[0]
    for entry in range(pool.count[0]):
        key, g = pool.key_E[entry], pool.wide_E[entry]
        if key < num_slots:
            f = pool.feature_E[entry]
            update_slot(key, f, pool.row_ED[entry, : plan.width_F[f]], g, plan, rules, memory)
        else:
            slot = key - num_slots
            weight = wide_of(slot, memory.pair_z, memory.pair_n, rules)
            ftrl_step(memory.pair_z, memory.pair_n, slot, weight, g, rules.alpha)
            mark_touched(pool, slot)
        pool.cells_H[pool.cell_E[entry]] = 0
    pool.count[0] = 0


@kernel
def learn_offset(offset: Float64s, positives: float, count: float, g: float, lr: float) -> None:
    """Move the running label counts and, by Adagrad, the bias; g is the summed gradient."""
    offset[POSITIVES] += positives
    offset[COUNT] += count
    offset[BIAS_ACCUMULATOR] += g * g
    offset[BIAS] -= lr * g / np.sqrt(offset[BIAS_ACCUMULATOR])


@kernel_fast
def ask_for_rows(batch: Batch, b: int, plan: Plan, memory: Memory) -> None:
    """Start fetching the memory of an event that comes soon; it is scattered, and waiting for it costs most."""
    for f in range(plan.column_F.shape[0]):
        slot = batch.slots_BC[b, plan.column_F[f]]
        if slot >= 0:
            prefetch(memory.weights, slot * plan.width_F[f] + plan.shift_F[f])
            prefetch(memory.accumulators, slot)
            prefetch(memory.wide_z, slot)
            prefetch(memory.wide_n, slot)


@kernel_fast
def run_events(
    batch: Batch, plan: Plan, net: Net, rules: Rules, memory: Memory, scratch: Scratch, pool: Pool, micro_batch: int
) -> None:
    """Predict the rows in order and, with micro_batch >= 1, learn from each group of that many. 0: only predict."""
    act, back = scratch.act, scratch.back
    num_rows = batch.rows_N.shape[0]
    dense_rule = rules.dense if micro_batch == 1 else ACCUMULATE
    state = memory.state if micro_batch == 1 else pool.dense
    base, positives, g_sum, waiting = base_logit(memory.offset), 0.0, 0.0, 0
    if micro_batch > 0:
        forget_touched(pool)
    for i in range(num_rows):
        b = batch.rows_N[i]
        if i + 1 < num_rows:
            ask_for_rows(batch, batch.rows_N[i + 1], plan, memory)
        logit = base + gather(batch, b, plan, rules, memory, act) + gather_pairs(batch, b, plan, rules, memory)
        logit += net_logit(net, memory.params, act)
        batch.logits_B[b] = logit
        if micro_batch == 0:
            continue
        label = batch.labels_B[b]
        g = np.float32(sigmoid(logit) - label)
        net_backward(net, memory.params, state, act, back, g, dense_rule, rules.lr, rules.eps)
        learn_ids(batch, b, plan, rules, memory, back, g, pool, micro_batch > 1)
        collect_pairs(batch, b, plan, memory, g, pool)
        positives += label
        g_sum += g
        waiting += 1
        if waiting < micro_batch and i + 1 < num_rows:
            continue
        if micro_batch > 1:
            dense_step(rules.dense, memory.params, memory.state, ONE, pool.dense, rules.lr, rules.eps)
            pool.dense[:] = ZERO
        apply_pool(pool, plan, rules, memory)
        learn_offset(memory.offset, positives, np.float64(waiting), g_sum, rules.bias_lr)
        base, positives, g_sum, waiting = base_logit(memory.offset), 0.0, 0.0, 0


class EventEngine:
    """Learns in place on the memory of `tables` and `state`; not for use from several threads at once.

    Raises:
        UnsupportedByEventEngine: the model is not of the family that the kernels know.
    """

    def __init__(self, schema: Schema, model: ModelSettings, tables: Tables, state: LearnerState) -> None:
        self._net = build_net(schema, model)
        self._plan = build_plan(schema, tables, model, self._net)
        self._rules = build_rules(model)
        self._memory = Memory(
            weights=tables.weights,
            accumulators=tables.accumulators,
            wide_z=tables.wide_z,
            wide_n=tables.wide_n,
            params=state.params,
            state=state.accumulators,
            offset=state.offset,
            pair_z=state.pair_z,
            pair_n=state.pair_n,
        )
        self._scratch = Scratch(np.zeros(self._net.act_size, np.float32), np.zeros(self._net.back_size, np.float32))
        self._num_id_columns = schema.num_id_columns
        self._pool = make_pool(entries=0, width=max(schema.feature_width_F, default=0), dense=0, touched_pairs=0, pair_slots=len(state.pair_z))
        self._no_labels_B = np.zeros(0, np.float32)

    def learn(
        self, slots_BC: Int64s, features: Features, labels_B: Float32s, *, micro_batch: int = 1
    ) -> Float32s:
        """Predict and learn, in order; returns the logits made before learning (NaN where the label is NaN).

        slots_BC: global slots from `Tables.assign`; -1 reads zeros and learns nothing. Rows whose label is NaN
        (feature events) are passed over. A `micro_batch` that outgrows the last one allocates anew.
        """
        if micro_batch < 1:
            raise ValueError(f"micro_batch: got {micro_batch}, wanted at least 1")
        self._reserve(micro_batch, len(labels_B))
        rows_N = np.flatnonzero(labels_B == labels_B)  # noqa: PLR0124 - NaN is the one value that differs from itself
        return self._run(rows_N, slots_BC, features, labels_B, micro_batch)

    def predict(self, slots_BC: Int64s, features: Features) -> Float32s:
        """Logits of B rows; changes nothing."""
        return self._run(np.arange(len(slots_BC)), slots_BC, features, self._no_labels_B, 0)

    @property
    def touched_pairs(self) -> Int64s:
        """Slots of the hashed pairs that the last `learn` changed, each once; valid until the next one."""
        return self._pool.touched_pairs[: self._pool.count[1]]

    def _run(
        self, rows_N: Int64s, slots_BC: Int64s, features: Features, labels_B: Float32s, micro_batch: int
    ) -> Float32s:
        logits_B = np.full(len(slots_BC), np.nan, np.float32)
        batch = Batch(
            rows_N, _plain(slots_BC), _plain(features.ids_BC), _plain(features.lengths_BF), _plain(features.floats_BM),
            _plain(labels_B), logits_B,
        )  # fmt: skip
        run_events(batch, self._plan, self._net, self._rules, self._memory, self._scratch, self._pool, micro_batch)
        return logits_B

    def _reserve(self, micro_batch: int, batch_size: int) -> None:
        """Make room for the pool's entries and the list of touched pairs; keeps the list as it stands."""
        num_pairs, pair_slots = len(self._plan.pairs_P2), len(self._memory.pair_z)
        entries = micro_batch * (self._num_id_columns + num_pairs)
        touched = min(batch_size * num_pairs, pair_slots)
        dense = len(self._memory.params) if micro_batch > 1 else 0
        pool = self._pool
        if entries <= len(pool.key_E) and touched <= len(pool.touched_pairs) and dense <= len(pool.dense):
            return
        self._pool = make_pool(
            entries=max(entries, len(pool.key_E)),
            width=pool.row_ED.shape[1],
            dense=max(dense, len(pool.dense)),
            touched_pairs=max(touched, len(pool.touched_pairs)),
            pair_slots=pair_slots,
        )


def build_plan(schema: Schema, tables: Tables, model: ModelSettings, net: Net) -> Plan:
    """Places of a schema's features."""
    table_F, width_F = schema.feature_table_F, schema.feature_width_F
    users_T = np.bincount(table_F, minlength=len(schema.tables))
    deep = len(net.weight) + len(net.cross) + len(net.fm_x) > 0
    return Plan(
        column_F=schema.feature_column_F,
        list_F=schema.feature_list_F,
        mean_F=schema.feature_mean_F,
        width_F=width_F,
        x_F=schema.feature_x_F,
        shift_F=tables.weight_base_T[table_F] - tables.slot_base_T[table_F] * width_F,
        alone_F=((users_T[table_F] == 1) & (schema.feature_length_F == 1)).astype(np.int64),
        lr_F=np.array([schema.tables[t].lr for t in table_F], np.float32),
        eps_F=np.array([schema.tables[t].eps for t in table_F], np.float32),
        float_x_M=schema.float_x_M,
        pairs_P2=schema.pairs_P2,
        wide=int(model.wide),
        deep=int(deep),
    )


def build_rules(model: ModelSettings) -> Rules:
    """Optimizer settings in the kernels' types."""
    dense, wide = model.optimizer, model.wide_optimizer
    return Rules(
        dense=ADAGRAD if dense.kind == "adagrad" else SGD,
        lr=np.float32(dense.lr),
        eps=np.float32(dense.eps),
        alpha=np.float32(wide.alpha),
        beta=np.float32(wide.beta),
        l1=np.float32(wide.l1),
        l2=np.float32(wide.l2),
        bias_lr=np.float64(model.bias_lr),
    )


def make_pool(*, entries: int, width: int, dense: int, touched_pairs: int, pair_slots: int) -> Pool:
    """An empty pool; its hash table is at most half full."""
    cells = 2 ** int(np.ceil(np.log2(max(2 * entries, 16))))
    return Pool(
        cells_H=np.zeros(cells, np.int32),
        count=np.zeros(2, np.int64),
        key_E=np.zeros(entries, np.int64),
        cell_E=np.zeros(entries, np.int64),
        feature_E=np.zeros(entries, np.int64),
        wide_E=np.zeros(entries, np.float32),
        row_ED=np.zeros((entries, width), np.float32),
        dense=np.zeros(dense, np.float32),
        touched_pairs=np.zeros(touched_pairs, np.int64),
        is_touched=np.zeros(pair_slots // 64 + 1, np.uint64),
    )


def _plain(array: npt.NDArray[Any]) -> npt.NDArray[Any]:
    """The array itself, or a copy if numba would compile the kernel anew for it (read-only, strided)."""
    return array if array.flags.carray else array.copy()
