"""Packed bodies (`Content-Encoding: gzip`), never unpacked beyond the limit of a body."""

import zlib
from typing import Final

from service.errors import ServiceError
from service.limits import too_large
from trainer.settings import Limits

GZIP_WINDOW: Final = 16 + zlib.MAX_WBITS  # a gzip header and no other
PLAIN: Final = frozenset({"", "identity"})


def is_packed(content_encoding: str | None) -> bool:
    """Whether a body is gzip. Raises ServiceError("unsupported_media_type") for what is neither that nor plain."""
    if content_encoding is None or (name := content_encoding.strip().lower()) in PLAIN:
        return False
    if name not in {"gzip", "x-gzip"}:
        raise ServiceError("unsupported_media_type", f"Content-Encoding is {name[:100]}, wanted gzip or none")
    return True


def unpack(packed: bytes, limits: Limits) -> bytes:
    """One gzip member of at most `limits.body_bytes` unpacked: beyond it nothing is unpacked and nothing kept.

    Raises ServiceError: `too_large`, or `malformed` for what is not gzip, ends too early or goes on after its end.
    """
    stream = zlib.decompressobj(GZIP_WINDOW)
    try:
        body = stream.decompress(packed, limits.body_bytes + 1)
    except zlib.error as error:
        raise ServiceError("malformed", f"the body is not gzip: {error}") from None
    if len(body) > limits.body_bytes:
        raise too_large(limits)
    if not stream.eof:
        raise ServiceError("malformed", "the gzip body ends too early")
    if stream.unused_data:
        raise ServiceError("malformed", "there is more after the end of the gzip body")
    return body
