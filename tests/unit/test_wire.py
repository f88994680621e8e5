"""Requests as JSON and as protobuf: one meaning, one set of checks."""

from typing import Any

import msgspec
import numpy as np
import orjson
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from service.answers import safe_integer
from service.client import _score_request
from service.errors import ServiceError
from service.event_service_pb2 import Event, PublishEventsRequest
from service.negotiation import accepted
from service.proto_wire import Messages
from service.scoring_service_pb2 import CandidateColumns, ScoreRequest
from service.value_pb2 import Value
from service.wire import Requests, pointer_of
from tests.unit.worlds import every_kind
from trainer.event_pb2 import EventBatch, InputColumn
from trainer.events import Inputs
from trainer.hashing import hash_values
from trainer.settings import Limits

ROWS: list[dict[str, Any]] = [
    {"user_id": "u1", "item_id": 7, "previous": ["a", 2], "price": 3, "content": [1.0, 2.5, -1.0]},
    {"user_id": 2**60, "price": 1.5, "tags": []},
    {},
]


def requests(**limits: int) -> Requests:
    return Requests(every_kind()[1], Limits(**limits))


def refused(body: Any, **limits: int) -> ServiceError:
    content = body if isinstance(body, bytes) else orjson.dumps(body)
    with pytest.raises(ServiceError) as raised:
        requests(**limits).score(content)
    return raised.value


def assert_same(one: Inputs, other: Inputs) -> None:
    assert one.count == other.count
    assert one.columns.keys() == other.columns.keys()
    for name, column in one.columns.items():
        for attribute in ("given_B", "ids", "lengths", "numbers"):
            np.testing.assert_array_equal(getattr(column, attribute), getattr(other.columns[name], attribute), name)


def test_an_unknown_feature_is_named_and_pointed_at() -> None:
    error = refused({"candidates": [{}, {"colour": "red"}]})
    assert (error.code, error.violations[0].pointer) == ("unknown_feature", "/candidates/1/colour")
    assert "'colour'" in error.detail


@pytest.mark.parametrize(
    ("body", "code", "pointer"),
    [
        ({"candidates": [{"user_id": 1.5}]}, "invalid", "/candidates/0/user_id"),
        ({"candidates": [{"previous": ["a", None]}]}, "invalid", "/candidates/0/previous/1"),
        ({"candidates": [{"previous": ["a", "b", "c", "d"]}]}, "invalid", "/candidates/0/previous"),
        ({"candidates": [{"content": [1.0, 2.0]}]}, "invalid", "/candidates/0/content"),
        ({"candidates": [{"user_id": "x" * 257}]}, "invalid", "/candidates/0/user_id"),
        ({"candidates": [{"price": 1e300}]}, "invalid", "/candidates/0/price"),
        ({"context": {"colour": 1}, "candidates": []}, "unknown_feature", "/context/colour"),
        ({"candidates": [], "colour": 1}, "invalid", "/colour"),
        ({"candidates": [], "time_ms": -1}, "invalid", "/time_ms"),
        ({"candidates": [], "rows": []}, "invalid", ""),
        ({"context": {}, "rows": []}, "invalid", "/context"),
        ({}, "invalid", ""),
        ([], "invalid", ""),
    ],
)
def test_what_is_well_formed_but_wrong_is_refused_with_its_place(body: Any, code: str, pointer: str) -> None:
    error = refused(body)
    assert (error.kind.http, error.code, error.violations[0].pointer) == (422, code, pointer)


@pytest.mark.parametrize(
    "body",
    [b"", b"{", b"nonsense", b'{"candidates": [{"price": NaN}]}', b'{"candidates": [{"price": -Infinity}]}', b"\xff"],
)
def test_what_is_not_json_is_malformed(body: bytes) -> None:
    assert refused(body).code == "malformed"


def test_counts_are_limited() -> None:
    assert refused({"candidates": [{}] * 3}, candidates=2).limit == ("candidates", 2)
    assert refused({"candidates": [{}, ROWS[0]]}, features=4).limit == ("features", 4)
    with pytest.raises(ServiceError, match="3 ids, at most 2"):
        requests(ids=2).lookup(b'{"ids": [1, 2, 3]}')
    with pytest.raises(ServiceError, match="9 top_k, at most 8"):
        requests(top_k=8).rank(b'{"candidates": [], "top_k": 9}')


def test_rows_as_json_as_messages_and_as_columns_are_the_same_inputs() -> None:
    wire = requests()
    as_json = wire.score(orjson.dumps({"candidates": ROWS, "context": ROWS[1], "time_ms": 5}))
    as_messages = Messages(wire).candidates(_score_request(ROWS, ROWS[1], 5))
    assert_same(as_json.inputs, as_messages.inputs)
    assert as_json.context is not None
    assert as_messages.context is not None
    assert_same(as_json.context, as_messages.context)
    assert as_json.time_ms == as_messages.time_ms == 5
    columns = [
        InputColumn(name="user_id", given=bytes([1, 1, 0]), strings=["u1", str(2**60)]),
        InputColumn(name="item_id", given=bytes([1, 0, 0]), integers=[7]),
        InputColumn(name="previous", given=bytes([1, 0, 0]), lengths=np.int32(2).tobytes(), strings=["a", "2"]),
        InputColumn(name="price", given=bytes([1, 1, 0]), numbers=np.array([3, 1.5]).tobytes()),
        InputColumn(name="content", given=bytes([1, 0, 0]), numbers=np.array([1, 2.5, -1]).tobytes()),
        InputColumn(name="tags", given=bytes([0, 1, 0]), lengths=np.int32(0).tobytes()),
    ]
    as_columns = Messages(wire).candidates(ScoreRequest(columns=CandidateColumns(count=3, columns=columns)))
    assert_same(as_json.inputs, as_columns.inputs)


IDS = st.none() | st.integers(-(2**63), 2**63 - 1) | st.text(max_size=5)


@settings(deadline=None)  # the first call loads or compiles
@given(st.lists(st.tuples(IDS, IDS), max_size=20))
def test_ids_of_any_mixture_are_the_hashes_of_those_given_in_order(rows: list[tuple[Any, Any]]) -> None:
    names = ("user_id", "item_id")
    made = requests().score(msgspec.json.encode({"rows": [dict(zip(names, row, strict=True)) for row in rows]})).inputs
    for k, name in enumerate(names):
        given_B = [row[k] is not None for row in rows]
        ids = [int(hash_values([str(row[k])])[0]) for row in rows if row[k] is not None]
        assert (name in made.columns) == any(given_B)
        if any(given_B):
            column = made.columns[name]
            assert column.ids is not None
            assert column.ids.tolist() == ids
            assert (column.given_B is None) == all(given_B)
            assert column.given_B is None or column.given_B.tolist() == given_B


@pytest.mark.parametrize("number", [float("nan"), float("inf"), -float("inf")])
def test_a_number_that_is_not_finite_is_refused_in_every_message(number: float) -> None:
    messages = Messages(requests())
    with pytest.raises(ServiceError) as raised:
        messages.candidates(_score_request([{"price": number}], None, None))
    assert raised.value.code == "invalid"
    column = InputColumn(name="price", numbers=np.array([number]).tobytes())
    with pytest.raises(ServiceError) as raised:
        messages.candidates(ScoreRequest(columns=CandidateColumns(count=1, columns=[column])))
    assert raised.value.code == "invalid"
    good = Event(features={"price": Value(number=1.0)}, label=1.0)
    events = PublishEventsRequest(events=[good, Event(features={"price": Value(number=number)}, label=1.0), good])
    raw, rejected = messages.events(events, 1)
    assert (raw.inputs.count, [(r.index, r.code) for r in rejected]) == (2, [(1, "not_finite")])


def test_texts_of_messages_are_limited_too() -> None:
    messages = Messages(requests(string_chars=4))
    batch = EventBatch(count=1, columns=[InputColumn(name="user_id", strings=["äöüéè"])], labels=bytes(4))
    with pytest.raises(ServiceError, match="5 characters, at most 4"):
        messages.events(PublishEventsRequest(batch=batch), 1)


def test_a_pointer_keeps_a_name_with_dots_and_escapes_slashes() -> None:
    assert pointer_of("Expected `int` - at `$.context.user.id`") == "/context/user.id"
    assert pointer_of("Expected `int` - at `$.candidates[3].user.id[0]`") == "/candidates/3/user.id/0"
    assert pointer_of("Expected `object`, got `array`") == ""
    assert refused({"candidates": [{"a/b~c": 1}]}).violations[0].pointer == "/candidates/0/a~1b~0c"


def test_an_integer_that_a_double_cannot_hold_is_printed_as_text() -> None:
    assert [safe_integer(value) for value in (2**53 - 1, 2**53)] == [2**53 - 1, str(2**53)]


@pytest.mark.parametrize(
    ("header", "kind"),
    [
        (None, "application/json"),
        ("*/*", "application/json"),
        ("application/*;q=0.5, application/octet-stream", "application/octet-stream"),
        ("application/octet-stream;q=0.1, application/json", "application/json"),
        ("text/html, */*;q=0.1", "application/json"),
        ("APPLICATION/JSON; charset=utf-8", "application/json"),
    ],
)
def test_the_preferred_format_is_answered(header: str | None, kind: str) -> None:
    assert accepted(header, ["application/json", "application/octet-stream"]) == kind


@pytest.mark.parametrize("header", ["text/html", "application/json;q=0", "application/json;q=abc"])
def test_a_format_that_nobody_offers_is_not_acceptable(header: str) -> None:
    with pytest.raises(ServiceError, match="offered"):
        accepted(header, ["application/json"])


def test_the_documented_types_are_those_that_decode() -> None:
    schema = msgspec.json.schema(requests().ScoreRequest)
    row = schema["$defs"]["Row"]
    assert set(row["properties"]) == {"user_id", "item_id", "previous", "price", "tags", "content"}
    assert row["additionalProperties"] is False
