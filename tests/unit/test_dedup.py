"""The window of event ids against a deque that says the same in three lines."""

from collections import deque

import numpy as np
import numpy.typing as npt
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from trainer.dedup import Dedup


class Plain:
    """The last `window` sightings, and whether an id is among them."""

    def __init__(self, window: int) -> None:
        self.seen: deque[int] = deque(maxlen=window)

    def fresh(self, keys: list[int]) -> list[bool]:
        return [self.see(key) for key in keys]

    def see(self, key: int) -> bool:
        fresh = key == 0 or key not in self.seen
        if key:
            self.seen.append(key)
        return fresh


def batch(*keys: int) -> npt.NDArray[np.uint64]:
    return np.array(keys, np.uint64)


# Few ids, so that they come back; large ones are above 2^63.
KEYS = st.lists(st.lists(st.integers(0, 12).map(lambda k: k * 0x1F3A_5C7E_9B1D_2F41 % 2**64), max_size=40), max_size=8)


@settings(deadline=None)  # the first call compiles
@given(window=st.integers(0, 14), batches=KEYS)
def test_it_says_what_a_deque_says(window: int, batches: list[list[int]]) -> None:
    dedup, plain = Dedup(window), Plain(window)
    for keys in batches:
        assert dedup.fresh(batch(*keys)).tolist() == plain.fresh(keys)


@settings(deadline=None)  # the first call compiles
@given(window=st.integers(0, 9), later=st.integers(0, 9), before=KEYS, after=KEYS)
def test_a_restored_window_goes_on_and_a_shorter_one_keeps_the_newest(
    window: int, later: int, before: list[list[int]], after: list[list[int]]
) -> None:
    dedup, restored, plain = Dedup(window), Dedup(later), Plain(later)
    for keys in before:
        dedup.fresh(batch(*keys))
    restored.fresh(batch(1, 2, 3))  # what it held is gone after a load
    restored.load(dedup.arrays)
    plain.fresh(([key for keys in before for key in keys if key] or [0])[-window:] if window else [])
    for keys in after:
        assert restored.fresh(batch(*keys)).tolist() == plain.fresh(keys)


def test_many_ids_through_a_full_window_with_batches_cut_anywhere() -> None:
    random = np.random.default_rng(1)
    for window in (1, 100, 5000):
        keys = random.integers(1, 2 * window + 2, 30_000).astype(np.uint64) * np.uint64(0x9E3779B97F4A7C15)
        whole, cut = Dedup(window), Dedup(window)
        cuts = np.sort(random.integers(0, len(keys), 200))
        parts = [cut.fresh(part) for part in np.split(keys, cuts)]
        fresh = whole.fresh(keys)
        np.testing.assert_array_equal(np.concatenate(parts), fresh)
        np.testing.assert_array_equal(cut.arrays["keys"], whole.arrays["keys"])
        assert 0 < fresh.sum() < len(keys)
        last: dict[int, int] = {}
        for place, key in enumerate(keys.tolist()):
            assert fresh[place] == (place - last.get(key, -window - 1) > window)
            last[key] = place


def test_memory_is_fixed_and_as_stated() -> None:
    for window in (1, 1000, 1024, 262_144):
        dedup = Dedup(window)
        before = dedup.num_bytes
        dedup.fresh(np.arange(1, 3 * window + 1, dtype=np.uint64))
        assert dedup.num_bytes == before
        assert 40 <= before / window <= 72
        assert len(dedup.arrays["keys"]) == window


def test_a_batch_that_cannot_be_written_or_has_gaps_is_as_good() -> None:
    dedup = Dedup(8)
    keys = np.arange(1, 9, dtype=np.uint64)
    keys.flags.writeable = False
    assert dedup.fresh(keys[::2]).all()
    assert not dedup.fresh(keys[:1]).any()


def test_ids_of_another_type_are_refused() -> None:
    with pytest.raises(TypeError, match="uint64"):
        Dedup(8).fresh(np.array([1.5]))
