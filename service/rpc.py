"""The gRPC face: the same parts, checks and errors as over HTTP. One method of a servicer is one call of a part."""

import logging
import time
from collections.abc import AsyncIterator, Awaitable, Callable
from typing import Any, NoReturn, TypeAlias, TypeVar

import grpc
import grpc.aio

from service import embedding_service_pb2, event_service_pb2, scoring_service_pb2
from service.embedding_service_pb2 import LookupEmbeddingsRequest, LookupEmbeddingsResponse
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
from service.scoring_service_pb2 import RankRequest, RankResponse, ScoreRequest, ScoreResponse
from service.scoring_service_pb2_grpc import ScoringServiceServicer
from trainer.errors import LogError

Reply = TypeVar("Reply")
Context: TypeAlias = "grpc.aio.ServicerContext[Any, Any]"

EVENTS = event_service_pb2.DESCRIPTOR.services_by_name["EventService"].full_name
EMBEDDINGS = embedding_service_pb2.DESCRIPTOR.services_by_name["EmbeddingService"].full_name
SCORING = scoring_service_pb2.DESCRIPTOR.services_by_name["ScoringService"].full_name

STATUS_DETAILS = "grpc-status-details-bin"  # where clients look for google.rpc.Status
CODES: dict[int, grpc.StatusCode] = {code.value[0]: code for code in grpc.StatusCode}
MIN_PING_INTERVAL_MS = 10_000  # clients that ping more often are told to go away

logger = logging.getLogger("livebed.service")


class Calls:
    """Answers calls: request ids, timings, metrics and errors in one place."""

    def __init__(self, parts: Parts) -> None:
        self.parts = parts

    async def answer(self, context: Context, route: str, make: Callable[[Exchange], Awaitable[Reply]]) -> Reply:
        """What `make` makes, or the error that it raised."""
        exchange = Exchange(metadata(context, "x-request-id"))
        status = "CANCELLED"
        try:
            reply = await make(exchange)
            status = "OK"
        except Exception as error:
            answer = as_service_error(error)
            status = CODES[answer.kind.grpc].name
            if answer.code == "internal":
                logger.error("request %s failed", exchange.request_id, exc_info=error)
            self.parts.meters.refused(answer.code)
            await abort(context, answer, exchange)
        finally:
            self.parts.meters.request(face="grpc", route=route, code=status, duration_s=exchange.elapsed_s)
        context.set_trailing_metadata(tuple(exchange.headers()))
        return reply


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

        return await self.answer(context, f"/{SCORING}/Score", make)

    async def Rank(self, request: RankRequest, context: Context) -> RankResponse:
        """The best candidates."""

        async def make(exchange: Exchange) -> RankResponse:
            top_k = self.parts.requests.top_k(request.top_k or None)
            scores = self._scores(request.score, exchange)
            return rank_response(scores, scores.best(top_k), request_id=exchange.request_id)

        return await self.answer(context, f"/{SCORING}/Rank", make)

    def _scores(self, request: ScoreRequest, exchange: Exchange) -> Scores:
        scores = self.parts.model.score(self.parts.messages.candidates(request))
        exchange.stamp = scores.stamp
        exchange.stage("gather", scores.gather_s)
        exchange.stage("model", scores.model_s)
        return scores


class Embeddings(Calls, EmbeddingServiceServicer):
    """Looks rows up."""

    async def LookupEmbeddings(self, request: LookupEmbeddingsRequest, context: Context) -> LookupEmbeddingsResponse:
        """Rows of ids."""

        async def make(exchange: Exchange) -> LookupEmbeddingsResponse:
            return self.lookup(request, exchange)

        return await self.answer(context, f"/{EMBEDDINGS}/LookupEmbeddings", make)

    def lookup(self, request: LookupEmbeddingsRequest, exchange: Exchange) -> LookupEmbeddingsResponse:
        """The answer to one lookup."""
        table = self.parts.model.table(request.table)
        began_s = time.perf_counter()
        rows = self.parts.model.lookup(table, self.parts.messages.ids(request))
        exchange.stage("gather", time.perf_counter() - began_s)
        self.parts.meters.looked_up(table.name, rows.status_N)
        exchange.stamp = rows.stamp
        return lookup_response(rows)


class Events(Calls, EventServiceServicer):
    """Takes events."""

    async def PublishEvents(self, request: PublishEventsRequest, context: Context) -> PublishEventsResponse:
        """Append events to the log."""

        async def make(exchange: Exchange) -> PublishEventsResponse:
            return await self._publish(request)

        return await self.answer(context, f"/{EVENTS}/PublishEvents", make)

    async def PublishEventStream(
        self, request_iterator: AsyncIterator[PublishEventStreamRequest], context: Context
    ) -> AsyncIterator[PublishEventStreamResponse]:
        """An answer to each message, in order; one message is under way at a time."""
        exchange = Exchange(metadata(context, "x-request-id"))
        route = f"/{EVENTS}/PublishEventStream"
        async for message in request_iterator:
            one = Exchange(exchange.request_id)
            try:
                yield PublishEventStreamResponse(published=await self._publish(message.publish))
                status = "OK"
            except LogError as error:
                answer = as_service_error(error)
                self.parts.meters.refused(answer.code)
                await abort(context, answer, exchange)
            except Exception as error:
                answer = as_service_error(error)
                status = CODES[answer.kind.grpc].name
                if answer.code == "internal":
                    logger.error("request %s failed", exchange.request_id, exc_info=error)
                self.parts.meters.refused(answer.code)
                yield PublishEventStreamResponse(error=Refusal(code=answer.code, detail=answer.detail))
            self.parts.meters.request(face="grpc", route=route, code=status, duration_s=one.elapsed_s)

    async def _publish(self, request: PublishEventsRequest) -> PublishEventsResponse:
        raw, rejected = self.parts.messages.events(request, now_us())
        return publish_response(await self.parts.ingest.publish(raw, rejected))


def status_name(answer: ServiceError, exchange: Exchange, error: Exception) -> str:
    """The gRPC status of an error, for the metrics; one that is ours is logged."""
    if answer.code == "internal":
        logger.error("request %s failed", exchange.request_id, exc_info=error)
    return CODES[answer.kind.grpc].name


def metadata(context: Context, wanted: str) -> str | None:
    """A value that the caller sent along, if it is text."""
    for name, value in context.invocation_metadata() or ():
        if name == wanted:
            return value if isinstance(value, str) else None
    return None
