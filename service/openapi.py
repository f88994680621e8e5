"""The OpenAPI document, made from the types that decode requests and document answers, and from the configuration."""

from typing import Any

import msgspec

from service import answers, catalogue, oip_openapi, operations, search_wire
from service.errors import KINDS, PROBLEM_TYPE
from service.live_feed import EVENT_STREAM_TYPE, LiveAnswer
from service.packed_answers import MSGPACK_TYPE
from service.wire import Requests
from trainer.settings import Settings

Json = dict[str, Any]
REF = "#/components/schemas/{name}"

# Errors that any call may answer with, and those of calls with a body.
ANYWHERE = ("quota_exceeded", "overloaded", "internal")
WITH_BODY = ("malformed", "unsupported_media_type", "too_large", "invalid", "deadline_exceeded")
READING = ("not_ready",)
SCORING = (*READING, "not_acceptable")


def document(settings: Settings, requests: Requests) -> Json:
    """The whole document (3.1)."""
    return {
        "openapi": "3.1.0",
        "info": {
            "title": f"Livebed: {settings.name}",
            "version": catalogue.package_version(),
            "summary": "Events in, live CTR scores and embeddings out",
        },
        "paths": _paths(),
        "components": {"schemas": _schemas(requests)},
    }


def _paths() -> Json:
    table = _in_path("table")
    inspect = _operation(
        "One id: its row, counts and optimizer state",
        "InspectAnswer",
        errors=(*READING, "unknown_table", "unknown_id"),
    )
    return {
        "/v1/events": {"post": _publish()},
        "/v1/score": {
            "post": _add_forms(
                _operation("Probabilities of candidates", "ScoreAnswer", body="ScoreRequest", errors=SCORING),
                "A little-endian float32 a candidate",
            )
        },
        "/v1/rank": {
            "post": _add_forms(
                _operation("The best candidates, best first", "RankAnswer", body="RankRequest", errors=SCORING),
                "X-Rank-Count little-endian uint32 places, then as many float32 probabilities",
            )
        },
        "/v1/tables/{table}/embeddings:lookup": {"post": _lookup() | {"parameters": [table]}},
        "/v1/tables/{table}/embeddings:search": {"post": _search(), "parameters": [table]},
        "/v1/tables/{table}/embeddings/{id}": {"get": inspect, "parameters": [table, _in_path("id")]},
        "/v1/model/versions": {"get": _operation("Kept checkpoints, and what is served", "VersionsAnswer")},
        "/v1/model": {"get": _operation("State of the live model", "ModelAnswer", errors=READING)},
        "/v1/tables": {"get": _operation("All tables", "TablesAnswer")},
        "/v1/info": {"get": _operation("Inputs, entities and limits", "InfoAnswer")},
        "/v1/live": {"get": _live()},
        "/livez": {"get": _operation("The process lives", "Readiness")},
        "/readyz": {"get": _readyz()},
        "/startupz": {"get": _operation("This worker has been ready once", "Readiness", errors=READING)},
        **oip_openapi.paths(_operation),
    }


def admin_document(settings: Settings) -> Json:
    """The calls of the admin port."""
    table, id_ = _in_path("table"), _in_path("id")
    asked = ("no_trainer", "refused", "deadline_exceeded")
    logged = ("unknown_table", "log_unavailable", "log_full")
    forget = _operation("Forget an id everywhere", "CommandAnswer", status="202", errors=logged)
    resize = _operation("Resize a table", "CommandAnswer", body="ResizeRequest", status="202", errors=logged)
    activate = _operation(
        "Serve a kept checkpoint; nothing that is learned is shown until it is released",
        "ActivateAnswer",
        status="202",
        errors=(*asked, "unknown_version"),
    )
    paths = {
        "/v1/tables/{table}/embeddings/{id}": {"delete": forget, "parameters": [table, id_]},
        "/v1/tables/{table}:resize": {"post": resize, "parameters": [table]},
        "/v1/model/versions/{version}:activate": {"post": activate, "parameters": [_in_path("version")]},
        "/v1/model:release": {
            "post": _operation("Show again what is learned", "ReleaseAnswer", status="202", errors=asked)
        },
        "/v1/checkpoints": {
            "post": _operation("Write a checkpoint now", "CheckpointAnswer", status="202", errors=asked)
        },
        "/livez": {"get": _operation("The process lives", "Readiness")},
        "/readyz": {"get": _readyz()},
    }
    types = [
        operations.CommandAnswer,
        operations.ResizeRequest,
        operations.ActivateAnswer,
        operations.ReleaseAnswer,
        operations.CheckpointAnswer,
        catalogue.Readiness,
        answers.Problem,
    ]
    _, schemas = msgspec.json.schema_components(types, ref_template=REF)
    info = {"title": f"Livebed: {settings.name}, administration", "version": catalogue.package_version()}
    return {"openapi": "3.1.0", "info": info, "paths": paths, "components": {"schemas": schemas}}


def _in_path(name: str) -> Json:
    return {"name": name, "in": "path", "required": True, "schema": {"type": "string"}}


def _publish() -> Json:
    operation = _operation(
        "Append events to the log; accepted means durable there",
        "PublishAnswer",
        body="Events",
        status="202",
        errors=("log_unavailable", "log_full", "too_many"),
    )
    lines = {"schema": {"type": "string", "description": "One Event as JSON a line"}}
    operation["requestBody"]["content"]["application/x-ndjson"] = lines
    packed = {"schema": {"type": "string", "format": "binary", "description": "The JSON body as MessagePack"}}
    operation["requestBody"]["content"][MSGPACK_TYPE] = packed
    return operation


def _lookup() -> Json:
    operation = _operation(
        "Rows of ids; an unknown id is answered with the table's default and says so",
        "LookupAnswer",
        body="LookupRequest",
        errors=(*READING, "unknown_table", "not_acceptable"),
    )
    ok = operation["responses"]["200"]
    _add_forms(operation, "count x dim little-endian float32, then count status bytes: 0 unknown, 1 learned, 2 default")
    for name in ("X-Embedding-Dim", "X-Embedding-Count"):
        ok["headers"][name] = {"schema": {"type": "integer"}, "description": "Of the binary form"}
    return operation


def _add_forms(operation: Json, layout: str) -> Json:
    """The forms beside JSON: MessagePack both ways, and raw bytes out."""
    body, ok = operation["requestBody"]["content"], operation["responses"]["200"]["content"]
    body[MSGPACK_TYPE] = {
        "schema": {"type": "string", "format": "binary", "description": "The JSON body as MessagePack"}
    }
    packed = "The JSON answer as MessagePack, with arrays of numbers and status as little-endian binaries"
    ok[MSGPACK_TYPE] = {"schema": {"type": "string", "format": "binary", "description": packed}}
    ok[answers.BINARY_TYPE] = {"schema": {"type": "string", "format": "binary", "description": layout}}
    return operation


def _live() -> Json:
    summary = "Server-sent events for a console: an object a second until the caller goes or the worker drains"
    operation = _operation(summary, "LiveAnswer", errors=("not_acceptable",))
    ok = operation["responses"]["200"]
    ok["content"] = {EVENT_STREAM_TYPE: {"schema": _ref("LiveAnswer")}}
    return operation


def _search() -> Json:
    return _operation(
        "The rows nearest to a vector, or to the row of an id or key, which is left out",
        "SearchAnswer",
        body="SearchRequest",
        errors=(*READING, "unknown_table", "unknown_id", "too_many", "refused", "not_acceptable"),
    )


def _readyz() -> Json:
    operation = _operation("This worker answers", "Readiness", errors=READING)
    operation["parameters"] = [
        {"name": "verbose", "in": "query", "allowEmptyValue": True, "schema": {"type": "string"}}
    ]
    return operation


def _operation(
    summary: str, answer: str, *, body: str | None = None, status: str = "200", errors: tuple[str, ...] = ()
) -> Json:
    operation: Json = {
        "summary": summary,
        "responses": {
            status: {
                "description": summary,
                "headers": _headers(),
                "content": {answers.JSON_TYPE: {"schema": _ref(answer)}},
            }
        },
    }
    if body is not None:
        operation["requestBody"] = {"required": True, "content": {answers.JSON_TYPE: {"schema": _ref(body)}}}
        errors = (*errors, *WITH_BODY)
    codes: dict[str, list[str]] = {}
    for code in (*errors, *ANYWHERE):
        codes.setdefault(str(KINDS[code].http), []).append(code)
    for http, names in sorted(codes.items()):
        operation["responses"][http] = {
            "description": "; ".join(f"`{name}`: {KINDS[name].title}" for name in names),
            "content": {PROBLEM_TYPE: {"schema": _ref("Problem")}},
        }
    return operation


def _headers() -> Json:
    return {
        "X-Request-Id": {"schema": {"type": "string"}, "description": "The request's own, or a new one"},
        "X-Model-Version": {"schema": {"type": "integer"}, "description": "Of the model that answered"},
        "X-Model-Age-Ms": {"schema": {"type": "integer"}, "description": "Now minus the watermark"},
        "Server-Timing": {"schema": {"type": "string"}, "description": "queue, gather, model, total, in ms"},
    }


def _schemas(requests: Requests) -> Json:
    types = [
        requests.ScoreRequest,
        requests.RankRequest,
        requests.parser.Row,
        requests.LookupRequest,
        answers.ScoreAnswer,
        answers.RankAnswer,
        answers.LookupAnswer,
        search_wire.Searches(requests).SearchRequest,
        search_wire.SearchAnswer,
        answers.PublishAnswer,
        answers.Problem,
        catalogue.ModelAnswer,
        catalogue.TablesAnswer,
        catalogue.InfoAnswer,
        catalogue.Readiness,
        LiveAnswer,
        operations.InspectAnswer,
        operations.VersionsAnswer,
        *oip_openapi.TYPES,
    ]
    _, schemas = msgspec.json.schema_components(types, ref_template=REF)
    event = _event(schemas["Row"])
    columns = _columns(schemas["Row"])
    events = {"anyOf": [{"type": "array", "items": _ref("Event")}, _ref("Event"), _ref("EventColumns")]}
    return schemas | {"Event": event, "EventColumns": columns, "Events": events}


def _event(row: Json) -> Json:
    """An example or a feature event; what the parser takes beside the inputs."""
    properties: Json = {
        "features": {**row, "description": "Raw values by input name"},
        "label": {"type": ["number", "boolean"], "description": "The outcome; of an example"},
        "event_id": {"type": "string", "maxLength": 256},
        "time_ms": {"type": "integer", "minimum": 0, "description": "When it happened, ms since 1970 UTC"},
        "entity": {"type": "string", "description": "Of a feature event: the entity it speaks of"},
        "id": {"type": ["string", "integer"], "description": "Of a feature event: the entity's id"},
    }
    return {"type": "object", "properties": properties, "additionalProperties": False}


def _columns(row: Json) -> Json:
    """Examples by column: an array of every input that is given."""
    columns = {name: {"type": "array", "items": schema} for name, schema in row["properties"].items()}
    properties: Json = {
        "columns": {"type": "object", "properties": columns, "additionalProperties": False},
        "labels": {"type": "array", "items": {"type": ["number", "boolean"]}},
        "event_ids": {"type": "array", "items": {"type": ["string", "null"]}},
        "times_ms": {"type": "array", "items": {"type": "integer", "minimum": 0}},
    }
    return {
        "type": "object",
        "properties": properties,
        "required": ["columns", "labels"],
        "additionalProperties": False,
    }


def _ref(name: str) -> Json:
    return {"$ref": REF.format(name=name)}
