"""A small table on a stream that never stops bringing new ids, with an engine and readers (tests/bench/tables.py)."""

from typing import Any

import pytest

from tests.bench.tables import ADMISSIONS, BATCH, Stream, configuration, learn_all, make_stream

NUM_IDS, ROWS = 60_000, 600


@pytest.fixture(scope="module")
def stream() -> Stream:
    return make_stream(NUM_IDS, regulars=ROWS)


@pytest.fixture(scope="module")
def unbounded(stream: Stream) -> dict[str, Any]:
    return learn_all(stream, configuration(2 * NUM_IDS), live=False, checks=10)


@pytest.mark.parametrize(
    ("eviction", "admission", "most"),
    [
        ("lru", "all", 1.02),
        ("lru", "probability", 1.02),
        ("lru", "count", 1.01),
        ("lfu", "all", 1.01),
        ("lfu", "count", 1.01),
    ],
)
def test_a_hundredth_of_the_rows_learns_as_well(
    stream: Stream, unbounded: dict[str, Any], eviction: str, admission: str, most: float
) -> None:
    settings = configuration(ROWS, eviction=eviction, admission=ADMISSIONS[admission])
    bounded = learn_all(stream, settings, live=True, checks=len(stream.ids_N) // BATCH)
    assert bounded["logloss"] < most * unbounded["logloss"]
    assert bounded["rows"] <= ROWS
    assert bounded["failed_lookups"] == bounded["unplaced"] == 0
    assert (bounded["refused"] > 0) == (admission != "all")
