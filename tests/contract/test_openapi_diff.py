"""Callers of the last release find what they knew."""

import copy
import json
from collections.abc import Callable
from typing import Any

import pytest

from tests.contract.openapi_diff import BASELINE, Json, documents, missing

SCORE = ("paths", "/v1/score", "post")
LOOKUP = ("paths", "/v1/tables/{table}/embeddings:lookup", "post")
SCHEMAS = ("components", "schemas")
PARAMETER = {"name": "dim", "in": "query", "required": True, "schema": {"type": "integer"}}


@pytest.fixture(scope="module")
def released() -> Json:
    found: Json = json.loads(BASELINE.read_text())
    return found


def test_nothing_was_taken_away(released: Json) -> None:
    now = documents()
    assert [sentence for listener in released for sentence in missing(released[listener], now[listener])] == []


@pytest.mark.parametrize(
    ("place", "change", "said"),
    [
        (("paths",), lambda at: at.pop("/v1/rank"), "POST /v1/rank: is gone"),
        ((*SCORE, "responses"), lambda at: at.pop("422"), "POST /v1/score: answer 422 is gone"),
        ((*SCORE, "responses", "200", "headers"), lambda at: at.pop("Server-Timing"), "header Server-Timing is gone"),
        (
            (*LOOKUP, "responses", "200", "content"),
            lambda at: at.pop("application/octet-stream"),
            "octet-stream is gone",
        ),
        ((*LOOKUP, "requestBody", "content"), lambda at: at.pop("application/json"), "application/json is gone"),
        ((*LOOKUP, "parameters"), lambda at: at.append(PARAMETER), "parameter dim is now required"),
        ((*SCHEMAS, "ScoreAnswer", "properties"), lambda at: at.pop("unknown"), ".unknown: is gone"),
        ((*SCHEMAS, "ScoreAnswer", "required"), lambda at: at.remove("unknown"), ".unknown: is no longer always there"),
        ((*SCHEMAS, "ModelAnswer", "properties", "step"), lambda at: at.update(type="string"), ".step: had integer"),
        ((*SCHEMAS, "ScoreRequest"), lambda at: at.update(required=["context"]), ".context: is now required"),
        ((*SCHEMAS, "Row", "properties"), lambda at: at.pop("user_id"), ".user_id: is gone"),
        ((*SCHEMAS, "Row", "properties", "user_id", "anyOf"), lambda at: at.pop(2), ".user_id: took null"),
        (
            (*SCHEMAS, "Row", "properties", "user_id", "anyOf"),
            lambda at: at[1].update(maxLength=9),
            "maxLength was 256",
        ),
        ((*SCHEMAS, "LookupRequest", "properties", "ids"), lambda at: at.update(maxItems=5), ".ids: maxItems was None"),
        (
            (*SCHEMAS, "LookupRequest", "properties", "ids"),
            lambda at: at["items"]["anyOf"].pop(0),
            ".ids[]: took integer",
        ),
        (
            (*SCHEMAS, "LookupAnswer", "properties", "status", "items", "enum"),
            lambda at: at.append("maybe"),
            "'maybe' is new",
        ),
    ],
)
def test_what_is_taken_away_or_narrowed_is_said_with_its_place(
    released: Json, place: tuple[str, ...], change: Callable[[Any], Any], said: str
) -> None:
    changed = copy.deepcopy(released["public"])
    node: Any = changed
    for step in place:
        node = node[step]
    change(node)
    found = missing(released["public"], changed)
    assert any(said in sentence for sentence in found), found


def test_more_is_always_fine(released: Json) -> None:
    old, new = released["public"], copy.deepcopy(released["public"])
    new["paths"]["/v1/new"] = new["paths"]["/v1/info"]
    schemas = new["components"]["schemas"]
    schemas["Row"]["properties"]["colour"] = {"type": "string"}
    schemas["ScoreAnswer"]["properties"]["why"] = {"type": "string"}
    schemas["ScoreAnswer"]["required"].append("why")
    schemas["ScoreRequest"]["properties"]["explain"] = {"type": "boolean"}
    assert missing(old, new) == []
