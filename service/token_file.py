"""Changes to the file of tokens, each one whole: a crash leaves the old file or the new one, and two at once wait."""

import contextlib
import fcntl
import os
import secrets
from collections.abc import Iterator, Sequence
from datetime import UTC, datetime, timedelta
from pathlib import Path

import msgspec

from service.scopes import SCOPES
from service.tokens import MAX_TOKENS, PREFIX, Line, digest, read_lines
from trainer import durable
from trainer.errors import LivebedError, SettingsError

NUM_BYTES = 32


def create(path: Path, name: str, scopes: Sequence[str], *, expires_days: float | None = None) -> str:
    """Add a token under a new name, and return it: it is nowhere else. Raises LivebedError."""
    for scope in scopes:
        if scope not in SCOPES:
            raise SettingsError("--scope", got=scope, wanted=f"some of {', '.join(sorted(SCOPES))}")
    now = datetime.now(UTC).replace(microsecond=0)
    token = PREFIX + secrets.token_urlsafe(NUM_BYTES)
    expires = None if expires_days is None else now + timedelta(days=expires_days)
    line = Line(name, digest(token.encode()).hex(), sorted(set(scopes)), now, expires)
    try:
        msgspec.convert(msgspec.to_builtins(line), Line)
    except msgspec.ValidationError:
        raise SettingsError("--name", got=name, wanted="1 to 64 letters, digits, '_', '-' or '.'") from None
    with _alone(path):
        lines = read_lines(path) if path.exists() else []
        if name in {one.name for one in lines}:
            raise LivebedError(f"there is a token {name!r} in {path} already: revoke it, or take another name")
        if len(lines) == MAX_TOKENS:
            raise LivebedError(f"{path} has {MAX_TOKENS} tokens, and more are not read: revoke some")
        _write(path, [*lines, line])
    return token


def revoke(path: Path, name: str) -> None:
    """Take a token out. Raises LivebedError if there is none of that name."""
    with _alone(path):
        lines = read_lines(path)
        left = [line for line in lines if line.name != name]
        if len(left) == len(lines):
            raise LivebedError(f"there is no token {name!r} in {path}")
        _write(path, left)


def _write(path: Path, lines: list[Line]) -> None:
    durable.replace(path, b"".join(msgspec.json.encode(line) + b"\n" for line in lines))


@contextlib.contextmanager
def _alone(path: Path) -> Iterator[None]:
    """Hold a lock on the directory; the file itself is replaced."""
    try:
        directory = os.open(path.absolute().parent, os.O_RDONLY | os.O_DIRECTORY)
    except OSError as error:
        raise LivebedError(f"{path.absolute().parent}: {error.strerror}") from None
    try:
        fcntl.flock(directory, fcntl.LOCK_EX)
        yield
    except OSError as error:
        raise LivebedError(f"{path}: {error.strerror}") from None
    finally:
        os.close(directory)
