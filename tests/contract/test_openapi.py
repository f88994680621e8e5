"""The OpenAPI document says what the service does."""

from collections.abc import Iterator
from typing import Any

import pytest

from service.rest import Face
from tests.contract.running import RunningWorker


@pytest.fixture
def document(system: RunningWorker) -> dict[str, Any]:
    found: dict[str, Any] = system.http.get("/openapi.json").json()
    return found


def references(node: Any) -> Iterator[str]:
    if isinstance(node, dict):
        yield from (value for key, value in node.items() if key == "$ref")
        for value in node.values():
            yield from references(value)
    elif isinstance(node, list):
        for value in node:
            yield from references(value)


def described(document: dict[str, Any]) -> set[tuple[str, str]]:
    items = document["paths"].items()
    return {(path, method.upper()) for path, item in items for method in item if method != "parameters"}


def test_every_call_is_in_the_document_and_nothing_else(system: RunningWorker, document: dict[str, Any]) -> None:
    assert described(document) == {(path, method) for path, method, _ in Face(system.worker.parts).routes()}
    admin = system.admin.get("/openapi.json").json()
    assert described(admin) == {(path, method) for path, method, _ in Face(system.worker.parts).admin_routes()}


def test_every_reference_leads_somewhere(document: dict[str, Any]) -> None:
    names = {reference.removeprefix("#/components/schemas/") for reference in references(document)}
    assert names <= document["components"]["schemas"].keys()
    assert {"ScoreRequest", "ScoreAnswer", "Row", "Event", "Problem", "LookupAnswer", "Model"} <= names


def test_a_row_has_the_configurations_inputs_and_no_others(document: dict[str, Any]) -> None:
    row = document["components"]["schemas"]["Row"]
    assert set(row["properties"]) == {"user_id", "item_id", "previous", "price", "tags", "content"}
    assert row["additionalProperties"] is False


def test_every_error_is_described_as_a_problem(document: dict[str, Any]) -> None:
    for path, item in document["paths"].items():
        for method in ("get", "post"):
            responses = item.get(method, {"responses": {}})["responses"]
            for status, response in responses.items():
                if int(status) >= 400:
                    grammar = "application/json" if path.startswith("/v2") else "application/problem+json"
                    assert list(response["content"]) == [grammar]
    assert {"400", "413", "415", "422", "500", "503"} <= document["paths"]["/v1/score"]["post"]["responses"].keys()
