"""A trainer's state that is moved by random steps: what tests of snapshots and checkpoints save and restore."""

from typing import Any

import numpy as np

from tests.unit.test_entities import batch_of, example, fact
from trainer.dense import LearnerState
from trainer.entities import Entities
from trainer.schema import Schema
from trainer.settings import Settings
from trainer.snapshot import Progress, Snapshot, capture, restore
from trainer.tables import Ids, Tables

TABLES: dict[str, Any] = {"user": {"width": 4, "capacity": 128, "ttl_s": 50}, "item": {"width": 8, "capacity": 300}}
FEATURES: dict[str, Any] = {
    "user": {"kind": "categorical"},
    "item": {"kind": "categorical"},
    "price": {"kind": "numeric", "entity": "item"},
}
STATE = ("keys", "stamps", "seen_s", "counts", "accumulators", "wide_z", "wide_n", "weights")


class Trainer:
    """The state that a trainer would have, moved by random steps instead of learning."""

    def __init__(self, *, tables: Any = TABLES, features: Any = FEATURES, item_records: int = 64, **model: Any) -> None:
        model = {"wide": True, "pairs": [["user", "item"]], "pair_bits": 8, "hidden": [4]} | model
        entities = {"item": {"key": "item", "capacity": item_records}}
        settings = Settings.model_validate(
            {"tables": tables, "features": features, "entities": entities, "model": model}
        )
        self.settings = settings
        self.schema, self.model = Schema.from_settings(settings), settings.model
        self.tables, self.entities = Tables(self.schema, self.model), Entities(self.schema)
        self.learner = LearnerState.initial(self.schema, self.model)
        self.step = 0

    def run(self, steps: int) -> "Trainer":
        """Steps that depend on nothing but their number."""
        for _ in range(steps):
            self.step += 1
            random = np.random.default_rng(self.step)
            ids_BC = random.integers(0, 400, (20, len(self.schema.tables)))
            touched = self.tables.assign(Ids(ids_BC), None, 3 * self.step).touched_K
            for name in ("accumulators", "wide_z", "wide_n"):
                getattr(self.tables, name)[touched] += random.standard_normal(len(touched), np.float32)
            for t, base in enumerate(self.tables.slot_base_T.tolist()):
                local = self.tables.find(t, ids_BC[:, t]) - base
                self.tables.rows(t)[local[local >= 0]] *= np.float32(1.01)
            self.tables.expire(3 * self.step, 40)
            self.tables.remove(0, ids_BC[:2, 0])
            item = int(ids_BC[0, 1])
            self.entities.apply(batch_of(fact(item, price=self.step), example(item=item % 90), schema=self.schema))
            for name in ("params", "accumulators", "offset"):
                array = getattr(self.learner, name)
                array += random.standard_normal(len(array)).astype(array.dtype)
            pair = random.integers(0, 256)
            self.learner.pair_z[pair], self.learner.pair_n[pair] = random.standard_normal(2)
        return self

    def capture(self, position: str = "7-1") -> Snapshot:
        progress = Progress(step=self.step, position=position, store_version=11 << 40, watermark_us=12)
        groups = {"metrics": {"histogram": np.arange(5.0), "count": np.array(3)}, "dedup": {}}
        return capture(self.tables, self.entities, self.learner, self.settings, progress=progress, groups=groups)

    def restored(self, snapshot: Snapshot) -> list[str]:
        self.step = snapshot.progress.step
        return restore(snapshot, self.tables, self.entities, self.learner, self.model)

    def rows_by_id(self, table: int) -> dict[int, Any]:
        ids = self.tables.keys[self.tables.slot_base_T[table] + self.tables.occupied(table)].tolist()
        rows = {id_: self.tables.row_of(table, id_) for id_ in ids}
        return {
            id_: (*r.row_D.tolist(), r.accumulator, r.wide_z, r.wide_n, r.seen_s, r.count)
            for id_, r in rows.items()
            if r
        }


def assert_same_state(a: Trainer, b: Trainer) -> None:
    for name in STATE:
        in_use = (a.tables.keys >= 0) if name not in ("keys", "weights") else slice(None)
        np.testing.assert_array_equal(getattr(a.tables, name)[in_use], getattr(b.tables, name)[in_use], name)
    for name in ("keys", "stamps", "seen_s", "counts", "words"):
        np.testing.assert_array_equal(getattr(a.entities, name), getattr(b.entities, name), name)
    for name in ("params", "accumulators", "offset", "pair_z", "pair_n"):
        np.testing.assert_array_equal(getattr(a.learner, name), getattr(b.learner, name), name)
    assert [a.tables.clock, a.entities.clock, a.tables.sweep_position, a.tables.num_rows_T.tolist()] == [
        b.tables.clock, b.entities.clock, b.tables.sweep_position, b.tables.num_rows_T.tolist()
    ]  # fmt: skip
