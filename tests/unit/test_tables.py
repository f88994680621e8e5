"""Rows and optimizer state by slot: how they start, that a reused slot starts anew, what they cost."""

from typing import Any

import numpy as np
import pytest

from tests.unit.test_index import assign, ids_at_home, make_tables
from trainer.probe import EMPTY, WINDOW
from trainer.schema import LIVE_OVERHEAD_BYTES, Schema, bytes_per_row
from trainer.settings import Settings
from trainer.tables import Ids, Tables

TWO_TABLES: dict[str, Any] = {
    "user": {"width": 4, "capacity": 100, "init_std": 0.5, "optimizer": {"initial_accumulator": 0.25}},
    "item": {"width": 8, "capacity": 200},
}


def two_tables(seed: int = 0, **tables: Any) -> Tables:
    features = {name: {"kind": "categorical"} for name in tables or TWO_TABLES}
    settings = Settings.model_validate({"tables": tables or TWO_TABLES, "features": features, "model": {"seed": seed}})
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


def test_memory_is_what_the_budget_counted_on_and_does_not_grow() -> None:
    tables = two_tables()
    in_training = [bytes_per_row(d) - LIVE_OVERHEAD_BYTES - 4 * d for d in (4, 8)]
    assert tables.num_bytes == 100 * in_training[0] + 200 * in_training[1]
    for start in range(0, 4000, 50):
        tables.assign(Ids(np.arange(start, start + 100).reshape(50, 2)), None, 0)
    assert tables.num_bytes == 100 * in_training[0] + 200 * in_training[1]
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
