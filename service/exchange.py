"""One request from its arrival to its answer: its id, which model answered, and where the time went."""

import re
import secrets
import time

from service.live_model import Stamp
from service.tokens import Token

# What a client may choose as its request's id: it comes back in headers, bodies and logs.
REQUEST_ID = re.compile(r"[\x21-\x7e]{1,128}")

UNMATCHED = "unmatched"  # the route label of what no route takes: never a raw path


class Exchange:
    """Filled in by whoever answers; read when headers and metrics are written."""

    __slots__ = ("arrived_s", "code", "is_msgpack", "request_id", "route", "stages", "stamp", "token")

    def __init__(self, wanted_id: str | None) -> None:
        """Take the client's request id if it is one, else make one."""
        valid = wanted_id is not None and REQUEST_ID.fullmatch(wanted_id) is not None
        self.request_id = wanted_id if valid and wanted_id is not None else secrets.token_hex(16)
        self.arrived_s = time.perf_counter()
        self.route = UNMATCHED
        self.is_msgpack = False  # its body is MessagePack, not JSON
        self.stamp: Stamp | None = None
        self.stages: list[tuple[str, float]] = []
        self.code: str | None = None  # of the error that was answered
        self.token: Token | None = None  # the caller's; None where none is needed

    def stage(self, name: str, seconds: float) -> None:
        """Say how long a part took."""
        self.stages.append((name, seconds))

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
