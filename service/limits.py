"""Limits on what arrives, before anything is parsed: bytes of a body, time it may take, its type, requests at once."""

import asyncio
import contextlib
from collections.abc import Awaitable, Callable, Iterable, MutableMapping
from typing import Any

from service.errors import ServiceError
from trainer.settings import Limits

Message = MutableMapping[str, Any]
Receive = Callable[[], Awaitable[Message]]

JSON_TYPES = frozenset({b"application/json"})
MSGPACK_TYPES = frozenset({b"application/x-msgpack", b"application/msgpack", b"application/vnd.msgpack"})
BODY_TYPES = JSON_TYPES | MSGPACK_TYPES
EVENT_TYPES = BODY_TYPES | {b"application/x-ndjson", b"application/ndjson", b"application/jsonl"}
# Requests in a worker at one moment. What they wait for is a body or the log, so more would only be more memory: each
# may hold a body. Beyond it a request is refused at once.
MAX_IN_FLIGHT = 1024
# Of a body that is too large, up to so many times the limit is read and thrown away, so that a client that sends first
# and reads later gets to see the answer; past it the connection is closed.
MAX_DRAINED_BODIES = 8


class ClientGone(Exception):  # noqa: N818 - nothing went wrong, and nobody is there to be told
    """The client closed its connection before its request was complete."""


def check_length(headers: Iterable[tuple[bytes, bytes]], limits: Limits) -> None:
    """Refuse a body by its declared length. Raises ServiceError."""
    for name, value in headers:
        if name == b"content-length" and int(value) > limits.body_bytes:
            raise too_large(limits)


def is_drainable(headers: Iterable[tuple[bytes, bytes]], max_bytes: int) -> bool:
    """Whether what is left of a body that was refused for its size is worth reading, to keep the connection."""
    length = 0
    for name, value in headers:
        if name in {b"transfer-encoding", b"expect"}:  # read already, or never to come
            return False
        if name == b"content-length":
            length = int(value)
    return length <= MAX_DRAINED_BODIES * max_bytes


def check_type(content_type: bytes | None, allowed: frozenset[bytes]) -> bytes:
    """A body's declared type, JSON if it declares none. Raises ServiceError for one that is not allowed."""
    kind = (content_type or b"application/json").partition(b";")[0].strip().lower()
    if kind not in allowed:
        names = ", ".join(sorted(name.decode() for name in allowed))
        got = kind.decode("latin-1")[:100]
        raise ServiceError("unsupported_media_type", f"Content-Type is {got}, wanted one of {names}")
    return kind


async def read_body(receive: Receive, limits: Limits, *, timeout_s: float) -> bytes:
    """All of a body. Raises ServiceError (`too_large`, `deadline_exceeded`) or ClientGone."""
    message = _at_hand(receive)  # mostly all of it, and then no timer is needed
    chunks: list[bytes] = []
    num_bytes = 0
    more = True
    try:
        async with asyncio.timeout(timeout_s) if _is_partial(message) else contextlib.nullcontext():
            while more:
                if message is None:
                    message = await receive()
                if message["type"] == "http.disconnect":
                    raise ClientGone
                more = message.get("more_body", False)
                chunk: bytes = message.get("body", b"")
                num_bytes += len(chunk)
                if num_bytes <= limits.body_bytes:
                    chunks.append(chunk)
                elif num_bytes > MAX_DRAINED_BODIES * limits.body_bytes:
                    break
                message = None
    except TimeoutError:
        raise ServiceError("deadline_exceeded", f"the body did not arrive within {timeout_s:g} s") from None
    if num_bytes > limits.body_bytes:
        raise too_large(limits)
    return chunks[0] if len(chunks) == 1 else b"".join(chunks)


def is_gone(receive: Receive) -> bool:
    """Whether the client of a request whose body is read has closed its connection. Lets nobody else run meanwhile."""
    message = _at_hand(receive)
    return message is not None and message["type"] == "http.disconnect"


def _at_hand(receive: Receive) -> Message | None:
    """The next message, if it is there without waiting."""
    asking = receive().__await__()
    try:
        next(asking)  # as far as it goes without waiting
    except StopIteration as answered:
        message: Message = answered.value
        return message
    asking.close()
    return None


def _is_partial(message: Message | None) -> bool:
    """Whether there is more of a body to wait for."""
    return message is None or message.get("more_body", False)


def too_large(limits: Limits) -> ServiceError:
    """The answer to a body of too many bytes."""
    limit = int(limits.body_bytes)
    return ServiceError("too_large", f"a body has at most {limit} bytes", limit=("body_bytes", limit))
