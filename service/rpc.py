"""The gRPC face: the same parts, checks and errors as over HTTP. One method of a servicer is one call of a part."""

from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from typing import Any, NoReturn, TypeAlias, TypeVar

import grpc
import grpc.aio
from grpc_health.v1 import health_pb2, health_pb2_grpc
from grpc_health.v1.health import aio as health_aio
from grpc_reflection.v1alpha import reflection

from service import embedding_service_pb2, event_service_pb2, scoring_service_pb2
from service.admission import Lane
from service.embedding_service_pb2 import LookupEmbeddingsRequest, LookupEmbeddingsResponse
from service.embedding_service_pb2_grpc import EmbeddingServiceServicer, add_EmbeddingServiceServicer_to_server
from service.errors import ServiceError, as_service_error, rpc_status
from service.event_service_pb2 import (
    PublishEventsRequest,
    PublishEventsResponse,
    PublishEventStreamRequest,
    PublishEventStreamResponse,
    Refusal,
)
from service.event_service_pb2_grpc import EventServiceServicer, add_EventServiceServicer_to_server
from service.exchange import Exchange
from service.health import Report
from service.http_server import HANDSHAKE_S, max_connections
from service.ingest import now_us
from service.limits import MAX_IN_FLIGHT
from service.live_model import Scores
from service.parts import Parts
from service.proto_wire import lookup_response, publish_response, rank_response, score_response
from service.quota import client_key
from service.rpc_access import AccessInterceptor
from service.rpc_tls import server_credentials
from service.scoring_service_pb2 import RankRequest, RankResponse, ScoreRequest, ScoreResponse
from service.scoring_service_pb2_grpc import ScoringServiceServicer, add_ScoringServiceServicer_to_server
from service.tls import Certificates
from trainer.errors import LogError

Reply = TypeVar("Reply")
Context: TypeAlias = "grpc.aio.ServicerContext[Any, Any]"

EVENTS = event_service_pb2.DESCRIPTOR.services_by_name["EventService"].full_name
EMBEDDINGS = embedding_service_pb2.DESCRIPTOR.services_by_name["EmbeddingService"].full_name
SCORING = scoring_service_pb2.DESCRIPTOR.services_by_name["ScoringService"].full_name

STATUS_DETAILS = "grpc-status-details-bin"  # where clients look for google.rpc.Status
CODES: dict[int, grpc.StatusCode] = {code.value[0]: code for code in grpc.StatusCode}
MIN_PING_INTERVAL_MS = 10_000  # clients that ping more often are told to go away


class Calls:
    """Answers calls: request ids, timings, metrics and errors in one place."""

    def __init__(self, parts: Parts) -> None:
        self.parts = parts

    async def answer(
        self,
        context: Context,
        route: str,
        make: Callable[[Exchange], Awaitable[Reply]],
        *,
        size: int = 0,
        lane: Lane | None = None,
    ) -> Reply:
        """What `make` makes, or the error that it raised. `size` is the request's, in bytes; no `lane` means reads."""
        exchange = self.exchange(context, route)
        status = "CANCELLED"
        try:
            await self.enter(exchange, lane or self.parts.admission.reads, size)
            reply = await make(exchange)
            if lane is not self.parts.admission.writes:
                exchange.check_deadline()
            status = "OK"
        except Exception as error:
            answer = as_service_error(error)
            status = CODES[answer.kind.grpc].name
            if answer.code == "internal":
                self.parts.request_log.failed(exchange, error, traceparent=_metadata(context, "traceparent"))
            self.parts.meters.refused(answer.code)
            await abort(context, answer, exchange)
        finally:
            self.leave(exchange)
            self.parts.meters.request(face="grpc", route=route, code=status, duration_s=exchange.elapsed_s)
            if exchange.elapsed_s > self.parts.request_log.slow_s:
                self.parts.request_log.slow(exchange, status=status, traceparent=_metadata(context, "traceparent"))
        context.set_trailing_metadata(tuple(exchange.headers()))
        return reply

    def exchange(self, context: Context, route: str) -> Exchange:
        """Begin one call, with the caller's deadline or ours."""
        exchange = Exchange(_metadata(context, "x-request-id"))
        exchange.route = route
        token = None
        if self.parts.access is not None and self.parts.quotas.is_on:  # the token was checked before the call began
            token = self.parts.access.token((_metadata(context, "authorization") or "").encode()).name
        exchange.client = client_key(token, context.peer())
        remaining_s = context.time_remaining()
        longest_s = self.parts.settings.serving.request_timeout_s
        exchange.limit(longest_s if remaining_s is None else min(remaining_s, longest_s))
        return exchange

    async def enter(self, exchange: Exchange, lane: Lane, size: int) -> None:
        """Return when it is the request's turn. Raises ServiceError. One whose caller has gone is cancelled by gRPC."""
        self.parts.quotas.check(exchange.client)
        await self.parts.admission.enter(exchange, lane, size)
        self.parts.meters.queue_wait.observe(exchange.elapsed_s)

    def leave(self, exchange: Exchange) -> None:
        """The request is over, however it went."""
        exchange.finish()
        self.parts.quotas.charge(exchange.client, exchange.num_items)


async def abort(context: Context, error: ServiceError, exchange: Exchange) -> NoReturn:
    """End a call with an error and its details."""
    details = rpc_status(error, request_id=exchange.request_id).SerializeToString()
    trailing = ((STATUS_DETAILS, details), *exchange.headers())
    await context.abort(CODES[error.kind.grpc], error.detail, trailing)


class Scoring(Calls, ScoringServiceServicer):
    """Scores and ranks."""

    async def Score(self, request: ScoreRequest, context: Context) -> ScoreResponse:
        """A probability for each candidate."""

        async def make(exchange: Exchange) -> ScoreResponse:
            scores = self._scores(request, exchange)
            return score_response(scores, request_id=exchange.request_id)

        return await self.answer(context, f"/{SCORING}/Score", make, size=request.ByteSize())

    async def Rank(self, request: RankRequest, context: Context) -> RankResponse:
        """The best candidates."""

        async def make(exchange: Exchange) -> RankResponse:
            top_k = self.parts.requests.top_k(request.top_k or None)
            scores = self._scores(request.score, exchange)
            return rank_response(scores, scores.best(top_k), request_id=exchange.request_id)

        return await self.answer(context, f"/{SCORING}/Rank", make, size=request.ByteSize())

    def _scores(self, request: ScoreRequest, exchange: Exchange) -> Scores:
        scores = self.parts.model.score(self.parts.messages.candidates(request))
        exchange.stamp = scores.stamp
        exchange.num_items = len(scores.probabilities_B)
        exchange.stage("gather", scores.gather_s)
        exchange.stage("model", scores.model_s)
        return scores


class Embeddings(Calls, EmbeddingServiceServicer):
    """Looks rows up."""

    async def LookupEmbeddings(self, request: LookupEmbeddingsRequest, context: Context) -> LookupEmbeddingsResponse:
        """Rows of ids."""

        async def make(exchange: Exchange) -> LookupEmbeddingsResponse:
            table = self.parts.model.table(request.table)
            rows = self.parts.model.lookup(table, self.parts.messages.ids(request))
            self.parts.meters.looked_up(table.name, rows.status_N)
            exchange.stamp = rows.stamp
            exchange.num_items = len(rows.status_N)
            return lookup_response(rows)

        return await self.answer(context, f"/{EMBEDDINGS}/LookupEmbeddings", make, size=request.ByteSize())


class Events(Calls, EventServiceServicer):
    """Takes events."""

    async def PublishEvents(self, request: PublishEventsRequest, context: Context) -> PublishEventsResponse:
        """Append events to the log."""

        async def make(exchange: Exchange) -> PublishEventsResponse:
            return await self._publish(request, exchange)

        writes = self.parts.admission.writes
        return await self.answer(context, f"/{EVENTS}/PublishEvents", make, size=request.ByteSize(), lane=writes)

    async def PublishEventStream(
        self, request_iterator: AsyncIterator[PublishEventStreamRequest], context: Context
    ) -> AsyncIterator[PublishEventStreamResponse]:
        """An answer to each message, in order; one message is under way at a time."""
        route = f"/{EVENTS}/PublishEventStream"
        exchange = self.exchange(context, route)
        async for message in request_iterator:
            one = Exchange(exchange.request_id)
            one.route, one.client = route, exchange.client
            one.limit(self.parts.settings.serving.request_timeout_s)
            try:
                await self.enter(one, self.parts.admission.writes, message.ByteSize())
                yield PublishEventStreamResponse(published=await self._publish(message.publish, one))
                status = "OK"
            except LogError as error:
                answer = as_service_error(error)
                self.parts.meters.refused(answer.code)
                await abort(context, answer, exchange)
            except Exception as error:
                answer = as_service_error(error)
                status = CODES[answer.kind.grpc].name
                if answer.code == "internal":
                    self.parts.request_log.failed(exchange, error, traceparent=_metadata(context, "traceparent"))
                self.parts.meters.refused(answer.code)
                yield PublishEventStreamResponse(error=Refusal(code=answer.code, detail=answer.detail))
            finally:
                self.leave(one)
            self.parts.meters.request(face="grpc", route=route, code=status, duration_s=one.elapsed_s)

    async def _publish(self, request: PublishEventsRequest, exchange: Exchange) -> PublishEventsResponse:
        raw, rejected = self.parts.messages.events(request, now_us())
        exchange.num_items = raw.inputs.count + len(rejected)
        return publish_response(await self.parts.ingest.publish(raw, rejected, exchange))


class RpcServer:
    """The gRPC server of one worker. Several workers listen on one port (SO_REUSEPORT), the kernel shares it out."""

    def __init__(
        self,
        parts: Parts,
        certificates: Certificates | None = None,
        interceptors: Sequence[grpc.aio.ServerInterceptor] = (),
    ) -> None:
        self._health = health_aio.HealthServicer()
        self._certificates = certificates
        access = parts.access
        self._server = grpc.aio.server(
            interceptors=[*interceptors, *([] if access is None else [AccessInterceptor(access, parts.meters, abort)])],
            maximum_concurrent_rpcs=MAX_IN_FLIGHT,
            options=[
                ("grpc.max_receive_message_length", int(parts.limits.body_bytes)),
                ("grpc.max_send_message_length", -1),  # what limits allow to ask for may also be answered
                ("grpc.so_reuseport", 1),
                ("grpc.server_handshake_timeout_ms", int(1000 * HANDSHAKE_S)),
                ("grpc.max_allowed_incoming_connections", max_connections()),
                ("grpc.http2.min_recv_ping_interval_without_data_ms", MIN_PING_INTERVAL_MS),
                ("grpc.keepalive_permit_without_calls", 1),
            ],
        )
        add_EventServiceServicer_to_server(Events(parts), self._server)
        add_EmbeddingServiceServicer_to_server(Embeddings(parts), self._server)
        add_ScoringServiceServicer_to_server(Scoring(parts), self._server)
        health_pb2_grpc.add_HealthServicer_to_server(self._health, self._server)
        names = (EVENTS, EMBEDDINGS, SCORING, health_pb2.DESCRIPTOR.services_by_name["Health"].full_name)
        reflection.enable_server_reflection((*names, reflection.SERVICE_NAME), self._server)

    async def start(self, host: str, port: int) -> int:
        """Listen; returns the port (0 takes any)."""
        address = f"[{host}]:{port}" if ":" in host else f"{host}:{port}"
        if self._certificates is None:
            bound: int = self._server.add_insecure_port(address)
        else:
            bound = self._server.add_secure_port(address, server_credentials(self._certificates))
        await self._server.start()
        return bound

    async def show(self, report: Report) -> None:
        """Let grpc.health.v1.Health follow what `/readyz` says; the event service needs the log alone."""
        reads = report.status != "not_ready"
        for name, serving in (("", reads), (EMBEDDINGS, reads), (SCORING, reads), (EVENTS, report.ok("log"))):
            status = health_pb2.HealthCheckResponse.SERVING if serving else health_pb2.HealthCheckResponse.NOT_SERVING
            await self._health.set(name, status)

    async def stop(self, grace_s: float) -> None:
        """Say that no more is served, take no new calls, and let those under way finish within `grace_s`."""
        await self._health.enter_graceful_shutdown()
        await self._server.stop(grace_s)


def _metadata(context: Context, wanted: str) -> str | None:
    for name, value in context.invocation_metadata() or ():
        if name == wanted:
            return value if isinstance(value, str) else None
    return None
