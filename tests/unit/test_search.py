"""Nearest rows of a store that the real writer writes: exact, by the graph, and while rows change, leave and move."""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from service.search_table import MAX_LAG_S, PASS_EVERY_S
from tests.unit.near_rows import Float32s, Int64s, NearRows, clustered, settle
from trainer.hashing import MISSING_ID
from trainer.probe import EMPTY

ALL, NONE = 1_000_000, 0  # exact_rows: every table is compared row by row, or none


def best(ids_N: Int64s, rows_ND: Float32s, vector_D: Float32s, k: int, *, by_angle: bool) -> tuple[list[int], Any]:
    """What numpy says."""
    scores_N = rows_ND.astype(np.float64) @ (vector_D / np.linalg.norm(vector_D)).astype(np.float64)
    if by_angle:
        scores_N /= np.linalg.norm(rows_ND.astype(np.float64), axis=1)
    order_N = np.argsort(-scores_N)[:k]
    return ids_N[order_N].tolist(), scores_N[order_N]


@pytest.fixture
def world(tmp_path: Path) -> Iterator[NearRows]:
    rows = NearRows(tmp_path, capacity=4000, width=8)
    yield rows
    rows.close()


@pytest.fixture
def sharded(tmp_path: Path) -> Iterator[NearRows]:
    rows = NearRows(tmp_path, capacity=2000, width=8, num_shards=3)
    yield rows
    rows.close()


def filled(world: NearRows, num: int = 2000) -> tuple[Int64s, Float32s]:
    rng = np.random.default_rng(1)
    ids_N, rows_ND = rng.choice(2**40, num, replace=False), clustered(rng, num, world.width)
    world.put(ids_N, rows_ND)
    return ids_N, rows_ND


@pytest.mark.parametrize("by_angle", [True, False])
@pytest.mark.parametrize("k", [1, 10, 999])
def test_the_exact_way_finds_what_numpy_finds(world: NearRows, by_angle: bool, k: int) -> None:
    ids_N, rows_ND = filled(world)
    searcher = world.searcher(exact_rows=ALL, by_angle=by_angle)
    for vector_D in clustered(np.random.default_rng(2), 20, 8):
        found, scores_K, index = world.nearest(searcher, vector_D, k)
        wanted, wanted_K = best(ids_N, rows_ND, vector_D, k, by_angle=by_angle)
        assert found == wanted or k == 999  # where some are equal but for the last bit
        np.testing.assert_allclose(scores_K, wanted_K, atol=1e-6)
        assert (np.diff(scores_K) <= 0).all()
        assert (index.kind, index.rows, index.lag_ms) == ("exact", 2000, 0)


def test_in_a_world_of_two_axes_the_neighbours_are_known(world: NearRows) -> None:
    rows_ND = np.zeros((4, 8), np.float32)
    rows_ND[0, 0], rows_ND[1, 0], rows_ND[2, 1], rows_ND[3] = 1, 5, 1, 0
    world.put(np.array([10, 11, 12, 13]), rows_ND)
    angle, dot = world.searcher(exact_rows=ALL), world.searcher(exact_rows=ALL, by_angle=False)
    axis_D = np.eye(8, dtype=np.float32)[0]
    found, scores_K, _ = world.nearest(angle, axis_D, 10, but=11)
    assert (found, scores_K.tolist()) == ([10, 12, 13], [1, 0, 0])  # of equals the smaller id; zeros are near nothing
    found, scores_K, _ = world.nearest(dot, axis_D, 2)
    assert (found, scores_K.tolist()) == ([11, 10], [5, 1])


@pytest.mark.parametrize("exact_rows", [ALL, NONE])
def test_the_row_of_missing_values_is_never_found(world: NearRows, exact_rows: int) -> None:
    ids_N, rows_ND = filled(world, 100)
    world.put(np.array([MISSING_ID]), rows_ND[:1])
    searcher = world.searcher(exact_rows=exact_rows)
    for _ in range(2):
        found, _, _ = world.nearest(searcher, rows_ND[0], 1000)
        assert sorted(found) == sorted(ids_N.tolist())
        settle(searcher)


def test_the_graph_of_a_large_table_answers_once_it_has_caught_up(world: NearRows) -> None:
    ids_N, rows_ND = filled(world)
    searcher = world.searcher(exact_rows=NONE)
    assert world.nearest(searcher, rows_ND[0], 1)[2].kind == "exact"
    settle(searcher)
    found, scores_K, index = world.nearest(searcher, rows_ND[0], 5)
    assert found[0] == ids_N[0]
    assert scores_K[0] == pytest.approx(1, abs=1e-6)
    assert (index.kind, index.version) == ("hnsw", world.reader.state().version)
    assert 0 < index.lag_ms < 1000 * (MAX_LAG_S + 1)


@pytest.mark.parametrize("fixture", ["world", "sharded"])
def test_rows_that_change_are_found_where_they_are_now_and_not_where_they_were(
    fixture: str, request: pytest.FixtureRequest
) -> None:
    world: NearRows = request.getfixturevalue(fixture)
    ids_N, rows_ND = filled(world)
    searcher = world.searcher(exact_rows=500)
    world.nearest(searcher, rows_ND[0], 1)
    settle(searcher)
    moved_ND = -rows_ND[:100]
    world.put(ids_N[:100], moved_ND)
    searcher.look_again()
    for is_placed in (False, True):
        for id_, old_D, new_D in zip(ids_N[:100].tolist(), rows_ND, moved_ND, strict=False):
            found, scores_K, index = world.nearest(searcher, new_D, 3)
            assert index.kind == "hnsw"
            assert found[0] == id_, is_placed
            assert scores_K[0] == pytest.approx(1, abs=1e-6)
            assert id_ not in world.nearest(searcher, old_D, 3)[0]
        settle(searcher)


def test_a_changed_row_is_looked_for_within_the_time_that_is_promised(world: NearRows) -> None:
    ids_N, rows_ND = filled(world)
    searcher = world.searcher(exact_rows=500)
    world.nearest(searcher, rows_ND[0], 1)
    settle(searcher)
    world.put(ids_N[:1], -rows_ND[:1])
    version = world.reader.state().version
    assert world.nearest(searcher, rows_ND[1], 1)[2].version < version  # and so the answer says
    while world.nearest(searcher, rows_ND[1], 1)[2].version < version:
        searcher.catch_up()
    found, _, index = world.nearest(searcher, -rows_ND[0], 1)
    assert found == [ids_N[0]]
    assert index.lag_ms <= 1000 * max(MAX_LAG_S, PASS_EVERY_S)


def test_what_left_is_not_found_and_who_came_into_its_slot_is(tmp_path: Path) -> None:
    world = NearRows(tmp_path, capacity=64, width=8)  # full: every new id takes the slot of another
    rng = np.random.default_rng(3)
    for searcher in (world.searcher(exact_rows=ALL), world.searcher(exact_rows=NONE)):
        old_N, new_N = rng.choice(2**40, 64, replace=False), rng.choice(2**40, 64, replace=False)
        rows_ND = clustered(rng, 64, 8)
        world.put(old_N, rows_ND)
        world.nearest(searcher, rows_ND[0], 1)
        settle(searcher)
        world.put(new_N, rows_ND)
        world.remove(new_N[:10])
        here_N = world.ids(0)[world.ids(0) != EMPTY]
        for _ in range(2):
            found, _, _ = world.nearest(searcher, rows_ND[0], 1000)
            assert set(found) <= set(here_N.tolist())
            assert not set(found) & set(new_N[:10].tolist())
            searcher.look_again()
            assert sorted(world.nearest(searcher, rows_ND[0], 1000)[0]) == sorted(here_N.tolist())
            settle(searcher)
    world.close()


def test_small_steps_leave_the_graph_alone_and_similarities_are_those_of_now(world: NearRows) -> None:
    ids_N, rows_ND = filled(world)
    searcher = world.searcher(exact_rows=NONE)
    world.nearest(searcher, rows_ND[0], 1)
    settle(searcher)
    stepped_ND = (rows_ND + 0.01 * np.linalg.norm(rows_ND, axis=1, keepdims=True) / np.sqrt(8)).astype(np.float32)
    world.put(ids_N, stepped_ND)
    searcher.look_again()
    found, scores_K, index = world.nearest(searcher, rows_ND[0], 10)
    assert (index.kind, searcher.graph is not None and searcher.graph.num_pending) == ("hnsw", 0)
    unit_ND = stepped_ND / np.linalg.norm(stepped_ND, axis=1, keepdims=True)
    scores = dict(zip(ids_N.tolist(), (unit_ND @ rows_ND[0] / np.linalg.norm(rows_ND[0])).tolist(), strict=True))
    np.testing.assert_allclose(scores_K, [scores[id_] for id_ in found], atol=1e-6)


def test_the_graph_follows_into_the_next_generation(world: NearRows) -> None:
    ids_N, rows_ND = filled(world, 1000)
    searcher = world.searcher(exact_rows=100)
    world.nearest(searcher, rows_ND[0], 1)
    settle(searcher)
    graph = searcher.graph
    world.close()
    again = NearRows(world.directory, world.capacity, world.width)
    again.put(ids_N[50:500], rows_ND[50:500])
    again.put(ids_N[:50], -rows_ND[:50])  # written as often as they were before
    again.reader = world.reader
    assert len(again.nearest(searcher, -rows_ND[7], 600)[0]) == 500
    settle(searcher)
    found, _, index = again.nearest(searcher, -rows_ND[7], 10)
    assert (found[0], index.kind, searcher.graph) == (ids_N[7], "hnsw", graph)
    found, _, _ = again.nearest(searcher, -rows_ND[7], 600)
    assert sorted(found) == sorted(ids_N[:500].tolist())  # all there are, whatever the graph leads to, and nobody else
    assert searcher.graph is not None
    assert len(searcher.graph._index) == 500
    again.close()
    smaller = NearRows(world.directory, 2000, world.width)  # as after a resize
    smaller.put(ids_N, rows_ND)
    smaller.reader = world.reader
    assert smaller.nearest(searcher, rows_ND[7], 5)[0][0] == ids_N[7]
    assert searcher.graph is not graph
    smaller.close()


def test_recall_at_10_of_the_graph_is_at_least_095(tmp_path: Path) -> None:
    world, rng = NearRows(tmp_path, capacity=26_000, width=16), np.random.default_rng(5)
    ids_N, rows_ND = np.arange(20_000), clustered(rng, 20_000, 16)
    world.put(ids_N, rows_ND)
    for by_angle in (True, False):
        exact, graph = (world.searcher(exact_rows=rows, by_angle=by_angle) for rows in (ALL, NONE))
        world.nearest(graph, rows_ND[0], 1)
        settle(graph)
        hits = 0
        for vector_D in rows_ND[rng.integers(0, 20_000, 200)]:
            found = world.nearest(graph, vector_D, 10)
            assert found[2].kind == "hnsw"
            hits += len(set(found[0]) & set(world.nearest(exact, vector_D, 10)[0]))
        assert hits / 2000 >= 0.95
    world.close()


def test_when_all_that_the_graph_proposes_has_left_every_row_is_compared(world: NearRows) -> None:
    ids_N, rows_ND = filled(world)
    searcher = world.searcher(exact_rows=NONE)
    world.nearest(searcher, rows_ND[0], 1)
    settle(searcher)
    near = world.nearest(searcher, rows_ND[0], 1000)[0]
    world.remove(np.array(near))
    found, _, index = world.nearest(searcher, rows_ND[0], 5)
    assert (len(found), index.kind) == (5, "exact")
    assert not set(found) & set(near)
    assert set(found) <= set(ids_N.tolist())
