"""Callers of the last release find what they knew."""

import copy
import json

import pytest

from tests.contract.openapi_diff import BASELINE, Json, documents, missing


@pytest.fixture(scope="module")
def released() -> Json:
    found: Json = json.loads(BASELINE.read_text())
    return found


def test_nothing_was_taken_away(released: Json) -> None:
    now = documents()
    assert [sentence for listener in released for sentence in missing(released[listener], now[listener])] == []


def test_what_is_taken_away_or_narrowed_is_found(released: Json) -> None:
    old, new = released["public"], copy.deepcopy(released["public"])
    del new["paths"]["/v1/rank"]
    del new["paths"]["/v1/score"]["post"]["responses"]["422"]
    del new["components"]["schemas"]["ScoreAnswer"]["properties"]["unknown"]
    new["components"]["schemas"]["ModelAnswer"]["properties"]["step"]["type"] = "string"
    new["components"]["schemas"]["ScoreRequest"]["required"] = ["context"]
    found = list(missing(old, new))
    assert len(found) == 5, found
    for said in (
        "rank: is gone",
        "answer 422",
        "ScoreAnswer.unknown",
        "step: may now be string",
        "context: is now req",
    ):
        assert any(said in sentence for sentence in found), said
