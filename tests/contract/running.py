"""The real parts, run by tests: a trainer and a worker on threads of their own, on real sockets and a real broker."""

import asyncio
import socket
import threading
import time
from collections.abc import Callable
from types import TracebackType
from typing import Any, Self

import httpx
import uvloop

from service.app import Listeners, Worker
from service.client import Client
from trainer.loop import Trainer
from trainer.settings import Settings

KERNELS_S = 180.0  # where no kernel has been compiled yet, the first start does it


def wait_until(condition: Callable[[], Any], *, within_s: float = 20.0) -> Any:
    """Poll until the condition holds, and return what it returned."""
    deadline_s = time.monotonic() + within_s
    while not (found := condition()):
        assert time.monotonic() < deadline_s, "did not happen in time"
        time.sleep(0.005)
    return found


def listener() -> socket.socket:
    """A listening socket on a free port of this machine."""
    opened = socket.create_server(("127.0.0.1", 0), backlog=128)
    opened.setblocking(False)
    return opened


class RunningTrainer:
    """A trainer on a thread."""

    def __init__(self, settings: Settings) -> None:
        self._stop = threading.Event()
        self._thread = threading.Thread(target=lambda: Trainer(settings).run(self._stop), daemon=True)

    def __enter__(self) -> Self:
        self._thread.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._stop.set()
        self._thread.join(30)
        assert not self._thread.is_alive()


class RunningWorker:
    """A worker on a thread, with an HTTP client and an SDK client of it."""

    def __init__(self, settings: Settings, worker: int = 0) -> None:
        self.settings = settings
        self._number = worker
        self._thread = threading.Thread(target=lambda: uvloop.run(self._run()), daemon=True)
        self._started = threading.Event()

    async def _run(self) -> None:
        self._listeners = Listeners(listener(), listener())
        ports = [opened.getsockname()[1] for opened in (self._listeners.http, self._listeners.admin)]
        self.worker = Worker(self.settings, worker=self._number, listeners=self._listeners)
        self.loop = asyncio.get_running_loop()
        self.http_port, self.admin_port = ports
        running = asyncio.create_task(self.worker.run(signals=False))
        while not self.worker.grpc_port and not running.done():
            await asyncio.sleep(0.01)
        self._started.set()
        await running

    def __enter__(self) -> Self:
        self._thread.start()
        assert self._started.wait(KERNELS_S)
        self.http = httpx.Client(base_url=f"http://127.0.0.1:{self.http_port}", timeout=20)
        self.admin = httpx.Client(base_url=f"http://127.0.0.1:{self.admin_port}", timeout=20)
        self.grpc_target = f"127.0.0.1:{self.worker.grpc_port}"
        self.sdk = Client(self.grpc_target, timeout_s=20)
        return self

    def wait_ready(self) -> Self:
        wait_until(lambda: self.http.get("/readyz").status_code == 200, within_s=KERNELS_S)
        return self

    def stop(self) -> None:
        if self._thread.is_alive():
            self.loop.call_soon_threadsafe(self.worker.ask_to_stop)
            self._thread.join(30)

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        for client in (self.sdk, self.http, self.admin):
            client.close()
        self.stop()
        assert not self._thread.is_alive()
