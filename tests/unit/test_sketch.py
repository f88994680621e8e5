"""The count-min sketch: what it promises of its estimates, and when it forgets."""

import numpy as np
import pytest

from trainer import sketch
from trainer.probe import mix64
from trainer.sketch import LINE, UInt8s, add, aligned, clear_ids, estimate, estimates, halve, spread

SALT = 12345


def hashed(id_: int) -> np.uint64:
    return np.uint64(spread(id_, SALT))


def counted(ids: list[int], lines: int) -> UInt8s:
    counters = aligned(LINE * lines)
    for id_ in ids:
        add(counters, 0, lines, hashed(id_))
    return counters


def estimates_of(counters: UInt8s, ids: list[int]) -> list[int]:
    out_N = np.empty(len(ids), np.uint8)
    estimates(counters, 0, len(counters) // LINE, SALT, np.array(ids, np.int64), out_N)
    return out_N.tolist()


def zipf(count: int, seed: int = 0) -> list[int]:
    return (np.random.default_rng(seed).zipf(1.2, count) % 2**40).tolist()


def test_an_estimate_is_never_below_the_count() -> None:
    ids = zipf(20_000)
    for lines in (1, 7, 500):
        counts = dict(zip(*np.unique(ids, return_counts=True), strict=True))
        for got, count in zip(estimates_of(counted(ids, lines), list(counts)), counts.values(), strict=True):
            assert got >= min(count, 255)


def test_an_estimate_is_exact_where_there_is_room() -> None:
    ids = zipf(2_000)
    counts = dict(zip(*np.unique(ids, return_counts=True), strict=True))
    exact = [min(count, 255) for count in counts.values()]
    got = estimates_of(counted(ids, 4_000), list(counts))
    assert np.mean(np.array(got) == exact) > 0.999


@pytest.mark.parametrize(("ids_a_line", "most_wrong"), [(8, 0.02), (16, 0.15)])
def test_few_ids_seen_once_are_taken_for_more(ids_a_line: int, most_wrong: float) -> None:
    """16 a line is what a sketch holds when it halves by itself; on the way there it is wrong less often."""
    lines = 500
    ids = list(range(ids_a_line * lines))
    wrong = np.mean(np.array(estimates_of(counted(ids, lines), ids)) > 1)
    assert wrong < most_wrong


def test_only_the_lowest_of_an_ids_counters_rise() -> None:
    """Conservative update: an id's sightings raise no counter of another id above its own estimate."""
    lines = 1
    counters = counted([1] * 10, lines)
    other = next(
        id_
        for id_ in range(2, 1000)
        if 0 < sum(counters[place] > 0 for place in places_of(id_)) < sketch.DEPTH
    )  # fmt: skip
    add(counters, 0, lines, hashed(other))
    assert estimates_of(counters, [1, other]) == [10, 1]
    assert counters.max() == 10


def places_of(id_: int) -> list[int]:
    return [int(sketch.counter_at(np.int64(0), hashed(id_), quarter)) for quarter in range(sketch.DEPTH)]


def test_a_counter_stops_at_255_and_halves() -> None:
    counters = counted([1] * 300, 4)
    assert estimates_of(counters, [1]) == [255]
    halve(counters, 0, 4)
    assert estimates_of(counters, [1]) == [127]


def test_an_id_lies_in_one_cache_line_with_a_counter_in_each_quarter() -> None:
    counters = counted([77], 9)
    places = np.flatnonzero(counters)
    assert counters.ctypes.data % LINE == 0
    assert len({place // LINE for place in places.tolist()}) == 1
    assert (places % LINE // sketch.QUARTER).tolist() == [0, 1, 2, 3]


def test_another_salt_puts_ids_elsewhere() -> None:
    assert spread(5, SALT) != spread(5, SALT + 1)
    assert spread(5, 0) == mix64(5)


def test_a_cleared_id_is_unseen_and_takes_sightings_from_few_others() -> None:
    ids = list(range(2_000))
    counters = counted(ids, 500)
    clear_ids(counters, 0, 500, SALT, np.array([7]))
    got = np.array(estimates_of(counters, ids))
    assert got[7] == 0
    assert (got == 0).sum() < 20


@pytest.mark.parametrize("lines", [10, 25, 30, 64])
def test_no_estimate_falls_in_a_sketch_of_another_size(lines: int) -> None:
    ids = list(range(400))
    before = counted(zipf(3_000) + ids, 30)
    after = sketch.resized(before.reshape(-1, LINE), lines).reshape(-1)
    assert len(after) == LINE * lines
    assert (np.array(estimates_of(after, ids)) >= estimates_of(before, ids)).all()
    if lines == 30:
        np.testing.assert_array_equal(after, before)


def test_an_estimate_changes_nothing() -> None:
    counters = counted([1, 2, 3], 2)
    before = counters.copy()
    assert estimate(counters, 0, 2, hashed(1)) >= 1
    np.testing.assert_array_equal(counters, before)
