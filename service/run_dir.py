"""The run directory: live store, metric boards and sockets of one running system, gone when it is.

Each part that runs (`trainer`, `service`) holds the lock `<part>.lock`: the supervisor takes it and its children
inherit it, so a lock is held exactly as long as a process of that part lives, whichever of them dies first.
Whoever leaves last removes the directory. One that a killed system left behind has locks that nobody holds, and
the next start removes it.
"""

import contextlib
import fcntl
import os
import shutil
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Final

from trainer.errors import LivebedError

PARTS: Final = ("trainer", "service")
MARK: Final = ".livebed-run"  # lies in every run directory: what has none is somebody's own, and is left alone
# The trainer of a supervisor that was killed still writes its last checkpoint; starting beside it would be two writers.
LOCK_WAIT_S: Final = 20.0
POLL_S: Final = 0.05


@contextlib.contextmanager
def directory_errors(field: str) -> Iterator[None]:
    """Inside, what the system says of a directory becomes a sentence that names its setting."""
    try:
        yield
    except OSError as error:
        variable = f"LIVEBED_{field.upper()}"
        raise LivebedError(
            f"{field}: cannot use {error.filename} ({error.strerror}); set {field} or {variable} to a directory that "
            "this user may write to"
        ) from None


class RunDirectory:
    """One run directory and the locks of our parts in it; use as a context manager or call `release`."""

    def __init__(self, path: Path, parts: Sequence[str], *, lock_wait_s: float = LOCK_WAIT_S) -> None:
        """Create the directory (mode 0700), take the locks of `parts`, and clear what a dead system left in it.

        Raises:
            LivebedError: the directory belongs to someone else, or a living system holds one of the locks.
        """
        self.path = path.absolute()
        self.lock_fds: dict[str, int] = {}
        self._create()
        try:
            for part in parts:
                self.lock_fds[part] = self._lock(part, lock_wait_s)
            if set(PARTS) <= set(parts):  # both parts are ours: no living process can be using what lies there
                self._clear()
        except BaseException:
            self._close()
            raise

    def release(self) -> None:
        """Give the locks back; remove the directory unless the other part still runs."""
        others = [_try_lock(self.path / f"{part}.lock") for part in PARTS if part not in self.lock_fds]
        if None not in others:
            shutil.rmtree(self.path, ignore_errors=True)  # a mount point stays, emptied
        for lock_fd in others:
            if lock_fd is not None:
                os.close(lock_fd)
        self._close()

    def _create(self) -> None:
        self.path.parent.mkdir(parents=True, exist_ok=True)
        self.path.mkdir(mode=0o700, exist_ok=True)
        owner = self.path.stat().st_uid
        if owner != os.getuid():
            raise LivebedError(f"the run directory {self.path} belongs to user {owner}: set run_dir to another path")
        content = {entry.name for entry in self.path.iterdir()}
        if content and MARK not in content and not content & {f"{part}.lock" for part in PARTS}:
            raise LivebedError(
                f"run_dir {self.path} is not empty and none of Livebed's, which empties it: set run_dir to another path"
            )
        (self.path / MARK).touch()

    def _lock(self, part: str, wait_s: float) -> int:
        path = self.path / f"{part}.lock"
        deadline_s = time.monotonic() + wait_s
        while True:
            self.path.mkdir(mode=0o700, exist_ok=True)  # a leaving system may have just removed it
            (self.path / MARK).touch()
            lock_fd = _try_lock(path)
            if lock_fd is not None:
                os.ftruncate(lock_fd, 0)
                os.pwrite(lock_fd, b"%d\n" % os.getpid(), 0)
                return lock_fd
            owner = _owner(path)
            if _lives(owner) or time.monotonic() >= deadline_s:
                raise LivebedError(
                    f"a {part} already runs in {self.path} (started by process {owner}): stop it, or give this one "
                    "another `name`"
                )
            time.sleep(POLL_S)

    def _clear(self) -> None:
        for entry in self.path.iterdir():
            if entry.suffix == ".lock" or entry.name == MARK:
                continue
            if entry.is_dir():
                shutil.rmtree(entry)
            else:
                entry.unlink()

    def _close(self) -> None:
        for lock_fd in self.lock_fds.values():
            os.close(lock_fd)
        self.lock_fds.clear()


def remove_stale(parent: Path, prefix: str) -> list[Path]:
    """Remove the run directories of systems that died without cleaning up; return which."""
    removed = []
    for path in sorted(parent.glob(f"{prefix}*")):
        locks = sorted(path.glob("*.lock"))
        if not locks or path.stat().st_uid != os.getuid():
            continue
        held = [_try_lock(lock) for lock in locks]
        if None not in held:
            shutil.rmtree(path, ignore_errors=True)
            removed.append(path)
        for lock_fd in held:
            if lock_fd is not None:
                os.close(lock_fd)
    return removed


def _owner(path: Path) -> str:
    """Who took a lock, as a process id; empty when the file is just being made or removed."""
    try:
        return path.read_text().strip()
    except FileNotFoundError:
        return ""


def _lives(pid: str) -> bool:
    """Whether the one who took a lock still runs; its children may hold the lock a moment longer than that."""
    try:
        os.kill(int(pid), 0)
    except (ValueError, ProcessLookupError):
        return False
    except PermissionError:
        return True
    return True


def _try_lock(path: Path) -> int | None:
    """A locked descriptor of the file (made if need be), or None when another process holds it."""
    try:
        lock_fd = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW, 0o600)
    except FileNotFoundError:  # its directory was removed a moment ago
        return None
    with contextlib.suppress(OSError):
        fcntl.flock(lock_fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
        # Between our open and our lock the one who left may have removed the file: then this lock guards nothing.
        if path.stat().st_ino == os.fstat(lock_fd).st_ino:
            return lock_fd
    os.close(lock_fd)
    return None
