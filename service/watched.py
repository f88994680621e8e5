"""What a few files say, read again when they change: tokens and certificates are rotated without a restart."""

import logging
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Final, Generic, TypeVar

from trainer.errors import LivebedError

T = TypeVar("T")
# Between looks at the files. Larger lets a revoked token live longer, smaller only asks the file system more often.
REFRESH_EVERY_S: Final = 1.0

logger = logging.getLogger("livebed.service")


class Watched(Generic[T]):
    """The newest good content of some files; a bad one is said once, and what was read before stays in force."""

    def __init__(self, paths: Sequence[Path], read: Callable[[], T]) -> None:
        """Read for the first time; `read` raises LivebedError, here to the caller."""
        self._paths = tuple(paths)
        self._read = read
        self._seen = self._state()  # before reading: what changes meanwhile is read again
        self.content = read()

    def refresh(self) -> None:
        """Look at the files, and read them if they have changed; from any thread, one at a time."""
        state = self._state()
        if state == self._seen:
            return
        self._seen = state
        names = ", ".join(map(str, self._paths))
        try:
            self.content = self._read()
        except LivebedError as error:
            logger.error("%s; what was read before stays in force", error)
        else:
            logger.info("read again: %s", names)

    def _state(self) -> list[tuple[int, ...] | None]:
        return [_state(path) for path in self._paths]


def _state(path: Path) -> tuple[int, ...] | None:
    """What differs when a file was written, replaced, or given another mode; None where there is none."""
    try:
        found = path.stat()
    except OSError:
        return None
    return found.st_ino, found.st_size, found.st_mtime_ns, found.st_ctime_ns
