"""What the OpenAPI document says of tokens, where there are any: the scope of each call, and the two refusals."""

from typing import Any

from service.answers import JSON_TYPE
from service.errors import KINDS, PROBLEM_TYPE, is_open_inference
from service.openapi import REF
from service.scopes import OPEN, http_scope

Json = dict[str, Any]
REFUSALS = ("unauthenticated", "permission_denied")


def with_tokens(document: Json) -> Json:
    """The same document, with what each call needs."""
    for path, item in document["paths"].items():
        for method, operation in item.items():
            scope = http_scope(method.upper(), path)
            if method == "parameters" or scope == OPEN:
                continue
            operation["security"] = [{"token": [scope]}]
            operation["responses"] |= {str(KINDS[code].http): _refusal(code, path) for code in REFUSALS}
    scheme = {"type": "http", "scheme": "bearer", "description": "A token of `livebed token create`"}
    document["components"]["securitySchemes"] = {"token": scheme}
    return document


def _refusal(code: str, path: str) -> Json:
    content = {PROBLEM_TYPE: {"schema": {"$ref": REF.format(name="Problem")}}}
    if is_open_inference(path):
        content = {JSON_TYPE: {"schema": {"$ref": REF.format(name="ErrorAnswer")}}}
    return {"description": f"`{code}`: {KINDS[code].title}", "content": content}
