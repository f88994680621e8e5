"""The torchrec engine: what it learns, what it promises about memory and process, what it refuses."""

import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from tests.unit.textbook import World, random_log
from trainer.dense import LearnerState
from trainer.engine_torchrec import TorchrecEngine
from trainer.engines import build_engine
from trainer.errors import LivebedError, SettingsError, UnsupportedByEventEngine
from trainer.events import Features
from trainer.rows import Rows
from trainer.schema import Schema
from trainer.settings import Settings
from trainer.sharding import Sharded, _check
from trainer.tables import Tables
from trainer.wide import batch_of

ROOT = Path(__file__).parents[2]
FEATURES: dict[str, Any] = {
    "user": {"kind": "categorical"},
    "item": {"kind": "categorical"},
    "price": {"kind": "numeric"},
}


class Parts:
    """What an engine is built of."""

    def __init__(self, *, engine: str = "torchrec", user_width: int = 8, **model: Any) -> None:
        tables = {"user": {"width": user_width, "capacity": 64}, "item": {"width": 8, "capacity": 64}}
        settings = {"tables": tables, "features": FEATURES, "engine": engine, "model": model}
        self.settings = Settings.model_validate(settings)
        self.schema = Schema.from_settings(self.settings)
        self.tables = Tables(self.schema, self.settings.model)
        self.state = LearnerState.initial(self.schema, self.settings.model)

    def engine(self) -> Any:
        return build_engine(self.settings, self.schema, self.tables, self.state)


def checkerboard(count: int, seed: int) -> tuple[Features, np.ndarray]:
    """A world that only products of ids explain: the label is 1 for 9 in 10 where user + item is even, else for 1."""
    random = np.random.default_rng(seed)
    ids_BC = random.integers(0, 12, (count, 2))
    floats_BM = random.standard_normal((count, 1)).astype(np.float32)
    features = Features(ids_BC, np.ones((count, 2), np.int32), floats_BM, np.ones((count, 3), np.uint8))
    likely = np.where(ids_BC.sum(1) % 2 == 0, 0.9, 0.1)
    return features, (random.random(count) < likely).astype(np.float32)


@pytest.mark.parametrize("family", ["ctr", "dlrm"])
def test_it_learns_a_known_world(family: str) -> None:
    parts = Parts(family=family)
    engine = parts.engine()
    for step in range(150):
        features, labels = checkerboard(64, step)
        logits = engine.learn(parts.tables.assign(features, None, 1).slots_BC, features, labels)
    features, labels = checkerboard(2000, 1000)
    slots = parts.tables.assign(features, None, 1).slots_BC
    logits = engine.predict(slots, features).astype(np.float64)
    logloss = np.mean(np.log1p(np.exp(-(2 * labels - 1) * logits)))
    assert logloss < 0.40  # the world's own is 0.325, that of knowing nothing 0.693


def test_building_it_and_predicting_change_nothing() -> None:
    tables = {name: {"width": 8, "capacity": 64} for name in ("user", "item")}
    world = World(tables, FEATURES, pairs="all", pair_bits=8)
    log, labels = random_log(world.schema, 40, num_ids=20, seed=0)
    slots = world.place(log)
    world.engine.learn(slots, log, labels)
    arrays, before = world.memory(), [array.copy() for array in world.memory()]
    engine = TorchrecEngine(world.schema, world.settings.model, world.tables, world.state)
    predicted = engine.predict(slots, log)
    assert all(one is other for one, other in zip(world.memory(), arrays, strict=True))
    assert all(np.array_equal(one, other) for one, other in zip(arrays, before, strict=True))
    assert np.array_equal(engine.learn(slots, log, labels), predicted)


def test_a_batch_without_examples_teaches_nothing() -> None:
    parts = Parts()
    engine = parts.engine()
    features, labels = checkerboard(3, 0)
    before = parts.state.offset.copy()
    nowhere = np.full((3, 2), -1)
    assert np.isnan(engine.learn(nowhere, features, np.full_like(labels, np.nan))).all()
    assert np.array_equal(parts.state.offset, before)
    assert len(engine.predict(nowhere[:0], checkerboard(0, 0)[0])) == 0


def test_examples_whose_ids_have_no_room_still_teach_the_rest() -> None:
    parts = Parts()
    features, labels = checkerboard(3, 0)
    logits = parts.engine().learn(np.full((3, 2), -1), features, labels)
    assert np.isfinite(logits).all()
    assert parts.state.offset[1] == 3
    assert not parts.tables.weights.any()


def test_a_slot_out_of_range_is_an_error_and_not_row_0() -> None:
    parts = Parts()
    features, labels = checkerboard(1, 0)
    rows = Rows(parts.schema, parts.tables)
    with pytest.raises(IndexError, match=re.escape("outside of 0 .. 127")):
        rows(np.arange(1), batch_of(np.array([[0, 128]]), features, labels))


def through_torchrec(rows: Rows, slots_NF: np.ndarray, dx_NFD: torch.Tensor) -> torch.Tensor:
    """The rows that torchrec's own modules look up; their backward learns."""
    from torchrec import KeyedJaggedTensor  # noqa: PLC0415 - warns of itself unless `sharding` has imported it first

    keys = [f"feature{f}" for f in range(slots_NF.shape[1])]
    values = torch.from_numpy(slots_NF.T.reshape(-1))
    jagged = KeyedJaggedTensor(keys=keys, values=values, lengths=torch.ones(slots_NF.size, dtype=torch.int64))
    pooled = rows.sharded.parallel(jagged).values()
    pooled.backward(dx_NFD.flatten(1))
    return pooled.detach()


def test_rows_are_looked_up_and_learned_as_torchrecs_own_modules_would() -> None:
    one, other = Parts(), Parts()
    features, labels = checkerboard(200, 0)  # 12 ids each: all come many times
    slots = one.tables.assign(features, None, 1).slots_BC
    other.tables.assign(features, None, 1)
    mine, theirs = Rows(one.schema, one.tables), Rows(other.schema, other.tables)
    before = one.tables.weights.copy()
    for seed in range(3):
        x_Nn = mine(np.arange(200), batch_of(slots, features, labels))
        dx_Nn = torch.randn(x_Nn.shape, generator=torch.Generator().manual_seed(seed))
        mine.learn(dx_Nn)
        wanted = through_torchrec(theirs, slots - one.tables.slot_base_T, dx_Nn[:, :16].unflatten(1, (2, 8)))
        torch.testing.assert_close(x_Nn[:, :16], wanted, rtol=1e-5, atol=1e-5)
    np.testing.assert_allclose(one.tables.weights, other.tables.weights, rtol=1e-5, atol=1e-5)
    np.testing.assert_allclose(one.tables.accumulators, other.tables.accumulators, rtol=1e-5, atol=1e-5)
    assert (one.tables.weights != before).any()


def test_rows_that_would_not_train_in_place_are_found_at_start() -> None:
    parts, others = Parts(), Parts()
    sharded = Sharded(parts.schema, parts.tables)
    with pytest.raises(LivebedError, match="does not train table user in place"):
        _check(sharded.parallel, others.tables)


def test_a_width_that_fbgemm_cannot_do_is_refused_by_name() -> None:
    with pytest.raises(SettingsError, match=re.escape("tables.user.width: got 6, wanted a multiple of 4")):
        Parts(user_width=6).engine()


def test_a_micro_batch_below_one_is_refused() -> None:
    parts = Parts()
    features, labels = checkerboard(3, 0)
    with pytest.raises(ValueError, match="micro_batch: got 0"):
        parts.engine().learn(np.zeros((3, 2), np.int64), features, labels, micro_batch=0)


@pytest.mark.parametrize(
    ("engine", "family", "chosen"),
    [
        ("auto", "ctr", "event"),
        ("auto", "dlrm", "torchrec"),
        ("torchrec", "ctr", "torchrec"),
        ("event", "ctr", "event"),
    ],
)
def test_the_engine_follows_from_settings_and_model(engine: str, family: str, chosen: str) -> None:
    assert Parts(engine=engine, family=family).engine().name == chosen


def test_what_the_event_engine_does_not_do_is_refused_where_it_is_asked_for() -> None:
    with pytest.raises(UnsupportedByEventEngine, match=r"model\.family 'dlrm'"):
        Parts(engine="event", family="dlrm").engine()


def run(code: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-W", "error", "-c", code]
    return subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)


def test_several_engines_live_and_leave_in_one_process_without_a_word() -> None:
    done = run(
        "from tests.unit.test_engine_torchrec import Parts, checkerboard\n"
        "for seed in range(2):\n"
        "    parts = Parts()\n"
        "    features, labels = checkerboard(8, seed)\n"
        "    parts.engine().learn(parts.tables.assign(features, None, 1).slots_BC, features, labels)\n"
    )
    assert (done.returncode, done.stdout, done.stderr) == (0, "", "")


def test_the_event_engine_needs_no_torch() -> None:
    done = run(
        "import sys\n"
        "from trainer.dense import LearnerState\n"
        "from trainer.engines import Schema, Settings, Tables, build_engine\n"
        "settings = Settings.model_validate({'tables': {'a': {}}, 'features': {'a': {'kind': 'categorical'}}})\n"
        "schema = Schema.from_settings(settings)\n"
        "state = LearnerState.initial(schema, settings.model)\n"
        "build_engine(settings, schema, Tables(schema, settings.model), state)\n"
        "print({'torch', 'torchrec'} & set(sys.modules))\n"
    )
    assert (done.returncode, done.stdout) == (0, "set()\n"), done.stderr
