"""Saves checkpoints beside the learning: the state is copied in the loop, written by a thread of its own."""

import logging
import time
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path

from trainer.board import Board
from trainer.checkpoint import save, saved_progress
from trainer.errors import CheckpointError
from trainer.settings import CheckpointSettings
from trainer.snapshot import Snapshot

logger = logging.getLogger(__name__)


class Saver:
    """At most one save at a time, every `every_s` seconds; a save that fails is said, and tried again when due."""

    def __init__(self, directory: Path, settings: CheckpointSettings, board: Board) -> None:
        self._directory = directory
        self._every_s = settings.every_s
        self._keep = settings.keep
        self._duration = board.histogram("livebed_checkpoint_duration_seconds")
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="checkpoint")
        self._running: Future[None] | None = None
        self._due_s = time.monotonic() + settings.every_s

    @property
    def is_due(self) -> bool:
        """Whether it is time for a save and none is being written."""
        return time.monotonic() >= self._due_s and (self._running is None or self._running.done())

    def start(self, snapshot: Snapshot) -> None:
        """Write a snapshot in the background."""
        self._due_s = time.monotonic() + self._every_s
        self._running = self._thread.submit(self._save, snapshot)

    def finish(self, snapshot: Snapshot | None) -> None:
        """Wait for a save under way, write the last one if there is one, and end."""
        if snapshot is not None:
            self._thread.submit(self._save, snapshot)
        self._thread.shutdown(wait=True)

    def oldest_position(self) -> str | None:
        """Log position of the oldest save that is kept: nothing after it may be trimmed."""
        kept = saved_progress(self._directory)
        return kept[-1].position if kept else None

    def _save(self, snapshot: Snapshot) -> None:
        started = time.perf_counter()
        try:
            path = save(self._directory, snapshot, keep=self._keep)
        except CheckpointError as error:
            logger.error("%s", error)
            return
        self._duration.observe(time.perf_counter() - started)
        logger.info("saved %s: step %d, log entry %s", path.name, snapshot.progress.step, snapshot.progress.position)
