"""The part of the OpenAPI document that describes the Open Inference Protocol (`/v2`)."""

from collections.abc import Callable
from typing import Any

from service import answers, oip_json
from service.errors import PROBLEM_TYPE
from service.oip_rest import HEADER_LENGTH

Json = dict[str, Any]
TYPES = (
    oip_json.InferRequest,
    oip_json.InferAnswer,
    oip_json.ModelMetadata,
    oip_json.ServerMetadata,
    oip_json.ServerLive,
    oip_json.ServerReady,
    oip_json.ModelReady,
    oip_json.ErrorAnswer,
)
MODEL = ("/v2/models/{model}", "/v2/models/{model}/versions/{version}")
BYTES_LAYOUT = f"`{HEADER_LENGTH}` bytes of JSON, then the values of the tensors that say `binary_data_size`"


def paths(operation: Callable[..., Json]) -> Json:
    """All calls; `operation` describes one as everywhere, and its errors are put into the protocol's grammar here."""
    reading, of_model = ("not_ready",), ("not_ready", "unknown_model", "unknown_version")
    found: Json = {
        "/v2": {"get": operation("What this server is", "ServerMetadata")},
        "/v2/health/live": {"get": operation("The process lives", "ServerLive")},
        "/v2/health/ready": {"get": operation("This worker answers", "ServerReady", errors=reading)},
    }
    for path in MODEL:
        names = ["model", "version"] if "{version}" in path else ["model"]
        in_path = [{"name": name, "in": "path", "required": True, "schema": {"type": "string"}} for name in names]
        calls = {
            path: {"get": operation("What the model takes and gives", "ModelMetadata", errors=of_model)},
            f"{path}/ready": {"get": operation("The model can be asked", "ModelReady", errors=of_model)},
            f"{path}/infer": {"post": _infer(operation)},
        }
        found |= {call: {**item, "parameters": in_path} for call, item in calls.items()}
    for item in found.values():
        _speak_their_grammar(item.get("get") or item["post"])
    return found


def _infer(operation: Callable[..., Json]) -> Json:
    errors = ("not_ready", "unknown_model", "unknown_version", "unknown_feature", "too_many")
    call = operation("Probabilities of rows", "InferAnswer", body="InferRequest", errors=errors)
    raw = {"schema": {"type": "string", "format": "binary", "description": BYTES_LAYOUT}}
    call["requestBody"]["content"][answers.BINARY_TYPE] = raw
    call["responses"]["200"]["content"][answers.BINARY_TYPE] = raw
    length = {"schema": {"type": "integer"}, "description": "Bytes of JSON, where values follow them"}
    call["responses"]["200"]["headers"][HEADER_LENGTH] = length
    call["parameters"] = [{"name": HEADER_LENGTH, "in": "header", **length}]
    return call


def _speak_their_grammar(call: Json) -> None:
    error = {"schema": {"$ref": "#/components/schemas/ErrorAnswer"}}
    for response in call["responses"].values():
        if PROBLEM_TYPE in response["content"]:
            response["content"] = {answers.JSON_TYPE: error}
