"""Ids that were forgotten since the oldest kept checkpoint, on disk: a checkpoint from before may still hold them.

Whoever serves such a checkpoint again takes them out of it first. One small JSON file:

    {"version": 1, "ids": [["1700000000000-0", "user", 4963...], ...]}      log entry, table, hashed id
"""

import json
import logging
from collections.abc import Iterator
from pathlib import Path

from trainer import durable
from trainer.errors import CheckpointError
from trainer.stream import parse_id

logger = logging.getLogger(__name__)

VERSION = 1


class ForgottenIds:
    """What was forgotten, and where in the log.

    >>> from tempfile import TemporaryDirectory
    >>> with TemporaryDirectory() as directory:
    ...     ForgottenIds(Path(directory) / "forgotten.json").add("17-0", "user", 5)
    ...     list(ForgottenIds(Path(directory) / "forgotten.json").after("16-0"))
    [('user', 5)]

    Raises:
        CheckpointError: the file is there but cannot be read; serving what it names would be worse than stopping.
    """

    def __init__(self, path: Path) -> None:
        self._path = path
        self._ids = _read(path)

    def add(self, position: str, table: str, key: int) -> None:
        """Take in an id that the log entry `position` forgets; on return it is on disk."""
        one = (position, table, key)
        if one not in self._ids:
            self._ids.append(one)
            self._save()

    def after(self, position: str) -> Iterator[tuple[str, int]]:
        """Table and hashed id of all that was forgotten after a place in the log."""
        return ((table, key) for at, table, key in self._ids if parse_id(at) > parse_id(position))

    def drop_before(self, position: str) -> None:
        """Let go of what every checkpoint from that place on has forgotten itself."""
        kept = [one for one in self._ids if parse_id(one[0]) > parse_id(position)]
        if len(kept) < len(self._ids):
            self._ids = kept
            self._save()

    def _save(self) -> None:
        try:
            self._path.parent.mkdir(parents=True, exist_ok=True)
            durable.replace(self._path, json.dumps({"version": VERSION, "ids": self._ids}).encode())
        except OSError as error:
            logger.error("what was forgotten is not on disk, an old checkpoint could show it again: %s", error)


def _read(path: Path) -> list[tuple[str, str, int]]:
    try:
        content = path.read_bytes()
    except FileNotFoundError:
        return []
    except OSError as error:
        raise CheckpointError(f"{path}: {error.strerror}; make it readable") from None
    wanted = f"{path}: got what is no list of forgotten ids of version {VERSION}; delete it to do without"
    try:
        saved = json.loads(content)
        if saved["version"] != VERSION:
            raise CheckpointError(wanted)
        ids = [(str(at), str(table), int(key)) for at, table, key in saved["ids"]]
        for at, _, _ in ids:
            parse_id(at)
    except (ValueError, KeyError, TypeError):
        raise CheckpointError(wanted) from None
    return ids
