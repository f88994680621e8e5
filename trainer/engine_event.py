"""The event engine: one kernel call learns from a batch event by event, on one core, in float32.

For each event: gather its rows, forward, and with the prediction made: backward, row-wise Adagrad on the rows, FTRL on
the wide weights, Adagrad on the dense ones. The next event is predicted by what this one taught, so the size of the
batch that I/O hands over costs no quality. Gradients of weight matrices are products of two vectors and are never
formed: each row of weights is read once, passed through to dx and updated in the same sweep (`optim.py`).

With `micro_batch` k, k events are predicted with the same weights and their summed gradients applied once, per slot;
this is what the torchrec engine does with a whole batch, and how the two are held together.

An id that one event names twice (a list, or two features over one table) gets one update of its summed gradient,
through `gradient_pool.py`; features that cannot repeat skip that when events are learned one by one.

Legend: B rows, C id columns, F id features, M float columns, P hashed pairs, D row width.
"""
# ruff: noqa: PLR0917 -- kernels take arrays one by one: numba unpacks no objects.

from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt
from numba.core import types
from numba.experimental import structref

from trainer.dense import BIAS, BIAS_ACCUMULATOR, COUNT, POSITIVES, LearnerState
from trainer.events import Features
from trainer.forward import Net, build_net, net_backward, net_logit, sigmoid
from trainer.gradient_pool import (
    ENTRIES,
    TOUCHED,
    Pool,
    empty_entries,
    empty_touched,
    entry_of,
    make_pool,
    mark_touched,
)
from trainer.kernel import kernel
from trainer.live_atomics import address_of, prefetch
from trainer.optim import ACCUMULATE, ADAGRAD, SGD, dense_step, ftrl_step, ftrl_weight, kernel_hot, row_step
from trainer.schema import Schema
from trainer.settings import ModelSettings, Settings
from trainer.tables import Tables

Float32s = npt.NDArray[np.float32]
Float64s = npt.NDArray[np.float64]
Int32s = npt.NDArray[np.int32]
Int64s = npt.NDArray[np.int64]

ZERO, ONE = np.float32(0), np.float32(1)
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
    """Optimizer settings: of the dense weights, of the wide ones, of the bias."""

    dense: int
    lr: np.float32
    eps: np.float32
    alpha: np.float32
    beta: np.float32
    l1: np.float32
    l2: np.float32
    bias_lr: float


class Memory(NamedTuple):
    """All that is learned; changed in place. See `tables.Tables` and `dense.LearnerState`."""

    weights: Float32s
    accumulators: Float32s
    wide_z: Float32s
    wide_n: Float32s
    params: Float32s
    params_accumulators: Float32s
    offset: Float64s
    pair_z: Float32s
    pair_n: Float32s


class Scratch(NamedTuple):
    """Activations of one event and their gradients, see `forward.py`."""

    act: Float32s
    back: Float32s


class Batch(NamedTuple):
    """One call's rows."""

    slots_BC: Int64s
    ids_BC: Int64s
    lengths_BF: Int32s
    floats_BM: Float32s
    labels_B: Float32s
    logits_B: Float32s


@kernel_hot
def pair_index(a: int, b: int, pair: int, num_slots: int) -> np.int64:
    """Slot of hashed pair number `pair` with ids a and b, of num_slots = 2^k.

    h = a * A + b * B + pair; h = (h ^ h >> 32) * A; h = (h ^ h >> 29) * B; bits 32.. of h. All modulo 2^64.
    """
    h = np.uint64(a) * PAIR_A + np.uint64(b) * PAIR_B + np.uint64(pair)
    h = (h ^ (h >> np.uint64(32))) * PAIR_A
    h = (h ^ (h >> np.uint64(29))) * PAIR_B
    return np.int64((h >> np.uint64(32)) & np.uint64(num_slots - 1))


@kernel_hot
def base_logit(offset: Float64s) -> np.float32:
    """Same as `dense.offset_logit`."""
    odds = (offset[POSITIVES] + 1.0) / (offset[COUNT] - offset[POSITIVES] + 1.0)
    return np.float32(np.log(odds) + offset[BIAS])


@kernel_hot
def wide_of(z: Float32s, n: Float32s, slot: int | np.int64, rules: Rules) -> np.float32:
    """Wide weight at a slot."""
    return ftrl_weight(z[slot], n[slot], rules.alpha, rules.beta, rules.l1, rules.l2)


@kernel_hot
def pair_of(batch: Batch, b: int, plan: Plan, memory: Memory, p: int) -> np.int64:
    """Slot of one event's p-th pair."""
    first, second = batch.ids_BC[b, plan.pairs_P2[p, 0]], batch.ids_BC[b, plan.pairs_P2[p, 1]]
    return pair_index(first, second, p, memory.pair_z.shape[0])


@kernel_hot
def length_of(batch: Batch, b: int, plan: Plan, f: int) -> np.int64:
    """Number of ids of a feature: 1 unless it is a list."""
    return np.int64(batch.lengths_BF[b, f]) if plan.list_F[f] else np.int64(1)


@kernel_hot
def gather(batch: Batch, b: int, plan: Plan, rules: Rules, memory: Memory, act: Float32s) -> np.float32:
    """Fill x from the tables and the floats; returns the sum of the wide weights. Slots of -1 count as zeros."""
    wide = ZERO
    for f in range(plan.column_F.shape[0]):
        first, width, at = plan.column_F[f], plan.width_F[f], plan.x_F[f]
        length = length_of(batch, b, plan, f)
        pooled = act[at : at + width]
        pooled[:] = ZERO
        for c in range(first, first + length):
            slot = batch.slots_BC[b, c]
            if slot < 0:
                continue
            if plan.deep:
                start = slot * width + plan.shift_F[f]
                row = memory.weights[start : start + width]
                for k in range(width):
                    pooled[k] += row[k]
            if plan.wide:
                wide += wide_of(memory.wide_z, memory.wide_n, slot, rules)
        if plan.mean_F[f] and length > 1:
            scale = ONE / np.float32(length)
            for k in range(width):
                pooled[k] *= scale
    for m in range(plan.float_x_M.shape[0]):
        act[plan.float_x_M[m]] = batch.floats_BM[b, m]
    for p in range(plan.pairs_P2.shape[0]):
        wide += wide_of(memory.pair_z, memory.pair_n, pair_of(batch, b, plan, memory, p), rules)
    return wide


@kernel_hot
def learn_slot(
    slot: int, f: int, gradient_D: Float32s, g: np.float32, plan: Plan, rules: Rules, memory: Memory
) -> None:
    """One update of a row and of its wide weight (whose gradient is g)."""
    if plan.deep:
        start = slot * plan.width_F[f] + plan.shift_F[f]
        row = memory.weights[start : start + plan.width_F[f]]
        row_step(row, memory.accumulators, slot, gradient_D, plan.lr_F[f], plan.eps_F[f])
    if plan.wide:
        weight = wide_of(memory.wide_z, memory.wide_n, slot, rules)
        ftrl_step(memory.wide_z, memory.wide_n, slot, weight, g, rules.alpha)


@kernel_hot
def learn_ids(
    batch: Batch,
    b: int,
    plan: Plan,
    rules: Rules,
    memory: Memory,
    dx: Float32s,
    g: np.float32,
    pool: Pool,
    at_once: bool,
) -> None:
    """Update one event's rows; those whose slot may come again before the pool is applied only collect gradients."""
    for f in range(plan.column_F.shape[0]):
        first, width, at = plan.column_F[f], plan.width_F[f], plan.x_F[f]
        length = length_of(batch, b, plan, f)
        scale = ONE / np.float32(length) if plan.mean_F[f] and length > 1 else ONE
        gradient_D = dx[at : at + width]
        for c in range(first, first + length):
            slot = batch.slots_BC[b, c]
            if slot < 0:
                continue
            if at_once and plan.alone_F[f]:
                learn_slot(slot, f, gradient_D, g, plan, rules, memory)
                continue
            entry = entry_of(pool, slot, f, width)
            pool.wide_E[entry] += g
            sum_D = pool.row_ED[entry]
            for k in range(width):
                sum_D[k] += scale * gradient_D[k]
    for p in range(plan.pairs_P2.shape[0]):  # two pairs of one event may share a slot
        key = memory.accumulators.shape[0] + pair_of(batch, b, plan, memory, p)
        pool.wide_E[entry_of(pool, key, 0, 0)] += g


@kernel_hot
def apply_pool(pool: Pool, plan: Plan, rules: Rules, memory: Memory) -> None:
    """Apply the collected gradients, one update a slot, and empty the pool."""
    num_slots = memory.accumulators.shape[0]
    for entry in range(pool.count[ENTRIES]):
        key, g, f = pool.key_E[entry], pool.wide_E[entry], pool.feature_E[entry]
        if key < num_slots:
            learn_slot(key, f, pool.row_ED[entry, : plan.width_F[f]], g, plan, rules, memory)
        else:
            slot = key - num_slots
            weight = wide_of(memory.pair_z, memory.pair_n, slot, rules)
            ftrl_step(memory.pair_z, memory.pair_n, slot, weight, g, rules.alpha)
            mark_touched(pool, slot)
    empty_entries(pool)


@kernel_hot
def learn_offset(offset: Float64s, positives: float, count: float, g: float, lr: float) -> None:
    """Move the running label counts and, by Adagrad, the bias; g is the summed gradient."""
    offset[POSITIVES] += positives
    offset[COUNT] += count
    offset[BIAS_ACCUMULATOR] += g * g
    offset[BIAS] -= lr * g / np.sqrt(offset[BIAS_ACCUMULATOR])


@kernel_hot
def ask_for_rows(batch: Batch, b: int, plan: Plan, memory: Memory) -> None:
    """Start fetching the rows of an event that comes soon: they lie anywhere in memory."""
    for f in range(plan.column_F.shape[0]):
        first = plan.column_F[f]
        for c in range(first, first + length_of(batch, b, plan, f)):
            slot = batch.slots_BC[b, c]
            if slot >= 0:
                prefetch(address_of(memory.weights) + 4 * (slot * plan.width_F[f] + plan.shift_F[f]))
                prefetch(address_of(memory.accumulators) + 4 * slot)
                prefetch(address_of(memory.wide_z) + 4 * slot)
                prefetch(address_of(memory.wide_n) + 4 * slot)


@structref.register
class LearnerType(types.StructRef):
    """numba's type of a `Learner`."""

    def preprocess_fields(self, fields: Any) -> Any:
        """No field's type may depend on a value."""
        return tuple((name, types.unliteral(kind)) for name, kind in fields)  # type: ignore[no-untyped-call] # numba


class Learner(structref.StructRefProxy):
    """All arrays of an engine as one argument: handing numba 50 arrays anew in each call took 12 us, this takes 2."""


structref.define_proxy(  # type: ignore[no-untyped-call] # numba's
    Learner, LearnerType, ["plan", "net", "rules", "memory", "scratch", "pool"]
)


@kernel
def make_learner(plan: Plan, net: Net, rules: Rules, memory: Memory, scratch: Scratch, pool: Pool) -> Learner:
    """Box the arrays; it keeps them alive."""
    return Learner(plan, net, rules, memory, scratch, pool)  # type: ignore[no-untyped-call] # numba's


@kernel
def run_events(
    learner: Any,
    slots_BC: Int64s,
    ids_BC: Int64s,
    lengths_BF: Int32s,
    floats_BM: Float32s,
    labels_B: Float32s,
    logits_B: Float32s,
    micro_batch: int,
) -> None:
    """Predict the rows in order and learn from each group of `micro_batch` examples; 0: only predict.

    Exact arithmetic here, for a kernel with fastmath takes it for granted that no label is NaN.
    """
    plan, net, rules, memory, pool = learner.plan, learner.net, learner.rules, learner.memory, learner.pool
    act, back = learner.scratch.act, learner.scratch.back
    params, params_state, gradients = memory.params, memory.params_accumulators, pool.dense
    rule, state = rules.dense, params_state
    batch = Batch(slots_BC, ids_BC, lengths_BF, floats_BM, labels_B, logits_B)
    num_rows, at_once = logits_B.shape[0], micro_batch == 1
    if not at_once:
        rule, state = ACCUMULATE, gradients
    if micro_batch > 0:
        empty_touched(pool)
    base, positives, g_sum, waiting = base_logit(memory.offset), 0.0, 0.0, 0
    for b in range(num_rows):
        if b + 1 < num_rows:
            ask_for_rows(batch, b + 1, plan, memory)
        learning = micro_batch > 0 and not np.isnan(labels_B[b])
        if learning or micro_batch == 0:
            logit = base + gather(batch, b, plan, rules, memory, act) + net_logit(net, params, act)
            logits_B[b] = logit
        else:
            logits_B[b] = np.nan
        if learning:
            g = sigmoid(logit) - labels_B[b]
            net_backward(net, params, state, act, back, g, rule, rules.lr, rules.eps)
            learn_ids(batch, b, plan, rules, memory, back, g, pool, at_once)
            positives += labels_B[b]
            g_sum += g
            waiting += 1
        if waiting > 0 and (waiting == micro_batch or b + 1 == num_rows):
            if not at_once:
                dense_step(rules.dense, params, params_state, ONE, gradients, rules.lr, rules.eps)
                gradients[:] = ZERO
            apply_pool(pool, plan, rules, memory)
            learn_offset(memory.offset, positives, float(waiting), g_sum, rules.bias_lr)
            base, positives, g_sum, waiting = base_logit(memory.offset), 0.0, 0.0, 0


class EventEngine:
    """Learns in place on the memory of `tables` and `state`; one thread at a time.

    Raises:
        UnsupportedByEventEngine: the model is not of the family that the kernels know.
    """

    name = "event"

    def __init__(self, schema: Schema, model: ModelSettings, tables: Tables, state: LearnerState) -> None:
        self._num_ids = schema.num_id_columns + len(schema.pairs_P2)
        self._num_pairs = len(schema.pairs_P2)
        self._pair_slots, self._dense_size = len(state.pair_z), len(state.params)
        net = build_net(schema, model)
        self._parts = (
            build_plan(schema, model, tables, net),
            net,
            build_rules(model),
            Memory(
                weights=tables.weights,
                accumulators=tables.accumulators,
                wide_z=tables.wide_z,
                wide_n=tables.wide_n,
                params=state.params,
                params_accumulators=state.accumulators,
                offset=state.offset,
                pair_z=state.pair_z,
                pair_n=state.pair_n,
            ),
            Scratch(np.zeros(net.act_size, np.float32), np.zeros(net.back_size, np.float32)),
        )
        self._width = max(schema.feature_width_F.tolist(), default=0)
        self._no_labels = np.zeros(0, np.float32)
        self._micro_batch = self._batch_size = 0
        self._reserve(micro_batch=1, batch_size=64)

    def learn(self, slots_BC: Int64s, features: Features, labels_B: Float32s, *, micro_batch: int = 1) -> Float32s:
        """Predict and learn, row by row; returns the logits, each made before its row was learned.

        slots_BC: global slots from `Tables.assign`; -1 reads zeros and learns nothing. A row whose label is NaN (a
        feature event) is passed over, its logit is NaN. A larger `micro_batch` than ever before allocates.
        """
        if micro_batch < 1:
            raise ValueError(f"micro_batch: got {micro_batch}, wanted at least 1")
        if micro_batch > self._micro_batch or len(labels_B) > self._batch_size:
            self._reserve(micro_batch=micro_batch, batch_size=len(labels_B))
        return self._run(slots_BC, features, labels_B, micro_batch)

    def predict(self, slots_BC: Int64s, features: Features) -> Float32s:
        """Logits of B rows; changes nothing."""
        return self._run(slots_BC, features, self._no_labels, 0)

    @property
    def touched_pairs(self) -> Int64s:
        """Slots of the hashed pairs that the last `learn` changed, each once; valid until the next one."""
        return self._pool.touched_pairs[: self._pool.count[TOUCHED]]

    def _run(self, slots_BC: Int64s, features: Features, labels_B: Float32s, micro_batch: int) -> Float32s:
        logits_B = np.empty(len(slots_BC), np.float32)
        run_events(
            self._learner,
            plain(slots_BC),
            plain(features.ids_BC),
            plain(features.lengths_BF),
            plain(features.floats_BM),
            plain(labels_B),
            logits_B,
            micro_batch,
        )
        return logits_B

    def _reserve(self, *, micro_batch: int, batch_size: int) -> None:
        """Make room for the gradients of a micro-batch, and for the touched pairs of a batch."""
        self._micro_batch = max(micro_batch, self._micro_batch)
        self._batch_size = max(batch_size, self._batch_size)
        self._pool = make_pool(
            entries=self._micro_batch * self._num_ids,
            width=self._width,
            dense=self._dense_size if self._micro_batch > 1 else 0,
            touched_pairs=min(self._batch_size * self._num_pairs, self._pair_slots),
            pair_slots=self._pair_slots,
        )
        self._learner = make_learner(*self._parts, self._pool)


def plain(array: npt.NDArray[Any]) -> npt.NDArray[Any]:
    """The array, or a copy if it is read-only or strided: numba would compile the kernel anew for such a one."""
    return array if array.flags.carray else array.copy()


def build_plan(schema: Schema, model: ModelSettings, tables: Tables, net: Net) -> Plan:
    """Places of a schema's features."""
    table_F, width_F = schema.feature_table_F, schema.feature_width_F
    users_T = np.bincount(table_F, minlength=len(schema.tables))
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
        deep=int(len(net.weight) + len(net.cross) + len(net.fm_x) > 0),
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
        bias_lr=float(model.bias_lr),
    )


def warm() -> None:
    """Compile the kernels, or load them from the cache."""
    settings = Settings.model_validate(
        {"tables": {"a": {"capacity": 64}}, "features": {"a": {"kind": "categorical"}}, "model": {"hidden": [2]}}
    )
    schema = Schema.from_settings(settings)
    tables, state = Tables(schema, settings.model), LearnerState.initial(schema, settings.model)
    one = Features(
        ids_BC=np.zeros((1, 1), np.int64),
        lengths_BF=np.ones((1, 1), np.int32),
        floats_BM=np.zeros((1, 0), np.float32),
        present_BA=np.ones((1, 1), np.uint8),
    )
    slots_11, label = np.zeros((1, 1), np.int64), np.ones(1, np.float32)
    EventEngine(schema, settings.model, tables, state).learn(slots_11, one, label)
