"""The event engine against a textbook learner in float64, and what it promises about its memory."""

from dataclasses import fields
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest

from tests.unit.textbook import Textbook, World, random_log
from trainer.errors import UnsupportedByEventEngine
from trainer.events import Features

SINGLES: dict[str, Any] = {"user": {"kind": "categorical"}, "item": {"kind": "categorical"}}
EVERY_KIND: dict[str, Any] = {
    **SINGLES,
    "price": {"kind": "numeric"},
    "seen": {"kind": "list", "table": "item", "max_length": 4, "pooling": "mean"},
    "tags": {"kind": "list", "table": "tag", "max_length": 3, "pooling": "sum"},
    "content": {"kind": "vector", "width": 5},
}
ROWS_BY_GRADIENT = {"lr": 1e6, "eps": 1e6}  # a step of 1 * gradient, to 1e-6
BY_GRADIENT = {"kind": "sgd", "lr": 1.0}


def tables(features: dict[str, Any], width: int = 8, **table: Any) -> dict[str, Any]:
    names = {spec.get("table", name) for name, spec in features.items() if spec["kind"] in ("categorical", "list")}
    return {name: {"width": width, "capacity": 64, **table} for name in sorted(names)}


def part(features: Features, start: int, stop: int) -> Features:
    return Features(*(getattr(features, f.name)[start:stop] for f in fields(Features)))


def relative_error(got: npt.NDArray[Any], wanted: npt.NDArray[Any]) -> float:
    """Largest difference, over the largest value where that is not zero."""
    return float(np.max(np.abs(got - wanted), initial=0) / (np.max(np.abs(wanted), initial=0) or 1))


@pytest.mark.parametrize("count", [1, 8])
@pytest.mark.parametrize(
    "model",
    [
        {"hidden": [], "cross_layers": 0},
        {"hidden": [16], "cross_layers": 0},
        {"hidden": [], "cross_layers": 1, "cross_rank": 3},
        {"hidden": [], "cross_layers": 0, "fm": True},
        {"hidden": [16, 8], "cross_layers": 0, "fm": True},
        {"hidden": [16, 8, 4], "cross_layers": 2, "cross_rank": 5, "fm": True},
    ],
    ids=["LR", "MLP", "DCN", "FM", "DeepFM", "all"],
)
@pytest.mark.parametrize("features", [SINGLES, EVERY_KIND], ids=["singles", "every kind"])
def test_a_step_is_what_autograd_gives(features: dict[str, Any], model: dict[str, Any], count: int) -> None:
    wild = tables(features, init_std=0.5, optimizer=ROWS_BY_GRADIENT)
    world = World(wild, features, optimizer=BY_GRADIENT, **model)
    log, labels = random_log(world.schema, count, num_ids=7, seed=3)
    slots = world.place(log)
    book = Textbook(world)
    rows, params = world.tables.weights.copy(), world.state.params.copy()
    logits = world.engine.learn(slots, log, labels, micro_batch=count)
    assert relative_error(logits, book.learn(slots, log, labels).numpy()) < 1e-5
    assert relative_error(params - world.state.params, params - book.params) < 1e-4
    assert relative_error(rows - world.tables.weights, rows - book.weights()) < 1e-4


@pytest.mark.parametrize("micro_batch", [1, 8])
def test_the_default_optimizers_keep_to_the_textbook_for_1600_events(micro_batch: int) -> None:
    world = World(tables(EVERY_KIND), EVERY_KIND, hidden=[16, 8], pairs=[["user", "item"]], pair_bits=8)
    log, labels = random_log(world.schema, 1600, num_ids=20, seed=5)
    slots = world.place(log)
    book = Textbook(world)
    logits = world.engine.learn(slots, log, labels, micro_batch=micro_batch)
    wanted = [
        book.learn(slots[b : b + micro_batch], part(log, b, b + micro_batch), labels[b : b + micro_batch]).numpy()
        for b in range(0, 1600, micro_batch)
    ]
    assert np.abs(logits - np.concatenate(wanted)).max() < 1e-4
    assert np.abs(world.tables.weights - book.weights()).max() < 1e-4
    assert np.abs(world.state.params - book.params).max() < 1e-4
    assert np.allclose(world.tables.wide_z, book.wide[0], atol=1e-3)
    assert np.allclose(world.state.pair_z, book.pairs[0], atol=1e-3)
    assert np.allclose(world.state.offset, book.offset, atol=1e-5)


def test_the_forward_pass_is_that_of_the_reference_net() -> None:
    world = World(tables(EVERY_KIND, init_std=0.3), EVERY_KIND, fm=True, cross_layers=2)
    log, labels = random_log(world.schema, 50, num_ids=30, seed=1)
    slots = world.place(log)
    slots[::7, 0] = -1  # no room for it: zeros
    wanted = Textbook(world).learn(slots, log, labels).numpy()
    assert np.abs(world.engine.predict(slots, log) - wanted).max() < 1e-5


def test_predicting_changes_nothing_and_gives_the_logits_that_learning_starts_from() -> None:
    world = World(tables(EVERY_KIND), EVERY_KIND, pairs="all", pair_bits=8)
    log, labels = random_log(world.schema, 40, num_ids=10, seed=2)
    slots = world.place(log)
    world.engine.learn(slots, log, labels)
    before = [array.copy() for array in world.memory()]
    predicted = world.engine.predict(slots, log)
    assert all(np.array_equal(old, new) for old, new in zip(before, world.memory(), strict=True))
    assert predicted[0] == world.engine.learn(slots, log, labels)[0]


def test_where_the_stream_is_cut_into_batches_leaves_no_trace() -> None:
    whole, cut = (World(tables(EVERY_KIND), EVERY_KIND, pairs="all", pair_bits=8) for _ in range(2))
    log, labels = random_log(whole.schema, 60, num_ids=10, seed=4)
    logits = whole.engine.learn(whole.place(log), log, labels)
    slots = cut.place(log)
    pieces = [(0, 1), (1, 20), (20, 60)]
    again = [cut.engine.learn(slots[a:b], part(log, a, b), labels[a:b]) for a, b in pieces]
    assert np.array_equal(logits, np.concatenate(again))
    assert all(np.array_equal(a, b) for a, b in zip(whole.memory(), cut.memory(), strict=True))


@pytest.mark.parametrize("micro_batch", [1, 4])
def test_feature_events_between_examples_are_passed_over(micro_batch: int) -> None:
    mixed, pure = (World(tables(SINGLES), SINGLES) for _ in range(2))
    log, labels = random_log(mixed.schema, 21, num_ids=10, seed=6)
    slots = mixed.place(log)
    pure.place(log)
    labels[[0, 5, 6, 20]] = np.nan
    keep = ~np.isnan(labels)
    logits = mixed.engine.learn(slots, log, labels, micro_batch=micro_batch)
    examples = Features(*(getattr(log, f.name)[keep] for f in fields(Features)))
    assert np.array_equal(logits[keep], pure.engine.learn(slots[keep], examples, labels[keep], micro_batch=micro_batch))
    assert np.isnan(logits[~keep]).all()
    assert all(np.array_equal(a, b) for a, b in zip(mixed.memory(), pure.memory(), strict=True))


def test_an_id_without_a_slot_reads_zeros_and_teaches_no_row() -> None:
    world = World(tables(SINGLES), SINGLES)
    log, labels = random_log(world.schema, 8, num_ids=3, seed=7)
    world.place(log)
    nowhere = np.full((8, 2), -1)
    before = [array.copy() for array in world.memory()]
    assert world.engine.learn(nowhere, log, labels)[0] == 0
    rows = zip(before[:4], world.memory()[:4], strict=True)
    assert all(np.array_equal(old, new) for old, new in rows)


def test_touched_pairs_are_those_of_the_last_batch_each_once() -> None:
    world = World(tables(SINGLES), SINGLES, pairs=[["user", "item"]], pair_bits=8)
    log, labels = random_log(world.schema, 200, num_ids=4, seed=8)
    world.engine.learn(world.place(log), log, labels)
    touched = world.engine.touched_pairs
    assert len(touched) == len(set(touched.tolist()))
    assert sorted(touched) == np.flatnonzero(world.state.pair_n).tolist()
    world.engine.learn(world.place(part(log, 0, 1)), part(log, 0, 1), labels[:1])
    assert len(world.engine.touched_pairs) == 1


def test_without_net_and_pairs_the_logit_is_the_sum_of_the_wide_weights() -> None:
    world = World(tables(SINGLES), SINGLES, hidden=[], cross_layers=0)
    log, labels = random_log(world.schema, 300, num_ids=5, seed=9)
    slots = world.place(log)
    rows = world.tables.weights.copy()
    world.engine.learn(slots, log, labels)
    alone = np.full((1, 2), -1)
    one = part(log, 0, 1)
    both = world.engine.predict(slots[:1], one) - world.engine.predict(alone, one)
    first, second = slots[:1].copy(), slots[:1].copy()
    first[0, 1], second[0, 0] = -1, -1
    parts = [world.engine.predict(s, one) - world.engine.predict(alone, one) for s in (first, second)]
    assert both == pytest.approx(parts[0] + parts[1], abs=1e-6) and both != 0
    assert np.array_equal(rows, world.tables.weights)


def test_an_interaction_of_two_ids_is_learned_to_near_its_entropy() -> None:
    random = np.random.default_rng(0)
    world = World(tables(SINGLES), SINGLES)
    ids = random.integers(0, 20, (20_000, 2))
    log = Features(ids, np.ones(ids.shape, np.int32), np.zeros((len(ids), 0), np.float32), np.ones(ids.shape, np.uint8))
    odds = np.where(ids.sum(1) % 2 == 0, 3.0, -3.0)  # neither id alone says anything
    labels = (random.random(len(ids)) < 1 / (1 + np.exp(-odds))).astype(np.float32)
    logits = world.engine.learn(world.place(log), log, labels)[10_000:].astype(np.float64)
    truth, labels = odds[10_000:], labels[10_000:]
    regret = np.mean(np.logaddexp(0, logits) - labels * logits) - np.mean(np.logaddexp(0, truth) - labels * truth)
    assert regret < 0.02  # the entropy is .19, knowing the base rate alone costs .69


def test_read_only_and_strided_batches_are_taken() -> None:
    world = World(tables(SINGLES), SINGLES)
    log, labels = random_log(world.schema, 8, num_ids=3, seed=7)
    slots = world.place(log)
    wanted = world.engine.predict(slots, log)
    labels.setflags(write=False)
    assert np.array_equal(world.engine.predict(np.asfortranarray(slots), log), wanted)
    assert world.engine.learn(slots, log, labels)[0] == wanted[0]


def test_a_family_that_the_kernels_do_not_know_is_refused_by_name() -> None:
    with pytest.raises(UnsupportedByEventEngine, match=r"model\.family 'dlrm'.*engine: torchrec"):
        World(tables(SINGLES), SINGLES, family="dlrm")


def test_a_micro_batch_of_none_is_refused() -> None:
    world = World(tables(SINGLES), SINGLES)
    log, labels = random_log(world.schema, 1, num_ids=3, seed=7)
    with pytest.raises(ValueError, match="micro_batch: got 0"):
        world.engine.learn(world.place(log), log, labels, micro_batch=0)
