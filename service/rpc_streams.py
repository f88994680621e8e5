"""Streams of rows: a lookup for each message, and the ids that change."""

import asyncio
import time
from collections.abc import AsyncIterator
from typing import Final

from service.changes import Change, Changes
from service.embedding_service_pb2 import (
    LookupRefusal,
    StreamLookupRequest,
    StreamLookupResponse,
    WatchEmbeddingsRequest,
    WatchEmbeddingsResponse,
)
from service.errors import ServiceError
from service.live_model import Stamp
from service.parts import Parts
from service.proto_wire import stamp_message
from service.rpc import EMBEDDINGS, Context, Embeddings, abort
from trainer.errors import StoreUnavailable

MIN_INTERVAL_MS: Final = 10
DEFAULT_INTERVAL_MS: Final = 100
MAX_INTERVAL_MS: Final = 60_000
# Looks at a table take at most one part in so many of a core, whatever interval is asked for.
REST: Final = 10
# Watchers of one worker. Each keeps 12 bytes a slot of its table.
MAX_WATCHERS: Final = 16
# Ids in one message: 512 KiB, well within what a client takes by default.
IDS_A_MESSAGE: Final = 65_536


class EmbeddingStreams(Embeddings):
    """All of EmbeddingService."""

    def __init__(self, parts: Parts) -> None:
        super().__init__(parts)
        self._num_watchers = 0

    async def StreamLookup(
        self, request_iterator: AsyncIterator[StreamLookupRequest], context: Context
    ) -> AsyncIterator[StreamLookupResponse]:
        """An answer to each message, in order; one message is under way at a time, which is the back-pressure."""
        route = f"/{EMBEDDINGS}/StreamLookup"
        async for message in request_iterator:
            one = self.exchange(context, route)
            one.limit(self.parts.settings.serving.request_timeout_s)
            status = "OK"
            try:
                await self.enter(one, self.parts.admission.reads, message.ByteSize())
                yield StreamLookupResponse(rows=self.lookup(message.lookup, one))
            except Exception as error:
                answer, status = self.refused(error, one, context)
                yield StreamLookupResponse(error=LookupRefusal(code=answer.code, detail=answer.detail))
            finally:
                self.leave(one)
                self.parts.meters.request(face="grpc", route=route, code=status, duration_s=one.elapsed_s)

    async def WatchEmbeddings(
        self, request: WatchEmbeddingsRequest, context: Context
    ) -> AsyncIterator[WatchEmbeddingsResponse]:
        """Ids that change, until the caller ends it or the worker drains."""
        exchange = self.exchange(context, f"/{EMBEDDINGS}/WatchEmbeddings")
        status, began_s = "OK", None
        self._num_watchers += 1
        try:
            if self._num_watchers > MAX_WATCHERS:
                raise ServiceError("overloaded", f"{MAX_WATCHERS} callers watch tables here already")
            interval_s = _interval_s(request)
            table = self.parts.model.table(request.table)
            self.parts.model.stamp()  # moves to the newest generation; raises where there is none
            changes = await asyncio.to_thread(self.parts.model.changes, table)
            began_s = exchange.elapsed_s  # how long it lasts is up to the caller
            yield WatchEmbeddingsResponse(model=stamp_message(self.parts.model.stamp()))
            while not self.parts.health.draining:
                stamp, change, took_s = await self._look(changes)
                for response in _responses(change, stamp):
                    yield response
                await self.parts.health.rest(max(interval_s, REST * took_s))
        except asyncio.CancelledError:
            status = "CANCELLED"
            raise
        except Exception as error:
            answer, status = self.refused(error, exchange, context)
            await abort(context, answer, exchange)
        finally:
            self._num_watchers -= 1
            duration_s = exchange.elapsed_s if began_s is None else began_s
            self.parts.meters.request(face="grpc", route=exchange.route, code=status, duration_s=duration_s)

    async def _look(self, changes: Changes) -> tuple[Stamp, Change, float]:
        """A look in a thread, with the version taken before it: what changed up to it has been seen."""
        try:
            stamp = self.parts.model.stamp()
        except StoreUnavailable:  # goes on with the generation at hand; the canary says what is wrong
            raise ServiceError("not_ready", "the live store is gone") from None
        started_s = time.perf_counter()
        change = await asyncio.to_thread(changes.look)
        return stamp, change, time.perf_counter() - started_s


def _interval_s(request: WatchEmbeddingsRequest) -> float:
    interval_ms = request.interval_ms or DEFAULT_INTERVAL_MS
    if not MIN_INTERVAL_MS <= interval_ms <= MAX_INTERVAL_MS:
        raise ServiceError("invalid", f"interval_ms: got {interval_ms}, wanted {MIN_INTERVAL_MS} to {MAX_INTERVAL_MS}")
    return interval_ms / 1000


def _responses(change: Change, stamp: Stamp) -> list[WatchEmbeddingsResponse]:
    """Messages of a bounded size; none where nothing changed."""
    model = stamp_message(stamp)
    responses = [WatchEmbeddingsResponse(resync=True, model=model)] if change.resync else []
    most = max(len(change.changed_N), len(change.removed_N))
    for start in range(0, most, IDS_A_MESSAGE):
        part = slice(start, start + IDS_A_MESSAGE)
        changed, removed = (ids[part].astype("<i8").tobytes() for ids in (change.changed_N, change.removed_N))
        responses.append(WatchEmbeddingsResponse(changed=changed, removed=removed, model=model))
    return responses
