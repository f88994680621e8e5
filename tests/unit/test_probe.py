"""The probing rule: known answers, range, evenness, independence of home and shard."""

import numpy as np
import pytest

from trainer.live_kernels import tag_of
from trainer.probe import home_slot, mix64, shard_of

CLUSTERED_IDS = [*range(2000), *range(-2000, 0), *(k << 40 for k in range(2000))]


def test_mix_is_the_finaliser_of_splitmix64() -> None:
    golden = 0x9E3779B97F4A7C15  # SplitMix64 from seed 0 mixes this first; its outputs are published
    assert int(mix64(golden - 2**64)) == 0xE220A8397B1DCDAF
    assert int(mix64((2 * golden) % 2**64)) == 0x6E789E6AA1B965F4


@pytest.mark.parametrize("capacity", [1, 2, 7, 1000, 1 << 20, 2**31 - 1])
def test_home_slots_are_slots_of_the_table(capacity: int) -> None:
    homes = [int(home_slot(id_, capacity)) for id_ in CLUSTERED_IDS]
    assert min(homes) >= 0
    assert max(homes) < capacity


def test_clustered_ids_spread_evenly_over_slots() -> None:
    homes = np.array([int(home_slot(id_, 60)) for id_ in CLUSTERED_IDS])
    per_slot = np.bincount(homes, minlength=60)
    assert abs(per_slot - 100).max() < 50  # five standard deviations


def test_shard_and_home_and_tag_do_not_follow_each_other() -> None:
    shards = np.array([int(shard_of(id_, 4)) for id_ in CLUSTERED_IDS])
    quarters = np.array([int(home_slot(id_, 4)) for id_ in CLUSTERED_IDS])
    tags = np.array([int(tag_of(id_)) % 4 for id_ in CLUSTERED_IDS])
    for one, other in ((shards, quarters), (shards, tags), (quarters, tags)):
        cells = np.bincount(4 * one + other, minlength=16)
        assert abs(cells - 375).max() < 100
