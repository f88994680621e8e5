"""Optimizers of rows and dense weights against their textbook forms, and what they promise on streams without end."""

from typing import Any

import numpy as np
import pytest

from tests.unit.test_engine_event import EVERY_KIND, SINGLES, part, tables
from tests.unit.textbook import Textbook, World, random_log
from trainer.engines import build_engine
from trainer.tables import Ids

ROWS: dict[str, dict[str, Any]] = {
    "sgd": {"kind": "sgd", "lr": 0.05},
    "adam": {"kind": "adam", "lr": 0.01},
    "clipped": {"clip_norm": 0.02},
    "adam clipped": {"kind": "adam", "lr": 0.01, "clip_norm": 0.02},
}
DENSE: dict[str, dict[str, Any]] = {
    "adam": {"kind": "adam", "lr": 0.003},
    "adamw": {"kind": "adamw", "lr": 0.003, "weight_decay": 0.1},
    "warm-up": {"warmup_examples": 300},
    "adam with warm-up": {"kind": "adam", "lr": 0.003, "warmup_examples": 200},
    "clipped": {"clip_norm": 0.1},
    "sgd clipped": {"kind": "sgd", "lr": 0.05, "clip_norm": 0.1},
}


def compare(world: World, micro_batch: int, count: int = 400) -> None:
    log, labels = random_log(world.schema, count, num_ids=20, seed=5)
    slots, book = world.place(log), Textbook(world)
    logits = world.engine.learn(slots, log, labels, micro_batch=micro_batch)
    wanted = [
        book.learn(slots[b : b + micro_batch], part(log, b, b + micro_batch), labels[b : b + micro_batch]).numpy()
        for b in range(0, count, micro_batch)
    ]
    assert np.abs(logits - np.concatenate(wanted)).max() < 2e-4
    assert np.abs(world.tables.weights - book.weights()).max() < 2e-4
    assert np.abs(world.state.params - book.params).max() < 2e-4


@pytest.mark.parametrize("micro_batch", [1, 8])
@pytest.mark.parametrize("rule", ROWS)
def test_rows_are_updated_as_in_the_textbook(rule: str, micro_batch: int) -> None:
    world = World(tables(EVERY_KIND, optimizer=ROWS[rule]), EVERY_KIND, hidden=[16, 8])
    compare(world, micro_batch)


@pytest.mark.parametrize("micro_batch", [1, 8])
@pytest.mark.parametrize("rule", DENSE)
def test_dense_weights_are_updated_as_by_torch(rule: str, micro_batch: int) -> None:
    world = World(tables(EVERY_KIND), EVERY_KIND, hidden=[16, 8], optimizer=DENSE[rule])
    compare(world, micro_batch)


def test_the_longest_gradient_of_a_row_is_told_before_it_is_clipped() -> None:
    told = []
    for clip_norm in (None, 1e-3):
        world = World(tables(SINGLES, optimizer={"kind": "sgd", "lr": 1.0, "clip_norm": clip_norm}), SINGLES)
        log, labels = random_log(world.schema, 1, num_ids=5, seed=1)
        slots, before = world.place(log), world.tables.weights.copy()
        world.engine.learn(slots, log, labels)
        moved = (before - world.tables.weights).reshape(-1, 8)
        longest = float(np.linalg.norm(moved, axis=1).max())
        assert longest == pytest.approx(world.engine.max_gradient_norm if clip_norm is None else clip_norm, rel=1e-4)
        told.append(world.engine.max_gradient_norm)
    assert told[0] == told[1] > 1e-3


def test_accumulators_decay_at_their_example_wherever_batches_are_cut_and_not_below_the_floor() -> None:
    decaying = {"optimizer": {"decay": 0.5, "decay_every": 25, "floor": 0.01, "initial_accumulator": 0.01}}
    whole, cut = (World(tables(SINGLES, **decaying), SINGLES) for _ in range(2))
    log, labels = random_log(whole.schema, 200, num_ids=12, seed=6)
    first = whole.place(log)
    whole.engine.learn(first, log, labels)
    for start in range(0, 200, 7):
        rows = part(log, start, start + 7)
        cut.engine.learn(cut.place(rows), rows, labels[start : start + 7])
    assert np.array_equal(whole.tables.accumulators, cut.tables.accumulators)
    assert np.array_equal(whole.tables.weights, cut.tables.weights)
    used = np.unique(first)
    assert whole.tables.accumulators[used].min() >= np.float32(0.01)
    plain = World(tables(SINGLES, optimizer={"initial_accumulator": 0.01}), SINGLES)
    plain.engine.learn(plain.place(log), log, labels)
    assert plain.tables.accumulators[used].mean() > 2 * whole.tables.accumulators[used].mean()


def test_on_a_stream_that_turns_around_decay_follows_and_plain_adagrad_does_not() -> None:
    """One id whose label is 1 for 30,000 events and then 0: a step that has died needs as long to come back."""
    losses = {}
    for decay in (1.0, 0.5):
        world = World(
            {"a": {"width": 4, "capacity": 64, "optimizer": {"decay": decay, "decay_every": 500}}},
            {"a": {"kind": "categorical"}},
            wide=False,
            hidden=[],
            fm=False,
            cross_layers=1,
            bias_lr=0.0,
            optimizer={"kind": "sgd", "lr": 1e-9},
        )
        random = np.random.default_rng(2)
        log, _ = random_log(world.schema, 36_000, num_ids=2, seed=1)
        log.ids_BC[:] = 1
        labels = (random.random(36_000) < np.where(np.arange(36_000) < 30_000, 0.9, 0.1)).astype(np.float32)
        world.state.offset[:2] = 5e8, 1e9  # the running log-odds stand still
        logits = world.engine.learn(world.place(log), log, labels).astype(np.float64)
        losses[decay] = float(np.mean((np.log1p(np.exp(logits)) - labels * logits)[32_000:]))
    assert losses[0.5] < losses[1.0] - 0.05


@pytest.mark.parametrize("rule", ROWS)
def test_a_slot_that_changes_its_owner_starts_its_state_anew(rule: str) -> None:
    world = World({"a": {"width": 4, "capacity": 64, "optimizer": ROWS[rule]}}, {"a": {"kind": "categorical"}})
    log, labels = random_log(world.schema, 50, num_ids=3, seed=4)
    slots = world.place(log)
    world.engine.learn(slots, log, labels)
    slot = int(slots[0, 0])
    key = int(world.tables.keys[slot])
    fresh = World({"a": {"width": 4, "capacity": 64, "optimizer": ROWS[rule]}}, {"a": {"kind": "categorical"}})
    fresh.tables.assign(Ids(np.array([[key]])), None, 1)
    world.tables.remove(0, np.array([key]))
    again = world.tables.assign(Ids(np.array([[key]])), None, 1).slots_BC[0, 0]
    row, new = world.tables.row_of(0, key), fresh.tables.row_of(0, key)
    assert row is not None and new is not None
    assert np.array_equal(row.row_D, new.row_D)
    assert row.accumulator == new.accumulator
    if len(world.tables.moments):
        assert not world.tables.row_arrays(0)["moments"][again].any()


@pytest.mark.parametrize("rule", ROWS)
def test_the_torchrec_engine_updates_rows_by_the_same_rules(rule: str) -> None:
    one, other = (World(tables(SINGLES, optimizer=ROWS[rule]), SINGLES) for _ in range(2))
    log, labels = random_log(one.schema, 400, num_ids=20, seed=5)
    settings = other.settings.model_copy(update={"engine": "torchrec"})
    engine = build_engine(settings, other.schema, other.tables, other.state)
    ours = one.engine.learn(one.place(log), log, labels, micro_batch=8)
    theirs = engine.learn(other.place(log), log, labels, micro_batch=8)
    assert np.abs(ours - theirs).max() < 1e-4
    assert np.abs(one.tables.weights - other.tables.weights).max() < 1e-4
    assert np.abs(one.tables.accumulators - other.tables.accumulators).max() < 1e-4
    assert engine.max_gradient_norm > 0
