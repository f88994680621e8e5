"""One command, one system: broker, trainer and service workers as children of this process.

Start, in this order:
    1. ports (the cheapest thing to fail)    2. run directory and its locks    3. broker, unless stream.url is set
    4. settings.json with what was resolved  5. trainer and workers            6. wait until they are ready
Stop, in this order: workers (they drain), trainer (its last checkpoint), broker, run directory.
Whatever dies in between is started again with a back-off, and said so.
"""

import contextlib
import logging
import os
import signal
import socket
import sys
import threading
import time
import urllib.error
import urllib.request
from collections.abc import Iterator, Sequence
from pathlib import Path
from types import FrameType, TracebackType
from typing import IO, Final, Self

from service.ports import listen, reserve
from service.run_dir import PARTS, RunDirectory, directory_errors, remove_stale
from service.supervised import Supervised, SupervisedBroker, ended
from service.tls import read_certificate
from service.tokens import read_tokens
from trainer import board
from trainer.broker import Broker
from trainer.errors import LivebedError
from trainer.settings import ENVIRONMENT_PREFIX, Settings

# The first start on a machine compiles the kernels, which takes up to a minute on a busy core.
READY_TIMEOUT_S: Final = 180.0
DRAIN_TIMEOUT_S: Final = 20.0
CHECKPOINT_TIMEOUT_S: Final = 60.0
BROKER_MEMORY_PART: Final = 4  # the embedded broker may use this part of the machine's memory, unless it is told
TEND_EVERY_S: Final = 0.1
PROBE_TIMEOUT_S: Final = 2.0

log = logging.getLogger("livebed.supervisor")


class StartCancelledError(LivebedError):
    """A signal asked to stop before everything was ready."""


class Supervisor:
    """Runs the parts of one system; use it from the main thread.

    with Supervisor(settings) as running:
        running.serve_forever()
    """

    def __init__(
        self, settings: Settings, *, parts: Sequence[str] = PARTS, forward: IO[str] | None = sys.stderr
    ) -> None:
        """Take the settings and which parts to run; children's log lines go to `forward`."""
        self.settings = settings
        self.parts = tuple(parts)
        self._forward = forward
        self._stop_asked = threading.Event()
        self._sockets: dict[str, socket.socket] = {}
        self._run_directory: RunDirectory | None = None
        self._broker: SupervisedBroker | None = None
        self._children: list[Supervised] = []

    @property
    def http_url(self) -> str:
        """Where the service answers, from this machine."""
        serving = self.settings.serving
        return _url(serving.host, serving.http_port, scheme="http" if serving.tls is None else "https")

    @property
    def pids(self) -> dict[str, int | None]:
        """The children's process ids by name."""
        broker = {"broker": self._broker.broker.pid} if self._broker is not None else {}
        return broker | {child.name: child.pid for child in self._children}

    @property
    def num_restarts(self) -> int:
        """How often a trainer or worker had to be started again."""
        return sum(child.num_restarts for child in self._children)

    def start(self, *, timeout_s: float = READY_TIMEOUT_S) -> None:
        """Start everything and wait until it is ready; on failure stop what was started and raise.

        Raises:
            LivebedError: a port or directory in use, a child that ended, or the deadline; says which and why.
        """
        try:
            self._check()
            self._open_ports()
            self._open_run_directory()
            self._start_broker()
            self._start_children()
            self._wait_ready(timeout_s)
        except BaseException:
            self.stop()
            raise

    def tend(self) -> None:
        """Start again what has died, if its back-off has passed; never blocks for long."""
        if self._broker is not None:
            self._broker.tend()
        for child in self._children:
            child.tend()

    def run(self) -> None:
        """Start, tend the children until SIGINT, SIGTERM or `ask_to_stop`, and stop everything in order."""
        with self.signals():
            try:
                self.start()
                log.info("ready: %s", self.http_url if "service" in self.parts else "the trainer publishes")
                while not self.wait(TEND_EVERY_S):
                    self.tend()
                log.info("stopping")
            except StartCancelledError:
                log.info("asked to stop before everything was ready")
            finally:
                self.stop()

    def wait(self, seconds: float) -> bool:
        """Sleep so long, or until asked to stop; True if it was asked."""
        return self._stop_asked.wait(seconds)

    def ask_to_stop(self) -> None:
        """Let `run` return; may be called from any thread."""
        self._stop_asked.set()

    @property
    def stop_asked(self) -> bool:
        """Whether a signal or `ask_to_stop` came."""
        return self._stop_asked.is_set()

    @contextlib.contextmanager
    def signals(self) -> Iterator[None]:
        """While inside, SIGINT, SIGTERM and SIGHUP ask to stop instead of ending this process."""

        def ask(number: int, frame: FrameType | None) -> None:
            if self._stop_asked.is_set():  # asked twice: in a hurry
                self._kill_children()
            self._stop_asked.set()

        numbers = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
        before = {number: signal.signal(number, ask) for number in numbers}
        try:
            yield
        finally:
            for number, handler in before.items():
                signal.signal(number, handler)

    def stop(self) -> None:
        """Stop everything in order and remove what only lives while the system runs; may be called again."""
        workers = [child for child in self._children if child.name != "trainer"]
        trainers = [child for child in self._children if child.name == "trainer"]
        for group, timeout_s in ((workers, DRAIN_TIMEOUT_S), (trainers, CHECKPOINT_TIMEOUT_S)):
            for child in group:
                child.terminate()
            for child in group:
                child.join(timeout_s=timeout_s)
        self._children.clear()
        if self._broker is not None:
            self._broker.broker.stop()
            self._broker = None
        for listener in self._sockets.values():
            listener.close()
        self._sockets.clear()
        if self._run_directory is not None:
            self._run_directory.release()
            self._run_directory = None

    def __enter__(self) -> Self:
        """Start."""
        self.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        """Stop."""
        self.stop()

    def _check(self) -> None:
        if self.settings.stream.url is None and set(self.parts) != set(PARTS):
            raise LivebedError(
                "stream.url: trainer and service that run apart need one log between them; set stream.url or "
                "LIVEBED_REDIS_URL, or run both with `livebed up`"
            )

        if "service" in self.parts:  # each worker reads these; a mistake is better said once and at once
            if self.settings.serving.tokens_file is not None:
                read_tokens(self.settings.serving.tokens_file)
            if self.settings.serving.tls is not None:
                read_certificate(self.settings.serving.tls)

    def _open_ports(self) -> None:
        if "service" not in self.parts:
            return
        serving = self.settings.serving
        for name, opener in (("http_port", listen), ("admin_port", listen), ("grpc_port", reserve)):
            host = serving.admin_host if name == "admin_port" else serving.host
            self._sockets[name] = opener(host, getattr(serving, name), field=f"serving.{name}")
        ports = {name: opened.getsockname()[1] for name, opened in self._sockets.items()}
        self.settings = self.settings.model_copy(update={"serving": serving.model_copy(update=ports)})

    def _open_run_directory(self) -> None:
        path = self.settings.run_path.absolute()
        if self.settings.run_dir is None:
            for removed in remove_stale(path.parent, f"livebed-{os.getuid()}-"):
                log.warning("removed %s, left behind by a system that was killed", removed)
        with directory_errors("run_dir"):
            self._run_directory = RunDirectory(path, self.parts)
        if "trainer" in self.parts:
            with directory_errors("data_dir"):
                (self.settings.data_dir / self.settings.name).mkdir(parents=True, exist_ok=True)
        self.settings = self.settings.model_copy(
            update={"run_dir": path, "data_dir": self.settings.data_dir.absolute()}
        )

    def _start_broker(self) -> None:
        if self.settings.stream.url is not None:
            return
        data_dir = self.settings.data_dir / self.settings.name / "valkey"
        self._broker = SupervisedBroker(
            Broker(data_dir, self.settings.run_path / "valkey.sock", max_memory_bytes=_broker_memory(self.settings))
        )
        self._broker.start()
        stream = self.settings.stream.model_copy(update={"url": self._broker.broker.url})
        self.settings = self.settings.model_copy(update={"stream": stream})

    def _start_children(self) -> None:
        settings_path = self._write_settings()
        if "trainer" in self.parts:
            self._children.append(self._child("trainer", "trainer", ["-m", "trainer"], settings_path))
        if "service" in self.parts:
            http, admin = (self._sockets[name].fileno() for name in ("http_port", "admin_port"))
            listeners = ["--http-fd", str(http), "--admin-fd", str(admin)]
            for worker in range(self.settings.serving.workers):
                command = ["-m", "service", "--worker", str(worker), *listeners]
                self._children.append(self._child(f"service-{worker}", "service", command, settings_path))
        for child in self._children:
            child.start()

    def _child(self, name: str, part: str, command: list[str], settings_path: Path) -> Supervised:
        assert self._run_directory is not None  # noqa: S101 - opened before any child
        sockets = [opened.fileno() for opened in self._sockets.values()] if part == "service" else []
        # What the environment says is in the settings file already; ports in it are those really opened.
        inherited = {name: value for name, value in os.environ.items() if not name.startswith(ENVIRONMENT_PREFIX)}
        return Supervised(
            name,
            [*command, "--settings", str(settings_path)],
            pass_fds=[*sockets, self._run_directory.lock_fds[part]],
            environment=inherited | {"PYTHONUNBUFFERED": "1"},
            forward=self._forward,
        )

    def _write_settings(self) -> Path:
        name = "settings.json" if set(self.parts) == set(PARTS) else f"settings-{'-'.join(self.parts)}.json"
        path = self.settings.run_path / name
        path.touch(mode=0o600)
        path.write_text(self.settings.model_dump_json(indent=1))
        return path

    def _wait_ready(self, timeout_s: float) -> None:
        deadline_s = time.monotonic() + timeout_s
        while not self._ready():
            for child in self._children:
                if child.status is not None:
                    reason = f"{child.name} {ended(child.status)} while starting"
                    raise LivebedError(f"{reason}; its last log lines:\n{child.last_words()}")
            if time.monotonic() > deadline_s:
                words = "\n".join(f"{child.name}:\n{child.last_words()}" for child in self._children)
                raise LivebedError(f"not ready within {timeout_s:g} s; the last log lines:\n{words}")
            if self.wait(TEND_EVERY_S):
                raise StartCancelledError("asked to stop while starting")

    def _ready(self) -> bool:
        """Service: /readyz (with our trainer) or /livez (the trainer is elsewhere). Trainer alone: a live store."""
        if "service" not in self.parts:
            return (self.settings.store_path / "CURRENT").exists()
        if self.settings.serving.tls is not None:  # which may want a client's certificate; we have none
            ready = board.read(self.settings.metrics_path).value("livebed_ready")
            return ready == 1 or (ready == 0 and "trainer" not in self.parts)
        probe = "/readyz" if "trainer" in self.parts else "/livez"
        return answers(self.http_url + probe)

    def _kill_children(self) -> None:
        for pid in (child.pid for child in self._children):
            if pid is not None:
                os.kill(pid, signal.SIGKILL)


def answers(url: str) -> bool:
    """Whether a GET is answered with 200."""
    try:
        with urllib.request.urlopen(url, timeout=PROBE_TIMEOUT_S) as reply:  # noqa: S310 - our own http URL
            return bool(reply.status == 200)
    except (urllib.error.URLError, OSError):
        return False


def _url(host: str, port: int, *, scheme: str) -> str:
    """A URL that reaches a listener from this machine, also one that listens on every address."""
    reachable = {"0.0.0.0": "127.0.0.1", "::": "::1", "": "127.0.0.1"}.get(host, host)  # noqa: S104
    return f"{scheme}://[{reachable}]:{port}" if ":" in reachable else f"{scheme}://{reachable}:{port}"


def _broker_memory(settings: Settings) -> int:
    """Bytes that the embedded broker may use."""
    wanted = settings.stream.broker_memory_bytes
    if wanted is not None:
        return int(wanted)
    return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") // BROKER_MEMORY_PART
