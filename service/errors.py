"""The one table of errors: what each says over HTTP and over gRPC, and whether to try again.

    trainer.errors.LivebedError
    `- ServiceError      an answer that is an error: a code of `KINDS`, a sentence, and what is wrong where

Everything else that a request can raise is mapped onto a ServiceError by `as_service_error`, so both faces only ever
render one thing: `problem_json` (RFC 9457) or `rpc_status` (google.rpc.Status with its details).
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import orjson
from google.protobuf.duration_pb2 import Duration
from google.rpc import code_pb2, error_details_pb2, status_pb2

from trainer.errors import (
    BadEvent,
    LivebedError,
    LogError,
    LogFull,
    LogOverloaded,
    SchemaMismatch,
    StoreUnavailable,
)

PROBLEM_TYPE = "application/problem+json"
ERROR_DOMAIN = "livebed"  # of google.rpc.ErrorInfo: whose codes these are
RETRY_S = 1  # what clears up by itself here (a restart, a broker's fail-over, a full queue) takes about a second


@dataclass(frozen=True)
class Kind:
    """One line of the table. `grpc` is a google.rpc.Code."""

    http: int
    grpc: int
    title: str
    retry_after_s: int | None = None


KINDS: dict[str, Kind] = {
    "malformed": Kind(400, code_pb2.INVALID_ARGUMENT, "The body is not well-formed"),
    "invalid": Kind(422, code_pb2.INVALID_ARGUMENT, "The request is well-formed but not valid"),
    "unknown_feature": Kind(422, code_pb2.INVALID_ARGUMENT, "A feature is not in the configuration"),
    "unauthenticated": Kind(401, code_pb2.UNAUTHENTICATED, "A valid token is needed"),
    "permission_denied": Kind(403, code_pb2.PERMISSION_DENIED, "The token does not allow this call"),
    "not_found": Kind(404, code_pb2.NOT_FOUND, "There is nothing here"),
    "unknown_table": Kind(404, code_pb2.NOT_FOUND, "There is no such table"),
    "unknown_id": Kind(404, code_pb2.NOT_FOUND, "There is no row for that id"),
    "unknown_model": Kind(404, code_pb2.NOT_FOUND, "There is no such model"),
    "unknown_version": Kind(404, code_pb2.NOT_FOUND, "There is no such version"),
    "refused": Kind(409, code_pb2.FAILED_PRECONDITION, "That cannot be done now"),
    "no_trainer": Kind(503, code_pb2.UNAVAILABLE, "No trainer runs here", RETRY_S),
    "method_not_allowed": Kind(405, code_pb2.UNIMPLEMENTED, "The method is not allowed here"),
    "not_acceptable": Kind(406, code_pb2.UNIMPLEMENTED, "No accepted format is offered"),
    "unsupported_media_type": Kind(415, code_pb2.UNIMPLEMENTED, "The body's format is not supported"),
    "too_large": Kind(413, code_pb2.RESOURCE_EXHAUSTED, "The body is too large"),
    "too_many": Kind(413, code_pb2.INVALID_ARGUMENT, "The request asks for too many items"),
    "quota_exceeded": Kind(429, code_pb2.RESOURCE_EXHAUSTED, "The client's quota is used up", RETRY_S),
    "overloaded": Kind(503, code_pb2.RESOURCE_EXHAUSTED, "The server is full", RETRY_S),
    "not_ready": Kind(503, code_pb2.UNAVAILABLE, "The model is not ready", RETRY_S),
    "deadline_exceeded": Kind(504, code_pb2.DEADLINE_EXCEEDED, "The request took too long"),
    "log_unavailable": Kind(503, code_pb2.UNAVAILABLE, "The event log does not answer", RETRY_S),
    "log_full": Kind(507, code_pb2.RESOURCE_EXHAUSTED, "The event log is full"),
    "internal": Kind(500, code_pb2.INTERNAL, "An error of ours"),
}


# What the trainer's errors mean to a caller; the first that fits.
MEANINGS: tuple[tuple[type[LivebedError], str], ...] = (
    (LogFull, "log_full"),
    (LogOverloaded, "overloaded"),
    (LogError, "log_unavailable"),
    (StoreUnavailable, "not_ready"),
    (SchemaMismatch, "not_ready"),
)


@dataclass(frozen=True)
class Violation:
    """What is wrong at one place: a JSON pointer into the body ("" is all of it) and a sentence."""

    pointer: str
    detail: str


class ServiceError(LivebedError):
    """An answer that is an error.

    >>> ServiceError("unknown_table", "no table 'x'").kind.http
    404
    """

    def __init__(
        self,
        code: str,
        detail: str,
        *,
        violations: Sequence[Violation] = (),
        limit: tuple[str, int] | None = None,
        retry_after_s: int | None = None,
    ) -> None:
        """Take a code of `KINDS`; `limit` is the setting that was exceeded and its value.

        `retry_after_s` is when to try again where that is known better than the table knows it.
        """
        super().__init__(code, detail)
        self.code = code
        self.detail = detail
        self.violations = tuple(violations)
        self.limit = limit
        self.retry_after_s = self.kind.retry_after_s if retry_after_s is None else retry_after_s

    @property
    def kind(self) -> Kind:
        """The line of the table."""
        return KINDS[self.code]


def too_many(setting: str, count: int, limit: int) -> ServiceError:
    """More items than `serving.limits.<setting>` allows."""
    sentence = f"{count} {setting}, at most {limit} a request"
    return ServiceError("too_many", sentence, limit=(setting, limit))


def as_service_error(error: Exception) -> ServiceError:
    """What to answer for any exception; of one that we did not foresee nothing is told."""
    if isinstance(error, ServiceError):
        return error
    if isinstance(error, BadEvent):
        return ServiceError(error.code if error.code in KINDS else "invalid", error.detail)
    for kind, code in MEANINGS:
        if isinstance(error, kind):
            return ServiceError(code, str(error))
    if isinstance(error, TimeoutError):
        return ServiceError("deadline_exceeded", "the request was not answered in time")
    return ServiceError("internal", "the error was logged under the request's id")


def problem_json(error: ServiceError, *, request_id: str, instance: str, **more: Any) -> bytes:
    """The body of an HTTP error (RFC 9457); `more` are further members."""
    kind = error.kind
    problem: dict[str, Any] = {
        "type": f"urn:livebed:error:{error.code}",
        "title": kind.title,
        "status": kind.http,
        "detail": error.detail,
        "instance": instance,
        "code": error.code,
        "request_id": request_id,
        "errors": [{"pointer": violation.pointer, "detail": violation.detail} for violation in error.violations],
        **more,
    }
    if error.limit is not None:
        problem["limit"] = {"name": error.limit[0], "value": error.limit[1]}
    return orjson.dumps(problem)


def is_open_inference(path: str) -> bool:
    """Whether a path belongs to the Open Inference Protocol, which has an error grammar of its own."""
    return path == "/v2" or path.startswith("/v2/")


def open_inference_json(error: ServiceError) -> bytes:
    """The body of an HTTP error under `/v2`."""
    return orjson.dumps({"error": error.detail})


def rpc_status(error: ServiceError, *, request_id: str) -> status_pb2.Status:
    """The same error for gRPC: ErrorInfo always, BadRequest and RetryInfo where they apply."""
    status = status_pb2.Status(code=error.kind.grpc, message=error.detail)
    metadata = {"request_id": request_id}
    if error.limit is not None:
        metadata |= {"limit_name": error.limit[0], "limit_value": str(error.limit[1])}
    info = error_details_pb2.ErrorInfo(reason=error.code.upper(), domain=ERROR_DOMAIN, metadata=metadata)
    status.details.add().Pack(info)
    if error.violations:
        request = error_details_pb2.BadRequest()
        for violation in error.violations:
            request.field_violations.add(field=violation.pointer, description=violation.detail)
        status.details.add().Pack(request)
    if error.retry_after_s is not None:
        status.details.add().Pack(error_details_pb2.RetryInfo(retry_delay=Duration(seconds=error.retry_after_s)))
    return status
