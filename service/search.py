"""Nearest rows of a vector or of an id (`embeddings:search`), found on a thread of their own.

A search takes from a tenth of a millisecond to tens of them, so it never runs on the event loop. One thread answers
all, in the order of arrival, and between answers keeps the graphs of large tables up, a slice at a time, within its
share of a core. It alone touches them, so nothing is locked, and a search waits for a slice at most (a millisecond).
"""

import asyncio
import logging
import queue
import threading
import time
from concurrent.futures import Future
from dataclasses import dataclass
from typing import Literal

import numpy as np
import numpy.typing as npt

from service.errors import ServiceError, Violation
from service.exchange import Exchange
from service.live_model import LiveModel, Stamp
from service.search_table import IndexState, TableSearch
from trainer.live import LEARNED, ShardView
from trainer.probe import EMPTY
from trainer.schema import Table
from trainer.settings import SearchSettings

Metric = Literal["cosine", "dot"]

MAX_WAITING = 64  # searches in a worker that wait for the thread; one more is refused at once: it would wait too long
NOTHING_TO_DO_S = 0.05  # between looks for something to do

logger = logging.getLogger("livebed.service")


@dataclass(frozen=True)
class Query:
    """What is looked for: the rows nearest to a vector (D), or to the row of a hashed id, which is then left out."""

    vector_D: npt.NDArray[np.float32] | None
    key: int | None
    k: int
    metric: Metric


@dataclass(frozen=True)
class Matches:
    """Hashed ids and similarities of the nearest rows, nearest first; each similarity is of the row as it was read."""

    keys_K: npt.NDArray[np.int64]
    similarities_K: npt.NDArray[np.float32]
    stamp: Stamp
    index: IndexState
    search_s: float


@dataclass(frozen=True)
class _Job:
    query: Query
    table: Table
    vector_D: npt.NDArray[np.float32]
    stamp: Stamp
    views: list[ShardView]
    section: int
    answer: "Future[Matches]"


class Search:
    """The searches of one worker. The thread is started by the first one."""

    def __init__(self, model: LiveModel, settings: SearchSettings) -> None:
        self._model, self._settings = model, settings
        self._jobs: queue.Queue[_Job | None] = queue.Queue(MAX_WAITING)  # full: refused
        self._thread: threading.Thread | None = None
        self._tables: dict[tuple[str, str], TableSearch] = {}
        self._next_slice_s = 0.0

    async def nearest(self, table: Table, query: Query, exchange: Exchange) -> Matches:
        """Answer a query. Raises ServiceError, StoreUnavailable or TimeoutError."""
        exchange.num_items = query.k
        if not self._settings.enabled:
            raise ServiceError("refused", "search is switched off here (serving.search.enabled)")
        job = self._job(table, query)
        try:
            self._jobs.put_nowait(job)
        except queue.Full:
            raise ServiceError("overloaded", f"{MAX_WAITING} searches are waiting already") from None
        if self._thread is None:
            self._thread = threading.Thread(target=self._run, name="livebed-search", daemon=True)
            self._thread.start()
        exchange.finish()  # the loop is free meanwhile
        async with asyncio.timeout(exchange.remaining_s):
            matches = await asyncio.wrap_future(job.answer)
        exchange.stamp = matches.stamp
        exchange.stage("search", matches.search_s)
        return matches

    def close(self) -> None:
        """End the thread, after what waits has been answered."""
        if self._thread is not None:
            self._jobs.put(None)
            self._thread.join()
            self._thread = None

    def memory_bytes(self) -> int:
        """What all graphs keep."""
        return sum(one.graph.memory_bytes() for one in self._tables.values() if one.graph is not None)

    def _job(self, table: Table, query: Query) -> _Job:
        stamp, views, section = self._model.shards(table)
        vector_D = query.vector_D
        if vector_D is None:
            rows = self._model.lookup(table, np.array([query.key], np.int64))
            if rows.status_N[0] != LEARNED:
                raise ServiceError("unknown_id", f"table {table.name!r} has no row for that id, so nothing is near it")
            vector_D = rows.vectors_ND[0]
        elif len(vector_D) != table.width:
            raise _invalid(f"{len(vector_D)} numbers; a row of table {table.name!r} has {table.width}")
        if not np.isfinite(vector_D).all():
            raise _invalid("a number is NaN, infinite, or too large for float32")
        if query.metric == "cosine" and not vector_D.any():
            raise _invalid("all zeros, which point nowhere: there is no cosine to anything")
        return _Job(query, table, vector_D, stamp, views, section, Future())

    def _run(self) -> None:
        while True:
            try:
                job = self._jobs.get(timeout=self._pause_s())
            except queue.Empty:
                pass
            else:
                if job is None:
                    return
                if job.answer.set_running_or_notify_cancel():  # who has gone needs no answer
                    self._answer(job)
            if time.monotonic() >= self._next_slice_s:
                self._catch_up()

    def _pause_s(self) -> float | None:
        if all(one.graph is None for one in self._tables.values()):
            return None
        return max(0.0, self._next_slice_s - time.monotonic())

    def _answer(self, job: _Job) -> None:
        try:
            job.answer.set_result(self._matches(job))
        except Exception as error:
            job.answer.set_exception(error)

    def _matches(self, job: _Job) -> Matches:
        began_s, query = time.perf_counter(), job.query
        length = float(np.linalg.norm(job.vector_D.astype(np.float64)))
        unit_D = (job.vector_D / length).astype(np.float32) if length else job.vector_D
        keys_K, scores_K, index = self._table(job).nearest(
            unit_D, query.k, job.views, but=EMPTY if query.key is None else query.key, version=job.stamp.version
        )
        if query.metric == "cosine":
            scores_K = np.clip(scores_K, -1, 1)
        else:
            largest = np.finfo(np.float32).max
            scores_K = np.clip(scores_K.astype(np.float64) * length, -largest, largest).astype(np.float32)
        return Matches(keys_K, scores_K, job.stamp, index, time.perf_counter() - began_s)

    def _table(self, job: _Job) -> TableSearch:
        name = (job.table.name, job.query.metric)
        if name not in self._tables:
            self._tables[name] = TableSearch(
                job.section,
                job.table.width,
                by_angle=job.query.metric == "cosine",
                settings=self._settings,
                reader=self._model.reader,
            )
        return self._tables[name]

    def _catch_up(self) -> None:
        """A slice for each table, then a pause that keeps the thread within its share."""
        spent_s, is_busy = time.thread_time(), False
        for (table, metric), one in self._tables.items():
            try:
                is_busy |= one.catch_up()
            except Exception:
                logger.exception("the %s graph of table %s failed: its searches are exact from now on", metric, table)
                one.give_up()
        spent_s = time.thread_time() - spent_s
        rest_s = spent_s * (1 / self._settings.cpu_share - 1) if is_busy else NOTHING_TO_DO_S
        self._next_slice_s = time.monotonic() + rest_s


def _invalid(detail: str) -> ServiceError:
    return ServiceError("invalid", f"vector: {detail}", violations=[Violation("/vector", detail)])
