"""What the service counts, on the metric board that all processes share; each metric is looked up once."""

import numpy as np
import numpy.typing as npt

from service.live_model import STATUS_NAMES
from trainer.board import Board, Counter, Histogram


class Meters:
    """The metrics of one worker."""

    def __init__(self, board: Board) -> None:
        self.board = board
        self.queue_wait = board.histogram("livebed_queue_wait_seconds")
        self.ready = board.gauge("livebed_ready")
        self.model_age = board.gauge("livebed_model_age_seconds")
        self.events_received = board.counter("livebed_events_received_total")
        self.events_accepted = board.counter("livebed_events_accepted_total")
        self.events_duplicate = board.counter("livebed_events_duplicate_total")
        self.events_rejected = board.counter("livebed_events_rejected_total")
        self._durations: dict[tuple[str, str, str], Histogram] = {}
        self._rejected: dict[str, Counter] = {}
        self._lookups: dict[tuple[str, str], Counter] = {}

    def request(self, *, face: str, route: str, code: str, duration_s: float) -> None:
        """Count one request; `route` is a template, never a raw path."""
        histogram = self._durations.get((face, route, code))
        if histogram is None:
            histogram = self.board.histogram("livebed_request_duration_seconds", face=face, route=route, code=code)
            self._durations[face, route, code] = histogram
        histogram.observe(duration_s)

    def refused(self, reason: str) -> None:
        """Count one request that was answered with an error."""
        counter = self._rejected.get(reason)
        if counter is None:
            counter = self._rejected[reason] = self.board.counter("livebed_rejected_requests_total", reason=reason)
        counter.inc()

    def looked_up(self, table: str, status_N: npt.NDArray[np.uint8]) -> None:
        """Count rows looked up, by their status."""
        statuses = status_N.tobytes()  # counted in a tenth of the time that numpy takes to begin
        for status, name in enumerate(STATUS_NAMES):
            count = statuses.count(status)
            if count:
                self._lookup_counter(table, name).inc(count)

    def _lookup_counter(self, table: str, status: str) -> Counter:
        counter = self._lookups.get((table, status))
        if counter is None:
            counter = self.board.counter("livebed_embedding_lookups_total", table=table, status=status)
            self._lookups[table, status] = counter
        return counter
