"""Searches while another process writes, evicts and removes: never another id's row, nor half of one."""

import multiprocessing
import time
from pathlib import Path

import numpy as np
import numpy.typing as npt
import pytest

from service.search_table import TableSearch
from tests.system.live_race import FREE, place
from trainer.live import Layout, Reader, Section, Writer
from trainer.probe import EMPTY
from trainer.settings import SearchSettings

CAPACITY, WIDTH, BATCH = 256, 16, 64
NUM_IDS = 3 * CAPACITY
LAYOUT = Layout((Section("table/item", "rows", CAPACITY, WIDTH + 1),), 0, 0, num_shards=1, schema_hash=1)
CONTEXT = multiprocessing.get_context("spawn")

# A row's direction says whose it is, all its numbers are scaled by which write it is of: a row of another id has
# another cosine to any query, and so has one that is half of one write and half of another.
DIRECTIONS = np.random.default_rng(4).normal(size=(NUM_IDS, WIDTH))
DIRECTIONS /= np.linalg.norm(DIRECTIONS, axis=1, keepdims=True)


def write(directory: str) -> None:
    """Publish until killed."""
    rng, ids_G = np.random.default_rng(0), np.full(CAPACITY, FREE, np.int64)
    slots_N, ones_N = np.empty(BATCH, np.int64), np.ones(BATCH, np.uint32)
    with Writer.create(directory, LAYOUT) as writer:
        writer.activate()
        for clock in range(1, 2**62):
            ids_N = rng.choice(NUM_IDS, BATCH, replace=False)
            place(ids_N, ids_G, rng.integers(0, 32, BATCH), slots_N)
            rows_NW = np.ones((BATCH, WIDTH + 1), np.float32)
            rows_NW[:, :WIDTH] = DIRECTIONS[ids_N] * float(2 ** (clock % 16))
            writer.put("table/item", slots_N, ids_N, rows_NW.view(np.uint32), ones_N, ones_N)
            freed_N = rng.choice(CAPACITY, 4, replace=False)
            ids_G[freed_N] = FREE
            writer.remove("table/item", freed_N)
            writer.commit(step=clock, watermark_us=clock)


@pytest.mark.parametrize("kind", ["exact", "hnsw"])
def test_no_search_names_a_row_that_is_not_the_ids(tmp_path: Path, kind: str) -> None:
    process = CONTEXT.Process(target=write, args=(str(tmp_path),), daemon=True)
    process.start()
    try:
        reader = Reader(tmp_path)
        reader.attach(60)
        settings = SearchSettings(exact_rows=1000 if kind == "exact" else 20)
        searcher = TableSearch(0, WIDTH, by_angle=True, settings=settings, reader=reader)
        kinds, versions, matches = race(reader, searcher, seconds=3)
    finally:
        process.kill()
        process.join()
    assert kind in kinds
    assert versions > 100
    assert matches > 1000


def race(reader: Reader, searcher: TableSearch, *, seconds: float) -> tuple[set[str], int, int]:
    """Search and check; (kinds of answers, versions seen, matches checked)."""
    rng, kinds, versions, matches = np.random.default_rng(1), set(), set(), 0
    end_s = time.monotonic() + seconds
    while time.monotonic() < end_s:
        wanted = int(rng.integers(NUM_IDS))
        query_D: npt.NDArray[np.float32] = DIRECTIONS[wanted].astype(np.float32)
        version = reader.state().version
        keys_K, scores_K, index = searcher.nearest(query_D, 20, reader.shards, but=EMPTY, version=version)
        np.testing.assert_allclose(scores_K, DIRECTIONS[keys_K] @ DIRECTIONS[wanted], atol=1e-5)
        assert len(set(keys_K.tolist())) == len(keys_K)
        kinds.add(index.kind)
        versions.add(version)
        matches += len(keys_K)
        for _ in range(20):
            searcher.catch_up()
    return kinds, len(versions), matches
