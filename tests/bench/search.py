"""Search: how near the graph of a large table comes to comparing all rows, how fast both are, and how fresh.

    python -m tests.bench.search [--json] [--quick]

Rows are clustered, as trained ones are. The exact way is timed at 10,000 and 100,000 rows; the graph at a million
(--quick: 100,000), for rows of 16 and of 64, after it was built at full speed. Then rows change, in a process's live
store and under the share of a core that the default allows, and the time is taken until each is found at its new
place. Searches take turns with that on one thread, as they do in service.
"""

import tempfile
import time
from pathlib import Path
from typing import Any

import numpy as np

from service.search_table import TableSearch
from tests.bench.harness import arguments, emit, goal, percentiles_ms
from tests.bench.store import shared_memory
from tests.unit.near_rows import Float32s, Int64s, NearRows, clustered, settle
from trainer import live, live_scan
from trainer.settings import SearchSettings

K = 10
QUERIES = 200
CHANGES = 20
MOVES = 5000  # rows that go elsewhere and are placed anew
ALL = 2**62  # exact_rows: no graph
WIDTHS = (16, 64)


def filled(directory: str, rng: np.random.Generator, num: int, width: int) -> tuple[NearRows, Int64s, Float32s]:
    """A store of rows; the few ids that lost their slot to another are left out."""
    world, ids_N = NearRows(Path(directory), 4 * num // 3, width), np.arange(num)
    rows_ND = clustered(rng, num, width)
    world.put(ids_N, rows_ND)
    here_N = np.isin(ids_N, world.ids(0))
    return world, ids_N[here_N], rows_ND[here_N]


def timed_s(world: NearRows, searcher: TableSearch, queries: Float32s) -> tuple[list[float], list[set[int]]]:
    """Seconds of each search, and what it found."""
    times, found = [], []
    for query_D in queries:
        began_s = time.perf_counter()
        keys, _, _ = world.nearest(searcher, query_D, K)
        times.append(time.perf_counter() - began_s)
        found.append(set(keys))
    return times, found


def measure_exact(num: int, width: int) -> dict[str, float]:
    """The exact way, p50 and p99 in ms."""
    rng = np.random.default_rng(0)
    with tempfile.TemporaryDirectory(dir=shared_memory()) as directory:
        world, _, rows_ND = filled(directory, rng, num, width)
        times, _ = timed_s(world, world.searcher(exact_rows=ALL), rows_ND[rng.integers(0, len(rows_ND), QUERIES)])
        world.close()
    return percentiles_ms(times)


def share_of(searcher: TableSearch, share: float, seconds: float, deadline_s: float) -> tuple[float, float]:
    """Catch up for some seconds as the search's thread does; (CPU seconds, seconds)."""
    spent_s, began_s = time.thread_time(), time.monotonic()
    while time.monotonic() < min(began_s + seconds, deadline_s):
        slice_s = time.thread_time()
        is_busy = searcher.catch_up()
        slice_s = time.thread_time() - slice_s
        time.sleep(slice_s * (1 / share - 1) if is_busy else 0.005)
    return time.thread_time() - spent_s, time.monotonic() - began_s


def measure_changes(world: NearRows, searcher: TableSearch, ids_N: Int64s, rows_ND: Float32s) -> dict[str, float]:
    """Rows that turn round among others that are written again: time until found, and what following cost."""
    rng, share = np.random.default_rng(9), SearchSettings().cpu_share
    found_s, cpu_s, wall_s = [], 0.0, 0.0
    for turned in rng.choice(len(ids_N), CHANGES, replace=False).tolist():
        around_N = rng.choice(len(ids_N), 1000, replace=False)
        world.put(ids_N[around_N], rows_ND[around_N])
        rows_ND[turned] = -rows_ND[turned]
        world.put(ids_N[turned : turned + 1], rows_ND[turned : turned + 1])
        began_s = time.monotonic()
        while world.nearest(searcher, rows_ND[turned], 1)[0] != [ids_N[turned]]:
            spent_s, took_s = share_of(searcher, share, 0.01, began_s + 10)
            cpu_s, wall_s = cpu_s + spent_s, wall_s + took_s
        found_s.append(time.monotonic() - began_s)
    return {
        "found_again_p50_ms": float(np.percentile(found_s, 50)) * 1e3,
        "found_again_max_ms": max(found_s) * 1e3,
        "cpu_share": cpu_s / wall_s if wall_s else 0.0,
    }


def measure_graph(num: int, width: int) -> dict[str, Any]:
    """The graph of one table: building, recall, times, memory; then following changes, and recall after many."""
    rng = np.random.default_rng(1)
    with tempfile.TemporaryDirectory(dir=shared_memory()) as directory:
        world, ids_N, rows_ND = filled(directory, rng, num, width)
        graph, exact = world.searcher(exact_rows=1000), world.searcher(exact_rows=ALL)
        world.nearest(graph, rows_ND[0], K)
        began_s = time.thread_time()
        settle(graph)
        build_s = time.thread_time() - began_s
        queries = rows_ND[rng.integers(0, len(rows_ND), QUERIES)]
        times, found = timed_s(world, graph, queries)
        exact_times, wanted = timed_s(world, exact, queries)
        changes = measure_changes(world, graph, ids_N, rows_ND)
        moved_N = rng.choice(len(ids_N), MOVES, replace=False)
        world.put(ids_N[moved_N], clustered(rng, len(moved_N), width))
        graph.look_again()
        began_s = time.thread_time()
        settle(graph)
        place_us = (time.thread_time() - began_s) / len(moved_N) * 1e6
        recall_after = recall(timed_s(world, graph, queries)[1], timed_s(world, exact, queries)[1])
        memory = graph.graph.memory_bytes() / len(ids_N) if graph.graph is not None else 0.0
        world.close()
    return {
        "rows": len(ids_N), "width": width, "recall_at_10": recall(found, wanted), **percentiles_ms(times),
        "exact": percentiles_ms(exact_times), "build_us_per_row": build_s / len(ids_N) * 1e6,
        "bytes_per_row": memory, **changes, "place_us_per_row": place_us, "recall_at_10_after_moves": recall_after,
    }  # fmt: skip


def recall(found: list[set[int]], wanted: list[set[int]]) -> float:
    """Share of the nearest that were found."""
    return sum(len(one & other) for one, other in zip(found, wanted, strict=True)) / sum(map(len, wanted))


def main() -> None:
    """Measure, and print one JSON object."""
    options = arguments(__doc__ or "").parse_args()
    live.warm()
    live_scan.warm()
    results: dict[str, Any] = {
        f"exact_{num}_x_{width}": measure_exact(num, width) for num in (10_000, 100_000) for width in WIDTHS
    }
    goals = [
        goal(f"exact, 100,000 x {w}, p50", results[f"exact_100000_x_{w}"]["p50"], "ms", at_most=10) for w in WIDTHS
    ]
    num = 100_000 if options.quick else 1_000_000
    for width in WIDTHS:
        one = results[f"graph_x_{width}"] = measure_graph(num, width)
        of = f"{num:,} x {width}"
        goals += [
            goal(f"recall@10 of the graph, {of}", one["recall_at_10"], "", at_least=0.95),
            goal(f"graph search, {of}, p50", one["p50"], "ms", at_most=10),
            goal(f"changed row found at its new place, {of}, longest", one["found_again_max_ms"], "ms", at_most=2000),
        ]
    emit("search", results, goals, options.json)


if __name__ == "__main__":
    main()
