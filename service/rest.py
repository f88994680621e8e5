"""The HTTP face: read, call, answer. Bodies are bytes in and bytes out; pydantic has no part in a request."""

import time
from collections.abc import Awaitable, Callable
from typing import Any

import msgspec
import orjson
from fastapi import FastAPI, Request, Response
from starlette.exceptions import HTTPException
from starlette.responses import StreamingResponse

from service import answers, catalogue, openapi, packed_answers
from service.access import admin_gate, public_gate
from service.admission import Lane
from service.edge import EXCHANGE, Edge, problem_reply
from service.errors import ServiceError, as_service_error
from service.exchange import Exchange, wanted_timeout_s
from service.hot_path import CLIENT_GONE, HotPath
from service.limits import (
    BODY_TYPES,
    EVENT_TYPES,
    JSON_TYPES,
    MSGPACK_TYPES,
    ClientGone,
    check_type,
    is_gone,
    read_body,
)
from service.live_feed import EVENT_STREAM_TYPE, LiveFeed
from service.live_model import Scores
from service.negotiation import accepted
from service.oip_rest import OpenInferenceFace
from service.openapi_access import with_tokens
from service.operations import capacity_of
from service.parts import Parts
from service.scopes import http_scope
from service.search_wire import search_json
from service.unpack import is_packed, unpack
from trainer import board
from trainer.errors import LivebedError
from trainer.events import RawEvents, Rejection
from trainer.settings import Limits

Handler = Callable[[Request], Awaitable[Response]]
# No pages that load scripts from elsewhere; a path has one spelling.
PLAIN: dict[str, Any] = {"docs_url": None, "redoc_url": None, "redirect_slashes": False}
FORMS = [answers.JSON_TYPE, answers.BINARY_TYPE, packed_answers.MSGPACK_TYPE]
ROUTING_CODES = {404: "not_found", 405: "method_not_allowed"}


def build_app(parts: Parts) -> Edge:
    """The public application."""
    app = FastAPI(openapi_url="/openapi.json", **PLAIN, exception_handlers=_error_handlers(parts.limits))
    document = openapi.document(parts.settings, parts.requests)
    if parts.access is not None:
        document = with_tokens(document)
    app.openapi = lambda: document  # type: ignore[method-assign] # made from our own types, not from signatures
    face = Face(parts)
    for path, method, handler in face.routes():
        _add_route(app, path, method, handler)
    hot = {path: _routed(path, method, handler) for path, method, handler in face.routes() if method == "POST"}
    return Edge(
        HotPath(app, hot),
        parts.meters,
        parts.limits,
        public_gate(parts.access),
        quotas=parts.quotas,
        request_log=parts.request_log,
        stamp=parts.model.stamp_if_any,
    )


def build_admin_app(parts: Parts) -> Edge:
    """The admin application: metrics and health, for this machine alone."""
    face = Face(parts)

    async def metrics(request: Request) -> Response:
        return Response(board.render(parts.settings.metrics_path), media_type=board.CONTENT_TYPE)

    app = FastAPI(openapi_url="/openapi.json", **PLAIN, exception_handlers=_error_handlers(parts.limits))
    document = openapi.admin_document(parts.settings)
    if parts.access is not None:
        document = with_tokens(document)
    app.openapi = lambda: document  # type: ignore[method-assign] # made from our own types, not from signatures
    _add_route(app, "/metrics", "GET", metrics)
    for path, method, handler in face.admin_routes():
        _add_route(app, path, method, handler)
    return Edge(
        app,
        parts.meters,
        parts.limits,
        admin_gate(parts.access),
        quotas=parts.quotas,
        request_log=parts.request_log,
        stamp=parts.model.stamp_if_any,
    )


def _add_route(app: FastAPI, path: str, method: str, handler: Handler) -> None:
    """A plain route: one of FastAPI's own takes 45 us more, to resolve dependencies that there are none of."""
    app.add_route(path, _routed(path, method, handler), methods=[method])


def _routed(path: str, method: str, handler: Handler) -> Handler:
    """The handler, for callers who may: what every route does first."""
    scope = http_scope(method, path)

    async def routed(request: Request) -> Response:
        exchange = _exchange(request)
        exchange.route = path
        if exchange.token is not None:
            exchange.token.demand(scope)
        return await handler(request)

    return routed


class Face:
    """The handlers."""

    def __init__(self, parts: Parts) -> None:
        self.parts = parts
        self._timeout_s = parts.settings.serving.request_timeout_s
        self._live = LiveFeed(parts)

    def routes(self) -> list[tuple[str, str, Handler]]:
        """Path, method and handler of every public call."""
        return [
            ("/v1/events", "POST", self.events),
            ("/v1/score", "POST", self.score),
            ("/v1/rank", "POST", self.rank),
            ("/v1/tables/{table}/embeddings:lookup", "POST", self.lookup),
            ("/v1/tables/{table}/embeddings:search", "POST", self.search),
            ("/v1/tables/{table}/embeddings/{id}", "GET", self.inspect),
            ("/v1/model", "GET", self.model),
            ("/v1/model/versions", "GET", self.versions),
            ("/v1/tables", "GET", self.tables),
            ("/v1/info", "GET", self.info),
            ("/v1/live", "GET", self.live),
            ("/livez", "GET", self.livez),
            ("/readyz", "GET", self.readyz),
            ("/startupz", "GET", self.startupz),
            *OpenInferenceFace(self.parts, self._body).routes(),
        ]

    def admin_routes(self) -> list[tuple[str, str, Handler]]:
        """Path, method and handler of every call of the admin port, metrics aside."""
        return [
            ("/v1/tables/{table}/embeddings/{id}", "DELETE", self.forget),
            ("/v1/tables/{table}:resize", "POST", self.resize),
            ("/v1/model/versions/{version}:activate", "POST", self.activate),
            ("/v1/model:release", "POST", self.release),
            ("/v1/checkpoints", "POST", self.create_checkpoint),
            ("/livez", "GET", self.livez),
            ("/readyz", "GET", self.readyz),
        ]

    async def events(self, request: Request) -> Response:
        """Append events to the log."""
        body = await self._body(request, EVENT_TYPES, self.parts.admission.writes)
        exchange = _exchange(request)
        raw, rejected = self._parse_events(body, msgpack=exchange.is_msgpack)
        exchange.num_items = raw.inputs.count + len(rejected)
        published = await self.parts.ingest.publish(raw, rejected, exchange)
        return _json(answers.publish_json(published), status=202)

    async def score(self, request: Request) -> Response:
        """Score candidates."""
        kind = accepted(request.headers.get("accept"), FORMS)
        body = await self._body(request, BODY_TYPES, self.parts.admission.reads)
        msgpack = _exchange(request).is_msgpack
        scores = self.parts.model.score(self.parts.requests.score(body, msgpack=msgpack))
        exchange = _answered(request, scores)
        if kind == answers.JSON_TYPE:
            return _json(answers.score_json(scores, request_id=exchange.request_id))
        if kind == packed_answers.MSGPACK_TYPE:
            return Response(packed_answers.score_msgpack(scores, request_id=exchange.request_id), media_type=kind)
        return Response(packed_answers.score_bytes(scores), media_type=kind)

    async def rank(self, request: Request) -> Response:
        """Rank candidates."""
        kind = accepted(request.headers.get("accept"), FORMS)
        body = await self._body(request, BODY_TYPES, self.parts.admission.reads)
        candidates, top_k = self.parts.requests.rank(body, msgpack=_exchange(request).is_msgpack)
        scores = self.parts.model.score(candidates)
        exchange, best_K = _answered(request, scores), scores.best(top_k)
        if kind == answers.JSON_TYPE:
            return _json(answers.rank_json(scores, best_K, request_id=exchange.request_id))
        if kind == packed_answers.MSGPACK_TYPE:
            return Response(
                packed_answers.rank_msgpack(scores, best_K, request_id=exchange.request_id), media_type=kind
            )
        count = {"x-rank-count": str(len(best_K))}
        return Response(packed_answers.rank_bytes(scores, best_K), media_type=kind, headers=count)

    async def lookup(self, request: Request) -> Response:
        """Rows of ids."""
        kind = accepted(request.headers.get("accept"), FORMS)
        body = await self._body(request, BODY_TYPES, self.parts.admission.reads)
        table = self.parts.model.table(request.path_params["table"])
        exchange, began_s = _exchange(request), time.perf_counter()
        rows = self.parts.model.lookup(table, self.parts.requests.lookup(body, msgpack=exchange.is_msgpack))
        exchange.read(time.perf_counter() - began_s, model_s=0.0)
        self.parts.meters.looked_up(table.name, rows.status_N)
        exchange.stamp = rows.stamp
        exchange.num_items = len(rows.status_N)
        exchange.check_deadline()
        if kind == answers.JSON_TYPE:
            return _json(answers.lookup_json(rows))
        if kind == packed_answers.MSGPACK_TYPE:
            return Response(packed_answers.lookup_msgpack(rows), media_type=kind)
        shape = {"x-embedding-dim": str(table.width), "x-embedding-count": str(len(rows.status_N))}
        return Response(packed_answers.lookup_bytes(rows), media_type=kind, headers=shape)

    async def search(self, request: Request) -> Response:
        """Nearest rows."""
        accepted(request.headers.get("accept"), [answers.JSON_TYPE])
        body = await self._body(request, JSON_TYPES, self.parts.admission.reads)
        table = self.parts.model.table(request.path_params["table"])
        query, known_ids = self.parts.searches.read(body)
        matches = await self.parts.search.nearest(table, query, _exchange(request))
        return _json(search_json(matches, known_ids))

    async def inspect(self, request: Request) -> Response:
        """One id of one table."""
        found = await self.parts.operations.inspect(request.path_params["table"], request.path_params["id"])
        return _encoded(found)

    async def forget(self, request: Request) -> Response:
        """Forget one id."""
        table, id_ = request.path_params["table"], request.path_params["id"]
        return _encoded(await self.parts.operations.forget(table, id_), status=202)

    async def resize(self, request: Request) -> Response:
        """Give a table another capacity."""
        body = await self._body(request, JSON_TYPES, None)
        capacity = capacity_of(body)
        return _encoded(await self.parts.operations.resize(request.path_params["table"], capacity), status=202)

    async def versions(self, request: Request) -> Response:
        """Kept checkpoints."""
        return _encoded(await self.parts.operations.versions())

    async def activate(self, request: Request) -> Response:
        """Roll serving back."""
        return _encoded(await self.parts.operations.activate(request.path_params["version"]), status=202)

    async def release(self, request: Request) -> Response:
        """Show again what is learned."""
        return _encoded(await self.parts.operations.release(), status=202)

    async def create_checkpoint(self, request: Request) -> Response:
        """Write a checkpoint."""
        return _encoded(await self.parts.operations.create_checkpoint(), status=202)

    async def model(self, request: Request) -> Response:
        """State of the live model."""
        _exchange(request).stamp = self.parts.model.stamp()
        return _json(msgspec.json.encode(catalogue.model_answer(self.parts)))

    async def tables(self, request: Request) -> Response:
        """All tables."""
        return _json(msgspec.json.encode(catalogue.tables_answer(self.parts)))

    async def info(self, request: Request) -> Response:
        """Inputs and limits."""
        return _json(msgspec.json.encode(catalogue.info_answer(self.parts)))

    async def live(self, request: Request) -> Response:
        """Server-sent events for a console."""
        accepted(request.headers.get("accept"), [EVENT_STREAM_TYPE])
        frames = await self._live.listen()
        _exchange(request).is_stream = True
        unbuffered = {"cache-control": "no-store", "x-accel-buffering": "no"}
        return StreamingResponse(frames, media_type=EVENT_STREAM_TYPE, headers=unbuffered)

    async def livez(self, request: Request) -> Response:
        """The process lives."""
        return _json(b'{"status":"ok"}')

    async def readyz(self, request: Request) -> Response:
        """This worker answers."""
        report = await self.parts.health.report()
        body = report.as_json(verbose="verbose" in request.query_params)
        if report.status == "not_ready":
            detail = next(check.detail for check in report.checks if check.needed and not check.ok)
            return _problem(
                request, ServiceError("not_ready", detail), self.parts.limits, checks=body.get("checks", [])
            )
        return _json(orjson.dumps(body))

    async def startupz(self, request: Request) -> Response:
        """This worker has been ready once."""
        if not self.parts.health.started:
            raise ServiceError("not_ready", self.parts.health.attach_problem)
        return _json(b'{"status":"ok"}')

    async def _body(self, request: Request, types: frozenset[bytes], lane: Lane | None) -> bytes:
        """The body, once it is there and it is this request's turn in its lane; None: it takes no turn."""
        exchange = _exchange(request)
        exchange.limit(wanted_timeout_s(request.headers.get("x-request-timeout-ms"), self._timeout_s))
        if lane is not None:
            self.parts.quotas.check(exchange.client)
        content_type = request.headers.get("content-type")
        kind = check_type(content_type.encode("latin-1") if content_type is not None else None, types)
        exchange.is_msgpack = kind in MSGPACK_TYPES
        packed = is_packed(request.headers.get("content-encoding"))
        body = await read_body(request.receive, self.parts.limits, timeout_s=exchange.timeout_s)
        waited = lane is not None and await self.parts.admission.enter(exchange, lane, len(body))
        if waited and is_gone(request.receive):
            raise ClientGone
        if packed:
            body = unpack(body, self.parts.limits)
        waited_s = exchange.elapsed_s
        exchange.stage("queue", waited_s)
        self.parts.meters.queue_wait.observe(waited_s)
        return body

    def _parse_events(self, body: bytes, *, msgpack: bool) -> tuple[RawEvents, list[Rejection]]:
        limit = self.parts.limits.events
        now_us = time.time_ns() // 1000
        return self.parts.requests.parser.parse(body, accepted_us=now_us, max_events=limit, msgpack=msgpack)


def _exchange(request: Request) -> Exchange:
    exchange: Exchange = request.scope[EXCHANGE]
    return exchange


def _answered(request: Request, scores: Scores) -> Exchange:
    exchange = _exchange(request)
    exchange.stamp = scores.stamp
    exchange.num_items = len(scores.probabilities_B)
    exchange.check_deadline()
    exchange.read(scores.gather_s, model_s=scores.model_s)
    return exchange


def _json(body: bytes, *, status: int = 200) -> Response:
    return Response(body, status_code=status, media_type=answers.JSON_TYPE)


def _encoded(answer: msgspec.Struct, *, status: int = 200) -> Response:
    return _json(msgspec.json.encode(answer), status=status)


def _problem(request: Request, error: ServiceError, limits: Limits, **more: Any) -> Response:
    status, headers, body = problem_reply(error, request.scope, max_bytes=limits.body_bytes, **more)
    return Response(body, status_code=status, headers=headers)


def _error_handlers(limits: Limits) -> dict[Any, Any]:
    """Answers to whatever is raised; what was not foreseen goes on to the edge, which logs it."""

    async def ours(request: Request, error: Exception) -> Response:
        return _problem(request, as_service_error(error), limits)

    async def routing(request: Request, error: HTTPException) -> Response:
        code = ROUTING_CODES.get(error.status_code, "invalid")
        answer = ServiceError(code, f"{request.method} {request.url.path}: {error.detail}")
        response = _problem(request, answer, limits)
        response.headers.update(error.headers or {})
        return response

    async def gone(request: Request, error: ClientGone) -> Response:
        _exchange(request).code = "client_gone"
        return Response(status_code=CLIENT_GONE)

    return {LivebedError: ours, Exception: ours, HTTPException: routing, ClientGone: gone}
