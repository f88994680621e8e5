"""The network's input out of embedding rows, and learning those rows, on the memory that `sharding.py` has planned.

A rank that is alone has nobody to exchange ids with, so this goes past torchrec's modules: it calls fbgemm's lookup on
all tables of one width at once, as one table of all their slots, with the bags row by row, so that what comes out is
the network's input as it is; and it learns as the event engine does, each row once, with its summed gradient.

A lookup with 4 features of 16, in us at 16 / 256 / 4,096 rows: torchrec's module 890 / 940 / 1,400 (fbgemm's under it
240 / 260 / 600), here 28 / 43 / 310. Learning: fbgemm's kernel 44 / 260 / 1,850 (0.7 us a row, even one named once),
ours 9 / 35 / 420. A test holds both to the modules' own forward and backward.

Legend: B rows of a batch, N rows (examples) looked up, C id columns, F id features of a run of tables, J ids of all
bags end to end, D row width, n network input.
"""
# ruff: noqa: PLR0917 -- kernels take arrays one by one: numba unpacks no objects.

from typing import NamedTuple

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from trainer.engine_event import row_rule
from trainer.event_kernels import Batch
from trainer.gradient_pool import ENTRIES, Pool, empty_entries, entry_of, make_pool
from trainer.kernel import kernel_hot
from trainer.optim import ADAGRAD, row_step, row_step_by_rule
from trainer.schema import Schema
from trainer.sharding import Run, Sharded
from trainer.tables import Tables

Int64s = npt.NDArray[np.int64]
Float32s = npt.NDArray[np.float32]

SUM, FLOAT32 = 0, 0  # fbgemm's numbers for pooling by sum, and for float32 results


class Bags(NamedTuple):
    """Ids to look up, bag by bag: the features of the first row, then those of the next. Views, valid until the next.

    slots_J: counted from the run's first; weights_J: what each row is multiplied with (none of them: 1).
    """

    slots_J: Int64s
    offsets: Int64s  # N * F + 1: where each bag starts in J
    weights_J: Float32s


@kernel_hot
def fill_bags(
    rows_N: Int64s,
    slots_BC: Int64s,
    lengths_BF: npt.NDArray[np.int32],
    plan_F5: Int64s,
    first_slot: int,
    num_slots: int,
    bags: Bags,
) -> int:
    """Fill the arrays of `Bags`. Returns J; -1: a slot is not one of the run's."""
    at, bag = 0, 0
    for i in range(rows_N.shape[0]):
        b = rows_N[i]
        for k in range(plan_F5.shape[0]):
            f, first, is_list, takes_mean, _ = plan_F5[k]
            bags.offsets[bag] = at
            bag += 1
            length = np.int64(lengths_BF[b, f]) if is_list else np.int64(1)
            for c in range(first, first + length):
                if slots_BC[b, c] < 0:
                    continue
                slot = slots_BC[b, c] - first_slot
                if slot < 0 or slot >= num_slots:
                    return -1
                bags.slots_J[at] = slot
                if bags.weights_J.shape[0] > 0:
                    bags.weights_J[at] = np.float32(1) / np.float32(length) if takes_mean else np.float32(1)
                at += 1
    bags.offsets[bag] = at
    return at


@kernel_hot
def learn_bags(
    dx_Nn: Float32s,
    plan_F5: Int64s,
    bags: Bags,
    pool: Pool,
    weights: Float32s,
    moments: Float32s,
    accumulators: Float32s,
    rule: int,
    lr: np.float32,
    eps: np.float32,
    beta1: np.float32,
    beta2: np.float32,
    clip_squares: np.float32,
) -> None:
    """Sum each id's gradients, from where its feature lies in x, and take a step with each sum.

    The largest squared length of a sum goes to `pool.peak`.
    """
    bag, D = 0, pool.row_ED.shape[1]
    for i in range(dx_Nn.shape[0]):
        for k in range(plan_F5.shape[0]):
            gradient_D = dx_Nn[i, plan_F5[k, 4] : plan_F5[k, 4] + D]
            for j in range(bags.offsets[bag], bags.offsets[bag + 1]):
                sum_D = pool.row_ED[entry_of(pool, bags.slots_J[j], 0, D)]
                weight = bags.weights_J[j] if bags.weights_J.shape[0] > 0 else np.float32(1)
                for d in range(D):
                    sum_D[d] += weight * gradient_D[d]
            bag += 1
    for entry in range(pool.count[ENTRIES]):
        slot = pool.key_E[entry]
        row, gradient = weights[slot * D : slot * D + D], pool.row_ED[entry]
        if rule == ADAGRAD:
            squares = row_step(row, accumulators, slot, gradient, lr, eps)
        else:
            moment = moments[slot * D : slot * D + D] if moments.shape[0] > 0 else row
            squares = row_step_by_rule(
                rule, row, moment, accumulators, slot, gradient, lr, eps, beta1, beta2, clip_squares
            )  # fmt: skip
        pool.peak[0] = max(pool.peak[0], squares)
    empty_entries(pool)


@kernel_hot
def place_rows(pooled_NFD: Float32s, plan_F5: Int64s, x_Nn: Float32s) -> None:
    """Copy each feature's rows to its place in x."""
    D = pooled_NFD.shape[2]
    for i in range(x_Nn.shape[0]):
        for k in range(plan_F5.shape[0]):
            for d in range(D):
                x_Nn[i, plan_F5[k, 4] + d] = pooled_NFD[i, k, d]


class RunRows:
    """The tables of a run as one table of all their slots."""

    def __init__(self, schema: Schema, tables: Tables, run: Run) -> None:
        first, last = run.tables[0].index, run.tables[-1].index
        self._first_slot = int(tables.slot_base_T[first])
        self._num_slots = int(tables.slot_base_T[last] + tables.capacity_T[last]) - self._first_slot
        self._width = run.tables[0].width
        self.features = np.flatnonzero((schema.feature_table_F >= first) & (schema.feature_table_F <= last))
        # Of each feature: its number, first column, whether it is a list, whether it takes the mean, its place in x.
        places = (schema.feature_column_F, schema.feature_list_F, schema.feature_mean_F, schema.feature_x_F)
        self._plan_F5 = np.stack([self.features, *(place[self.features] for place in places)], axis=1)
        self._weighted = bool(schema.feature_mean_F[self.features].any())
        floats = slice(tables.weight_base_T[first], tables.weight_base_T[last] + tables.rows(last).size)
        moments = tables.moments[floats] if len(tables.moments) else tables.moments
        rule = row_rule(run.tables[0].spec.optimizer)
        self._weights, self._memory = run.weights, (run.weights.numpy(), moments, run.accumulators.numpy(), *rule)
        # As fbgemm's lookup wants it: one table, whose floats start at 0, with this many columns and rows.
        self._table = (torch.tensor([0]), torch.tensor([0, self._width], dtype=torch.int32), self._width)
        self._rows = torch.tensor([0, self._num_slots])
        self._room = 0

    def bags(self, rows_N: Int64s, slots_BC: Int64s, lengths_BF: npt.NDArray[np.int32]) -> Bags:
        """What to look up for some rows of a batch; slots are global, -1 (nothing there) is left out.

        Raises:
            IndexError: a slot is not one of these tables'.
        """
        num_bags = len(rows_N) * len(self._plan_F5)
        self._reserve(max(len(rows_N) * slots_BC.shape[1], num_bags))
        room = self._bags
        count = fill_bags(rows_N, slots_BC, lengths_BF, self._plan_F5, self._first_slot, self._num_slots, room)
        if count < 0:
            last = self._first_slot + self._num_slots - 1
            raise IndexError(f"slots_BC: got one outside of {self._first_slot} .. {last}, where its table's slots lie")
        return Bags(room.slots_J[:count], room.offsets[: num_bags + 1], room.weights_J[:count])

    def pooled(self, bags: Bags) -> Tensor:
        """Rows of the bags, [N, F, D]."""
        slots_J, offsets = torch.from_numpy(bags.slots_J), torch.from_numpy(bags.offsets)
        weights_J = torch.from_numpy(bags.weights_J) if self._weighted else None
        pooled: Tensor = torch.ops.fbgemm.split_embedding_codegen_forward_cpu.default(
            self._weights, *self._table, self._rows, slots_J, offsets, SUM, weights_J, FLOAT32
        )
        return pooled.view(-1, len(self.features), self._width)

    def place(self, pooled_NFD: Tensor, x_Nn: Float32s) -> None:
        """Copy the rows to their places in x."""
        place_rows(pooled_NFD.numpy(), self._plan_F5, x_Nn)

    def learn(self, bags: Bags, dx_Nn: Float32s) -> None:
        """One update of every row of the bags, with the summed gradient of the places where it came to lie in x."""
        learn_bags(dx_Nn, self._plan_F5, bags, self._pool, *self._memory)

    def take_longest(self) -> float:
        """Squared length of the longest gradient of a row since this was last asked."""
        longest = float(self._pool.peak[0]) if self._room else 0.0
        if self._room:
            self._pool.peak[0] = 0
        return longest

    def _reserve(self, ids: int) -> None:
        if ids <= self._room:
            return
        self._room = ids
        weights_J = np.empty(ids if self._weighted else 0, np.float32)
        self._bags = Bags(np.empty(ids, np.int64), np.empty(ids + 1, np.int64), weights_J)
        self._pool = make_pool(entries=ids, width=self._width, dense=0, touched_pairs=0, pair_slots=0)


class Rows:
    """The network's input out of rows and floats; learning updates rows and accumulators in place.

    Raises:
        SettingsError: a table whose width is not a multiple of four.
    """

    def __init__(self, schema: Schema, tables: Tables) -> None:
        self.sharded = Sharded(schema, tables)
        runs = [RunRows(schema, tables, run) for run in self.sharded.runs]
        self._runs = [run for run in runs if len(run.features)]
        self._bags: list[Bags] = []
        self._width, self._float_x_M = schema.x_width, schema.float_x_M
        in_order = np.diff(schema.feature_x_F).min(initial=1) > 0
        # All of x comes out of one kernel, in its order: nothing needs to be placed.
        self._whole = len(self._runs) == 1 and in_order and not schema.num_floats

    def __call__(self, rows_N: Int64s, batch: Batch) -> Tensor:
        """x [N, n] for some rows of a batch, whose slots are global."""
        self._bags = [run.bags(rows_N, batch.slots_BC, batch.lengths_BF) for run in self._runs]
        if self._whole:
            return self._runs[0].pooled(self._bags[0]).view(len(rows_N), self._width)
        x_Nn = np.empty((len(rows_N), self._width), np.float32)
        x_Nn[:, self._float_x_M] = batch.floats_BM[rows_N]
        for run, bags in zip(self._runs, self._bags, strict=True):
            run.place(run.pooled(bags), x_Nn)
        return torch.from_numpy(x_Nn)

    def take_longest(self) -> float:
        """Squared length of the longest gradient of a row since this was last asked."""
        return max((run.take_longest() for run in self._runs), default=0.0)

    def learn(self, dx_Nn: Tensor) -> None:
        """Update the rows that the last call has read; dx: the gradient of the loss by its x."""
        for run, bags in zip(self._runs, self._bags, strict=True):
            run.learn(bags, dx_Nn.numpy())
