"""Which of the formats on offer a client accepts (RFC 9110, 12.5.1)."""

from collections.abc import Sequence

from service.errors import ServiceError


def accepted(header: str | None, offered: Sequence[str]) -> str:
    """The offered type that an Accept header prefers; the first one where it has no preference.

    Raises ServiceError("not_acceptable").

    >>> accepted("application/octet-stream, application/json;q=0.5", ["application/json", "application/octet-stream"])
    'application/octet-stream'
    >>> accepted(None, ["application/json"])
    'application/json'
    """
    if not header or header == "*/*":
        return offered[0]
    ranges = [_range(part) for part in header.split(",")]
    weights = [_weight(ranges, kind) for kind in offered]
    best = max(range(len(offered)), key=lambda index: weights[index])
    if weights[best] <= 0:
        raise ServiceError("not_acceptable", f"Accept is {header[:200]!r}, offered: {', '.join(offered)}")
    return offered[best]


def _range(part: str) -> tuple[str, float]:
    kind, *parameters = part.split(";")
    weight = 1.0
    for parameter in parameters:
        name, _, value = parameter.partition("=")
        if name.strip().lower() == "q":
            try:
                weight = float(value)
            except ValueError:
                weight = 0.0
    return kind.strip().lower(), weight


def _weight(ranges: Sequence[tuple[str, float]], kind: str) -> float:
    """The weight of the most specific range that matches a type; 0 if none does."""
    for pattern in (kind, kind.partition("/")[0] + "/*", "*/*"):
        for given, weight in ranges:
            if given == pattern:
                return weight
    return 0.0
