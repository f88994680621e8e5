"""The outermost ASGI layer: request ids, limits, headers, metrics, and an answer in our grammar whatever happens."""

from collections.abc import Awaitable, Callable, MutableMapping
from typing import Any

from service.access import Gate
from service.errors import (
    PROBLEM_TYPE,
    ServiceError,
    as_service_error,
    is_open_inference,
    open_inference_json,
    problem_json,
)
from service.exchange import Exchange
from service.limits import MAX_IN_FLIGHT, Message, Receive, check_length, is_drainable
from service.live_model import Stamp
from service.meters import Meters
from service.quota import Quotas, client_key
from service.request_log import RequestLog
from trainer.settings import Limits

Scope = MutableMapping[str, Any]
Send = Callable[[Message], Awaitable[None]]
App = Callable[[Scope, Receive, Send], Awaitable[None]]

# Refused before the body was read; what is left of it is read, or the connection closed, whichever is cheaper.
UNREAD = frozenset({"too_large", "unauthenticated", "permission_denied"})
EXCHANGE = "livebed.exchange"  # where an exchange lies in the ASGI scope
# "Not ready" is their answer, not a refusal.
PROBES = frozenset(
    {"/livez", "/readyz", "/startupz", "/v2/health/live", "/v2/health/ready", "/v2/models/{model}/ready"}
)


class Edge:
    """Wraps an ASGI application; the only place that knows every request's end."""

    def __init__(
        self,
        app: App,
        meters: Meters,
        limits: Limits,
        gate: Gate | None,
        *,
        quotas: Quotas,
        request_log: RequestLog,
        stamp: Callable[[], Stamp | None],
    ) -> None:
        """`stamp`: which model is served, for answers that read no row."""
        self._app = app
        self._meters = meters
        self._limits = limits
        self._gate = gate
        self._quotas = quotas
        self._log = request_log
        self._stamp = stamp
        self._num_in_flight = 0

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Answer one request; what is not HTTP is refused by the server already."""
        exchange = Exchange(_header(scope, b"x-request-id"))
        exchange.client = client_key(None, scope["client"][0] if scope["client"] else "")
        scope[EXCHANGE] = exchange
        reply = _Reply(exchange, send, self._served)
        self._num_in_flight += 1
        try:
            if self._num_in_flight > MAX_IN_FLIGHT:
                raise ServiceError("overloaded", f"{MAX_IN_FLIGHT} requests are under way here")
            if self._gate is not None:
                exchange.token = self._gate.admit(scope["path"], _raw_header(scope, b"authorization"))
                if exchange.token is not None:
                    exchange.client = client_key(exchange.token.name, exchange.client)
            check_length(scope["headers"], self._limits)
            await self._app(scope, receive, reply)
        except Exception as error:
            await self._answer_error(error, scope, reply)
        finally:
            self._num_in_flight -= 1
            exchange.finish()
            self._quotas.charge(exchange.client, exchange.num_items)
            self._count(exchange, reply)
            if exchange.elapsed_s > self._log.slow_s and not exchange.is_stream:
                self._log.slow(exchange, status=str(reply.status), traceparent=_header(scope, b"traceparent"))

    def _served(self, exchange: Exchange) -> Stamp | None:
        """Which model is served, for callers who may know: where there are tokens, those who have one."""
        return self._stamp() if self._gate is None or exchange.token is not None else None

    async def _answer_error(self, error: Exception, scope: Scope, reply: "_Reply") -> None:
        """An error that no handler of the application has turned into an answer."""
        answer = as_service_error(error)
        if answer.code == "internal":
            self._log.failed(scope[EXCHANGE], error, traceparent=_header(scope, b"traceparent"))
        if reply.status:  # the reply has begun: the server closes the connection
            return
        status, headers, body = problem_reply(answer, scope, max_bytes=self._limits.body_bytes)
        raw = [(name.encode(), value.encode()) for name, value in headers.items()]
        await reply({"type": "http.response.start", "status": status, "headers": raw})
        await reply({"type": "http.response.body", "body": body})

    def _count(self, exchange: Exchange, reply: "_Reply") -> None:
        took_s = reply.began_s if exchange.is_stream else exchange.elapsed_s
        self._meters.request(face="http", route=exchange.route, code=str(reply.status), duration_s=took_s)
        if exchange.code is not None and exchange.route not in PROBES:
            self._meters.refused(exchange.code)


class _Reply:
    """Sends a reply, with our headers added; remembers its status."""

    def __init__(self, exchange: Exchange, send: Send, served: Callable[[Exchange], Stamp | None]) -> None:
        self.status = 0
        self.began_s = 0.0  # after the arrival
        self._exchange = exchange
        self._send = send
        self._served = served

    async def __call__(self, message: Message) -> None:
        if message["type"] == "http.response.start":
            self.status = message["status"]
            self.began_s = self._exchange.elapsed_s
            if self._exchange.stamp is None:
                self._exchange.stamp = self._served(self._exchange)
            added = [(name.encode(), value.encode()) for name, value in self._exchange.headers()]
            message["headers"] = [*message["headers"], *added]
        await self._send(message)


def problem_reply(
    error: ServiceError, scope: Scope, *, max_bytes: int, **more: Any
) -> tuple[int, dict[str, str], bytes]:
    """Status, headers and body of an error; says so in the exchange. `max_bytes`: the limit of a body."""
    exchange: Exchange = scope[EXCHANGE]
    exchange.code = error.code
    if is_open_inference(scope["path"]):
        body, kind = open_inference_json(error), "application/json"
    else:
        body, kind = problem_json(error, request_id=exchange.request_id, instance=scope["path"], **more), PROBLEM_TYPE
    headers = {"content-type": kind, "content-length": str(len(body))}
    if error.retry_after_s is not None:
        headers["retry-after"] = str(error.retry_after_s)
    if error.code == "unauthenticated":
        headers["www-authenticate"] = "Bearer"
    if error.code in UNREAD and not is_drainable(scope["headers"], max_bytes):
        headers["connection"] = "close"
    return error.kind.http, headers, body


def _header(scope: Scope, wanted: bytes) -> str | None:
    value = _raw_header(scope, wanted)
    return None if value is None else value.decode("latin-1")


def _raw_header(scope: Scope, wanted: bytes) -> bytes | None:
    for name, value in scope["headers"]:
        if name == wanted:
            found: bytes = value
            return found
    return None
