"""The calls that every microsecond counts in go straight to their handlers, past the layers of the web framework.

FastAPI wraps a request in eight layers (exceptions twice, telemetry, body limits, exit stacks, routing) before our
handler sees it: 35 us of the 90 that a score takes in this process apart from scoring. What those layers do for other
calls `Edge` does for these: it turns every error into an answer, and no handler here needs more.
"""

from collections.abc import Awaitable, Callable, Mapping
from typing import TypeAlias

from starlette.requests import Request
from starlette.responses import Response
from starlette.types import ASGIApp, Receive, Scope, Send

from service.edge import EXCHANGE
from service.limits import ClientGone

Handler: TypeAlias = Callable[[Request], Awaitable[Response]]

TABLES, LOOKUP = "/v1/tables/", "/embeddings:lookup"  # before and after a table's name
LOOKUP_ROUTE = f"{TABLES}{{table}}{LOOKUP}"
CLIENT_GONE = 499  # as nginx counts it; nobody reads it


class HotPath:
    """An ASGI application: some routes by hand, all else by `app`, which has them all."""

    def __init__(self, app: ASGIApp, posts: Mapping[str, Handler]) -> None:
        """`posts`: handlers of POST by route; those of fixed paths and LOOKUP_ROUTE are taken."""
        self._app = app
        self._fixed = {path: handler for path, handler in posts.items() if "{" not in path}
        self._lookup = posts.get(LOOKUP_ROUTE)

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Answer one request; errors go on to the edge, which answers them."""
        path: str = scope["path"]
        handler = self._fixed.get(path)
        if handler is None and self._lookup is not None and path.startswith(TABLES) and path.endswith(LOOKUP):
            table = path[len(TABLES) : -len(LOOKUP)]
            if table and "/" not in table:
                handler = self._lookup
                scope["path_params"] = {"table": table}
        if handler is None or scope["method"] != "POST":
            await self._app(scope, receive, send)
            return
        try:
            response = await handler(Request(scope, receive))
        except ClientGone:
            scope[EXCHANGE].code = "client_gone"
            response = Response(status_code=CLIENT_GONE)
        await response(scope, receive, send)
