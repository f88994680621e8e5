"""The two engines and the reference net: one model, one memory, whoever runs."""

from typing import Any

import numpy as np
import numpy.typing as npt
import pytest

from tests.unit.textbook import Textbook, World, random_log
from trainer.engine_torchrec import TorchrecEngine

SINGLES: dict[str, Any] = {"user": {"kind": "categorical"}, "item": {"kind": "categorical"}}
EVERY_KIND: dict[str, Any] = {
    "price": {"kind": "numeric"},
    "seen": {"kind": "list", "table": "item", "max_length": 4, "pooling": "mean"},
    **SINGLES,
    "content": {"kind": "vector", "width": 5},
    "tags": {"kind": "list", "table": "tag", "max_length": 3, "pooling": "sum"},
    "also": {"kind": "categorical", "table": "tag"},
}
NETS: dict[str, dict[str, Any]] = {
    "LR": {"hidden": [], "cross_layers": 0},
    "MLP": {"hidden": [16], "cross_layers": 0, "wide": False},
    "DCN": {"hidden": [], "cross_layers": 2, "cross_rank": 3, "optimizer": {"kind": "sgd", "lr": 0.01}},
    "FM": {"hidden": [], "cross_layers": 0, "fm": True},
    "all": {"hidden": [16, 8], "cross_layers": 1, "fm": True, "pairs": [["user", "item"]], "pair_bits": 8},
}
Arrays = list[npt.NDArray[Any]]


def world(features: dict[str, Any], widths: tuple[int, int, int] = (8, 8, 8), **model: Any) -> World:
    names = [name for name in ("user", "item", "tag") if name != "tag" or "tags" in features]
    tables = {
        name: {"width": width, "capacity": 64, "init_std": 0.3, "optimizer": {"lr": lr}}
        for name, width, lr in zip(names, widths, (0.1, 0.1, 0.3), strict=False)  # the last has a kernel of its own
    }
    return World(tables, features, **model)


def torchrec(of: World) -> TorchrecEngine:
    return TorchrecEngine(of.schema, of.settings.model, of.tables, of.state)


def assert_same(got: Arrays, wanted: Arrays) -> None:
    for one, other in zip(got, wanted, strict=True):
        np.testing.assert_allclose(one, other, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("net", NETS)
@pytest.mark.parametrize("features", [SINGLES, EVERY_KIND], ids=["singles", "every kind"])
def test_both_engines_predict_what_the_reference_net_does(features: dict[str, Any], net: str) -> None:
    one = world(features, **NETS[net])
    log, labels = random_log(one.schema, 50, num_ids=30, seed=1)
    slots = one.place(log)
    one.engine.learn(slots, log, labels)
    slots[::7, 0] = -1  # no room for it: zeros
    wanted = Textbook(one).learn(slots, log, labels).numpy()
    assert_same([one.engine.predict(slots, log), torchrec(one).predict(slots, log)], [wanted, wanted])


@pytest.mark.parametrize("net", NETS)
@pytest.mark.parametrize("features", [SINGLES, EVERY_KIND], ids=["singles", "every kind"])
def test_a_micro_batch_teaches_both_engines_the_same(features: dict[str, Any], net: str) -> None:
    one, other = (world(features, **NETS[net]) for _ in range(2))
    engine = torchrec(other)
    for step, micro_batch in enumerate([1, 40, 7, 16]):
        log, labels = random_log(one.schema, 40, num_ids=150, seed=step)  # more ids than slots: rows come and go
        labels[::9] = np.nan
        slots = one.place(log)
        assert np.array_equal(other.place(log), slots)
        wanted = one.engine.learn(slots, log, labels, micro_batch=micro_batch)
        got = engine.learn(slots, log, labels, micro_batch=micro_batch)
        assert_same([got, *other.memory()], [wanted, *one.memory()])
        assert set(engine.touched_pairs.tolist()) == set(one.engine.touched_pairs.tolist())


def test_tables_of_several_widths_agree() -> None:
    one, other = (world(EVERY_KIND, widths=(4, 16, 8)) for _ in range(2))
    log, labels = random_log(one.schema, 60, num_ids=20, seed=2)
    slots = one.place(log)
    other.place(log)
    one.engine.learn(slots, log, labels, micro_batch=60)
    torchrec(other).learn(slots, log, labels)
    assert_same(other.memory(), one.memory())


def test_engines_take_turns_on_one_memory_as_if_one_had_done_it_all() -> None:
    one, other = (world(EVERY_KIND, **NETS["all"]) for _ in range(2))
    turns = [other.engine, torchrec(other)]  # the second is built over the rows that the first works on
    for step in range(6):
        log, labels = random_log(one.schema, 30, num_ids=40, seed=step)
        slots = one.place(log)
        other.place(log)
        wanted = one.engine.learn(slots, log, labels, micro_batch=10)
        assert_same([turns[step % 2].learn(slots, log, labels, micro_batch=10)], [wanted])
    assert_same(other.memory(), one.memory())
