"""What callers of the last release would miss in the OpenAPI documents of today.

    python -m tests.contract.openapi_diff            print what was taken away or narrowed; exit 1 if anything was
    python -m tests.contract.openapi_diff --renew    make today's documents the ones to keep to (at a release)

Both are those of the demo's configuration. More is always fine: paths, answers' members, optional members of requests,
formats, error codes.
"""

import argparse
import json
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from service import openapi
from service.examples import KUAIRAND
from service.wire import Requests
from trainer.schema import Schema
from trainer.settings import Settings

BASELINE = Path(__file__).parent / "baseline" / "openapi.json"
Json = dict[str, Any]


def documents() -> Json:
    """The documents as they are now, by listener."""
    settings = Settings.load(KUAIRAND / "livebed.yaml", environment={})
    requests = Requests(Schema.from_settings(settings), settings.serving.limits)
    return {"public": openapi.document(settings, requests), "admin": openapi.admin_document(settings)}


def missing(old: Json, new: Json) -> Iterator[str]:
    """Sentences about one document."""
    for path, item in old["paths"].items():
        for method, operation in item.items():
            if method == "parameters":
                continue
            call = f"{method.upper()} {path}"
            if method not in new["paths"].get(path, {}):
                yield f"{call}: is gone"
                continue
            yield from _operation(call, operation, new["paths"][path][method])
    schemas = new["components"]["schemas"]
    requests = {name for name in old["components"]["schemas"] if name.endswith(("Request", "Row", "Event", "Columns"))}
    for name, schema in old["components"]["schemas"].items():
        if name not in schemas:
            yield f"schema {name}: is gone"
        else:
            yield from _schema(name, schema, schemas[name], is_request=name in requests)


def _operation(call: str, old: Json, new: Json) -> Iterator[str]:
    for status, answer in old["responses"].items():
        if status not in new["responses"]:
            yield f"{call}: answer {status} is gone"
            continue
        for kind in answer.get("content", {}).keys() - new["responses"][status].get("content", {}).keys():
            yield f"{call}: answer {status} as {kind} is gone"
        for name in answer.get("headers", {}).keys() - new["responses"][status].get("headers", {}).keys():
            yield f"{call}: header {name} is gone"
    for kind in (
        old.get("requestBody", {}).get("content", {}).keys() - new.get("requestBody", {}).get("content", {}).keys()
    ):
        yield f"{call}: a body as {kind} is no longer taken"


def _schema(place: str, old: Json, new: Json, *, is_request: bool) -> Iterator[str]:
    before, now = _types(old), _types(new)
    if is_request and not before <= now:
        yield f"{place}: no longer takes {', '.join(sorted(before - now))}"
    if not is_request and not now <= before:
        yield f"{place}: may now be {', '.join(sorted(now - before))}"
    if is_request:
        for name in set(new.get("required", [])) - set(old.get("required", [])):
            yield f"{place}.{name}: is now required"
        for bound in ("maximum", "maxLength", "maxItems"):
            if new.get(bound, float("inf")) < old.get(bound, float("inf")):
                yield f"{place}: {bound} is now {new[bound]}, was {old.get(bound, 'without')}"
    for name, schema in old.get("properties", {}).items():
        if name not in new.get("properties", {}):
            yield f"{place}.{name}: is gone"
        else:
            yield from _schema(f"{place}.{name}", schema, new["properties"][name], is_request=is_request)


def _types(schema: Json) -> set[str]:
    """What a schema lets through, coarsely: types and references."""
    options = [schema, *schema.get("anyOf", [])]
    kinds: set[str] = set()
    for option in options:
        kind = option.get("type", option.get("$ref"))
        kinds |= set(kind) if isinstance(kind, list) else {kind} if kind else set()
    return kinds


def main() -> int:
    """Compare, or renew."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--renew", action="store_true")
    if parser.parse_args().renew:
        BASELINE.write_text(json.dumps(documents(), sort_keys=True, separators=(",", ":")) + "\n")
        return 0
    old, new = json.loads(BASELINE.read_text()), documents()
    found = [f"{listener}: {sentence}" for listener in old for sentence in missing(old[listener], new[listener])]
    for sentence in found:
        sys.stdout.write(f"{sentence}\n")
    sys.stdout.write(f"OpenAPI: {len(found) or 'nothing'} taken from callers of the last release\n")
    return 1 if found else 0


if __name__ == "__main__":
    sys.exit(main())
