"""The one table of errors, rendered for both faces."""

import orjson
import pytest
from google.rpc import code_pb2, error_details_pb2

from service.errors import KINDS, ServiceError, Violation, as_service_error, problem_json, rpc_status, too_many
from trainer.errors import (
    BadEvent,
    LogFull,
    LogOverloaded,
    LogUnavailable,
    SchemaMismatch,
    StoreUnavailable,
)


@pytest.mark.parametrize("code", KINDS)
def test_each_kind_says_the_same_over_both_faces(code: str) -> None:
    error = ServiceError(code, "a sentence", violations=[Violation("/candidates/0", "why")])
    problem = orjson.loads(problem_json(error, request_id="r1", instance="/v1/score"))
    status = rpc_status(error, request_id="r1")
    info, request = error_details_pb2.ErrorInfo(), error_details_pb2.BadRequest()
    assert status.details[0].Unpack(info)
    assert status.details[1].Unpack(request)
    assert (problem["code"], problem["detail"], problem["request_id"]) == (code, status.message, "r1")
    assert (info.reason, info.metadata["request_id"]) == (code.upper(), "r1")
    assert [problem["errors"][0]["pointer"]] == [field.field for field in request.field_violations]
    assert (problem["status"], status.code) == (KINDS[code].http, KINDS[code].grpc)


def test_what_clears_up_by_itself_says_when_to_try_again() -> None:
    status = rpc_status(ServiceError("log_unavailable", "down"), request_id="r")
    retry = error_details_pb2.RetryInfo()
    assert status.details[1].Unpack(retry)
    assert retry.retry_delay.seconds == 1


def test_an_exceeded_limit_is_named_with_its_value() -> None:
    error = too_many("candidates", 2000, 1024)
    problem = orjson.loads(problem_json(error, request_id="r", instance="/v1/score"))
    info = error_details_pb2.ErrorInfo()
    assert rpc_status(error, request_id="r").details[0].Unpack(info)
    assert problem["limit"] == {"name": "candidates", "value": 1024}
    assert (info.metadata["limit_name"], info.metadata["limit_value"]) == ("candidates", "1024")


@pytest.mark.parametrize(
    ("raised", "code"),
    [
        (BadEvent("malformed", "x"), "malformed"),
        (BadEvent("bad_label", "x"), "invalid"),
        (BadEvent("unknown_feature", "x"), "unknown_feature"),
        (LogUnavailable("x"), "log_unavailable"),
        (LogFull("x"), "log_full"),
        (LogOverloaded("x"), "overloaded"),
        (StoreUnavailable("x"), "not_ready"),
        (SchemaMismatch("x"), "not_ready"),
        (TimeoutError(), "deadline_exceeded"),
    ],
)
def test_the_trainers_errors_have_their_line_in_the_table(raised: Exception, code: str) -> None:
    assert as_service_error(raised).code == code


def test_of_an_error_that_we_did_not_foresee_nothing_is_told() -> None:
    answer = as_service_error(ValueError("password=hunter2"))
    assert answer.kind.grpc == code_pb2.INTERNAL
    assert b"hunter2" not in problem_json(answer, request_id="r", instance="/")
