"""What callers of the last release would miss in the OpenAPI documents of today.

    python -m tests.contract.openapi_diff            print what was taken away or narrowed; exit 1 if anything was
    python -m tests.contract.openapi_diff --renew    make today's documents the ones to keep to (at a release)

Both are those of the demo's configuration. Whatever a caller may send must go on being taken, and whatever an answer
promises must go on being there (`openapi_schemas`). More is always fine: paths, answers' members, optional members of
requests, formats, error codes.
"""

import argparse
import json
import sys
from pathlib import Path
from typing import Any

from service import openapi
from service.examples import KUAIRAND
from service.wire import Requests
from tests.contract.openapi_schemas import Schemas, lost
from trainer.schema import Schema
from trainer.settings import Settings

BASELINE = Path(__file__).parent / "baseline" / "openapi.json"
Json = dict[str, Any]
METHODS = ("get", "put", "post", "delete", "patch", "head", "options")


def documents() -> Json:
    """The documents as they are now, by listener."""
    settings = Settings.load(KUAIRAND / "livebed.yaml", environment={})
    requests = Requests(Schema.from_settings(settings), settings.serving.limits)
    return {"public": openapi.document(settings, requests), "admin": openapi.admin_document(settings)}


def missing(old: Json, new: Json) -> list[str]:
    """A sentence for each thing that a caller of the old document misses in the new one."""
    found = []
    for path, item in old["paths"].items():
        for method in (name for name in METHODS if name in item):
            place = f"{method.upper()} {path}"
            now = new["paths"].get(path, {})
            if method not in now:
                found.append(f"{place}: is gone")
                continue
            schemas = old["components"]["schemas"], new["components"]["schemas"]
            found += _parameters(place, _given(item, method), _given(now, method), schemas)
            found += _body(place, item[method].get("requestBody"), now[method].get("requestBody"), schemas)
            found += _answers(place, item[method]["responses"], now[method]["responses"], schemas)
    return found


def _given(item: Json, method: str) -> dict[tuple[str, str], Json]:
    parameters = [*item.get("parameters", []), *item[method].get("parameters", [])]
    return {(one["in"], one["name"]): one for one in parameters}


def _parameters(
    place: str, old: dict[tuple[str, str], Json], new: dict[tuple[str, str], Json], schemas: tuple[Schemas, Schemas]
) -> list[str]:
    gone = [f"{place}: parameter {name} is gone" for where, name in old if (where, name) not in new]
    needed = [
        f"{place}: parameter {key[1]} is now required"
        for key, one in new.items()
        if one.get("required") and not old.get(key, {}).get("required")
    ]
    both = [(key[1], one["schema"], new[key]["schema"]) for key, one in old.items() if key in new]
    narrowed = [why for name, was, now in both for why in lost(was, now, schemas, f"{place}: {name}", sent=True)]
    return gone + needed + narrowed


def _body(place: str, old: Json | None, new: Json | None, schemas: tuple[Schemas, Schemas]) -> list[str]:
    if new is None:
        return [] if old is None else [f"{place}: takes no body any more"]
    if new.get("required") and not (old or {}).get("required"):
        return [f"{place}: a body is now required"]
    return [] if old is None else _contents(f"{place} body", old["content"], new["content"], schemas, sent=True)


def _answers(place: str, old: Json, new: Json, schemas: tuple[Schemas, Schemas]) -> list[str]:
    found = []
    for status, was in old.items():
        if status not in new:
            found.append(f"{place}: answer {status} is gone")
            continue
        missing = set(was.get("headers", {})) - set(new[status].get("headers", {}))
        found += [f"{place} {status}: header {name} is gone" for name in sorted(missing)]
        now = new[status].get("content", {})
        found += _contents(f"{place} {status}", was.get("content", {}), now, schemas, sent=False)
    return found


def _contents(place: str, old: Json, new: Json, schemas: tuple[Schemas, Schemas], *, sent: bool) -> list[str]:
    found = [f"{place}: {kind} is gone" for kind in old if kind not in new]
    for kind in (kind for kind in old if kind in new):
        found += lost(old[kind]["schema"], new[kind]["schema"], schemas, f"{place} ({kind})", sent=sent)
    return found


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
