"""What is logged of a request: one that was slow, and one that failed by our fault. Never what it asked for."""

import logging
import re
from typing import Final

from service.exchange import Exchange

TRACEPARENT: Final = re.compile(r"[0-9a-f]{2}-([0-9a-f]{32})-[0-9a-f]{16}-[0-9a-f]{2}")  # W3C Trace Context

logger = logging.getLogger("livebed.service")


class RequestLog:
    """Logs requests that took longer than `slow_ms`; None: none of them."""

    def __init__(self, slow_ms: float | None) -> None:
        self.slow_s = float("inf") if slow_ms is None else slow_ms / 1000

    def slow(self, exchange: Exchange, *, status: str, traceparent: str | None) -> None:
        """Say that a request was slow, and where its time went."""
        stages = ", ".join(f"{name} {seconds * 1000:.1f}" for name, seconds in exchange.stages)
        logger.warning(
            "slow request: %s %s took %.1f ms (%s)",
            *(exchange.route, status, exchange.elapsed_s * 1000, stages or "no stages"),
            extra=_extra(exchange, traceparent),
        )

    def failed(self, exchange: Exchange, error: Exception, *, traceparent: str | None) -> None:
        """Say what went wrong, with its trace."""
        logger.error("request %s failed", exchange.request_id, exc_info=error, extra=_extra(exchange, traceparent))


def trace_id(traceparent: str | None) -> str | None:
    """The trace that a request belongs to.

    >>> trace_id("00-0af7651916cd43dd8448eb211c80319c-b7ad6b7169203331-01")
    '0af7651916cd43dd8448eb211c80319c'
    """
    found = TRACEPARENT.fullmatch(traceparent or "")
    return found.group(1) if found else None


def _extra(exchange: Exchange, traceparent: str | None) -> dict[str, str | None]:
    return {"request_id": exchange.request_id, "trace_id": trace_id(traceparent)}
