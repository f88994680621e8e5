"""Which ids get a row, and which lose theirs to whom: one test a rule of `trainer.index`."""

from typing import Any

import numpy as np
import pytest

from tests.unit.test_index import assign, ids_at_home, make_tables
from trainer import index
from trainer.index import LAST_STAMP, STAMP_STEP, stamp_base
from trainer.probe import WINDOW
from trainer.tables import Tables

MANY = 10_000


def with_count(min_count: int = 2, **table: Any) -> Tables:
    """Count admission without pressure; `table` may say otherwise."""
    admission = {"kind": "count", "min_count": min_count, "pressure_from": 1.0} | table.pop("admission", {})
    return make_tables(admission=admission, **{"capacity": MANY} | table)


def with_probability(probability: float, **admission: Any) -> Tables:
    admission = {"kind": "probability", "probability": probability, "pressure_from": 1.0} | admission
    return make_tables(admission=admission, capacity=MANY)


def held(tables: Tables, ids: list[int]) -> list[bool]:
    return (tables.find(0, np.array(ids, np.int64)) >= 0).tolist()


def test_an_id_gets_its_row_at_the_sighting_that_makes_the_count() -> None:
    tables = with_count(3)
    outcome = assign(tables, [5, 6, 5, 5, 6, 5])
    assert (outcome.slots_BC[:, 0] >= 0).tolist() == [False, False, False, True, False, True]
    assert (outcome.num_refused, outcome.num_unplaced, outcome.num_new) == (4, 0, 1)
    assert outcome.touched_K.tolist() == [outcome.slots_BC[3, 0]]
    assert tables.num_rows(0) == 1


def test_one_off_ids_never_get_a_row() -> None:
    tables = with_count(2)
    assign(tables, range(2000))
    assert tables.num_rows(0) < 5


def test_sightings_of_an_id_with_a_row_are_not_counted_in_the_sketch() -> None:
    tables = with_count(2)
    assign(tables, [5] * 50)
    assert tables.sketch_estimate(0, 5) == 2
    assert tables.scalars["sightings/a"] == 2


def test_the_sketch_halves_at_exactly_that_sighting() -> None:
    tables = with_count(3, admission={"halve_every": 4})
    assign(tables, [5, 5, 6])
    assert tables.sketch_estimate(0, 5) == 2
    assign(tables, [7])
    assert [tables.sketch_estimate(0, id_) for id_ in (5, 6, 7)] == [1, 0, 0]
    assert tables.scalars["sightings/a"] == 0


def test_a_probability_admits_about_that_share_of_sightings() -> None:
    tables = with_probability(0.25)
    assert assign(tables, range(4000)).num_new == pytest.approx(1000, abs=80)


def test_what_a_probability_decides_is_a_function_of_seed_table_id_and_row() -> None:
    first, same, later = (with_probability(0.5) for _ in range(3))
    later.clock = 2
    ids = list(range(200))
    outcomes = [assign(tables, ids).slots_BC[:, 0] >= 0 for tables in (first, same, later)]
    assert (outcomes[0] == outcomes[1]).all()
    assert (outcomes[0] != outcomes[2]).any()


def test_a_refused_id_may_be_admitted_at_its_next_sighting() -> None:
    tables = with_probability(0.5)
    slots_N = assign(tables, [5] * 20).slots_BC[:, 0]
    first = int((slots_N >= 0).argmax())
    assert (slots_N[first:] == slots_N[first]).all()


def test_pressure_raises_the_needed_count_before_anything_is_evicted() -> None:
    tables = with_count(
        2, capacity=1000, admission={"pressure_from": 0.5, "sketch_bytes": 64_000, "halve_every": 10**6}
    )
    half, more = list(range(500)), list(range(1000, 1400))
    assign(tables, half + half)
    assert tables.num_rows(0) == 500
    outcome = assign(tables, more + more)
    assert tables.num_rows(0) < 520  # one more row is past the limit: three sightings from there on
    assert len(outcome.evicted_ids_E) == 0
    assign(tables, more)
    assert tables.num_rows(0) > 800


def test_pressure_lowers_the_probability_to_its_half() -> None:
    tables = make_tables(
        capacity=MANY, admission={"kind": "probability", "probability": 1.0, "pressure_from": 0.01}
    )  # fmt: skip
    assert assign(tables, range(100)).num_new == 100
    assign(tables, range(100, 60_000))
    full = assign(tables, range(100_000, 102_000))
    assert full.num_refused == pytest.approx(1000, abs=100)


def full_window(tables: Tables, *, sightings: int = 1) -> tuple[list[int], int]:
    """Fill one window with ids of so many sightings each; the ids, and one more of the same home."""
    *ids, newcomer = ids_at_home(7, WINDOW + 1, int(tables.capacity_T[0]))
    for _ in range(sightings):
        assign(tables, ids)
    return ids, newcomer


def let_rows_pass(tables: Tables, count: int) -> None:
    tables.clock += count


def test_lfu_evicts_the_lowest_count_and_of_equals_the_oldest() -> None:
    tables = make_tables(eviction="lfu", capacity=MANY)
    ids, newcomer = full_window(tables)
    assign(tables, [id_ for id_ in ids if id_ not in (ids[3], ids[9])])
    let_rows_pass(tables, MANY)
    outcome = assign(tables, [newcomer])
    assert outcome.evicted_ids_E.tolist() == [ids[3]]
    assert outcome.evicted_reason_E.tolist() == [index.PRESSURE]


def test_lfu_spares_what_was_used_in_the_last_rows() -> None:
    tables = make_tables(eviction="lfu", capacity=MANY)
    ids, newcomer = full_window(tables, sightings=3)
    let_rows_pass(tables, MANY)
    assign(tables, [newcomer])
    another = ids_at_home(7, WINDOW + 2, MANY)[-1]
    assert assign(tables, [another]).evicted_ids_E.tolist() == [ids[1]]
    assert held(tables, [newcomer]) == [True]


def test_lfu_falls_back_to_the_oldest_where_all_were_used_of_late() -> None:
    tables = make_tables(eviction="lfu", capacity=MANY)
    ids, newcomer = full_window(tables)
    assign(tables, ids[:1] * 9)
    assert assign(tables, [newcomer]).evicted_ids_E.tolist() == [ids[1]]


def test_counts_of_lfu_halve_at_every_half_life_and_those_of_lru_do_not() -> None:
    for eviction, wanted in (("lfu", 8 // 4 + 1), ("lru", 9)):
        tables = make_tables(eviction=eviction, lfu_half_life=100, capacity=MANY)
        slot = assign(tables, [5] * 8).slots_BC[0, 0]
        tables.clock = 250
        assign(tables, [5])
        assert tables.counts[slot] == wanted


def test_under_lfu_a_counted_newcomer_must_have_been_seen_more_often_than_its_victim() -> None:
    tables = with_count(1, eviction="lfu")
    _, newcomer = full_window(tables, sightings=3)
    let_rows_pass(tables, MANY)
    outcome = assign(tables, [newcomer] * 4)
    assert (outcome.slots_BC[:, 0] >= 0).tolist() == [False, False, False, True]
    assert outcome.num_refused == 3


def test_under_lru_a_counted_newcomer_takes_the_oldest_slot() -> None:
    tables = with_count(2)
    ids, newcomer = full_window(tables, sightings=5)
    outcome = assign(tables, [newcomer] * 2)
    assert outcome.evicted_ids_E.tolist() == [ids[0]]


def test_an_expired_id_goes_before_one_under_pressure_and_the_reason_says_so() -> None:
    tables = make_tables(ttl_s=10, eviction="lfu")
    *ids, newcomer = ids_at_home(7, WINDOW + 1)
    assign(tables, ids[1:], now_s=100)
    assign(tables, ids[:1], now_s=100)
    assign(tables, ids[1:], now_s=111)
    let_rows_pass(tables, MANY)
    outcome = assign(tables, [newcomer], now_s=111)
    assert outcome.evicted_ids_E.tolist() == [ids[0]]
    assert outcome.evicted_reason_E.tolist() == [index.EXPIRED]


@pytest.mark.parametrize("eviction", ["lru", "lfu"])
@pytest.mark.parametrize(
    "admission", [{"kind": "all"}, {"kind": "probability", "probability": 0.5}, {"kind": "count", "halve_every": 90}]
)
def test_nothing_depends_on_where_batches_were_cut(eviction: str, admission: dict[str, Any]) -> None:
    ids = np.random.default_rng(3).integers(0, 300, 6000).tolist()
    tables = [make_tables(eviction=eviction, lfu_half_life=500, admission=admission, capacity=160) for _ in range(4)]
    slots = [
        np.concatenate([assign(one, ids[at : at + size]).slots_BC[:, 0] for at in range(0, 6000, size)])
        for one, size in zip(tables, (1, 7, WINDOW - 1, 30), strict=True)
    ]
    for one, slots_N in zip(tables[1:], slots[1:], strict=True):
        np.testing.assert_array_equal(slots_N, slots[0])
        for name in ("keys", "stamps", "counts", "weights", "sketches"):
            np.testing.assert_array_equal(getattr(one, name), getattr(tables[0], name), name)
        assert one.scalars == tables[0].scalars
    assert len(np.unique(slots[0])) > 100


def test_stamps_go_on_past_their_range_wherever_batches_are_cut() -> None:
    near_the_end = 2 * STAMP_STEP + LAST_STAMP - 1500
    ids = np.random.default_rng(4).integers(0, 200, 3000).tolist()
    tables = [make_tables() for _ in range(3)]
    tables[1].clock = tables[2].clock = near_the_end
    for one, size in zip(tables, (10, 10, 31), strict=True):
        for at in range(0, 3000, size):
            assign(one, ids[at : at + size])
    assert stamp_base(tables[1].clock) == stamp_base(near_the_end) + STAMP_STEP
    for one in tables[1:]:
        np.testing.assert_array_equal(one.keys, tables[0].keys)
        np.testing.assert_array_equal(one.counts, tables[0].counts)
        rows_N = one.stamps[one.occupied(0)].astype(np.int64) + stamp_base(one.clock) - near_the_end
        np.testing.assert_array_equal(rows_N, tables[0].stamps[tables[0].occupied(0)].astype(np.int64) - 1)


def test_stamps_older_than_their_range_are_equally_old() -> None:
    stamps = np.array([0, 1, STAMP_STEP, STAMP_STEP + 1, LAST_STAMP], np.uint32)
    index.age_stamps(stamps)
    assert stamps.tolist() == [0, 0, 0, 1, STAMP_STEP - 1]
    assert [stamp_base(clock) for clock in (1, LAST_STAMP - 1, LAST_STAMP, LAST_STAMP + STAMP_STEP)] == [
        0, 0, STAMP_STEP, 2 * STAMP_STEP
    ]  # fmt: skip
