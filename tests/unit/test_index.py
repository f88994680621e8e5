"""The id index against a dict, in a small table where windows overflow all the time."""

from collections.abc import Iterable

import numpy as np
from hypothesis import settings as hypothesis_settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, rule

from trainer import index
from trainer.index import Int64s
from trainer.probe import EMPTY, REMOVED, WINDOW, home_slot
from trainer.schema import Schema
from trainer.settings import Settings
from trainer.tables import Assignment, Ids, Tables

CAPACITY = 80  # over two windows, so that some windows wrap around
TTL_S = 50


def make_tables(ttl_s: float | None = None, capacity: int = CAPACITY) -> Tables:
    settings = Settings.model_validate(
        {
            "tables": {"a": {"capacity": capacity, "width": 2, "ttl_s": ttl_s}},
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


class IndexMachine(RuleBasedStateMachine):
    """`last`: for each id that the model believes is held, (row of last use, time of last use)."""

    def __init__(self) -> None:
        super().__init__()
        self.tables = make_tables(TTL_S)
        self.last: dict[int, tuple[int, int]] = {}
        self.now_s = 1000
        self.row = 0

    @rule(ids=st.lists(st.integers(0, 300), min_size=1, max_size=60))
    def assign(self, ids: list[int]) -> None:
        slot_before = dict(zip(self.last, self.find(self.last), strict=True))
        first_row = self.row
        outcome = assign(self.tables, ids, self.now_s)
        evicted = set(zip(outcome.evicted_ids_E.tolist(), outcome.evicted_slots_E.tolist(), strict=True))
        for id_, slot in evicted:
            assert slot_before[id_] == slot, "only what was held can be evicted, from where it was"
        for id_, _ in evicted:
            assert self.last.pop(id_)[0] < first_row, "an id used in this batch was evicted by it"
        for id_, slot in zip(ids, outcome.slots_BC[:, 0].tolist(), strict=True):
            if slot >= 0:
                assert self.tables.keys[slot] == id_
                self.last[id_] = (self.row, self.now_s)
            self.row += 1
        placed = {slot for slot in outcome.slots_BC[:, 0].tolist() if slot >= 0}
        assert set(outcome.touched_K.tolist()) == placed
        assert len(outcome.touched_K) == len(placed)
        assert outcome.num_unplaced == int((outcome.slots_BC < 0).sum())
        fresh = {int(s) for s, f in zip(outcome.touched_K, outcome.fresh_K, strict=True) if f}
        kept = {s for i, s in slot_before.items() if s in placed and (i, s) not in evicted}
        assert fresh == placed - kept, "a slot is fresh exactly when its id was not held before"

    @rule(ids=st.lists(st.integers(0, 300), max_size=20, unique=True))
    def remove(self, ids: list[int]) -> None:
        slots = self.find(ids)
        removed = self.tables.remove(0, np.array(ids, np.int64))
        assert removed.tolist() == [slot for slot in slots if slot >= 0]
        for id_ in ids:
            self.last.pop(id_, None)

    @rule(seconds=st.integers(1, 40))
    def wait(self, seconds: int) -> None:
        self.now_s += seconds

    @rule(max_slots=st.integers(1, 2 * CAPACITY))
    def expire(self, max_slots: int) -> None:
        slots = dict(zip(self.find(self.last), self.last, strict=True))
        for slot in self.tables.expire(self.now_s, max_slots).tolist():
            _, seen_s = self.last.pop(slots[slot])
            assert self.now_s - seen_s > TTL_S
        if max_slots >= CAPACITY:
            assert all(self.now_s - seen_s <= TTL_S for _, seen_s in self.last.values())

    def find(self, ids: Iterable[int]) -> list[int]:
        return [int(slot) for slot in self.tables.find(0, np.array(list(ids), np.int64))]

    @invariant()
    def holds_each_id_once_where_it_is_found(self) -> None:
        held = self.tables.keys[self.tables.occupied(0)].tolist()
        assert sorted(held) == sorted(self.last)
        assert self.tables.num_rows(0) == len(held) <= CAPACITY
        for id_, slot in zip(held, self.find(held), strict=True):
            assert slot >= 0
            assert self.tables.keys[slot] == id_
            assert (slot - home_slot(id_, CAPACITY)) % CAPACITY < WINDOW
            assert (self.tables.stamps[slot] - 1, self.tables.seen_s[slot]) == self.last[id_]

    @invariant()
    def finds_nothing_else(self) -> None:
        assert all(slot < 0 for slot in self.find(set(range(301)) - self.last.keys()))


TestIndex = IndexMachine.TestCase
TestIndex.settings = hypothesis_settings(max_examples=60, stateful_step_count=25, deadline=None)


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
