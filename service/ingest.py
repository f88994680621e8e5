"""Events on their way into the log: accepted is in the log, everything else is said.

parsed -> 1. duplicates within the request are dropped -> 2. stamped and encoded as one entry -> 3. appended
(grouped with what other requests append at the same moment) -> 4. counted and answered
"""

import asyncio
import time
from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np

from service.errors import ServiceError, Violation
from service.exchange import Exchange
from service.meters import Meters
from trainer.codec import encode
from trainer.events import RawEvents, Rejection, select
from trainer.schema import Schema
from trainer.stream import PROTO_FIELD, AsyncEventLog


@dataclass(frozen=True)
class Published:
    """What became of the events of one request; `stream_id` is None when none was accepted."""

    num_accepted: int
    num_duplicates: int
    rejected: Sequence[Rejection]
    stream_id: str | None


def now_us() -> int:
    """Wall clock in microseconds since 1970 UTC."""
    return time.time_ns() // 1000


class Ingest:
    """Appends the events of requests to the log."""

    def __init__(self, schema: Schema, log: AsyncEventLog, meters: Meters) -> None:
        self.schema = schema
        self.log = log
        self._meters = meters

    async def publish(self, raw: RawEvents, rejected: Sequence[Rejection], exchange: Exchange) -> Published:
        """Append the valid events; return when they are in the log.

        Raises:
            ServiceError: every event was refused, or the deadline passed (the events may be in the log).
            LogError: the log did not take them (of LogUnavailable it is not known).
        """
        num_valid = raw.inputs.count
        self._meters.events_received.inc(num_valid + len(rejected))
        self._meters.events_rejected.inc(len(rejected))
        if rejected and not num_valid:
            raise _all_refused(rejected)
        raw = _without_duplicates(raw)
        num_accepted = raw.inputs.count
        stream_id = await self._append(raw, exchange) if num_accepted else None
        self._meters.events_accepted.inc(num_accepted)
        self._meters.events_duplicate.inc(num_valid - num_accepted)
        return Published(num_accepted, num_valid - num_accepted, rejected, stream_id)

    async def _append(self, raw: RawEvents, exchange: Exchange) -> str:
        stamped = replace(raw, accepted_us_B=np.full(raw.inputs.count, now_us(), np.int64))
        entry = {PROTO_FIELD: encode(self.schema, stamped)}
        exchange.finish()
        try:
            async with asyncio.timeout(exchange.remaining_s):
                return (await self.log.append([entry]))[-1]
        except TimeoutError:
            detail = f"the log did not answer within {exchange.timeout_s * 1000:.0f} ms; it may have taken the events"
            raise ServiceError("deadline_exceeded", detail) from None


def _without_duplicates(raw: RawEvents) -> RawEvents:
    """The first event of each event id, and all that have none."""
    keys = raw.event_key_B
    if not keys.any():
        return raw
    keep = keys == 0
    keep[np.unique(keys, return_index=True)[1]] = True
    return raw if keep.all() else select(raw, keep)


def _all_refused(rejected: Sequence[Rejection]) -> ServiceError:
    first = rejected[0]
    detail = f"all {len(rejected)} events were refused; the first: {first.detail}"
    code = first.code if len({r.code for r in rejected}) == 1 and first.code == "unknown_feature" else "invalid"
    return ServiceError(code, detail, violations=[Violation(f"/{r.index}", f"{r.code}: {r.detail}") for r in rejected])
