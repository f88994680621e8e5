"""The careful server that a good engineer writes in an afternoon: FastAPI, msgspec, one gather, a frozen trace, orjson.

python -m tests.bench.peer_servers.handwritten DIRECTORY PORT
"""

import sys
from pathlib import Path
from typing import Any

import msgspec
import orjson
import uvicorn
from fastapi import FastAPI, Request, Response

from tests.bench.peer_servers.frozen import FrozenModel


def build_app(model: FrozenModel) -> FastAPI:
    """One route; a plain Starlette one, which spares it FastAPI's resolving of dependencies."""
    app = FastAPI(docs_url=None, redoc_url=None, openapi_url=None)
    row: Any = msgspec.defstruct("Row", [(name, int) for name in model.features], gc=False)
    body: Any = msgspec.defstruct("Body", [("candidates", list[row])], gc=False)  # type: ignore[valid-type]
    decode = msgspec.json.Decoder(body).decode

    async def score(request: Request) -> Response:
        rows = decode(await request.body()).candidates
        answer = {"scores": model.score(model.encode(rows))}
        return Response(orjson.dumps(answer, option=orjson.OPT_SERIALIZE_NUMPY), media_type="application/json")

    app.add_route("/score", score, methods=["POST"])
    return app


def main() -> None:
    """Serve on one worker, as Livebed is run beside it."""
    app = build_app(FrozenModel.of_structs(Path(sys.argv[1])))
    uvicorn.run(
        app, host="127.0.0.1", port=int(sys.argv[2]), loop="uvloop", http="httptools", access_log=False,
        log_level="error",
    )  # fmt: skip


if __name__ == "__main__":
    main()
