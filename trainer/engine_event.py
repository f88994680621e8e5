"""The event engine: one kernel call learns from a batch event by event, on one core, in float32.

For each event: gather its rows, forward, and with the prediction made: backward, row-wise Adagrad on the rows, FTRL on
the wide weights, Adagrad on the dense ones. The next event is predicted by what this one taught, so the size of the
batch that I/O hands over costs no quality. Gradients of weight matrices are products of two vectors and are never
formed: each row of weights is read once, passed through to dx and updated in the same sweep (`optim.py`).

With `micro_batch` k, k events are predicted with the same weights and their summed gradients applied once, per slot;
this is what the torchrec engine does with a whole batch, and how the two are held together.

An id that one event names twice (a list, or two features over one table) gets one update of its summed gradient,
through `gradient_pool.py`; features that cannot repeat skip that when events are learned one by one.

Measured on one core of a server of 2023 (AVX-512), 8 features x 16, MLP 64-32, one cross of rank 8: 185,000 events/s in
one call, 184,000 in calls of 16, 88,000 in calls of 1; 650,000 predictions/s; 2,300,000 events/s without a net. What
made the difference: no reference counts inside (3x), prefetching the next event's rows (1.15x), one boxed `Learner`
instead of 50 arrays a call (10 us). Tried and left: four units to a pass in the forward layers (a tie).

Legend: B rows, C id columns, F id features, M float columns, P hashed pairs, D row width.
"""
# ruff: noqa: PLR0917 -- kernels take arrays one by one: numba unpacks no objects.

from typing import Any

import numpy as np
import numpy.typing as npt
from numba.core import types
from numba.experimental import structref

from trainer.dense import COUNT, LearnerState
from trainer.event_kernels import (
    Batch,
    Memory,
    Plan,
    Rules,
    Scratch,
    apply_pool,
    ask_for_rows,
    base_logit,
    decay_tables,
    gather,
    learn_ids,
    learn_offset,
    rate_now,
)
from trainer.events import Features
from trainer.forward import Net, build_net, net_backward, net_logit, sigmoid
from trainer.gradient_pool import TOUCHED, Pool, empty_touched, make_pool
from trainer.kernel import kernel
from trainer.optim import ACCUMULATE, ADAGRAD, ADAM, ADAMW, CLIPPED_ADAGRAD, SGD, dense_update
from trainer.schema import Schema
from trainer.settings import ModelSettings, RowOptimizer, Settings
from trainer.tables import Tables

Float32s = npt.NDArray[np.float32]
Int32s = npt.NDArray[np.int32]
Int64s = npt.NDArray[np.int64]

ZERO, ONE = np.float32(0), np.float32(1)
RULES = {"sgd": SGD, "adagrad": ADAGRAD, "adam": ADAM, "adamw": ADAMW}
MOST = 3e38  # a squared length that no gradient has: in place of infinity, which fast kernels must not be asked about


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
    peak, offset = pool.peak, memory.offset
    act, back = learner.scratch.act, learner.scratch.back
    params, params_state, gradients = memory.params, memory.params_accumulators, pool.dense
    rule, state, apart = rules.dense, params_state, rules.dense in (ADAM, ADAMW) or rules.clip_squares > 0
    batch = Batch(slots_BC, ids_BC, lengths_BF, floats_BM, labels_B, logits_B)
    num_rows, at_once = logits_B.shape[0], micro_batch == 1
    apart |= not at_once
    if apart:
        rule, state = ACCUMULATE, gradients
    if micro_batch > 0:
        empty_touched(pool)
        peak[0] = ZERO
    lr = rate_now(offset[COUNT], rules.lr, rules.warmup)
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
            net_backward(net, params, state, act, back, g, rule, lr, rules.eps)
            learn_ids(batch, b, plan, rules, memory, back, g, pool, at_once)
            positives += labels_B[b]
            g_sum += g
            waiting += 1
        if waiting > 0 and (waiting == micro_batch or b + 1 == num_rows):
            if apart:
                dense_update(
                    rules.dense, params, params_state, memory.params_moments, memory.powers, gradients, lr, rules.eps,
                    rules.beta1, rules.beta2, rules.weight_decay, rules.clip_squares,
                )  # fmt: skip
            apply_pool(pool, plan, rules, memory)
            learn_offset(offset, positives, float(waiting), g_sum, rules.bias_lr)
            decay_tables(offset[COUNT] - waiting, offset[COUNT], plan, memory)
            lr = rate_now(offset[COUNT], rules.lr, rules.warmup)
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
        # Adam and clipping look at the whole gradient, which is then collected even when events are learned one by one.
        self._collects = model.optimizer.kind in {"adam", "adamw"} or model.optimizer.clip_norm is not None
        net = build_net(schema, model)
        self._parts = (
            build_plan(schema, model, tables, net),
            net,
            build_rules(model),
            build_memory(tables, state),
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
        group = max(1, min(micro_batch, len(labels_B)))
        if group > self._micro_batch or len(labels_B) > self._batch_size:
            self._reserve(micro_batch=group, batch_size=len(labels_B))
        return self._run(slots_BC, features, labels_B, group)

    def predict(self, slots_BC: Int64s, features: Features) -> Float32s:
        """Logits of B rows; changes nothing."""
        return self._run(slots_BC, features, self._no_labels, 0)

    @property
    def touched_pairs(self) -> Int64s:
        """Slots of the hashed pairs that the last `learn` changed, each once; valid until the next one."""
        return self._pool.touched_pairs[: self._pool.count[TOUCHED]]

    @property
    def max_gradient_norm(self) -> float:
        """Length of the longest gradient of a row in the last `learn`, before clipping."""
        return float(np.sqrt(self._pool.peak[0]))

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
            dense=self._dense_size if self._micro_batch > 1 or self._collects else 0,
            touched_pairs=min(self._batch_size * self._num_pairs, self._pair_slots),
            pair_slots=self._pair_slots,
        )
        self._learner = make_learner(*self._parts, self._pool)


def plain(array: npt.NDArray[Any]) -> npt.NDArray[Any]:
    """The array, or a copy if it is read-only or strided: numba would compile the kernel anew for such a one."""
    return array if array.flags.carray else array.copy()


def build_memory(tables: Tables, state: LearnerState) -> Memory:
    """The arrays that learning changes."""
    return Memory(
        weights=tables.weights,
        moments=tables.moments,
        accumulators=tables.accumulators,
        wide_z=tables.wide_z,
        wide_n=tables.wide_n,
        params=state.params,
        params_accumulators=state.accumulators,
        params_moments=state.moments,
        powers=state.powers,
        offset=state.offset,
        pair_z=state.pair_z,
        pair_n=state.pair_n,
    )


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
        **_row_rules(schema, tables),
        float_x_M=schema.float_x_M,
        pairs_P2=schema.pairs_P2,
        wide=int(model.wide),
        deep=int(len(net.weight) + len(net.cross) + len(net.fm_x) > 0),
    )


def _row_rules(schema: Schema, tables: Tables) -> dict[str, Any]:
    """Optimizers of the rows: by feature, and the tables whose accumulators decay."""
    specs = [schema.tables[t].spec.optimizer for t in schema.feature_table_F]
    decays = [table for table in schema.tables if table.spec.optimizer.decay < 1]
    first = tables.slot_base_T
    names = ("rule_F", "lr_F", "eps_F", "beta1_F", "beta2_F", "clip_F")
    columns = zip(*map(row_rule, specs), strict=True)
    return {
        **{name: np.array(column) for name, column in zip(names, columns, strict=True)},
        "decay_T4": np.array(
            [(first[t.index], first[t.index] + t.capacity, t.spec.optimizer.decay_every, t.index) for t in decays],
            np.int64,
        ).reshape(-1, 4),
        "factors_T2": np.array([(t.spec.optimizer.decay, t.spec.optimizer.floor) for t in decays], np.float32).reshape(
            -1, 2
        ),
    }


def row_rule(spec: RowOptimizer) -> tuple[int, np.float32, np.float32, np.float32, np.float32, np.float32]:
    """Rule, learning rate, eps, beta1, beta2 and squared clip norm, as `optim.row_step_by_rule` takes them.

    Adagrad that clips is another rule than Adagrad, so that the default need not ask.
    """
    clips = spec.kind == "adagrad" and spec.clip_norm is not None
    squares = MOST if spec.clip_norm is None else spec.clip_norm**2
    numbers = (spec.lr, spec.eps, spec.beta1, spec.beta2, squares)
    lr, eps, beta1, beta2, clip_squares = (np.float32(number) for number in numbers)
    return CLIPPED_ADAGRAD if clips else RULES[spec.kind], lr, eps, beta1, beta2, clip_squares


def build_rules(model: ModelSettings) -> Rules:
    """Optimizer settings in the kernels' types."""
    dense, wide = model.optimizer, model.wide_optimizer
    return Rules(
        dense=RULES[dense.kind],
        lr=np.float32(dense.lr),
        eps=np.float32(dense.eps),
        beta1=np.float32(dense.beta1),
        beta2=np.float32(dense.beta2),
        weight_decay=np.float32(dense.weight_decay),
        clip_squares=np.float32(0 if dense.clip_norm is None else dense.clip_norm**2),
        warmup=float(dense.warmup_examples),
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
