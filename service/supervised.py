"""Child processes under supervision: started, its log kept and passed on, started again when it dies."""

import logging
import os
import signal
import subprocess
import sys
import threading
import time
from collections import deque
from collections.abc import Mapping, Sequence
from typing import IO, Final

from trainer.broker import Broker
from trainer.child import bound_to_parent
from trainer.errors import BrokerError

FIRST_BACKOFF_S: Final = 0.2
MAX_BACKOFF_S: Final = 10.0
# A child that lived this long was healthy: its next death starts the back-off anew.
HEALTHY_S: Final = 30.0
KEPT_LINES: Final = 50

log = logging.getLogger("livebed.supervisor")


class Backoff:
    """How long to wait before the next start: 0.2 s, doubled at each death up to 10 s.

    >>> backoff = Backoff()
    >>> [round(backoff.after_death(lived_s=0.0), 1) for _ in range(7)]
    [0.2, 0.4, 0.8, 1.6, 3.2, 6.4, 10.0]
    >>> backoff.after_death(lived_s=60.0)
    0.2
    """

    def __init__(self) -> None:
        """Start without any death."""
        self._deaths = 0

    def after_death(self, *, lived_s: float) -> float:
        """Count one death and return the seconds to wait."""
        self._deaths = 0 if lived_s >= HEALTHY_S else self._deaths
        wait_s = min(FIRST_BACKOFF_S * 2.0**self._deaths, MAX_BACKOFF_S)
        self._deaths += 1
        return wait_s


class Supervised:
    """A Python module run as a child that dies with us; call `start` and `tend` from the main thread.

    Its standard error is read line by line: the last lines are kept to explain a death, and every line goes on
    to `forward` (ours, unless None).
    """

    def __init__(
        self,
        name: str,
        arguments: Sequence[str],
        *,
        pass_fds: Sequence[int] = (),
        environment: Mapping[str, str] | None = None,
        forward: IO[str] | None = None,
    ) -> None:
        """Take what to run: the interpreter's arguments, for instance `["-m", "trainer"]`."""
        self.name = name
        self.num_restarts = 0
        self.last_lines: deque[str] = deque(maxlen=KEPT_LINES)
        self._arguments = list(arguments)
        self._pass_fds = tuple(pass_fds)
        self._environment = dict(os.environ if environment is None else environment)
        self._forward = forward
        self._process: subprocess.Popen[str] | None = None
        self._reader: threading.Thread | None = None
        self._backoff = Backoff()
        self._started_s = 0.0
        self._start_again_s: float | None = None

    @property
    def pid(self) -> int | None:
        """Its process id, or None when it does not run."""
        return self._process.pid if self._process is not None and self._process.poll() is None else None

    @property
    def status(self) -> int | None:
        """The exit status of the last process, None while it runs or before the first."""
        return self._process.poll() if self._process is not None else None

    def start(self) -> None:
        """Start it. In a session of its own: Ctrl-C reaches the supervisor alone, which decides the order."""
        self._process = subprocess.Popen(  # noqa: S603 - our own interpreter and modules
            bound_to_parent([sys.executable, *self._arguments]),
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            pass_fds=self._pass_fds,
            env=self._environment,
            start_new_session=True,
            text=True,
            errors="replace",
        )
        self._started_s = time.monotonic()
        self._start_again_s = None
        self._reader = threading.Thread(
            target=self._read_log, args=(self._process.stdout,), name=f"log of {self.name}", daemon=True
        )
        self._reader.start()

    def tend(self) -> None:
        """Notice a death, wait the back-off (without blocking), start again; say all of it."""
        now_s = time.monotonic()
        if self._start_again_s is not None:
            if now_s >= self._start_again_s:
                self._collect()
                self.num_restarts += 1
                self.start()
                log.warning("%s started again (process %s, restart %d)", self.name, self.pid, self.num_restarts)
            return
        status = self.status
        if status is not None:
            wait_s = self._backoff.after_death(lived_s=now_s - self._started_s)
            self._start_again_s = now_s + wait_s
            log.error("%s %s; starting it again in %.1f s", self.name, ended(status), wait_s)

    def terminate(self) -> None:
        """Ask it to finish and end (SIGTERM); do not start it again."""
        self._start_again_s = None
        if self.pid is not None and self._process is not None:
            self._process.terminate()

    def join(self, *, timeout_s: float) -> None:
        """Wait until it has ended; kill it at the deadline, and say so."""
        if self._process is None:
            return
        try:
            self._process.wait(timeout_s)
        except subprocess.TimeoutExpired:
            log.error("%s did not end within %g s of being asked: killed", self.name, timeout_s)
            self._process.kill()
            self._process.wait()
        self._collect()

    def last_words(self) -> str:
        """Its last log lines, for an error message."""
        if self._reader is not None and self.pid is None:
            self._reader.join(1.0)
        return "\n".join(f"  {line}" for line in list(self.last_lines)[-12:]) or "  (it logged nothing)"

    def _collect(self) -> None:
        """Close the pipe of a process that has ended, unless a grandchild still writes to it."""
        if self._process is None or self._process.stdout is None or self._reader is None:
            return
        self._reader.join(1.0)
        if not self._reader.is_alive():
            self._process.stdout.close()

    def _read_log(self, stream: IO[str]) -> None:
        for line in stream:
            self.last_lines.append(line.rstrip("\n"))
            if self._forward is not None:
                try:
                    self._forward.write(line)
                    self._forward.flush()
                except OSError:  # who read us is gone; the child's pipe must be emptied all the same
                    self._forward = None


class SupervisedBroker:
    """The embedded broker under the same care: started again, with a back-off, when its server dies."""

    def __init__(self, broker: Broker) -> None:
        """Take a broker that is not started yet."""
        self.broker = broker
        self._backoff = Backoff()
        self._started_s = 0.0
        self._start_again_s: float | None = None

    def start(self) -> None:
        """Start it and wait until it answers; raises BrokerError."""
        self.broker.start()
        self._started_s = time.monotonic()
        self._start_again_s = None

    def tend(self) -> None:
        """Notice a death, wait the back-off (without blocking), start again; say all of it."""
        now_s = time.monotonic()
        if self._start_again_s is None:
            status = self.broker.poll()
            if status is not None:
                wait_s = self._backoff.after_death(lived_s=now_s - self._started_s)
                self._start_again_s = now_s + wait_s
                log.error("broker %s; starting it again in %.1f s", ended(status), wait_s)
        elif now_s >= self._start_again_s:
            try:
                self.start()
                log.warning("broker started again (process %s)", self.broker.pid)
            except BrokerError as error:
                wait_s = self._backoff.after_death(lived_s=0.0)
                self._start_again_s = time.monotonic() + wait_s
                log.error("%s; trying again in %.1f s", error, wait_s)


def ended(status: int) -> str:
    """An exit status in words.

    >>> ended(1), ended(-9)
    ('ended with status 1', 'was ended by SIGKILL')
    """
    if status >= 0:
        return f"ended with status {status}"
    return f"was ended by {signal.Signals(-status).name}"
