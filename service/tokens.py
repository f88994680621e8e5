"""Bearer tokens: what the file of tokens says, and whose a token is.

A token is `lbd_` and 256 random bits. The file has one JSON object a line, with its SHA-256 and never itself:

    {"name": "ads", "sha256": "9f86d0...", "scopes": ["score", "lookup"], "expires": "2027-01-01T00:00:00Z"}

A slow hash (bcrypt, argon2) makes guessing a person's password dear. Of 256 random bits nothing can be guessed,
whatever the hash costs; a slow one would only let anybody who sends nonsense take our processor for it.
"""

import hashlib
import hmac
import os
import stat
from collections.abc import Sequence
from dataclasses import dataclass
from datetime import datetime
from pathlib import Path
from typing import Annotated, Final

import msgspec

from service.errors import ServiceError
from service.scopes import ANY, SCOPES
from trainer.errors import SettingsError

PREFIX: Final = "lbd_"  # so that scanners of code and logs can find one that leaked
FIELD: Final = "serving.tokens_file"
# Each is compared with each token that arrives; at this many that takes about 15 us.
MAX_TOKENS: Final = 100


class Line(msgspec.Struct, forbid_unknown_fields=True, omit_defaults=True):
    """One line of the file."""

    name: Annotated[str, msgspec.Meta(pattern=r"^[A-Za-z0-9_.-]{1,64}$")]
    sha256: Annotated[str, msgspec.Meta(pattern=r"^[0-9a-f]{64}$")]
    scopes: Annotated[list[str], msgspec.Meta(min_length=1)]
    created: Annotated[datetime, msgspec.Meta(tz=True)] | None = None
    expires: Annotated[datetime, msgspec.Meta(tz=True)] | None = None


@dataclass(frozen=True)
class Token:
    """Who may call, as far as the file knows; `expires_s`: seconds since 1970, None never."""

    name: str
    sha256: bytes
    scopes: frozenset[str]
    expires_s: float | None

    def demand(self, scope: str) -> None:
        """Raise ServiceError("permission_denied") unless it has that scope."""
        if scope not in self.scopes and scope != ANY:
            has = ", ".join(sorted(self.scopes))
            raise ServiceError("permission_denied", f"this call needs the scope {scope}; token {self.name!r} has {has}")


def digest(token: bytes) -> bytes:
    """What is stored of a token."""
    return hashlib.sha256(token).digest()


def find(tokens: Sequence[Token], token: bytes) -> Token | None:
    """The one that this is, expired or not; takes the same time wherever it stands and however much of it fits."""
    sha256 = digest(token)
    found = None
    for one in tokens:
        if hmac.compare_digest(one.sha256, sha256):
            found = one
    return found


def read_tokens(path: Path) -> tuple[Token, ...]:
    """The tokens of a file. Raises SettingsError: not there, open to others, or a line that is none (never shown)."""
    return tuple(
        Token(
            line.name,
            bytes.fromhex(line.sha256),
            frozenset(line.scopes),
            None if line.expires is None else line.expires.timestamp(),
        )
        for line in read_lines(path)
    )


def read_lines(path: Path) -> list[Line]:
    """The lines of a file of tokens. Raises SettingsError."""
    lines: list[Line] = []
    for number, text in enumerate(_read_private(path).splitlines(), 1):
        if not text.strip() or text.startswith(b"#"):
            continue
        try:
            line = msgspec.json.decode(text, type=Line)
        except msgspec.DecodeError as error:
            wanted = f'{{"name", "sha256", "scopes"}} and maybe "created" and "expires" ({error})'
            raise SettingsError(f"{FIELD}: {path}, line {number}", got="no token", wanted=wanted) from None
        if unknown := set(line.scopes) - SCOPES:
            wanted = f"some of {', '.join(sorted(SCOPES))}"
            raise SettingsError(f"{FIELD}: {path}, line {number}: scopes", got=min(unknown), wanted=wanted)
        if line.name in {one.name for one in lines}:
            raise SettingsError(f"{FIELD}: {path}, line {number}: name", got=line.name, wanted="one that differs")
        lines.append(line)
    if len(lines) > MAX_TOKENS:
        raise SettingsError(f"{FIELD}: {path}", got=f"{len(lines)} tokens", wanted=f"at most {MAX_TOKENS}")
    return lines


def _read_private(path: Path) -> bytes:
    try:
        with path.open("rb") as file:
            mode = stat.S_IMODE(os.fstat(file.fileno()).st_mode)
            if mode & (stat.S_IRWXG | stat.S_IRWXO):
                wanted = f"a file that only its owner may use: chmod 600 {path}"
                raise SettingsError(FIELD, got=f"mode {mode:04o}", wanted=wanted)
            return file.read()
    except OSError as error:
        wanted = "a readable file of tokens: `livebed token create` makes one"
        raise SettingsError(FIELD, got=f"{path}: {error.strerror}", wanted=wanted) from None
