"""The learner as a textbook would write it: PyTorch autograd in float64, no tricks. What the engines are held to.

Also small random logs for such comparisons. Legend as in `trainer.engine_event`.
"""

from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor, nn

from trainer import model as models
from trainer.dense import BIAS, BIAS_ACCUMULATOR, COUNT, POSITIVES, LearnerState
from trainer.engine_event import EventEngine
from trainer.event_kernels import pair_index
from trainer.events import Features
from trainer.schema import Schema, Table
from trainer.settings import Settings
from trainer.tables import Tables

Int64s = npt.NDArray[np.int64]


class World:
    """Tables, learner state and event engine of one configuration."""

    def __init__(self, tables: dict[str, Any], features: dict[str, Any], **model: Any) -> None:
        self.settings = Settings.model_validate(
            {"tables": tables, "features": features, "model": {"wide": True, **model}}
        )
        self.schema = Schema.from_settings(self.settings)
        self.tables = Tables(self.schema, self.settings.model)
        self.state = LearnerState.initial(self.schema, self.settings.model)
        self.engine = EventEngine(self.schema, self.settings.model, self.tables, self.state)

    def memory(self) -> list[npt.NDArray[Any]]:
        """All arrays that learning may change."""
        t, s = self.tables, self.state
        rows = [t.weights, t.accumulators, t.wide_z, t.wide_n]
        return [*rows, s.params, s.accumulators, s.offset, s.pair_z, s.pair_n]

    def place(self, features: Features) -> npt.NDArray[np.int64]:
        """Slots of a batch."""
        return self.tables.assign(features, None, 1).slots_BC


def random_log(schema: Schema, count: int, *, num_ids: int, seed: int) -> tuple[Features, npt.NDArray[np.float32]]:
    """Events of few ids, so that they come again and again, within one event's lists too; labels are coin flips."""
    random = np.random.default_rng(seed)
    features = Features(
        ids_BC=random.integers(0, num_ids, (count, schema.num_id_columns)),
        lengths_BF=random.integers(0, schema.feature_length_F + 1, (count, len(schema.id_features))).astype(np.int32),
        floats_BM=random.standard_normal((count, schema.num_floats)).astype(np.float32),
        present_BA=np.ones((count, len(schema.features)), np.uint8),
    )
    for f, (first, span) in enumerate(zip(schema.feature_column_F, schema.feature_length_F, strict=True)):
        if not schema.feature_list_F[f]:
            features.lengths_BF[:, f] = 1
        for k in range(span):
            features.ids_BC[features.lengths_BF[:, f] <= k, first + k] = -1
    return features, (random.random(count) < 0.4).astype(np.float32)


class Textbook:
    """Starts from a copy of a world's memory."""

    def __init__(self, world: World) -> None:
        self.schema, self.settings = world.schema, world.settings
        self.base_T = world.tables.slot_base_T.tolist()
        self.weight_base_T = world.tables.weight_base_T.tolist()
        self.rows_T = [_leaf(world.tables.rows(t.index)) for t in self.schema.tables]
        self.accumulators = _double(world.tables.accumulators)
        self.params = world.state.params.astype(np.float64)  # the net's own memory
        self.net = models.build(self.schema, self.settings.model, self.params)
        o = self.settings.model.optimizer
        self.dense_accumulators = [torch.full_like(p, o.initial_accumulator) for p in self.net.parameters()]
        adams = {"adam": torch.optim.Adam, "adamw": torch.optim.AdamW}
        self.adam = None
        if o.kind in adams:
            decay = {"weight_decay": o.weight_decay} if o.kind == "adamw" else {}
            self.adam = adams[o.kind](self.net.parameters(), o.lr, (o.beta1, o.beta2), o.eps, **decay)
        self.moments = _double(world.tables.moments)
        self.offset = world.state.offset.copy()
        self.wide, self.pairs = [
            [_double(z), _double(n)]
            for z, n in ((world.tables.wide_z, world.tables.wide_n), (world.state.pair_z, world.state.pair_n))
        ]

    def weights(self) -> npt.NDArray[np.float64]:
        """All rows, as `Tables.weights` holds them."""
        return np.concatenate([rows.detach().numpy().ravel() for rows in self.rows_T])

    def learn(self, slots_BC: Int64s, features: Features, labels_B: npt.NDArray[np.float32]) -> Tensor:
        """One update from the summed loss of a batch; the logits before it."""
        bias = _leaf(self.offset[BIAS])
        wide_G, pairs_P = self._ftrl_weights(*self.wide), self._ftrl_weights(*self.pairs)
        negatives = self.offset[COUNT] - self.offset[POSITIVES]
        base = np.log((self.offset[POSITIVES] + 1) / (negatives + 1))
        linear_B = torch.stack(
            [self._linear(s, i, wide_G, pairs_P) for s, i in zip(slots_BC, features.ids_BC, strict=True)]
        )
        x_Bn = torch.stack([self._x(slots_BC[b], features, b) for b in range(len(slots_BC))])
        logits_B = self.net(x_Bn, base + bias + linear_B)
        loss = nn.functional.binary_cross_entropy_with_logits(logits_B, _double(labels_B), reduction="sum")
        self.net.zero_grad()
        loss.backward()
        self._update(wide_G, pairs_P)
        self.offset[[POSITIVES, COUNT]] += labels_B.sum(), len(labels_B)
        self.offset[BIAS_ACCUMULATOR] += float(bias.grad) ** 2
        self.offset[BIAS] -= self.settings.model.bias_lr * float(bias.grad) / np.sqrt(self.offset[BIAS_ACCUMULATOR])
        return logits_B.detach()

    def _update_rows(self, table: Table, base: int, rows: Tensor) -> None:
        """Only rows with a gradient: to Adam, others are not zero gradients but none."""
        o, a = table.spec.optimizer, self.accumulators[base : base + table.capacity]
        for slot in torch.nonzero((rows.grad != 0).any(1)).ravel().tolist():
            g = rows.grad[slot]
            if o.clip_norm is not None:
                g = g * min(1.0, o.clip_norm / float(g.norm()))
            if o.kind == "sgd":
                rows[slot] -= o.lr * g
            elif o.kind == "adagrad":
                a[slot] += (g**2).mean()
                rows[slot] -= o.lr * g / (a[slot].sqrt() + o.eps)
            else:
                start = self.weight_base_T[table.index] + slot * table.width
                m, first = self.moments[start : start + table.width], float(a[slot]) == 0
                a[slot] = (g**2).mean() if first else o.beta2 * a[slot] + (1 - o.beta2) * (g**2).mean()
                m[:] = g if first else o.beta1 * m + (1 - o.beta1) * g
                rows[slot] -= o.lr * m / (a[slot].sqrt() + o.eps)

    def _x(self, slots_C: Int64s, features: Features, b: int) -> Tensor:
        schema, parts = self.schema, []
        for feature in schema.features:
            if not feature.is_id:
                parts.append(_double(features.floats_BM[b, feature.first : feature.first + feature.span]))
                continue
            t, length = schema.feature_table_F[feature.id_index], features.lengths_BF[b, feature.id_index]
            slots = slots_C[feature.first : feature.first + length]
            pooled = self.rows_T[t][slots[slots >= 0] - self.base_T[t]].sum(0)
            parts.append(pooled / max(length, 1) if schema.feature_mean_F[feature.id_index] else pooled)
        return torch.cat(parts)

    def _linear(self, slots_C: Int64s, ids_C: Int64s, wide_G: Tensor, pairs_P: Tensor) -> Tensor:
        total = wide_G[slots_C[slots_C >= 0]].sum() if self.settings.model.wide else torch.zeros(()).double()
        for p, (a, b) in enumerate(self.schema.pairs_P2):
            total = total + pairs_P[pair_index(ids_C[a], ids_C[b], p, len(pairs_P))]
        return total

    def _ftrl_weights(self, z: Tensor, n: Tensor) -> Tensor:
        o = self.settings.model.wide_optimizer
        shrunk = torch.sign(z) * torch.clamp(z.abs() - o.l1, min=0)
        return (-shrunk / ((o.beta + n.sqrt()) / o.alpha + o.l2)).requires_grad_()

    @torch.no_grad()
    def _update(self, wide_G: Tensor, pairs_P: Tensor) -> None:
        o = self.settings.model.optimizer
        lr = o.lr * min(1.0, (self.offset[COUNT] + 1) / max(o.warmup_examples, 1))
        if o.clip_norm is not None:
            nn.utils.clip_grad_norm_(self.net.parameters(), o.clip_norm)
        if self.adam is not None:
            self.adam.param_groups[0]["lr"] = lr
            self.adam.step()
        else:
            for p, a in zip(self.net.parameters(), self.dense_accumulators, strict=True):
                if o.kind == "sgd":
                    p.sub_(lr * p.grad)
                else:
                    a.add_(p.grad**2)
                    p.sub_(lr * p.grad / (a.sqrt() + o.eps))
        for table, base, rows in zip(self.schema.tables, self.base_T, self.rows_T, strict=True):
            if rows.grad is not None:
                self._update_rows(table, base, rows)
                rows.grad = None
        for weights, (z, n) in ((wide_G, self.wide), (pairs_P, self.pairs)):
            if weights.grad is not None:
                before = n.sqrt()
                n.add_(weights.grad**2)
                z.add_(weights.grad - (n.sqrt() - before) / self.settings.model.wide_optimizer.alpha * weights)


def _double(array: Any) -> Tensor:
    return torch.tensor(np.asarray(array, np.float64))


def _leaf(array: Any) -> Tensor:
    return _double(array).requires_grad_()
