"""The part of a logit that needs no network: offset, wide weights and hashed pairs, micro-batch by micro-batch.

The torchrec engine learns it with the event engine's kernels, whose network is switched off here: the same rules on the
same memory, whichever engine runs. The gradients come from the whole logit.

Legend: B rows of a batch, N rows of a micro-batch, P hashed pairs.
"""
# ruff: noqa: PLR0917 -- kernels take arrays one by one: numba unpacks no objects.

import numpy as np
import numpy.typing as npt

from trainer.dense import COUNT, LearnerState
from trainer.engine_event import build_memory, build_plan, build_rules, plain
from trainer.event_kernels import (
    Batch,
    Memory,
    Plan,
    Rules,
    apply_pool,
    base_logit,
    decay_tables,
    gather,
    learn_ids,
    learn_offset,
)
from trainer.events import Features
from trainer.forward import build_net
from trainer.gradient_pool import TOUCHED, Pool, empty_touched, make_pool
from trainer.kernel import kernel_fast
from trainer.schema import Schema
from trainer.settings import ModelSettings
from trainer.tables import Tables

Float32s = npt.NDArray[np.float32]
Int64s = npt.NDArray[np.int64]


@kernel_fast
def predict_rows(rows_N: Int64s, batch: Batch, plan: Plan, rules: Rules, memory: Memory, logits_N: Float32s) -> None:
    """Offset + wide weights + pairs of each row; changes nothing."""
    base = base_logit(memory.offset)
    for i in range(rows_N.shape[0]):
        logits_N[i] = base + gather(batch, rows_N[i], plan, rules, memory, batch.logits_B)


@kernel_fast
def learn_rows(
    rows_N: Int64s, gradients_N: Float32s, batch: Batch, plan: Plan, rules: Rules, memory: Memory, pool: Pool
) -> None:
    """One update of everything that the rows name, each slot with its summed gradient."""
    positives, total = 0.0, 0.0
    for i in range(rows_N.shape[0]):
        b, g = rows_N[i], gradients_N[i]
        learn_ids(batch, b, plan, rules, memory, batch.logits_B, g, pool, False)
        positives += batch.labels_B[b]
        total += g
    apply_pool(pool, plan, rules, memory)
    count = memory.offset[COUNT]
    learn_offset(memory.offset, positives, float(rows_N.shape[0]), total, rules.bias_lr)
    decay_tables(count, memory.offset[COUNT], plan, memory)


def without_net(model: ModelSettings) -> ModelSettings:
    """The same model with no term but the wide part, which every family has and the kernels always know."""
    return model.model_copy(update={"family": "ctr", "hidden": [], "cross_layers": 0, "fm": False})


class Wide:
    """Wide weights, pairs and offset over the memory of `tables` and `state`; learned in place."""

    def __init__(self, schema: Schema, model: ModelSettings, tables: Tables, state: LearnerState) -> None:
        linear = without_net(model)
        plan = build_plan(schema, linear, tables, build_net(schema, linear))
        # Rows of no floats: the kernels then leave x, and the gradients by slot, without them.
        self._plan = plan._replace(width_F=np.zeros_like(plan.width_F), float_x_M=plan.float_x_M[:0])
        self._rules = build_rules(model)
        self._memory = build_memory(tables, state)
        # Handing the kernels 50 arrays takes 20 us: only for something to do.
        self._offset_alone = not (plan.wide or len(plan.pairs_P2) or len(plan.decay_T4))
        self._num_ids = schema.num_id_columns + len(schema.pairs_P2)
        self._entries = self._touched = 0
        self._reserve(entries=self._num_ids, touched=0)

    @property
    def touched_pairs(self) -> Int64s:
        """Slots of the pairs changed since `begin`, each once."""
        return self._pool.touched_pairs[: self._pool.count[TOUCHED]]

    def begin(self, batch: Batch, micro_batch: int) -> None:
        """Forget the touched pairs, and make room for what a micro-batch and the batch may touch."""
        if self._offset_alone:
            return
        pairs = min(len(batch.labels_B) * len(self._plan.pairs_P2), len(self._memory.pair_z))
        self._reserve(entries=micro_batch * self._num_ids, touched=pairs)
        empty_touched(self._pool)

    def predict(self, rows_N: Int64s, batch: Batch) -> Float32s:
        """This part of the rows' logits, [N]."""
        if self._offset_alone:
            return np.full(len(rows_N), base_logit(self._memory.offset), np.float32)
        logits_N = np.empty(len(rows_N), np.float32)
        predict_rows(rows_N, batch, self._plan, self._rules, self._memory, logits_N)
        return logits_N

    def learn(self, rows_N: Int64s, gradients_N: Float32s, batch: Batch) -> None:
        """Take one step; gradients_N: of the loss by each row's logit."""
        if self._offset_alone:
            positives, total = float(batch.labels_B[rows_N].sum()), float(gradients_N.sum())
            learn_offset(self._memory.offset, positives, float(len(rows_N)), total, self._rules.bias_lr)
            return
        learn_rows(rows_N, gradients_N, batch, self._plan, self._rules, self._memory, self._pool)

    def _reserve(self, *, entries: int, touched: int) -> None:
        if entries <= self._entries and touched <= self._touched:
            return
        self._entries, self._touched = max(entries, self._entries), max(touched, self._touched)
        self._pool = make_pool(
            entries=self._entries, width=0, dense=0, touched_pairs=self._touched, pair_slots=len(self._memory.pair_z)
        )


def batch_of(slots_BC: Int64s, features: Features, labels_B: Float32s) -> Batch:
    """Arrays as the kernels take them; its logits are NaN."""
    logits_B = np.full(len(slots_BC), np.nan, np.float32)
    return Batch(
        plain(slots_BC),
        plain(features.ids_BC),
        plain(features.lengths_BF),
        plain(features.floats_BM),
        plain(labels_B),
        logits_B,
    )
