"""Log entries that a trainer which goes back must not learn again, on disk before it goes back.

One small JSON file: {"version": 1, "ids": ["1700000000000-0", ...]}.
"""

import json
import logging
from collections.abc import Iterable
from pathlib import Path

from trainer import durable
from trainer.errors import CheckpointError

logger = logging.getLogger(__name__)

VERSION = 1


class Quarantine:
    """A set of log entry ids that outlives the process.

    >>> from tempfile import TemporaryDirectory
    >>> with TemporaryDirectory() as directory:
    ...     Quarantine(Path(directory) / "quarantine.json").add(["17-0"])
    ...     "17-0" in Quarantine(Path(directory) / "quarantine.json")
    True

    Raises:
        CheckpointError: the file is there but cannot be read; learning what it names would be worse than stopping.
    """

    def __init__(self, path: Path) -> None:
        self._path = path
        self._ids = _read(path)

    def __contains__(self, entry_id: str) -> bool:
        """Whether an entry must be passed over."""
        return entry_id in self._ids

    def __len__(self) -> int:
        """Number of entries."""
        return len(self._ids)

    def add(self, entry_ids: Iterable[str]) -> None:
        """Take in ids; on return they are on disk. Where the disk refuses, this process still knows them."""
        new = set(entry_ids) - self._ids
        if new:
            self._ids |= new
            self._save()

    def drop_before(self, position: str) -> None:
        """Forget the ids before a log position from which on every kept checkpoint goes."""
        old = {entry_id for entry_id in self._ids if _order(entry_id) < _order(position)}
        if old:
            self._ids -= old
            self._save()

    def _save(self) -> None:
        content = json.dumps({"version": VERSION, "ids": sorted(self._ids, key=_order)}).encode()
        try:
            self._path.parent.mkdir(parents=True, exist_ok=True)
            durable.replace(self._path, content)
        except OSError as error:
            logger.error("the quarantine is not on disk, a restart would learn its entries again: %s", error)


def _read(path: Path) -> set[str]:
    try:
        content = path.read_bytes()
    except FileNotFoundError:
        return set()
    except OSError as error:
        raise CheckpointError(f"{path}: {error.strerror}; make it readable") from None
    wanted = f"{path}: got what is no quarantine of version {VERSION}; delete it to learn its entries again"
    try:
        saved = json.loads(content)
        if saved["version"] != VERSION:
            raise CheckpointError(wanted)
        ids = {str(entry_id) for entry_id in saved["ids"]}
        set(map(_order, ids))
    except (ValueError, KeyError, TypeError):
        raise CheckpointError(wanted) from None
    return ids


def _order(entry_id: str) -> tuple[int, int]:
    """Place of an entry in the log: milliseconds and number, compared as numbers."""
    milliseconds, _, number = entry_id.partition("-")
    return int(milliseconds), int(number or 0)
