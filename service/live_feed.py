"""What a console shows: one object a second of the model, the events, the requests and the tables (`GET /v1/live`).

Server-sent events. The numbers are those of `/metrics`, over all processes, as rates since the last object; a worker
reads them once a second for all its listeners, and not at all while nobody listens. A listener that reads slowly gets
fewer objects: each is made when the last one has gone to its connection, and nothing queues up.
"""

import math
import time
from collections.abc import AsyncIterator
from typing import Final

import msgspec

from service.answers import Model, model_of
from service.catalogue import TableState, tables_answer
from service.errors import ServiceError
from service.health import MAX_HEARTBEAT_AGE_S
from service.parts import Parts
from trainer import board
from trainer.errors import LivebedError

EVENT_STREAM_TYPE: Final = "text/event-stream"
EVERY_S: Final = 1.0
FRESH_S: Final = 0.9  # an object this young is handed to other listeners, too
# Listeners of one worker, beyond which one is refused: each is an open connection, 2 KiB a second.
MAX_LISTENERS: Final = 32
RETRY_MS: Final = 1000  # after which a browser comes again
END: Final = b"event: end\ndata: draining\n\n"


class EventRates(msgspec.Struct, forbid_unknown_fields=True):
    """Events a second; null in the first object. `lag_entries`: entries of the log that are not applied yet."""

    received: float | None
    accepted: float | None
    rejected: float | None
    applied: float | None
    lag_entries: float | None
    visible_p50_ms: float | None
    visible_p99_ms: float | None


class RequestRates(msgspec.Struct, forbid_unknown_fields=True):
    """Requests a second, those refused among them, and how long they took; null in the first object."""

    answered: float | None
    refused: float | None
    ids_looked_up: float | None
    p50_ms: float | None
    p99_ms: float | None


class Quality(msgspec.Struct, forbid_unknown_fields=True):
    """Of predictions made before their event was learned, recent; null before there are any."""

    logloss: float | None
    auc: float | None
    calibration: float | None


class LiveAnswer(msgspec.Struct, forbid_unknown_fields=True):
    """One second of the system. `model` and `step` are null while there is no model."""

    time_ms: int
    model: Model | None
    step: int | None
    publishing: str
    trainer_alive: bool
    events: EventRates
    requests: RequestRates
    quality: Quality
    tables: list[TableState]


class LiveFeed:
    """The listeners of one worker, and the object that they share."""

    def __init__(self, parts: Parts) -> None:
        self._parts = parts
        self._num_listeners = 0
        self._made_s = -math.inf
        self._made = b""
        self._counted: board.Snapshot | None = None

    async def listen(self) -> AsyncIterator[bytes]:
        """Frames for one more listener, until it goes or the worker drains. Raises ServiceError("overloaded")."""
        if self._num_listeners >= MAX_LISTENERS:
            raise ServiceError("overloaded", f"{MAX_LISTENERS} listeners are here already")
        frames = self._frames()
        await anext(frames)  # so that it is counted at once, and no longer however it ends
        return frames

    async def _frames(self) -> AsyncIterator[bytes]:
        self._num_listeners += 1
        try:
            yield b""
            yield f"retry: {RETRY_MS}\n\n".encode()
            while not self._parts.health.draining:
                yield b"data: " + self._now() + b"\n\n"
                await self._parts.health.rest(EVERY_S)
            yield END
        finally:
            self._num_listeners -= 1

    def _now(self) -> bytes:
        """The object of this second; what a listener gets who comes within it, too."""
        now_s = time.monotonic()
        since_s = now_s - self._made_s
        if since_s >= FRESH_S:
            counted = board.read(self._parts.settings.metrics_path)
            was = self._counted if since_s <= 2 * EVERY_S else None  # nobody listened: rates would be of long ago
            self._made = msgspec.json.encode(live_answer(self._parts, counted, was, since_s))
            self._made_s, self._counted = now_s, counted
        return self._made


def live_answer(parts: Parts, counted: board.Snapshot, was: board.Snapshot | None, since_s: float) -> LiveAnswer:
    """One object: what is, and what was counted since another look (None: there was none)."""
    model, step, trainer_alive = None, None, False
    try:
        state = parts.model.state()
        model, step = msgspec.convert(model_of(parts.model.stamp()), Model), state.step
        trainer_alive = not state.stopped and time.time() - state.heartbeat_us / 1e6 <= MAX_HEARTBEAT_AGE_S
    except LivebedError:
        pass  # there is no model yet: the rest is shown all the same
    recent = None if was is None else counted.since(was)
    return LiveAnswer(
        time_ms=time.time_ns() // 1_000_000,
        model=model,
        step=step,
        publishing="held" if counted.value("livebed_publishing_held") == 1 else "live",
        trainer_alive=trainer_alive,
        events=_event_rates(counted, recent, since_s),
        requests=_request_rates(recent, since_s),
        quality=Quality(*(_known(counted.value(name)) for name in _QUALITY)),
        tables=tables_answer(parts, counted).tables,
    )


_QUALITY: Final = ("livebed_progressive_logloss", "livebed_progressive_auc", "livebed_calibration_ratio")
_REQUESTS: Final = "livebed_request_duration_seconds"
_VISIBLE: Final = "livebed_event_to_visible_seconds"


def _event_rates(counted: board.Snapshot, recent: board.Snapshot | None, since_s: float) -> EventRates:
    kinds = ("received", "accepted", "rejected", "applied")
    rates = [None if recent is None else recent.value(f"livebed_events_{kind}_total") / since_s for kind in kinds]
    lag = _known(counted.value("livebed_stream_lag_entries"))
    received, accepted, rejected, applied = rates
    p50_ms, p99_ms = (_quantile_ms(recent, _VISIBLE, q) for q in (0.5, 0.99))
    return EventRates(received, accepted, rejected, applied, lag, p50_ms, p99_ms)


def _request_rates(recent: board.Snapshot | None, since_s: float) -> RequestRates:
    if recent is None:
        return RequestRates(None, None, None, None, None)
    return RequestRates(
        answered=recent.count(_REQUESTS) / since_s,
        refused=recent.value("livebed_rejected_requests_total") / since_s,
        ids_looked_up=recent.value("livebed_embedding_lookups_total") / since_s,
        p50_ms=_quantile_ms(recent, _REQUESTS, 0.5),
        p99_ms=_quantile_ms(recent, _REQUESTS, 0.99),
    )


def _quantile_ms(recent: board.Snapshot | None, name: str, q: float) -> float | None:
    return None if recent is None else _known(1000 * recent.quantile(name, q))


def _known(value: float) -> float | None:
    """NaN is no JSON, and means that nothing has been measured."""
    return None if math.isnan(value) else value
