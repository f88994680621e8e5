"""Nearest rows of one table under one metric: exact while the table is small, by a graph that follows it when large.

The exact way reads the live store slot by slot: it has no index, no memory and no lag. Above `exact_rows` rows a graph
is built beside, slowly (`serving.search.cpu_share`), and kept up; until it has caught up to within `exact_rows` slots,
and whenever it falls back further, answers are exact, and slower.
"""

import time
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from service.search_graph import Graph
from trainer.live import Reader, ShardView
from trainer.live_kernels import CAPACITY, TAGS
from trainer.live_scan import nearest_of_all, nearest_of_slots
from trainer.settings import SearchSettings

Int64s = npt.NDArray[np.int64]
Float32s = npt.NDArray[np.float32]

PASS_EVERY_S = 0.2  # between looks through all slots, where the share allows it: most of the lag
FOLLOW_S = 60.0  # since the last search: then following stops, and the next search looks through all slots first
MAX_LAG_S = 1.0  # a search that would be further behind looks through all slots first: 20 to 70 ms for a million
LEFT_OUT = 2  # rows that are never offered: that of missing values, and the one searched from
SPARE = 16  # slots asked of the graph beyond half as many again as wanted: it ranks by rows that are a little behind


@dataclass(frozen=True)
class IndexState:
    """How an answer was found: `exact` or `hnsw`.

    What changed more than `lag_ms` ago, and all of `version`, was looked for at its place of now; similarities are
    always those of now. `rows`: what the table had.
    """

    kind: str
    version: int
    lag_ms: float
    rows: int


class TableSearch:
    """One thread calls it, and the reader's `refresh` is called by another."""

    def __init__(self, section: int, width: int, *, by_angle: bool, settings: SearchSettings, reader: Reader) -> None:
        self._section, self._width, self._by_angle = section, width, by_angle
        self._settings, self._reader = settings, reader
        self.graph: Graph | None = None
        self.is_broken = False  # exact from now on
        self._searched_s = self._began_s = self._passed_s = self._next_pass_s = 0.0
        self._began_version = self._passed_version = 0
        self._pass_cost_s = 0.0
        self._is_passing = False

    def nearest(
        self, query_D: Float32s, count: int, views: Sequence[ShardView], *, but: int, version: int
    ) -> tuple[Int64s, Float32s, IndexState]:
        """Ids and similarities of the nearest rows, nearest first; of equals the smaller id. `but`: left out.

        `query_D` has unit length, `version` was there before.
        """
        self._searched_s = time.monotonic()
        rows = sum(self._num_rows(view) for view in views)
        scores_K, keys_K, found = np.empty(count, np.float32), np.empty(count, np.int64), 0
        state: IndexState | None = None
        if self._is_followed(views, rows):
            state = IndexState("hnsw", self._passed_version, (time.monotonic() - self._passed_s) * 1000, rows)
            for view, slots_N in self._candidates(query_D, count):
                found = nearest_of_slots(
                    view.u32, view.f32, view.descriptors_S7[self._section], slots_N, query_D, self._by_angle, but,
                    scores_K, keys_K, found,
                )  # fmt: skip
        if state is None or found < min(count, rows - LEFT_OUT):  # a graph need not be connected
            state, found = IndexState("exact", version, 0.0, rows), 0
            for view in views:
                found = nearest_of_all(
                    view.u32, view.f32, view.u32.view(np.uint8), view.descriptors_S7[self._section], query_D,
                    self._by_angle, but, scores_K, keys_K, found,
                )  # fmt: skip
        return *_ordered(scores_K[:found], keys_K[:found]), state

    def catch_up(self) -> bool:
        """One slice, about a millisecond, of looking for changes or of placing rows; whether there was anything."""
        if self.graph is None or not self._moved_to(self._reader.shards):  # so that no old generation is kept mapped
            return False
        now_s = time.monotonic()
        if now_s > self._searched_s + FOLLOW_S:
            return False
        if self._is_passing or now_s >= self._next_pass_s:
            self._pass_over(self.graph)
            return True
        if self.graph.num_pending:
            self.graph.place()
            return True
        return False

    def look_again(self) -> None:
        """Let the next search or slice look through all slots, however recent the last look was."""
        self._is_passing, self._passed_s, self._next_pass_s = False, 0.0, 0.0

    def give_up(self) -> None:
        """Do without a graph from now on."""
        self.graph, self.is_broken = None, True

    def _is_followed(self, views: Sequence[ShardView], rows: int) -> bool:
        """Whether the graph can answer. Begins one for a table that has grown large, ends that of a small one."""
        if rows <= self._settings.exact_rows or self.is_broken:
            self.graph = None
            return False
        if self.graph is None or not self._moved_to(views):
            self.graph = Graph(views, self._section, self._width, by_angle=self._by_angle)
            self.look_again()
            return False
        if time.monotonic() > self._passed_s + MAX_LAG_S:
            self._is_passing = False
            while not self._pass_over(self.graph):
                pass
        return self.graph.num_pending <= self._settings.exact_rows

    def _moved_to(self, views: Sequence[ShardView]) -> bool:
        """Take the graph to these files; without one if the table has been resized."""
        graph, before = self.graph, self.graph and self.graph.views
        if graph is None or not graph.fits(views):
            self.graph = None
            return False
        if graph.views is not before:
            self.look_again()
        return True

    def _pass_over(self, graph: Graph) -> bool:
        """The next slice of a pass; whether it was the last."""
        if not self._is_passing:
            graph.begin_pass()
            self._is_passing, self._pass_cost_s = True, 0.0
            self._began_s, self._began_version = time.monotonic(), self._reader.state().version
        spent_s = time.thread_time()
        is_done = graph.pass_over()
        self._pass_cost_s += time.thread_time() - spent_s
        if is_done:
            self._is_passing = False
            self._passed_s, self._passed_version = self._began_s, self._began_version
            # Half of the share at most, so that the other half is left to place rows.
            self._next_pass_s = self._began_s + max(PASS_EVERY_S, 2 * self._pass_cost_s / self._settings.cpu_share)
        return is_done

    def _candidates(self, query_D: Float32s, count: int) -> list[tuple[ShardView, Int64s]]:
        """Slots to compare, by shard."""
        assert self.graph is not None  # noqa: S101 - `_is_followed` said so
        slots_N = self.graph.nearest(query_D, count + count // 2 + SPARE)
        if len(self.graph.views) == 1:
            return [(self.graph.views[0], slots_N)]
        shards_N, locals_N = np.divmod(slots_N, self.graph.capacity)
        return [(view, locals_N[shards_N == shard]) for shard, view in enumerate(self.graph.views)]

    def _num_rows(self, view: ShardView) -> int:
        descriptor_7 = view.descriptors_S7[self._section]
        tags = int(descriptor_7[TAGS])
        return int(np.count_nonzero(view.u32.view(np.uint8)[tags : tags + int(descriptor_7[CAPACITY])]))


def _ordered(scores_K: Float32s, keys_K: Int64s) -> tuple[Int64s, Float32s]:
    """Best first; an id that moved between slots while they were read, and was met twice, once."""
    order_K = np.lexsort((keys_K, -scores_K))
    keys_K, scores_K = keys_K[order_K], scores_K[order_K]
    if len(np.unique(keys_K)) < len(keys_K):
        _, first_N = np.unique(keys_K, return_index=True)
        first_N.sort()
        keys_K, scores_K = keys_K[first_N], scores_K[first_N]
    return keys_K, scores_K
