"""Quotas of clients, charged by what a request asks for (ids, candidates, events), not by calls.

A token bucket for each client: it fills with `ids_per_s` up to `burst`. A request is let in while the bucket is not
empty and pays afterwards, once it is known how much it was; so one request may bring it below zero, and the client
waits until that is made up. Each worker counts for itself.
"""

import math
import time
from collections import OrderedDict
from typing import Final
from urllib.parse import unquote

from service.errors import ServiceError
from trainer.settings import QuotaSettings

# Clients remembered, the least recently seen forgotten first: a forgotten one begins with a full bucket.
MAX_CLIENTS: Final = 10_000


class Quotas:
    """The buckets of one worker.

    >>> quotas = Quotas(QuotaSettings(ids_per_s=10, burst=100))
    >>> quotas.check("a", now_s=0.0)
    >>> quotas.charge("a", 120, now_s=0.0)
    >>> quotas.check("a", now_s=1.0)
    Traceback (most recent call last):
    service.errors.ServiceError: ('quota_exceeded', 'this client may ask for 10 ids, candidates or events a second; ...
    >>> quotas.check("a", now_s=2.5)
    """

    def __init__(self, settings: QuotaSettings) -> None:
        self._rate = settings.ids_per_s
        self._burst = float(settings.burst)
        self._buckets: OrderedDict[str, tuple[float, float]] = OrderedDict()  # what is left, and when that was

    @property
    def is_on(self) -> bool:
        """Whether anybody is charged."""
        return self._rate is not None

    def check(self, client: str, *, now_s: float | None = None) -> None:
        """Raise ServiceError (`quota_exceeded`, with when to try again) if the client has nothing left."""
        if self._rate is None:
            return
        left = self._left(client, time.monotonic() if now_s is None else now_s)
        if left <= 0:
            raise ServiceError(
                "quota_exceeded",
                f"this client may ask for {self._rate:g} ids, candidates or events a second; it is {-left:.0f} over",
                retry_after_s=max(1, math.ceil(-left / self._rate)),
            )

    def charge(self, client: str, num_items: int, *, now_s: float | None = None) -> None:
        """Take what a request was; what is left may be less than nothing."""
        if self._rate is None or not num_items:
            return
        at_s = time.monotonic() if now_s is None else now_s
        self._buckets[client] = (self._left(client, at_s) - num_items, at_s)
        self._buckets.move_to_end(client)
        if len(self._buckets) > MAX_CLIENTS:
            self._buckets.popitem(last=False)

    def _left(self, client: str, now_s: float) -> float:
        left, then_s = self._buckets.get(client, (self._burst, now_s))
        return min(self._burst, left + (now_s - then_s) * (self._rate or 0.0))


def client_key(token: str | None, peer: str) -> str:
    """Whose quota a request is charged to: its token's name, without one the address that it came from.

    >>> client_key(None, "ipv4:10.0.0.7:51234"), client_key(None, "ipv6:%5B::1%5D:51234"), client_key("ads", "10.0.0.7")
    ('10.0.0.7', '::1', 'token ads')
    """
    if token is not None:
        return f"token {token}"
    kind, _, rest = peer.partition(":")
    if kind in {"ipv4", "ipv6"}:  # as gRPC names it, with its port
        return unquote(rest.rpartition(":")[0]).strip("[]")
    return peer
