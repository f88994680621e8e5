"""Saves checkpoints beside the learning: a forked child sees the state as it was at that instant, and writes it.

The kernel shares memory between parent and child until one of them writes to it, so the loop goes on at once: it pays
the fork (1.5 ms for 180 MB) and then about 2 us for each page of 4 kB that it is the first to write to.
"""

import contextlib
import gc
import json
import logging
import os
import select
import signal
import time
import traceback
import warnings
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import NoReturn

from trainer.board import Board
from trainer.checkpoint import lock, number_of, save, saved_progress
from trainer.child import end_with_parent
from trainer.errors import CheckpointError
from trainer.settings import CheckpointSettings
from trainer.snapshot import Snapshot
from trainer.stream import parse_id

logger = logging.getLogger(__name__)

INTERRUPTS = (signal.SIGINT, signal.SIGTERM)
NICENESS = 10  # the child yields to learning and serving
DEADLINE_S = 600.0  # a child that has not finished by then hangs, on a dead network disk say
MOST_CHARS = 2000  # of a report's text, so that it fits into a pipe whose other end is not being read


@dataclass(frozen=True)
class SaveResult:
    """What became of one save. Without an `error` it is on disk; with one the earlier saves are as they were.

    `seconds`: until it was on disk (or had failed); `pause_s`: how long the loop stood still for it.
    `number`, `step` and `position` are 0, 0 and "" where there is an error.
    """

    seconds: float
    pause_s: float
    number: int = 0
    step: int = 0
    position: str = ""
    error: str | None = None


@dataclass(frozen=True)
class _Child:
    pid: int
    pipe: int  # its report comes here
    started_s: float
    pause_s: float


class Saver:
    """At most one save at a time, every `every_s` seconds; a save that fails is said, and tried again when due.

    It holds the directory's lock until `finish`, and so does a child that outlives it. Its methods belong to one
    thread, which must live as long as the process: the kernel ends a child with the thread that made it.

    Raises:
        CheckpointError: another trainer writes in this directory.
    """

    def __init__(
        self,
        directory: Path,
        settings: CheckpointSettings,
        board: Board,
        *,
        spared: Callable[[], int | None] = lambda: None,
        deadline_s: float = DEADLINE_S,
    ) -> None:
        """`spared`: number of a save that is kept however old it is; asked in the child when others go."""
        self._directory = directory
        self._spared = spared
        self._every_s = settings.every_s
        self._keep = settings.keep
        self._deadline_s = deadline_s
        self._duration = board.histogram("livebed_checkpoint_duration_seconds")
        self._pause = board.histogram("livebed_checkpoint_pause_seconds")
        self._lock = lock(directory)
        self._child: _Child | None = None
        self._not_forked: SaveResult | None = None
        self._due_s = time.monotonic() + settings.every_s

    @property
    def is_due(self) -> bool:
        """Whether it is time for a save and none is being written."""
        return time.monotonic() >= self._due_s and not self.is_running

    @property
    def is_running(self) -> bool:
        """Whether a save has begun whose result `poll` has not given yet."""
        return self._child is not None or self._not_forked is not None

    def start(self, capture: Callable[[], Snapshot]) -> None:
        """Begin a save of the state as it is now; costs the time of a fork.

        `capture` is called in the child, where only the calling thread exists: it may read memory, and must not use
        sockets, the metric board or a GPU.
        """
        if self.is_running:
            raise ValueError("a checkpoint is being written: wait for its result")
        self._due_s = time.monotonic() + self._every_s
        receiving, sending = os.pipe()
        started_s = time.monotonic()
        parent = os.getpid()
        # A handler that raised in the child, before it has its own ones, would send it up the parent's stack.
        mask = signal.pthread_sigmask(signal.SIG_BLOCK, INTERRUPTS)
        try:
            pid = _fork()
            if pid == 0:
                self._write(capture, sending, parent, started_s, mask)
            self._child = _Child(pid, receiving, started_s, pause_s=time.monotonic() - started_s)
        except OSError as error:
            os.close(receiving)
            self._not_forked = SaveResult(0.0, 0.0, error=f"cannot start saving a checkpoint: {error.strerror}")
        finally:
            os.close(sending)
            signal.pthread_sigmask(signal.SIG_SETMASK, mask)

    def poll(self) -> SaveResult | None:
        """The result of a save that has ended since the last call, if one has; never waits."""
        if self._not_forked is not None:
            result, self._not_forked = self._not_forked, None
            return self._told(result)
        child = self._child
        if child is None:
            return None
        hangs = time.monotonic() - child.started_s > self._deadline_s
        if hangs:
            with contextlib.suppress(ProcessLookupError):
                os.kill(child.pid, signal.SIGKILL)
        pid, status = os.waitpid(child.pid, os.WNOHANG)
        if pid == 0:
            return None
        self._child = None
        with os.fdopen(child.pipe, "rb") as pipe:
            os.set_blocking(child.pipe, False)
            report = pipe.read() or b""
        if report:
            return self._told(SaveResult(pause_s=child.pause_s, **json.loads(report)))
        code = os.waitstatus_to_exitcode(status)
        why = f"was stopped after {self._deadline_s:g} s" if hangs else f"died: {_cause(code)}"
        error = f"the process that saved a checkpoint {why}; earlier ones are kept"
        return self._told(SaveResult(time.monotonic() - child.started_s, child.pause_s, error=error))

    def finish(self, capture: Callable[[], Snapshot] | None) -> SaveResult | None:
        """Wait for a save under way, write the last one if there is one to write, and end; the last result."""
        result = self._wait()
        if capture is not None:
            self.start(capture)
            result = self._wait()
        if self._lock >= 0:
            os.close(self._lock)
            self._lock = -1
        return result

    def oldest_position(self) -> str | None:
        """Log position of the earliest save that is kept: nothing after it may be trimmed.

        Not always the lowest number's: after going back to an earlier save, new ones begin before others again.
        """
        return min((kept.position for kept in saved_progress(self._directory)), key=parse_id, default=None)

    def _wait(self) -> SaveResult | None:
        """The result of the save under way, if there is one, as soon as it has ended."""
        result = None
        while self.is_running and (result := self.poll()) is None and self._child is not None:
            left_s = self._child.started_s + self._deadline_s - time.monotonic()
            # Readable when it has reported or died; a moment then, until it is gone.
            if select.select([self._child.pipe], [], [], max(left_s, 0.0) + 0.01)[0]:
                time.sleep(0.001)
        return result

    def _told(self, result: SaveResult) -> SaveResult:
        if result.error is not None:
            logger.error("%s", result.error)
            return result
        self._duration.observe(result.seconds)
        self._pause.observe(result.pause_s)
        logger.info("saved checkpoint %d: step %d, log entry %s", result.number, result.step, result.position)
        return result

    def _write(
        self,
        capture: Callable[[], Snapshot],
        sending: int,
        parent: int,
        started_s: float,
        mask: set[signal.Signals | int],
    ) -> NoReturn:
        """All that the child does; it has the parent's memory and none of its threads."""
        report: dict[str, object] = {"error": "unknown"}
        try:
            _become_a_child(parent, keep={sending, self._lock})
            signal.pthread_sigmask(signal.SIG_SETMASK, mask)
            snapshot = capture()
            path = save(self._directory, snapshot, keep=self._keep, spared=self._spared)
            progress = snapshot.progress
            report = {"number": number_of(path), "step": progress.step, "position": progress.position}
        except CheckpointError as error:
            report = {"error": str(error)[:MOST_CHARS]}
        except BaseException:  # nothing may leave this frame: it would run the parent's loop twice
            report = {"error": f"saving a checkpoint failed: {traceback.format_exc()[-MOST_CHARS:]}"}
        finally:
            with contextlib.suppress(OSError):
                os.write(sending, json.dumps(report | {"seconds": time.monotonic() - started_s}).encode())
            os._exit(0)


def _fork() -> int:
    with warnings.catch_warnings():
        # Python 3.12 warns of locks that other threads may hold. The child takes none of theirs: it copies arrays,
        # hashes, writes files, and ends without cleaning up.
        warnings.simplefilter("ignore", DeprecationWarning)
        return os.fork()


def _become_a_child(parent: int, *, keep: set[int]) -> None:
    """End with the parent, leave its signals, files and processor to it."""
    end_with_parent(parent)
    signal.set_wakeup_fd(-1)
    signal.signal(signal.SIGTERM, signal.SIG_DFL)
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C reaches the whole group; the parent waits for us
    gc.disable()  # it would write to pages that are shared, and close files that are the parent's
    # Closing takes nothing from the parent, and an orphan stuck on its disk then holds no lock or socket of it but
    # the one lock that it needs.
    for descriptor in map(int, os.listdir("/dev/fd")):  # noqa: PTH208 -- numbers, not paths
        if descriptor > 2 and descriptor not in keep:
            with contextlib.suppress(OSError):  # the listing's own is closed already
                os.close(descriptor)
    os.nice(NICENESS)


def _cause(exit_code: int) -> str:
    if exit_code < 0:
        return f"killed by {signal.Signals(-exit_code).name}"
    return f"exit code {exit_code}"
