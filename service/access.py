"""Who may call: a token from what a request says of itself, and what a listener wants of it."""

import time
from collections.abc import Mapping
from pathlib import Path

from service.errors import ServiceError
from service.scopes import ADMIN, ANY, METRICS, OPEN, OPEN_PATHS
from service.tokens import Token, find, read_tokens
from service.watched import Watched

SCHEME = b"bearer "
# Paths of the admin listener that need something else than `admin`.
ADMIN_LISTENER = {"/livez": OPEN, "/readyz": OPEN, "/metrics": METRICS}
# Of the public one it is said for each route (`service.scopes`); whatever else is asked for needs any token.
PUBLIC_LISTENER = dict.fromkeys(OPEN_PATHS, OPEN)


class Access:
    """The tokens in force."""

    def __init__(self, path: Path) -> None:
        """Read the file. Raises SettingsError."""
        self.watched = Watched([path], lambda: read_tokens(path))

    def token(self, authorization: bytes | None) -> Token:
        """Whose token an `Authorization` header has. Raises ServiceError("unauthenticated"), which never shows it."""
        if authorization is None:
            raise ServiceError("unauthenticated", "this call needs a token: Authorization: Bearer lbd_...")
        if authorization[: len(SCHEME)].lower() != SCHEME:
            raise ServiceError("unauthenticated", "the Authorization header is not of the form: Bearer lbd_...")
        found = find(self.watched.content, authorization[len(SCHEME) :].strip())
        if found is None:
            raise ServiceError("unauthenticated", "the token is not valid here")
        if found.expires_s is not None and found.expires_s <= time.time():
            raise ServiceError("unauthenticated", f"the token {found.name!r} has expired")
        return found


class Gate:
    """What a listener wants of a request before anything else looks at it."""

    def __init__(self, access: Access, paths: Mapping[str, str], *, otherwise: str) -> None:
        self._access = access
        self._paths = paths
        self._otherwise = otherwise

    def admit(self, path: str, authorization: bytes | None) -> Token | None:
        """The caller's token; None where none is needed. Raises ServiceError."""
        scope = self._paths.get(path, self._otherwise)
        if scope == OPEN:
            return None
        token = self._access.token(authorization)
        token.demand(scope)
        return token


def public_gate(access: Access | None) -> Gate | None:
    """Of the public listener; the scope of a route is demanded where it is routed."""
    return None if access is None else Gate(access, PUBLIC_LISTENER, otherwise=ANY)


def admin_gate(access: Access | None) -> Gate | None:
    """Of the admin listener."""
    return None if access is None else Gate(access, ADMIN_LISTENER, otherwise=ADMIN)
