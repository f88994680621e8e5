"""One request from its arrival to its answer: its id, which model answered, and where the time went."""

import math
import re
import secrets
import time
from typing import TYPE_CHECKING

from service.errors import ServiceError
from service.live_model import Stamp
from service.tokens import Token

if TYPE_CHECKING:
    from service.admission import Work

# What a client may choose as its request's id: it comes back in headers, bodies and logs.
REQUEST_ID = re.compile(r"[\x21-\x7e]{1,128}")

TIMEOUT_MS = re.compile(r"[1-9][0-9]{0,8}")  # what `X-Request-Timeout-Ms` may say

UNMATCHED = "unmatched"  # the route label of what no route takes: never a raw path


class Exchange:
    """Filled in by whoever answers; read when headers and metrics are written."""

    __slots__ = (
        *("arrived_s", "client", "code", "deadline_s", "is_msgpack", "is_stream", "num_items", "request_id"),
        *("route", "stages", "stamp", "timeout_s", "token", "work"),
    )

    def __init__(self, wanted_id: str | None) -> None:
        """Take the client's request id if it is one, else make one."""
        valid = wanted_id is not None and REQUEST_ID.fullmatch(wanted_id) is not None
        self.request_id = wanted_id if valid and wanted_id is not None else secrets.token_hex(16)
        self.arrived_s = time.perf_counter()
        self.route = UNMATCHED
        self.is_msgpack = False  # its body is MessagePack, not JSON
        self.is_stream = False  # it lasts as long as its caller likes
        self.stamp: Stamp | None = None
        self.stages: list[tuple[str, float]] = []
        self.code: str | None = None  # of the error that was answered
        self.timeout_s = self.deadline_s = math.inf
        self.client = ""  # whose quota is charged
        self.num_items = 0  # ids, candidates or events that were asked for
        self.work: Work | None = None  # what holds the event loop
        self.token: Token | None = None  # the caller's; None where none is needed

    def stage(self, name: str, seconds: float) -> None:
        """Say how long a part took."""
        self.stages.append((name, seconds))

    def read(self, gather_s: float, *, model_s: float) -> None:
        """Say how long reading rows and the net took; a lookup has no net."""
        self.stages += (("gather", gather_s), ("model", model_s))

    def limit(self, timeout_s: float) -> None:
        """Set the deadline, from the arrival on."""
        self.timeout_s = timeout_s
        self.deadline_s = self.arrived_s + timeout_s

    @property
    def remaining_s(self) -> float:
        """Time until the deadline; negative past it."""
        return self.deadline_s - time.perf_counter()

    def check_deadline(self) -> None:
        """Raise ServiceError (`deadline_exceeded`) past the deadline."""
        if time.perf_counter() > self.deadline_s:
            raise ServiceError("deadline_exceeded", f"not answered within {self.timeout_s * 1000:.0f} ms")

    def finish(self) -> None:
        """The request no longer holds the event loop; may be called again."""
        if self.work is not None:
            self.work.done()

    @property
    def elapsed_s(self) -> float:
        """Time since the arrival."""
        return time.perf_counter() - self.arrived_s

    def headers(self) -> list[tuple[str, str]]:
        """What every reply carries, over HTTP as headers and over gRPC as trailing metadata; names in lower case."""
        headers = [("x-request-id", self.request_id)]
        if self.stamp is not None:
            headers.append(("x-model-version", str(self.stamp.version)))
            if self.stamp.age_ms is not None:
                headers.append(("x-model-age-ms", str(int(self.stamp.age_ms))))
        timing = [f"{name};dur={seconds * 1000:.3f}" for name, seconds in [*self.stages, ("total", self.elapsed_s)]]
        headers.append(("server-timing", ", ".join(timing)))
        return headers


def wanted_timeout_s(header: str | None, longest_s: float) -> float:
    """The time that `X-Request-Timeout-Ms` leaves, at most the server's own. Raises ServiceError (`invalid`).

    >>> wanted_timeout_s("250", 5.0), wanted_timeout_s("60000", 5.0), wanted_timeout_s(None, 5.0)
    (0.25, 5.0, 5.0)
    """
    if header is None:
        return longest_s
    if TIMEOUT_MS.fullmatch(header) is None:
        raise ServiceError("invalid", f"X-Request-Timeout-Ms is {header[:32]!r}, wanted whole milliseconds from 1 on")
    return min(int(header) / 1000, longest_s)
