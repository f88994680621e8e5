"""The id index against plain dicts, in a small table where windows overflow all the time."""

from collections.abc import Iterable
from typing import Any

import numpy as np
import pytest
from hypothesis import settings as hypothesis_settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, rule

from tests.unit.index_model import IndexModel
from trainer import index
from trainer.budget import PUBLISH_BYTES, capacity_for, live_bytes
from trainer.errors import SettingsError
from trainer.index import Int64s
from trainer.probe import EMPTY, REMOVED, WINDOW, home_slot
from trainer.schema import Schema
from trainer.settings import Settings
from trainer.sketch import LINE
from trainer.tables import Assignment, Ids, Tables

CAPACITY = 80  # over two windows, so that some windows wrap around
TTL_S = 50
BUDGET = 12_400  # some 75 to 100 rows


def make_tables(ttl_s: float | None = None, capacity: int | None = CAPACITY, **table: Any) -> Tables:
    settings = Settings.model_validate(
        {
            "tables": {"a": {"capacity": capacity, "width": 2, "ttl_s": ttl_s, **table}},
            "features": {"a": {"kind": "categorical"}},
        }
    )
    return Tables(Schema.from_settings(settings), settings.model)


def assign(tables: Tables, ids: Iterable[int], now_s: int = 0) -> Assignment:
    return tables.assign(Ids(np.array(list(ids), np.int64).reshape(-1, 1)), None, now_s)


def ids_at_home(slot: int, count: int, capacity: int = CAPACITY) -> list[int]:
    """Ids whose window starts at a given slot."""
    found: list[int] = []
    candidate = 0
    while len(found) < count:
        candidate += 1
        if home_slot(candidate, capacity) == slot:
            found.append(candidate)
    return found


POLICIES = st.fixed_dictionaries(
    {
        "ttl_s": st.sampled_from([None, TTL_S]),
        "eviction": st.sampled_from(["lru", "lfu"]),
        "lfu_half_life": st.sampled_from([7, 100]),
        "admission": st.one_of(
            st.just({"kind": "all"}),
            st.just({"kind": "probability", "probability": 0.6, "pressure_from": 0.5}),
            st.fixed_dictionaries(
                {
                    "kind": st.just("count"),
                    "min_count": st.integers(1, 3),
                    "pressure_from": st.sampled_from([0.5, 1.0]),
                    "sketch_bytes": st.sampled_from([64, 1024]),
                    "halve_every": st.sampled_from([40, 1000]),
                }
            ),
        ),
    }
)
IDS = st.integers(0, 250)


class IndexMachine(RuleBasedStateMachine):
    """Whatever is done to a table with a budget, it does what the model does, and costs no byte more than it may."""

    @initialize(policies=POLICIES, clock=st.sampled_from([1, index.LAST_STAMP - 90]))
    def begin(self, policies: dict[str, Any], clock: int) -> None:
        self.tables = make_tables(capacity=None, budget_bytes=BUDGET, **policies)
        self.tables.clock = clock
        self.now_s = 1000
        salt, grace = self.tables._policies_TP[0, [index.SALT, index.GRACE]].tolist()
        self.model = IndexModel(self.tables.schema.tables[0], salt=salt, grace=grace, clock=clock)

    @rule(ids=st.lists(IDS, min_size=1, max_size=80))
    def assign(self, ids: list[int]) -> None:
        got, wanted = assign(self.tables, ids, self.now_s), self.model.assign(ids, self.now_s)
        assert got.slots_BC[:, 0].tolist() == wanted.slots
        assert got.touched_K.tolist() == wanted.touched
        assert got.fresh_K.tolist() == wanted.fresh
        evicted = (got.evicted_ids_E.tolist(), got.evicted_slots_E.tolist(), got.evicted_reason_E.tolist())
        assert list(zip(*evicted, strict=True)) == wanted.evicted
        assert (got.num_unplaced, got.num_refused) == (wanted.unplaced, wanted.refused)
        assert got.num_new == sum(wanted.fresh)

    @rule(ids=st.lists(IDS, max_size=20, unique=True))
    def forget(self, ids: list[int]) -> None:
        assert self.tables.remove(0, np.array(ids, np.int64)).tolist() == self.model.remove(ids)
        assert all(self.tables.row_of(0, id_) is None for id_ in ids)
        assert not any(self.tables.sketch_estimate(0, id_) for id_ in ids)

    @rule(seconds=st.integers(1, 40))
    def wait(self, seconds: int) -> None:
        self.now_s += seconds

    @rule(max_slots=st.integers(1, 2 * CAPACITY))
    def expire(self, max_slots: int) -> None:
        first, capacity = self.tables.sweep_position, self.model.table.capacity
        slots = [(first + step) % capacity for step in range(min(max_slots, capacity))]
        assert self.tables.expire(self.now_s, max_slots).tolist() == self.model.expire(slots, self.now_s)

    @rule(share=st.floats(0, 1))
    def resize(self, share: float) -> None:
        capacity = int(64 + share * (capacity_for("a", self.model.table.spec, self.tables.schema.costs) - 64))
        before, estimates = len(self.model.held), [self.tables.sketch_estimate(0, id_) for id_ in range(251)]
        self.tables, dropped = self.tables.resized(0, capacity)
        table = self.tables.schema.tables[0]
        self.model = self.model.resized(table, grace=int(self.tables._policies_TP[0, index.GRACE]))
        assert dropped == before - len(self.model.held)
        assert all(now is None or now >= (was or 0) for now, was in zip(self.estimates(), estimates, strict=True))

    @rule(more=st.integers(1, 1000))
    def grow_past_the_budget(self, more: int) -> None:
        spec, costs = self.model.table.spec, self.tables.schema.costs
        most = capacity_for("a", spec, costs)
        with pytest.raises(SettingsError, match=r"tables\.a\.capacity"):
            self.tables.resized(0, most + more)

    @rule()
    def restart(self) -> None:
        """From arrays and numbers alone, as a checkpoint does."""
        old, capacity = self.tables, self.model.table.capacity
        self.tables = make_tables(capacity=None, budget_bytes=BUDGET, **old.schema.tables[0].spec.model_dump(
            include={"ttl_s", "eviction", "lfu_half_life", "admission"}, mode="json"
        )).resized(0, capacity)[0]  # fmt: skip
        self.tables.keys[:] = old.keys
        for name, array in old.slot_arrays.items():
            self.tables.slot_arrays[name][:] = array
        self.tables.rows(0)[:] = old.rows(0)
        self.tables.sketch(0)[:] = old.sketch(0)
        self.tables.load_scalars(dict(old.scalars))

    def estimates(self) -> list[int | None]:
        return [self.tables.sketch_estimate(0, id_) for id_ in range(251)]

    @invariant()
    def holds_what_the_model_holds(self) -> None:
        held = {slot: self.model.held[slot].id for slot in sorted(self.model.held)}
        occupied = self.tables.occupied(0)
        assert dict(zip(occupied.tolist(), self.tables.keys[occupied].tolist(), strict=True)) == held
        assert len(set(held.values())) == len(held) == self.tables.num_rows(0) <= self.model.table.capacity
        found = self.tables.find(0, np.arange(251)).tolist()
        assert found == [self.model.slot_of(id_) for id_ in range(251)]
        base = index.stamp_base(self.tables.clock)
        for slot, one in self.model.held.items():
            got = (int(self.tables.stamps[slot]) + base, self.tables.seen_s[slot], self.tables.counts[slot])
            assert got == (one.row, one.seen_s, one.count)
        if len(self.model.sketch):
            assert self.estimates() == [self.model.estimate(id_) for id_ in range(251)]

    @invariant()
    def costs_no_byte_more_than_its_budget(self) -> None:
        in_training = self.tables.num_bytes + (LINE if len(self.tables.sketches) else 0)
        live = live_bytes(self.model.table.spec, self.model.table.capacity, self.tables.schema.costs)
        assert in_training + PUBLISH_BYTES * len(self.tables.keys) + live == self.tables.table_bytes(0) <= BUDGET


TestIndex = IndexMachine.TestCase
TestIndex.settings = hypothesis_settings(max_examples=80, stateful_step_count=25, deadline=None)


def test_the_least_recently_used_id_of_a_full_window_goes() -> None:
    tables = make_tables()
    *first, newcomer = ids_at_home(7, WINDOW + 1)
    assign(tables, first)
    assign(tables, [id_ for id_ in first if id_ != first[5]])
    outcome = assign(tables, [newcomer])
    assert outcome.evicted_ids_E.tolist() == [first[5]]
    assert outcome.evicted_tables_E.tolist() == [0]
    assert tables.find(0, np.array([newcomer])).tolist() == outcome.evicted_slots_E.tolist()


def test_an_id_finds_no_room_when_its_window_is_full_of_this_batch() -> None:
    tables = make_tables()
    ids = ids_at_home(7, WINDOW + 1)
    outcome = assign(tables, ids)
    assert outcome.slots_BC[-1, 0] == -1
    assert outcome.num_unplaced == 1
    assert len(outcome.touched_K) == outcome.num_new == WINDOW


def test_which_id_is_evicted_does_not_depend_on_where_batches_were_cut() -> None:
    whole, cut = make_tables(), make_tables()
    ids = np.random.default_rng(1).integers(0, 200, 3000).tolist()
    for start in range(0, 3000, 10):
        assign(whole, ids[start : start + 10])
    for id_ in ids:
        assign(cut, [id_])
    np.testing.assert_array_equal(whole.keys, cut.keys)
    np.testing.assert_array_equal(whole.weights, cut.weights)


def test_an_id_behind_a_removed_slot_is_found_and_the_slot_is_used_again() -> None:
    tables = make_tables()
    first, second, third = ids_at_home(3, 3)
    assign(tables, [first, second])
    tables.remove(0, np.array([first]))
    assert tables.find(0, np.array([second])).tolist() == [4]
    assert assign(tables, [second]).slots_BC.tolist() == [[4]]
    assert assign(tables, [third]).slots_BC.tolist() == [[3]]


def test_an_expired_id_starts_anew_in_its_slot() -> None:
    tables = make_tables(ttl_s=10)
    assign(tables, [5, 5, 5], now_s=100)
    slot = int(tables.find(0, np.array([5]))[0])
    assert tables.counts[slot] == 3
    again = assign(tables, [5], now_s=111)
    assert again.slots_BC.tolist() == [[slot]]
    assert again.fresh_K.tolist() == [1]
    assert again.evicted_ids_E.tolist() == [5]
    assert tables.counts[slot] == 1


def test_an_expired_slot_is_taken_before_the_least_recently_used_one() -> None:
    tables = make_tables(ttl_s=10)
    *first, newcomer = ids_at_home(7, WINDOW + 1)
    assign(tables, first, now_s=100)
    tables.seen_s[tables.find(0, np.array(first[3:4]))] = 89  # a clock that was behind when this one was seen
    outcome = assign(tables, [newcomer], now_s=100)
    assert outcome.evicted_ids_E.tolist() == [first[3]]


def test_padding_and_masked_rows_take_no_slot() -> None:
    tables = make_tables()
    ids_BC = np.array([[5], [EMPTY], [REMOVED], [6]])
    outcome = tables.assign(Ids(ids_BC), np.array([True, True, True, False]), 0)
    assert outcome.slots_BC[1:].tolist() == [[-1], [-1], [-1]]
    assert outcome.num_unplaced == 0
    assert tables.keys[tables.occupied(0)].tolist() == [5]


def test_a_count_stays_at_its_limit() -> None:
    tables = make_tables()
    slot = assign(tables, [5]).slots_BC[0, 0]
    tables.counts[slot] = index.MOST
    assign(tables, [5])
    assert tables.counts[slot] == index.MOST


def test_reinserting_keeps_those_given_first() -> None:
    keys: Int64s = np.full(CAPACITY, EMPTY, np.int64)
    ids = np.array(ids_at_home(70, WINDOW + 2))
    slots = np.empty(len(ids), np.int64)
    assert index.reinsert(keys, 0, CAPACITY, ids, slots) == 2
    assert (slots[:WINDOW] >= 0).all()
    assert (slots[WINDOW:] == -1).all()
