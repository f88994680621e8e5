"""A store on disk with rows that tests choose, changed as a trainer changes them, and searches of it."""

from pathlib import Path

import numpy as np
import numpy.typing as npt

from service.search_table import IndexState, TableSearch
from tests.system.live_race import FREE, place
from trainer.live import Layout, Reader, Section, Writer
from trainer.probe import EMPTY, shard_of
from trainer.settings import SearchSettings

Int64s = npt.NDArray[np.int64]
Float32s = npt.NDArray[np.float32]


class NearRows:
    """One table over one or more shards; `put` and `remove` are a publish each."""

    def __init__(self, directory: Path, capacity: int, width: int, *, num_shards: int = 1) -> None:
        section = Section("table/item", "rows", capacity, width + 1)
        self.directory, self.width, self.capacity = directory, width, capacity
        self._layout = Layout((section,), 0, 0, num_shards=num_shards, schema_hash=1)
        self._ids_SG = np.full((num_shards, capacity), FREE, np.int64)
        self.writers = [Writer.create(directory, self._layout, shard=shard) for shard in range(num_shards)]
        for writer in self.writers:
            writer.activate()
        self.reader = Reader(directory)
        self.reader.attach(5)

    def put(self, ids_N: Int64s, rows_ND: Float32s) -> None:
        words_NW = np.concatenate([rows_ND, np.full((len(rows_ND), 1), 9, np.float32)], axis=1).view(np.uint32)
        shards_N = np.array([shard_of(id_, len(self.writers)) for id_ in ids_N.tolist()])
        for shard, writer in enumerate(self.writers):
            mine_N, slots_N = np.flatnonzero(shards_N == shard), np.empty(int((shards_N == shard).sum()), np.int64)
            place(ids_N[mine_N], self._ids_SG[shard], np.arange(len(mine_N)) % 32, slots_N)
            ones_N = np.ones(len(mine_N), np.uint32)
            writer.put("table/item", slots_N, ids_N[mine_N], words_NW[mine_N], ones_N, ones_N)
            writer.commit(step=1, watermark_us=1)

    def remove(self, ids_N: Int64s) -> None:
        for shard, writer in enumerate(self.writers):
            slots_N = np.flatnonzero(np.isin(self._ids_SG[shard], ids_N))
            self._ids_SG[shard, slots_N] = FREE
            writer.remove("table/item", slots_N)
            writer.commit(step=1, watermark_us=1)

    def ids(self, shard: int) -> Int64s:
        """Who is in a shard's slots; FREE where nobody is."""
        return self._ids_SG[shard]

    def searcher(self, *, exact_rows: int, by_angle: bool = True) -> TableSearch:
        settings = SearchSettings(exact_rows=exact_rows)
        return TableSearch(0, self.width, by_angle=by_angle, settings=settings, reader=self.reader)

    def nearest(
        self, searcher: TableSearch, vector_D: Float32s, k: int, *, but: int = EMPTY
    ) -> tuple[list[int], Float32s, IndexState]:
        self.reader.refresh()
        unit_D = (vector_D / np.linalg.norm(vector_D)).astype(np.float32)
        version = self.reader.state().version
        keys_K, scores_K, index = searcher.nearest(unit_D, k, self.reader.shards, but=but, version=version)
        return keys_K.tolist(), scores_K, index

    def close(self) -> None:
        for writer in self.writers:
            writer.close()


def settle(searcher: TableSearch) -> None:
    """All that the search's thread would do in time, at once."""
    while searcher.graph is not None and (searcher.catch_up() or searcher.graph.num_pending):
        pass


def clustered(rng: np.random.Generator, num: int, width: int) -> Float32s:
    """Rows as a trained table has them: groups of like items, lengths that differ."""
    centres = rng.normal(size=(max(4, num // 200), width))
    rows_ND = centres[rng.integers(0, len(centres), num)] + 0.5 * rng.normal(size=(num, width))
    return (rows_ND * rng.lognormal(0, 0.3, (num, 1)) * 0.1).astype(np.float32)
