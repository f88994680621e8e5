"""The event engine's kernels, below the one that runs a batch: gather, and learning rows, wide weights and the offset.

They take tuples of arrays by name. All are compiled without reference counts (`kernel_hot`), and the torchrec engine
uses those of the wide part as they are.

Legend: B rows, C id columns, F id features, M float columns, P hashed pairs, D row width.
"""
# ruff: noqa: PLR0917 -- kernels take arrays one by one: numba unpacks no objects.

from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from trainer.dense import BIAS, BIAS_ACCUMULATOR, COUNT, POSITIVES
from trainer.gradient_pool import ENTRIES, Pool, empty_entries, entry_of, mark_touched
from trainer.kernel import kernel_hot, kernel_inner
from trainer.live_atomics import address_of, prefetch
from trainer.optim import ADAGRAD, decay_accumulators, ftrl_step, ftrl_weight, row_step, row_step_by_rule

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
    rule_F: Int64s  # optimizer of the feature's table
    lr_F: Float32s
    eps_F: Float32s
    beta1_F: Float32s
    beta2_F: Float32s
    clip_F: Float32s  # squared length that a row's gradient may have; inf as a very large number
    decay_T4: Int64s  # tables whose accumulators decay: first slot, past the last, every so many examples, table
    factors_T2: Float32s  # decay, floor
    float_x_M: Int64s
    pairs_P2: Int64s
    wide: int
    deep: int  # 0: nothing reads x


class Rules(NamedTuple):
    """Optimizer settings: of the dense weights, of the wide ones, of the bias."""

    dense: int
    lr: np.float32
    eps: np.float32
    beta1: np.float32
    beta2: np.float32
    weight_decay: np.float32
    clip_squares: np.float32  # 0: none
    warmup: float  # examples
    alpha: np.float32
    beta: np.float32
    l1: np.float32
    l2: np.float32
    bias_lr: float


class Memory(NamedTuple):
    """All that is learned; changed in place. See `tables.Tables` and `dense.LearnerState`."""

    weights: Float32s
    moments: Float32s  # of the rows; empty unless a table's optimizer has them
    accumulators: Float32s
    wide_z: Float32s
    wide_n: Float32s
    params: Float32s
    params_accumulators: Float32s
    params_moments: Float32s
    powers: Float64s
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


@kernel_inner
def wide_of(z: Float32s, n: Float32s, slot: int | np.int64, rules: Rules) -> np.float32:
    """Wide weight at a slot."""
    return ftrl_weight(z[slot], n[slot], rules.alpha, rules.beta, rules.l1, rules.l2)


@kernel_inner
def pair_of(batch: Batch, b: int, plan: Plan, memory: Memory, p: int) -> np.int64:
    """Slot of one event's p-th pair."""
    first, second = batch.ids_BC[b, plan.pairs_P2[p, 0]], batch.ids_BC[b, plan.pairs_P2[p, 1]]
    return pair_index(first, second, p, memory.pair_z.shape[0])


@kernel_inner
def length_of(batch: Batch, b: int, plan: Plan, f: int) -> np.int64:
    """Number of ids of a feature: 1 unless it is a list."""
    return np.int64(batch.lengths_BF[b, f]) if plan.list_F[f] else np.int64(1)


@kernel_inner
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


@kernel_inner
def learn_row(slot: int, f: int, gradient_D: Float32s, plan: Plan, memory: Memory) -> np.float32:
    """Update a row by a rule that is not the default; apart, for the default's speed. The gradient's squared length."""
    start = slot * plan.width_F[f] + plan.shift_F[f]
    row = memory.weights[start : start + plan.width_F[f]]
    moments = memory.moments[start : start + plan.width_F[f]] if memory.moments.shape[0] > 0 else row
    return row_step_by_rule(
        plan.rule_F[f], row, moments, memory.accumulators, slot, gradient_D, plan.lr_F[f], plan.eps_F[f],
        plan.beta1_F[f], plan.beta2_F[f], plan.clip_F[f],
    )  # fmt: skip


@kernel_inner
def learn_slot(
    slot: int, f: int, gradient_D: Float32s, g: np.float32, plan: Plan, rules: Rules, memory: Memory, peak: Float32s
) -> None:
    """One update of a row and of its wide weight (whose gradient is g); `peak` keeps the largest squared gradient."""
    if plan.deep:
        start = slot * plan.width_F[f] + plan.shift_F[f]
        row = memory.weights[start : start + plan.width_F[f]]
        if plan.rule_F[f] == ADAGRAD:
            squares = row_step(row, memory.accumulators, slot, gradient_D, plan.lr_F[f], plan.eps_F[f])
        else:
            squares = learn_row(slot, f, gradient_D, plan, memory)
        peak[0] = max(peak[0], squares)
    if plan.wide:
        weight = wide_of(memory.wide_z, memory.wide_n, slot, rules)
        ftrl_step(memory.wide_z, memory.wide_n, slot, weight, g, rules.alpha)


@kernel_inner
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
                learn_slot(slot, f, gradient_D, g, plan, rules, memory, pool.peak)
                continue
            entry = entry_of(pool, slot, f, width)
            pool.wide_E[entry] += g
            sum_D = pool.row_ED[entry]
            for k in range(width):
                sum_D[k] += scale * gradient_D[k]
    for p in range(plan.pairs_P2.shape[0]):  # two pairs of one event may share a slot
        key = memory.accumulators.shape[0] + pair_of(batch, b, plan, memory, p)
        pool.wide_E[entry_of(pool, key, 0, 0)] += g


@kernel_inner
def apply_pool(pool: Pool, plan: Plan, rules: Rules, memory: Memory) -> None:
    """Apply the collected gradients, one update a slot, and empty the pool."""
    num_slots = memory.accumulators.shape[0]
    for entry in range(pool.count[ENTRIES]):
        key, g, f = pool.key_E[entry], pool.wide_E[entry], pool.feature_E[entry]
        if key < num_slots:
            learn_slot(key, f, pool.row_ED[entry, : plan.width_F[f]], g, plan, rules, memory, pool.peak)
        else:
            slot = key - num_slots
            weight = wide_of(memory.pair_z, memory.pair_n, slot, rules)
            ftrl_step(memory.pair_z, memory.pair_n, slot, weight, g, rules.alpha)
            mark_touched(pool, slot)
    empty_entries(pool)


@kernel_inner
def decay_tables(before: float, after: float, plan: Plan, memory: Memory) -> None:
    """Decay the accumulators of tables whose turn came between two counts of examples."""
    for t in range(plan.decay_T4.shape[0]):
        every = plan.decay_T4[t, 2]
        if np.int64(before) // every != np.int64(after) // every:
            decay_accumulators(
                memory.accumulators, plan.decay_T4[t, 0], plan.decay_T4[t, 1], plan.factors_T2[t, 0],
                plan.factors_T2[t, 1],
            )  # fmt: skip


@kernel_hot
def rate_now(count: float, lr: np.float32, warmup: float) -> np.float32:
    """Learning rate of the dense weights at the next example, after `count` of them."""
    if count + 1.0 >= warmup:
        return lr
    return np.float32(lr * (count + 1.0) / warmup)


@kernel_hot
def learn_offset(offset: Float64s, positives: float, count: float, g: float, lr: float) -> None:
    """Move the running label counts and, by Adagrad, the bias; g is the summed gradient."""
    offset[POSITIVES] += positives
    offset[COUNT] += count
    offset[BIAS_ACCUMULATOR] += g * g
    offset[BIAS] -= lr * g / np.sqrt(offset[BIAS_ACCUMULATOR])


@kernel_inner
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
