"""The HTTP server: uvicorn, with our grammar for what is not HTTP, and time and room for each connection bounded.

uvicorn gives an idle connection up, and nothing else: headers that never end, or trickle, would be waited for for ever
and kept in memory. Deadlines are looked at once a second for all connections, so that a request costs no timer.

    head        from the first byte (or the connection's begin) to the end of the headers: HEAD_S, MAX_HEAD_BYTES
    body        from there to its end: the time that reading it may take, and BODY_GRACE_S for the client to see why not
    reply       no progress for WRITE_S while more than the socket takes is waiting to be read
    handshake   HANDSHAKE_S
"""

import asyncio
import contextlib
import math
import resource
import socket
from collections.abc import Iterator
from typing import Any, Final

import uvicorn
from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol

from service.edge import App
from service.errors import PROBLEM_TYPE, ServiceError, problem_json
from service.meters import Meters
from service.tls import Certificates

KEEP_ALIVE_S: Final = 75  # longer than a client's own idle time, so that it is rarely the server that closes
FINISH_S: Final = 10.0  # what is under way may take so long to finish at the end; the supervisor waits longer
HANDSHAKE_S: Final = 10.0
HEAD_S: Final = 10.0
BODY_GRACE_S: Final = 5.0
WRITE_S: Final = 30.0
SWEEP_TICKS: Final = 10  # of uvicorn's, 0.1 s each
MAX_HEAD_BYTES: Final = 64 * 1024
# Open connections of one listener of one worker, fewer where the process may not have twice as many files.
MAX_CONNECTIONS: Final = 8192


class Config(uvicorn.Config):
    """uvicorn's, and what our connections need."""

    meters: Meters
    body_s: float
    max_connections: int


class Connection(HttpToolsProtocol):
    """HTTP/1.1 on one connection, with deadlines."""

    config: Config
    deadline_s: float = math.inf  # what is being received has to be there by then
    blocked_s: float = math.inf  # the client has to have read something by then
    _in_head = True
    _head_bytes = 0

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override] # as uvicorn's
        """Begin, unless there are too many."""
        super().connection_made(transport)
        self.deadline_s = self.loop.time() + HEAD_S
        if len(self.connections) > self.config.max_connections:
            self._refuse(ServiceError("overloaded", f"{self.config.max_connections} connections are open here"))

    def data_received(self, data: bytes) -> None:
        """Parse, and count what does not get to an end."""
        was_in_head = self._in_head
        super().data_received(data)
        if self._in_head:
            if was_in_head:
                self._head_bytes += len(data)
                if self._head_bytes > MAX_HEAD_BYTES:
                    limit = ("head_bytes", MAX_HEAD_BYTES)
                    self._refuse(ServiceError("too_large", f"headers have at most {MAX_HEAD_BYTES} bytes", limit=limit))
        elif self.deadline_s == math.inf and self.cycle.response_complete and self.timeout_keep_alive_task is None:
            self.deadline_s = self.loop.time() + HEAD_S  # empty lines: uvicorn's timer is off, and nothing has begun

    def on_message_begin(self) -> None:
        """The first byte of a request."""
        super().on_message_begin()
        self._in_head, self._head_bytes = True, 0
        self.deadline_s = self.loop.time() + HEAD_S

    def on_headers_complete(self) -> None:
        """The head is there, the body follows."""
        self._in_head = False
        self.deadline_s = self.loop.time() + self.config.body_s
        super().on_headers_complete()

    def on_message_complete(self) -> None:
        """All of a request is there; what it takes to answer it is not the client's fault."""
        self.deadline_s = math.inf
        super().on_message_complete()

    def pause_writing(self) -> None:
        """The client reads slower than we write."""
        self.blocked_s = self.loop.time() + WRITE_S
        super().pause_writing()

    def resume_writing(self) -> None:
        """It has read."""
        self.blocked_s = math.inf
        super().resume_writing()

    def is_overdue(self, now_s: float) -> bool:
        """Whether to give the connection up."""
        if self.transport.is_closing():  # what is not sent yet may still be read, but not for ever
            self.deadline_s = min(self.deadline_s, now_s + WRITE_S)
        return now_s > self.deadline_s or now_s > self.blocked_s

    def send_400_response(self, msg: str) -> None:
        """Answer what is not HTTP, and close."""
        self._answer(ServiceError("malformed", msg))

    def _refuse(self, error: ServiceError) -> None:
        self.config.meters.refused(error.code)
        self._answer(error)

    def _answer(self, error: ServiceError) -> None:
        if self.transport.is_closing():
            return
        body = problem_json(error, request_id="", instance="")
        head = f"HTTP/1.1 {error.kind.http} {error.kind.title}\r\ncontent-type: {PROBLEM_TYPE}\r\n"
        if error.kind.retry_after_s is not None:
            head += f"retry-after: {error.kind.retry_after_s}\r\n"
        self.transport.write(f"{head}content-length: {len(body)}\r\nconnection: close\r\n\r\n".encode() + body)
        self.transport.close()


class Server(uvicorn.Server):
    """A server that leaves signals to the worker, which has more to stop, and looks at its connections' deadlines."""

    config: Config

    @contextlib.contextmanager
    def capture_signals(self) -> Iterator[None]:
        """Capture none."""
        yield

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        """As uvicorn's; with TLS it would wait a minute for a handshake, and has no parameter for it."""
        if not self.config.is_ssl or sockets is None:
            return await super().startup(sockets)
        await self.lifespan.startup()
        loop = asyncio.get_running_loop()
        self.servers = [
            await loop.create_server(
                self._connection,
                sock=opened,
                backlog=self.config.backlog,
                ssl=self.config.ssl,
                ssl_handshake_timeout=HANDSHAKE_S,
                ssl_shutdown_timeout=HANDSHAKE_S,
            )
            for opened in sockets
        ]
        self.started = True
        return None

    async def on_tick(self, counter: int) -> bool:
        """Give up connections that are overdue, once a second."""
        if counter % SWEEP_TICKS == 0:
            now_s = asyncio.get_running_loop().time()
            for connection in list(self.server_state.connections):
                if isinstance(connection, Connection) and connection.is_overdue(now_s):
                    self.config.meters.refused("slow_client")
                    connection.transport.abort()
        return await super().on_tick(counter)

    def _connection(self) -> asyncio.Protocol:
        return Connection(self.config, self.server_state, self.lifespan.state)


def http_server(app: App, meters: Meters, *, timeout_s: float, certificates: Certificates | None = None) -> Server:
    """A server of an application; `timeout_s`: how long the application waits for a body."""

    def context(*_: Any) -> Any:
        return certificates.server_context() if certificates is not None else None

    config = Config(
        app,
        http=Connection,
        ws="none",
        lifespan="off",
        log_config=None,
        access_log=False,
        server_header=False,
        proxy_headers=False,
        timeout_keep_alive=KEEP_ALIVE_S,
        timeout_graceful_shutdown=int(FINISH_S),
        ssl_context_factory=context if certificates is not None else None,
    )
    config.meters = meters
    config.body_s = timeout_s + BODY_GRACE_S
    config.max_connections = max_connections()
    return Server(config)


def max_connections() -> int:
    """What one listener may have open."""
    files, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    return min(MAX_CONNECTIONS, files // 2) if files != resource.RLIM_INFINITY else MAX_CONNECTIONS
