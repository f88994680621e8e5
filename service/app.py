"""One worker process: its parts, its three listeners on one event loop, and its life from start to drain.

start: 1. the admin listener is up   2. kernels are loaded, the store is attached if there is one   3. HTTP and gRPC
       are up: a worker that is started again takes no connection from the others before it can answer; without a
       store, or when loading takes long, they open all the same and say `not_ready`   4. attached: ready
drain: 1. readiness says no   2. no new connections   3. what is under way is finished   4. the process ends
"""

import asyncio
import gc
import logging
import math
import signal
import socket
from dataclasses import dataclass
from typing import Any

from service import catalogue, tensors
from service.access import Access
from service.admission import Admission
from service.edge import App
from service.health import Health
from service.http_server import FINISH_S, http_server
from service.ingest import Ingest
from service.live_model import LiveModel
from service.meters import Meters
from service.operations import Operations
from service.parts import Parts
from service.proto_wire import Messages
from service.quota import Quotas
from service.request_log import RequestLog
from service.rest import build_admin_app, build_app
from service.rpc_server import RpcServer
from service.rpc_tracing import TracedCalls
from service.search import Search
from service.search_wire import Searches
from service.tls import Certificates
from service.tracing import Tracing
from service.watched import REFRESH_EVERY_S, Watched
from service.wire import Requests
from trainer import entities, events, hashing, live, live_scan, scorer
from trainer.board import Board
from trainer.errors import SchemaMismatch, SettingsError, StoreUnavailable
from trainer.schema import Schema
from trainer.settings import Settings
from trainer.stream import TIMEOUT_S, AsyncEventLog

ATTACH_EVERY_S = 0.1  # between looks for a store that is not there yet
WATCH_EVERY_S = 1.0  # between looks at our own health, for gRPC's health service and the age metric
PING_TIMEOUT_S = 0.5  # a probe that waits longer for the log than its prober waits for it would say nothing
OPEN_AFTER_S = 5.0  # the longest that a starting worker lets connections wait before it says that it is starting
NOTICE_S = 0.2  # from saying "not ready" to refusing connections: a load balancer should hear it first

logger = logging.getLogger("livebed.service")


@dataclass(frozen=True)
class Listeners:
    """Sockets that the supervisor opened and every worker accepts from."""

    http: socket.socket
    admin: socket.socket


class Worker:
    """One worker. `run` returns after a drain; an error that it raises should end the process."""

    def __init__(self, settings: Settings, *, worker: int, listeners: Listeners) -> None:
        self.settings = settings
        self.grpc_port = 0
        self._board = Board.open(settings.metrics_path, f"service-{worker}")
        self._log, self._probe = _event_log(settings, TIMEOUT_S), _event_log(settings, PING_TIMEOUT_S)
        self.parts = build_parts(settings, self._board, self._log, self._probe)
        serving = settings.serving
        certificates = None if serving.tls is None else Certificates(serving.tls)
        admin_certificates = None if serving.admin_tls is None else certificates
        timeout_s, meters = serving.request_timeout_s, self.parts.meters
        self._tracing = Tracing.start(settings, f"service-{worker}")
        app: App = build_app(self.parts)
        app = app if self._tracing is None else self._tracing.traced(app)
        self._http = http_server(app, meters, timeout_s=timeout_s, certificates=certificates)
        self._admin = http_server(
            build_admin_app(self.parts), meters, timeout_s=timeout_s, certificates=admin_certificates
        )
        self._rpc = RpcServer(
            self.parts, certificates, interceptors=[] if self._tracing is None else [TracedCalls(self._tracing)]
        )
        rotated = (self.parts.access, certificates)
        self._watched: list[Watched[Any]] = [one.watched for one in rotated if one is not None]
        self._listeners = listeners
        self._stop = asyncio.Event()
        self._loaded = asyncio.Event()  # kernels are there, and the store has been looked for once

    def ask_to_stop(self) -> None:
        """Begin the drain; from the event loop's thread."""
        self._stop.set()

    async def run(self, *, signals: bool = True) -> None:
        """Serve until SIGTERM, SIGINT or `ask_to_stop`."""
        if signals:
            for number in (signal.SIGTERM, signal.SIGINT):
                asyncio.get_running_loop().add_signal_handler(number, self._stop.set)
        self._board.gauge("livebed_build_info", version=catalogue.package_version()).set(1)
        async with asyncio.TaskGroup() as tasks:  # one that fails takes the others, and the process, with it
            tasks.create_task(self._admin.serve(sockets=[self._listeners.admin]))
            refreshing = tasks.create_task(self._refresh())
            starting = tasks.create_task(self._start())
            await self._loaded_or_stopped()
            tasks.create_task(self._http.serve(sockets=[self._listeners.http]))
            serving = self.settings.serving
            self.grpc_port = await self._rpc.start(serving.host, serving.grpc_port)
            watching = tasks.create_task(self._watch())
            await self._stop.wait()
            starting.cancel()
            watching.cancel()
            refreshing.cancel()
            await self._drain()
        await self._close()

    async def _start(self) -> None:
        health = self.parts.health
        health.attach_problem = "loading the kernels"
        await asyncio.to_thread(load_kernels)
        await asyncio.to_thread(self.parts.model.prepare)
        while not self._attached():
            self._loaded.set()
            await asyncio.sleep(ATTACH_EVERY_S)
        self._loaded.set()
        logger.info("ready: %s", self.parts.model.canary())
        health.started = True
        # What was made so far stays: the collector need not look at it again in the middle of a request.
        gc.collect()
        gc.freeze()

    async def _loaded_or_stopped(self) -> None:
        waits = [asyncio.create_task(event.wait()) for event in (self._loaded, self._stop)]
        await asyncio.wait(waits, timeout=OPEN_AFTER_S, return_when=asyncio.FIRST_COMPLETED)
        for wait in waits:
            wait.cancel()

    def _attached(self) -> bool:
        health = self.parts.health
        try:
            self.parts.model.attach()
        except (StoreUnavailable, SchemaMismatch) as error:
            if health.attach_problem != str(error):
                logger.info("waiting for a live store: %s", error)
            health.attach_problem = str(error)
            return False
        return True

    async def _refresh(self) -> None:
        """Read tokens and certificates again when they change; in a thread, as their disk may be slow."""
        while self._watched:
            await asyncio.sleep(REFRESH_EVERY_S)
            for one in self._watched:
                await asyncio.to_thread(one.refresh)

    async def _watch(self) -> None:
        # Looked at, too, because the client of the log can swallow a cancellation that comes with its answer.
        while not self._stop.is_set():
            report = await self.parts.health.report()
            if self._stop.is_set():
                return
            await self._rpc.show(report)
            self.parts.meters.ready.set(0 if report.status == "not_ready" else 1)
            if self.parts.health.started and report.ok("canary"):
                age_ms = self.parts.model.stamp().age_ms
                self.parts.meters.model_age.set(math.nan if age_ms is None else age_ms / 1000)
            await asyncio.sleep(WATCH_EVERY_S)

    async def _drain(self) -> None:
        logger.info("draining")
        self.parts.health.draining = True
        await self._rpc.show(await self.parts.health.report())
        await asyncio.sleep(NOTICE_S)
        self._http.should_exit = self._admin.should_exit = True
        await self._rpc.stop(FINISH_S)

    async def _close(self) -> None:
        await asyncio.to_thread(self.parts.search.close)
        await self._log.close()
        await self._probe.close()
        if self._tracing is not None:
            await asyncio.to_thread(self._tracing.close)
        self._board.close()
        logger.info("drained")


def build_parts(settings: Settings, board: Board, log: AsyncEventLog, probe: AsyncEventLog) -> Parts:
    """Everything that the faces call."""
    schema = Schema.from_settings(settings)
    model = LiveModel(settings, schema)
    requests = Requests(schema, settings.serving.limits)
    meters = Meters(board)
    return Parts(
        settings=settings,
        schema=schema,
        model=model,
        requests=requests,
        messages=Messages(requests),
        ingest=Ingest(schema, log, meters),
        health=Health(model, probe.ping, settings.metrics_path),
        meters=meters,
        operations=Operations(settings, model, log),
        admission=Admission(settings.serving.queue),
        quotas=Quotas(settings.serving.quota),
        request_log=RequestLog(settings.serving.slow_request_ms),
        search=Search(model, settings.serving.search),
        searches=Searches(requests),
        access=None if settings.serving.tokens_file is None else Access(settings.serving.tokens_file),
    )


def load_kernels() -> None:
    """Compile what a worker calls, or load it from the cache on disk: a minute, or half a second."""
    for module in (hashing, events, live, live_scan, entities, scorer, tensors):
        module.warm()


def _event_log(settings: Settings, timeout_s: float) -> AsyncEventLog:
    if settings.stream.url is None:
        raise SettingsError("stream.url", None, "the address of the event log (the supervisor sets it)")
    return AsyncEventLog(settings.stream.url, settings.stream.key, timeout_s=timeout_s)
