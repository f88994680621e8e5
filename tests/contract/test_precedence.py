"""Candidate over context over what is known of an entity over the meaning of a missing value."""

from typing import Any

from tests.contract.running import RunningWorker

KNOWN = {"price": 20.0, "tags": ["i1", "i2"], "content": [1, 0, 1]}  # of item i0, by a feature event


def score(system: RunningWorker, candidate: dict[str, Any], context: dict[str, Any] | None = None) -> float:
    request = {"candidates": [candidate], "time_ms": 1, **({"context": context} if context is not None else {})}
    answer: float = system.http.post("/v1/score", json=request).raise_for_status().json()["scores"][0]
    return answer


def test_an_entity_named_by_id_brings_what_is_known_of_it(system: RunningWorker) -> None:
    named = score(system, {"item_id": "i0"})
    assert named == score(system, {"item_id": "i0", **KNOWN})
    assert named != score(system, {"item_id": "i0", "price": 0.0, "tags": [], "content": [0, 0, 0]})


def test_a_context_names_an_entity_too(system: RunningWorker) -> None:
    assert score(system, {"user_id": "u1"}, {"item_id": "i0"}) == score(system, {"user_id": "u1", "item_id": "i0"})


def test_a_candidates_value_wins_over_the_contexts(system: RunningWorker) -> None:
    context = {"user_id": "u1", "price": 1.0, "previous": ["i3"]}
    assert score(system, {"item_id": "i5", "price": 4.0}, context) == score(
        system, {"item_id": "i5", "user_id": "u1", "price": 4.0, "previous": ["i3"]}
    )
    assert score(system, {"item_id": "i5", "price": 4.0}, context) != score(system, {"item_id": "i5"}, context)


def test_a_contexts_value_wins_over_what_is_known(system: RunningWorker) -> None:
    assert score(system, {"item_id": "i0"}, {"price": 3.0}) == score(system, {"item_id": "i0", **KNOWN, "price": 3.0})


def test_an_empty_list_is_a_value_and_null_is_none(system: RunningWorker) -> None:
    assert score(system, {"item_id": "i0", "tags": []}) == score(system, {"item_id": "i0", **KNOWN, "tags": []})
    assert score(system, {"item_id": "i0", "tags": None}) == score(system, {"item_id": "i0", **KNOWN})


def test_an_item_of_which_nothing_is_known_has_the_missing_meaning(system: RunningWorker) -> None:
    assert score(system, {"item_id": "i3"}) == score(
        system, {"item_id": "i3", "price": 0.0, "tags": [], "content": [0, 0, 0]}
    )
