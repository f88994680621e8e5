import functools
from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import pytest

from service.examples import KUAIRAND
from trainer.dense import LearnerState
from trainer.engine_event import EventEngine
from trainer.events import Features, derive
from trainer.guard import REASONS, Finding, Guard
from trainer.schema import Schema
from trainer.settings import GuardSettings, Settings
from trainer.table_file import chunks, read_table
from trainer.tables import Assignment, Tables

TWO_IDS: dict[str, Any] = {
    "tables": {"a": {"capacity": 4096}, "b": {"capacity": 4096}},
    "features": {"a": {"kind": "categorical"}, "b": {"kind": "categorical"}},
}


@dataclass
class World:
    """A learner with its guard, and events to learn from."""

    settings: Settings
    features: Features
    labels_B: np.ndarray[Any, np.dtype[np.float32]]

    def __post_init__(self) -> None:
        self.schema = Schema.from_settings(self.settings)
        self.tables = Tables(self.schema, self.settings.model)
        self.state = LearnerState.initial(self.schema, self.settings.model)
        self.engine = EventEngine(self.schema, self.settings.model, self.tables, self.state)
        self.guard = Guard(self.settings.guard, self.tables, self.state)

    def explode(self) -> None:
        """Learn with a thousand times the learning rate from here on."""
        tree = self.settings.model_dump()
        for table in tree["tables"].values():
            table["optimizer"]["lr"] *= 1000
        tree["model"]["optimizer"]["lr"] *= 1000
        settings = Settings.model_validate(tree)
        self.engine = EventEngine(Schema.from_settings(settings), settings.model, self.tables, self.state)

    def learn(self, start: int, stop: int) -> tuple[Assignment, Any, Any]:
        rows, labels = self.features.rows(start, stop), self.labels_B[start:stop]
        assignment = self.tables.assign(rows, None, 0)
        return assignment, labels, self.engine.learn(assignment.slots_BC, rows, labels)

    def step(self, start: int, stop: int) -> list[Finding]:
        findings = self.guard.check(*self.learn(start, stop), max_gradient_norm=0.0)
        if not findings:
            self.guard.accept()
        return findings

    def steps(self, start: int, stop: int, size: int = 256) -> Iterator[list[Finding]]:
        for begin in range(start, stop, size):
            yield self.step(begin, min(begin + size, stop))

    def first_finding(self, start: int, size: int = 256) -> tuple[int, set[str]]:
        """Events from `start` to the end of the first step that is held, and its reasons."""
        for number, findings in enumerate(self.steps(start, len(self.labels_B), size), 1):
            if findings:
                return number * size, reasons(findings)
        return 0, set()


def reasons(findings: list[Finding]) -> set[str]:
    return {finding.reason for finding in findings}


@functools.cache
def kuairand_events() -> tuple[Settings, Features, Any]:
    """The real log, with the duration as a number too, so that there is one to corrupt."""
    loaded = Settings.load(KUAIRAND / "livebed.yaml", environment={}).model_dump()
    loaded["features"]["seconds"] = {"kind": "numeric", "source": "duration_ms", "transform": "log1p"}
    settings = Settings.model_validate(loaded)
    schema = Schema.from_settings(settings)
    table = read_table(KUAIRAND / "impressions.parquet", time="time_ms")
    (chunk,) = chunks(schema, table, label="is_click", time="time_ms")
    return settings, derive(schema, chunk.inputs, chunk.time_ms_B), chunk.labels_B


def kuairand() -> World:
    return World(*kuairand_events())


def two_ids(rate_B: Any, **overrides: Any) -> World:
    """Labels with a given rate for each event, told apart by ids of a skewed popularity."""
    rng, count = np.random.default_rng(3), len(rate_B)
    ids_BC = rng.zipf(1.4, (count, 2)) % 1000
    effect = rng.standard_normal((1000, 2))
    log_odds = np.log(rate_B / (1 - rate_B)) + effect[ids_BC[:, 0], 0] + effect[ids_BC[:, 1], 1]
    labels_B = (rng.random(count) < 1 / (1 + np.exp(-log_odds))).astype(np.float32)
    features = Features(
        ids_BC, np.ones((count, 2), np.int32), np.empty((count, 0), np.float32), np.ones((count, 2), np.uint8)
    )
    return World(Settings.load(None, {**TWO_IDS, **overrides}, {}), features, labels_B)


def one_step(**overrides: Any) -> tuple[World, Assignment, Any, Any]:
    world = two_ids(np.full(64, 0.5), **overrides)
    return (world, *world.learn(0, 64))


def test_a_real_log_is_never_held() -> None:
    world = kuairand()
    assert not any(world.steps(0, len(world.labels_B)))


@pytest.mark.parametrize("rates", [(0.0005, 0.0005), (0.03, 0.5), (0.5, 0.01)])
def test_rare_labels_and_a_drifting_rate_are_never_held(rates: tuple[float, float]) -> None:
    world = two_ids(np.geomspace(*rates, 60_000))
    assert not any(world.steps(0, 60_000))


def test_a_learning_rate_that_explodes_is_held_within_a_step() -> None:
    world = kuairand()
    assert not any(world.steps(0, 10_240))
    world.explode()
    delay, found = world.first_finding(10_240)
    assert delay == 256
    assert "row_norm" in found


def test_a_net_that_explodes_is_seen_by_its_loss() -> None:
    world = kuairand()
    assert not any(world.steps(0, 10_240))
    world.guard = restarted(world, max_row_norm=None)
    world.explode()
    delay, found = world.first_finding(10_240)
    assert delay <= 512
    assert "loss_spike" in found


def restarted(world: World, **changes: Any) -> Guard:
    """A guard with other limits that goes on where the world's stands."""
    guard = Guard(world.settings.guard.model_copy(update=changes), world.tables, world.state)
    guard.load(world.guard.arrays)
    return guard


def test_a_feature_that_grew_a_million_times_is_held() -> None:
    world = kuairand()
    assert not any(world.steps(0, 10_240))
    world.features = replace(world.features, floats_BM=world.features.floats_BM * np.float32(1e6))
    delay, found = world.first_finding(10_240)
    assert 0 < delay <= 512
    assert "loss_spike" in found


def test_labels_turned_over_are_held_when_the_model_does_not_relearn_at_once() -> None:
    world = two_ids(np.full(30_000, 0.005))
    assert not any(world.steps(0, 20_480))
    world.labels_B[20_480:] = 1 - world.labels_B[20_480:]
    delay, found = world.first_finding(20_480, size=1024)
    assert delay == 1024
    assert "loss_spike" in found


@pytest.mark.parametrize("poison", [np.nan, np.inf, -np.inf])
def test_a_row_that_is_not_finite_is_named(poison: float) -> None:
    world, assignment, labels, logits = one_step()
    slot, table = int(assignment.touched_K[5]), int(assignment.touched_table_K[5])
    world.tables.rows(table)[slot - world.tables.slot_base_T[table], 3] = poison
    (finding,) = world.guard.check(assignment, labels, logits, max_gradient_norm=0)
    assert finding.reason == "row_not_finite"
    assert f"table {'ab'[table]}, id {world.tables.keys[slot]}:" in finding.detail


@pytest.mark.parametrize("state", ["accumulators", "wide_z", "wide_n"])
def test_so_is_one_whose_optimizer_state_is_not_finite(state: str) -> None:
    world, assignment, labels, logits = one_step(model={"wide": True})
    world.tables.slot_arrays[state][assignment.touched_K[0]] = np.nan
    findings = world.guard.check(assignment, labels, logits, max_gradient_norm=0)
    assert reasons(findings) == {"row_not_finite"}


def test_dense_weights_and_their_state_must_be_finite() -> None:
    for name in ("params", "accumulators", "offset"):
        world, assignment, labels, logits = one_step()
        world.state.arrays[name][-1] = np.inf
        (finding,) = world.guard.check(assignment, labels, logits, max_gradient_norm=0)
        assert finding.reason == "dense_not_finite"
        assert name in finding.detail


def test_a_pair_of_the_step_must_be_finite() -> None:
    world, assignment, labels, logits = one_step(model={"pairs": "all", "pair_bits": 10})
    pairs = world.engine.touched_pairs
    world.state.pair_z[pairs[0]] = np.nan
    findings = world.guard.check(assignment, labels, logits, max_gradient_norm=0, touched_pairs=pairs)
    assert reasons(findings) == {"pair_not_finite"}


def test_predictions_must_be_finite_where_there_is_a_label() -> None:
    world, assignment, labels, logits = one_step()
    logits[:2] = np.nan
    labels[0] = np.nan  # a feature event
    (finding,) = world.guard.check(assignment, labels, logits, max_gradient_norm=0)
    assert finding == Finding("prediction_not_finite", "1 of 64 predictions are not finite")


def test_a_row_at_its_limit_passes_and_one_beyond_is_held() -> None:
    world, assignment, labels, logits = one_step()
    slot, table = int(assignment.touched_K[0]), int(assignment.touched_table_K[0])
    row = world.tables.rows(table)[slot - world.tables.slot_base_T[table]]
    row[:] = 25.0  # of 16 floats: norm 100
    assert world.guard.check(assignment, labels, logits, max_gradient_norm=0) == []
    row[0] = 25.1
    (finding,) = world.guard.check(assignment, labels, logits, max_gradient_norm=0)
    assert finding.reason == "row_norm"
    assert "norm 100" in finding.detail
    unlimited = Guard(GuardSettings(max_row_norm=None), world.tables, world.state)
    assert unlimited.check(assignment, labels, logits, max_gradient_norm=0) == []


@pytest.mark.parametrize("norm", [1001.0, np.nan, np.inf])
def test_a_gradient_beyond_its_limit_is_held(norm: float) -> None:
    world, assignment, labels, logits = one_step()
    assert world.guard.check(assignment, labels, logits, max_gradient_norm=1000.0) == []
    assert reasons(world.guard.check(assignment, labels, logits, max_gradient_norm=norm)) == {"gradient_norm"}


def judged(size: int, logits_N: Any, labels_N: Any, **settings: Any) -> tuple[int, set[str], Guard]:
    """Predictions alone, in steps of `size`: the last event of the first step held, its reasons, and the guard."""
    world, assignment, _, _ = one_step()
    guard = Guard(GuardSettings(**settings), world.tables, world.state)
    for start in range(0, len(labels_N), size):
        cut = slice(start, start + size)
        findings = guard.check(assignment, labels_N[cut], logits_N[cut], max_gradient_norm=0)
        if findings:
            return min(start + size, len(labels_N)), reasons(findings), guard
        guard.accept()
    return 0, set(), guard


def predictions(count: int) -> tuple[Any, Any]:
    rng = np.random.default_rng(4)
    logits_N = rng.normal(-1, 1, count).astype(np.float32)
    return logits_N, (rng.random(count) < 1 / (1 + np.exp(-logits_N))).astype(np.float32)


def test_where_steps_are_cut_changes_nothing() -> None:
    logits_N, labels_N = predictions(5000)
    states = [judged(size, logits_N, labels_N, loss_window=64, calibration_window=999)[2] for size in (1, 7, 256, 5000)]
    for guard in states[1:]:
        for name, array in states[0].arrays.items():
            np.testing.assert_array_equal(guard.arrays[name], array, err_msg=name)
    logits_N[4000:] *= -9
    ends = {judged(size, logits_N, labels_N, loss_window=64)[:1] for size in (1, 2, 5)}
    assert max(ends)[0] - min(ends)[0] < 5
    assert min(ends)[0] > 4000


def test_a_held_step_leaves_no_trace() -> None:
    logits_N, labels_N = predictions(3000)
    world, assignment, _, _ = one_step()
    guard = Guard(GuardSettings(loss_window=64, calibration_window=64), world.tables, world.state)
    guard.check(assignment, labels_N[:1000], logits_N[:1000], max_gradient_norm=0)
    guard.accept()
    before = guard.arrays
    assert guard.check(assignment, labels_N[1000:], -9 * logits_N[1000:], max_gradient_norm=0)
    for name, array in guard.arrays.items():
        np.testing.assert_array_equal(array, before[name], err_msg=name)


def test_calibration_is_judged_where_loss_says_little() -> None:
    labels_N = (np.random.default_rng(5).random(6000) < 0.002).astype(np.float32)
    windows = {"calibration_window": 2048, "max_loss_ratio": None}
    for logit, held in ((-6.2, set()), (-3.5, {"calibration"})):
        end, found, _ = judged(1, np.full(6000, logit, np.float32), labels_N, **windows)
        assert found == held
        assert end in {0, 2 * 2048}  # the first window, a model's beginning, is not judged


def test_no_label_by_chance_is_no_lack_of_calibration() -> None:
    assert judged(256, np.full(30_000, -6.9, np.float32), np.zeros(30_000, np.float32))[1] == set()


def test_the_estimates_go_on_from_a_checkpoint_and_begin_anew_under_another_window() -> None:
    logits_N, labels_N = predictions(20_000)
    guard = judged(256, logits_N, labels_N)[2]
    world, assignment, _, _ = one_step()
    same, other = (Guard(GuardSettings(loss_window=w), world.tables, world.state) for w in (1024, 2048))
    same.load(guard.arrays)
    other.load(guard.arrays)
    bad = (labels_N[:1024], -9 * logits_N[:1024])
    assert reasons(same.check(assignment, *bad, max_gradient_norm=0)) == {"loss_spike"}
    assert other.check(assignment, *bad, max_gradient_norm=0) == []


def test_reasons_are_a_small_fixed_set() -> None:
    assert len(set(REASONS)) == 8
