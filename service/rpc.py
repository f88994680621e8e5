"""The gRPC face: the same parts, checks and errors as over HTTP. One method of a servicer is one call of a part."""

import contextlib
import time
from collections.abc import AsyncIterator, Awaitable, Callable
from typing import Any, NoReturn, TypeAlias, TypeVar

import grpc
import grpc.aio

from service import embedding_service_pb2, event_service_pb2, scoring_service_pb2
from service.admission import Lane
from service.embedding_service_pb2 import (
    LookupEmbeddingsRequest,
    LookupEmbeddingsResponse,
    SearchEmbeddingsRequest,
    SearchEmbeddingsResponse,
)
from service.embedding_service_pb2_grpc import EmbeddingServiceServicer
from service.errors import ServiceError, as_service_error, rpc_status
from service.event_service_pb2 import (
    PublishEventsRequest,
    PublishEventsResponse,
    PublishEventStreamRequest,
    PublishEventStreamResponse,
    Refusal,
)
from service.event_service_pb2_grpc import EventServiceServicer
from service.exchange import Exchange
from service.ingest import now_us
from service.live_model import Scores
from service.parts import Parts
from service.proto_wire import lookup_response, publish_response, rank_response, score_response
from service.quota import client_key
from service.scoring_service_pb2 import RankRequest, RankResponse, ScoreRequest, ScoreResponse
from service.scoring_service_pb2_grpc import ScoringServiceServicer
from service.search_wire import search_response
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
        """What `make` makes, or the error that it raised. `size`: its bytes; without a lane it waits for no turn."""
        exchange = self.exchange(context, route)
        status = "CANCELLED"
        try:
            if lane is not None:
                await self.enter(exchange, lane, size)
            reply = await make(exchange)
            if lane is self.parts.admission.reads:
                exchange.check_deadline()
            status = "OK"
        except Exception as error:
            answer, status = self.refused(error, exchange, context)
            await abort(context, answer, exchange)
        finally:
            self.leave(exchange)
            self.parts.meters.request(face="grpc", route=route, code=status, duration_s=exchange.elapsed_s)
            if exchange.elapsed_s > self.parts.request_log.slow_s:
                self.parts.request_log.slow(exchange, status=status, traceparent=metadata(context, "traceparent"))
        self.stamped(exchange)
        context.set_trailing_metadata(tuple(exchange.headers()))
        return reply

    def stamped(self, exchange: Exchange) -> None:
        """Let an answer that read no row say which model is served, too."""
        if exchange.stamp is None:
            exchange.stamp = self.parts.model.stamp_if_any()

    def refused(self, error: Exception, exchange: Exchange, context: Context) -> tuple[ServiceError, str]:
        """What to answer for an exception, and its gRPC status; counted, and logged if it is our fault."""
        answer = as_service_error(error)
        if answer.code == "internal":
            self.parts.request_log.failed(exchange, error, traceparent=metadata(context, "traceparent"))
        self.parts.meters.refused(answer.code)
        self.stamped(exchange)
        return answer, CODES[answer.kind.grpc].name

    def exchange(self, context: Context, route: str) -> Exchange:
        """Begin one call, with the caller's deadline or ours."""
        exchange = Exchange(metadata(context, "x-request-id"))
        exchange.route = route
        token = None
        if self.parts.access is not None and self.parts.quotas.is_on:  # the token was checked before the call began
            with contextlib.suppress(ServiceError):  # it has just expired: the next call will be refused
                token = self.parts.access.token((metadata(context, "authorization") or "").encode()).name
        if self.parts.quotas.is_on:
            exchange.client = client_key(token, context.peer())
        remaining_s = context.time_remaining()
        longest_s = self.parts.settings.serving.request_timeout_s
        exchange.limit(longest_s if remaining_s is None else min(remaining_s, longest_s))
        return exchange

    async def enter(self, exchange: Exchange, lane: Lane, size: int) -> None:
        """Return when it is the request's turn. Raises ServiceError. One whose caller has gone is cancelled by gRPC."""
        self.parts.quotas.check(exchange.client)
        await self.parts.admission.enter(exchange, lane, size)
        waited_s = exchange.elapsed_s
        exchange.stage("queue", waited_s)
        self.parts.meters.queue_wait.observe(waited_s)

    def leave(self, exchange: Exchange) -> None:
        """The request is over, however it went."""
        exchange.finish()
        self.parts.quotas.charge(exchange.client, exchange.num_items)

    async def refuse_message(self, context: Context) -> NoReturn:
        """End a call whose message is none."""
        exchange = Exchange(metadata(context, "x-request-id"))
        error = ServiceError("malformed", "the request is no message of this method's type")
        answer, _ = self.refused(error, exchange, context)
        await abort(context, answer, exchange)


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

        reads = self.parts.admission.reads
        return await self.answer(context, f"/{SCORING}/Score", make, size=request.ByteSize(), lane=reads)

    async def Rank(self, request: RankRequest, context: Context) -> RankResponse:
        """The best candidates."""

        async def make(exchange: Exchange) -> RankResponse:
            top_k = self.parts.requests.top_k(request.top_k or None)
            scores = self._scores(request.score, exchange)
            return rank_response(scores, scores.best(top_k), request_id=exchange.request_id)

        reads = self.parts.admission.reads
        return await self.answer(context, f"/{SCORING}/Rank", make, size=request.ByteSize(), lane=reads)

    def _scores(self, request: ScoreRequest, exchange: Exchange) -> Scores:
        scores = self.parts.model.score(self.parts.messages.candidates(request))
        exchange.stamp = scores.stamp
        exchange.num_items = len(scores.probabilities_B)
        exchange.read(scores.gather_s, model_s=scores.model_s)
        return scores


class Embeddings(Calls, EmbeddingServiceServicer):
    """Looks rows up, and finds the nearest."""

    async def LookupEmbeddings(self, request: LookupEmbeddingsRequest, context: Context) -> LookupEmbeddingsResponse:
        """Rows of ids."""

        async def make(exchange: Exchange) -> LookupEmbeddingsResponse:
            return self.lookup(request, exchange)

        reads = self.parts.admission.reads
        return await self.answer(context, f"/{EMBEDDINGS}/LookupEmbeddings", make, size=request.ByteSize(), lane=reads)

    def lookup(self, request: LookupEmbeddingsRequest, exchange: Exchange) -> LookupEmbeddingsResponse:
        """The answer to one lookup."""
        table = self.parts.model.table(request.table)
        began_s = time.perf_counter()
        rows = self.parts.model.lookup(table, self.parts.messages.ids(request))
        exchange.read(time.perf_counter() - began_s, model_s=0.0)
        self.parts.meters.looked_up(table.name, rows.status_N)
        exchange.stamp = rows.stamp
        exchange.num_items = len(rows.status_N)
        return lookup_response(rows)

    async def SearchEmbeddings(self, request: SearchEmbeddingsRequest, context: Context) -> SearchEmbeddingsResponse:
        """Nearest rows."""

        async def make(exchange: Exchange) -> SearchEmbeddingsResponse:
            table = self.parts.model.table(request.table)
            query, known_ids = self.parts.searches.read_message(request)
            matches = await self.parts.search.nearest(table, query, exchange)
            return search_response(matches, known_ids)

        reads = self.parts.admission.reads
        return await self.answer(context, f"/{EMBEDDINGS}/SearchEmbeddings", make, size=request.ByteSize(), lane=reads)


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
                answer, status = self.refused(error, one, context)
                yield PublishEventStreamResponse(error=Refusal(code=answer.code, detail=answer.detail))
            finally:
                self.leave(one)
            self.parts.meters.request(face="grpc", route=route, code=status, duration_s=one.elapsed_s)

    async def _publish(self, request: PublishEventsRequest, exchange: Exchange) -> PublishEventsResponse:
        raw, rejected = self.parts.messages.events(request, now_us())
        exchange.num_items = raw.inputs.count + len(rejected)
        return publish_response(await self.parts.ingest.publish(raw, rejected, exchange))


def metadata(context: Context, wanted: str) -> str | None:
    """A value that the caller sent along, if it is text."""
    for name, value in context.invocation_metadata() or ():
        if name == wanted:
            return value if isinstance(value, str) else None
    return None
