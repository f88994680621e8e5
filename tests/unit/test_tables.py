"""Rows and optimizer state by slot: how they start, that a reused slot starts anew, what they cost."""

import dataclasses
from typing import Any

import numpy as np
import pytest

from tests.unit.test_index import assign, ids_at_home, make_tables
from trainer.budget import table_bytes
from trainer.errors import SettingsError
from trainer.live_layout import Places
from trainer.probe import EMPTY, REMOVED, WINDOW
from trainer.publish import Changed, layout_for
from trainer.schema import Schema
from trainer.settings import Settings
from trainer.sketch import LINE
from trainer.tables import Ids, Tables

TWO_TABLES: dict[str, Any] = {
    "user": {"width": 4, "capacity": 100, "init_std": 0.5, "optimizer": {"initial_accumulator": 0.25}},
    "item": {"width": 8, "capacity": 200},
}


def two_tables(seed: int = 0, wide: bool = False, **tables: Any) -> Tables:
    features = {name: {"kind": "categorical"} for name in tables or TWO_TABLES}
    model = {"seed": seed, "wide": wide}
    settings = Settings.model_validate({"tables": tables or TWO_TABLES, "features": features, "model": model})
    return Tables(Schema.from_settings(settings), settings.model)


def rows_of(tables: Tables, ids: list[int]) -> list[Any]:
    tables.assign(Ids(np.array(ids)[:, None] * np.ones(len(tables.width_T), np.int64)), None, 0)
    return [row.row_D.tolist() for id_ in ids if (row := tables.row_of(0, id_)) is not None]


def test_each_table_has_its_own_slots_and_rows() -> None:
    tables = two_tables()
    slots_BC = tables.assign(Ids(np.array([[7, 7], [8, 8]])), None, 0).slots_BC
    assert (slots_BC[:, 0] < 100).all()
    assert (slots_BC[:, 1] >= 100).all()
    user, item = tables.row_of(0, 7), tables.row_of(1, 7)
    assert user is not None
    assert item is not None
    assert len(user.row_D) == 4
    assert len(item.row_D) == 8
    assert user.row_D.tolist() != item.row_D[:4].tolist()
    start = int(tables.weight_base_T[1] + (slots_BC[1, 1] - tables.slot_base_T[1]) * 8)
    other = tables.row_of(1, 8)
    assert other is not None
    np.testing.assert_array_equal(tables.weights[start : start + 8], other.row_D)


def test_a_new_row_is_a_function_of_seed_table_and_id_alone() -> None:
    alone = rows_of(two_tables(), [42])
    among_others = rows_of(two_tables(), [3, 42, 5])
    behind_a_new_table = two_tables(hour={"width": 4, "capacity": 64}, **TWO_TABLES)
    behind_a_new_table.assign(Ids(np.array([[1, 42, 1]])), None, 0)
    moved = behind_a_new_table.row_of(1, 42)
    assert among_others[1] == alone[0]
    assert moved is not None
    assert moved.row_D.tolist() == alone[0]
    assert rows_of(two_tables(seed=1), [42]) != alone
    assert among_others[0] != among_others[2]


def test_new_rows_are_normal_with_the_declared_deviation() -> None:
    tables = two_tables(big={"width": 16, "capacity": 20_000, "init_std": 0.05})
    tables.assign(Ids(np.arange(8000)[:, None]), None, 0)
    rows = tables.rows(0)[tables.occupied(0)].astype(np.float64)
    assert rows.mean() == pytest.approx(0, abs=0.001)
    assert rows.std() == pytest.approx(0.05, rel=0.01)
    assert (rows**4).mean() / rows.var() ** 2 == pytest.approx(2.7, abs=0.05)  # four uniforms; a normal has 3
    assert np.abs(np.corrcoef(rows.T) - np.eye(16)).max() < 0.06


def test_a_new_row_is_the_same_in_every_release_and_on_every_machine() -> None:
    first = [0.7724403142929077, 0.12955494225025177, -0.2612638473510742, 0.6447750329971313]
    assert rows_of(two_tables(), [42]) == [first]


def test_a_reused_slot_has_no_trace_of_the_id_before() -> None:
    tables = make_tables()
    *first, newcomer = ids_at_home(7, WINDOW + 1)
    assign(tables, first)
    for state in (tables.weights, tables.accumulators, tables.wide_z, tables.wide_n):
        state[:] = 99.0
    assign(tables, [newcomer], now_s=5)
    pristine = make_tables()
    assign(pristine, [newcomer], now_s=5)
    got, wanted = tables.row_of(0, newcomer), pristine.row_of(0, newcomer)
    assert got is not None
    assert wanted is not None
    np.testing.assert_array_equal(got.row_D, wanted.row_D)
    assert got.accumulator == np.float32(0.03)
    assert got.wide_z == got.wide_n == 0
    assert (got.seen_s, got.count) == (5, 1)


def test_a_removed_id_that_comes_back_starts_anew() -> None:
    tables = make_tables()
    assign(tables, [5])
    fresh = tables.row_of(0, 5)
    tables.weights[:] = 99.0
    tables.remove(0, np.array([5]))
    assert tables.row_of(0, 5) is None
    assign(tables, [5])
    again = tables.row_of(0, 5)
    assert fresh is not None
    assert again is not None
    np.testing.assert_array_equal(again.row_D, fresh.row_D)


@pytest.mark.parametrize(("wide", "beside_the_row"), [(False, 24), (True, 32)])
def test_an_id_costs_24_bytes_beside_its_row_and_memory_does_not_grow(wide: bool, beside_the_row: int) -> None:
    tables = two_tables(wide=wide)
    num_bytes = 100 * (16 + beside_the_row) + 200 * (32 + beside_the_row)
    for start in range(0, 4000, 50):
        assert tables.num_bytes == num_bytes
        tables.assign(Ids(np.arange(start, start + 100).reshape(50, 2)), None, 0)
    assert tables.num_rows(0) == 100


def test_a_sweep_goes_round_the_tables_that_have_a_ttl() -> None:
    tables = two_tables(a={"capacity": 64, "ttl_s": 10}, b={"capacity": 64}, c={"capacity": 64, "ttl_s": 0.5})
    tables.assign(Ids(np.array([[1, 1, 1], [2, 2, EMPTY]])), None, 100)
    removed = np.concatenate([tables.expire(103, 30) for _ in range(5)])
    assert (removed >= tables.slot_base_T[2]).all()
    assert [tables.num_rows(t) for t in range(3)] == [2, 2, 0]
    assert len(tables.expire(111, 128)) == 2
    assert [tables.num_rows(t) for t in range(3)] == [0, 2, 0]


def test_a_sweep_without_a_ttl_does_nothing() -> None:
    tables = two_tables()
    tables.assign(Ids(np.array([[1, 1]])), None, 0)
    assert len(tables.expire(10**9, 1000)) == 0


COUNTED: dict[str, Any] = {"user": {"width": 4, "capacity": 100, "admission": {"kind": "count", "min_count": 2}}}


@pytest.mark.parametrize("admission", [{"kind": "all"}, {"kind": "count"}])
@pytest.mark.parametrize(("wide", "kind", "shards"), [(False, "adagrad", 1), (True, "adam", 3)])
def test_a_budget_covers_all_that_is_allocated_to_the_byte(
    admission: dict[str, Any], wide: bool, kind: str, shards: int
) -> None:
    budget = 300_000
    settings = Settings.model_validate(
        {
            "tables": {
                "a": {"width": 5, "budget_bytes": budget, "admission": admission, "optimizer": {"kind": kind}}
            },
            "features": {"a": {"kind": "categorical"}},
            "model": {"wide": wide},
            "store": {"num_shards": shards},
        }
    )  # fmt: skip
    schema = Schema.from_settings(settings)
    tables, layout = Tables(schema, settings.model), layout_for(schema, settings.model, shards)
    without = dataclasses.replace(layout, sections=())
    live = sum(Places.of(layout, k).num_bytes - Places.of(without, k).num_bytes for k in range(shards))
    changed = Changed(tables.slot_base_T, len(tables.keys))
    lists = changed.marks_G.nbytes + changed._queue_G.nbytes
    alignment = LINE if len(tables.sketches) else 0
    assert tables.num_bytes + alignment + live + lists == tables.table_bytes(0) <= budget
    assert table_bytes(schema.tables[0].spec, schema.tables[0].capacity + 1, schema.costs) > budget
    assert len(tables.moments) == (len(tables.weights) if kind == "adam" else 0)


def learned_at_random(tables: Tables, seed: int = 5) -> Tables:
    """Use the tables, and give what they hold state that tells ids apart."""
    random = np.random.default_rng(seed)
    for _ in range(30):
        ids_BC = random.integers(0, 250, (20, len(tables.width_T)))
        tables.assign(Ids(ids_BC), None, int(random.integers(1, 50)))
    for array in (tables.weights, tables.accumulators, tables.moments, tables.wide_z, tables.wide_n):
        array[:] = random.standard_normal(len(array), np.float32)
    return tables


def state_of(tables: Tables, table: int) -> dict[int, Any]:
    ids = tables.keys[tables.slot_base_T[table] + tables.occupied(table)].tolist()
    return {
        id_: [v.tolist() if isinstance(v, np.ndarray) else v for v in dataclasses.astuple(row)]
        for id_ in ids
        if (row := tables.row_of(table, id_)) is not None
    }


def test_a_table_that_grows_keeps_every_id_with_all_its_state() -> None:
    adam = {"optimizer": {"kind": "adam"}}
    old = learned_at_random(two_tables(wide=True, **{n: t | adam for n, t in TWO_TABLES.items()}))
    before = [state_of(old, 0), state_of(old, 1)]
    new, dropped = old.resized(0, 700)
    assert dropped == 0
    assert new.capacity_T.tolist() == [700, 200]
    assert state_of(new, 0) == before[0] == state_of(old, 0)
    np.testing.assert_array_equal(new.keys[new.slot_base_T[1] :], old.keys[old.slot_base_T[1] :])
    np.testing.assert_array_equal(new.rows(1), old.rows(1))
    assert state_of(new, 1) == before[1]
    assert (new.clock, new.num_rows_T.tolist()) == (old.clock, old.num_rows_T.tolist())


@pytest.mark.parametrize("eviction", ["lru", "lfu"])
def test_a_table_that_shrinks_keeps_the_most_useful(eviction: str) -> None:
    old = learned_at_random(two_tables(a={"capacity": 400, "eviction": eviction, "lfu_half_life": 300}))
    new, dropped = old.resized(0, 64)
    before, after = state_of(old, 0), state_of(new, 0)
    assert dropped == len(before) - len(after) > 0
    assert after.items() <= before.items()
    kept, gone = [[old.find(0, np.array([id_]))[0] for id_ in ids] for ids in (set(after), set(before) - set(after))]
    score = old.stamps if eviction == "lru" else old.counts
    assert score[kept].mean() > score[gone].mean()
    new.assign(Ids(np.arange(40)[:, None]), None, 60)


def test_a_table_goes_on_after_a_resize_to_its_own_size_as_if_nothing_had_been() -> None:
    old = learned_at_random(two_tables(a={"capacity": 500, "admission": {"kind": "count"}}))
    new, _ = old.resized(0, 500)
    for tables in (old, new):
        tables.assign(Ids(np.arange(300)[:, None]), None, 60)
    assert state_of(new, 0) == state_of(old, 0)


def test_a_resize_that_the_budget_does_not_pay_for_is_refused_by_name() -> None:
    tables = two_tables(a={"budget_bytes": 50_000})
    with pytest.raises(SettingsError, match=r"tables\.a\.capacity"):
        tables.resized(0, int(tables.capacity_T[0]) + 1)
    with pytest.raises(SettingsError, match=r"tables\.a\.capacity"):
        tables.resized(0, 63)


def test_a_forgotten_id_leaves_nothing_behind() -> None:
    tables = two_tables(**COUNTED)
    tables.assign(Ids(np.array([[5], [5], [6]])), None, 100)
    (slot,) = tables.find(0, np.array([5]))
    tables.accumulators[slot] = 9
    assert tables.remove(0, np.array([5, 6, 7])).tolist() == [slot]
    assert tables.row_of(0, 5) is None
    assert [tables.sketch_estimate(0, id_) for id_ in (5, 6)] == [0, 0]
    assert not tables.rows(0)[slot].any()
    assert [array[slot] for array in tables.slot_arrays.values() if len(array)] == [0, 0, 0, 0]
    assert tables.keys[slot] == REMOVED
    assert tables.num_rows(0) == 0


def test_one_id_is_shown_with_all_its_state() -> None:
    adam = COUNTED["user"] | {"optimizer": {"kind": "adam", "initial_accumulator": 0.25}}
    tables = two_tables(user=adam)
    tables.assign(Ids(np.array([[5], [5], [5], [6]])), None, 100)
    row = tables.row_of(0, 5)
    assert row is not None
    assert row.moments_D is not None
    assert row.moments_D.tolist() == [0, 0, 0, 0]
    assert (row.accumulator, row.wide_z, row.wide_n, row.seen_s, row.count) == (0, 0, 0, 100, 2)
    assert row.sketch_estimate == 2
    assert tables.row_of(0, 6) is None
    assert tables.sketch_estimate(0, 6) == 1
    assert two_tables().sketch_estimate(0, 6) is None


def test_arrays_and_scalars_are_the_whole_state() -> None:
    configuration = {
        "a": {"capacity": 100, "ttl_s": 20, "eviction": "lfu", "admission": {"kind": "count", "halve_every": 70}},
        "b": {"capacity": 64, "admission": {"kind": "probability", "probability": 0.5}},
    }
    went_on, again = two_tables(**configuration), two_tables(**configuration)
    learned_at_random(went_on)
    went_on.expire(60, 70)
    again.keys[:] = went_on.keys
    for name, array in went_on.slot_arrays.items():
        again.slot_arrays[name][:] = array
    for table in (0, 1):
        again.sketch(table)[:] = went_on.sketch(table)
        for name, by_row in went_on.row_arrays(table).items():
            again.row_arrays(table)[name][:] = by_row
    again.load_scalars(dict(went_on.scalars))
    for tables in (went_on, again):
        random = np.random.default_rng(6)
        for step in range(20):
            tables.assign(Ids(random.integers(0, 250, (20, 2))), None, 60 + step)
            tables.expire(60 + step, 10)
    assert again.scalars == went_on.scalars
    for name in ("keys", "weights", "sketches", "num_rows_T", "sightings_T"):
        np.testing.assert_array_equal(getattr(again, name), getattr(went_on, name), name)
    for name, array in went_on.slot_arrays.items():
        np.testing.assert_array_equal(again.slot_arrays[name], array, name)
