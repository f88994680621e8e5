"""Steps that the guard held back, kept on disk with their events so that people can see what was wrong with them.

    held-<n>/reason.json   when, where in the log, the findings, how many entries
    held-<n>/events.json   the log entries as they were: [{"id": ..., "fields": [[name, value], ...]}], base64

A held step is written beside its place and then renamed; only the newest `keep` stay. The events are people's data:
only the owner may read them, and none of their values is logged. A disk that is full costs the record, never the
trainer.
"""

import base64
import json
import logging
import shutil
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from trainer import durable
from trainer.guard import Finding

logger = logging.getLogger(__name__)

PREFIX = "held-"
REASON, EVENTS = "reason.json", "events.json"
VERSION = 1
MAX_BYTES = 16 * 2**20  # of a step's entries as they are; what comes after is left out, and counted

Entry = tuple[str, dict[bytes, bytes]]


@dataclass(frozen=True)
class HeldStep:
    """What is known of a held step without its events.

    `step`, `position`: examples learned and last log entry taken before it; `num_left_out`: entries beyond the size
    that is kept.
    """

    number: int
    held_us: int
    step: int
    position: str
    findings: tuple[Finding, ...]
    num_entries: int
    num_left_out: int


class HeldSteps:
    """The held steps in one directory."""

    def __init__(self, directory: Path, keep: int) -> None:
        self._directory, self._keep = directory, keep

    def keep(self, findings: Sequence[Finding], entries: Sequence[Entry], *, step: int, position: str) -> int | None:
        """Write a held step down and drop the oldest beyond `keep`; its number, None where the disk refused."""
        kept = _within(entries, MAX_BYTES)
        try:
            self._directory.mkdir(mode=0o700, parents=True, exist_ok=True)
            number = max(self._numbers(), default=0) + 1
            held = HeldStep(
                number, time.time_ns() // 1000, step, position, tuple(findings), len(kept), len(entries) - len(kept)
            )
            self._write(held, kept)
            for old in self._numbers()[: -self._keep]:
                shutil.rmtree(self._path(old))
        except OSError as error:
            logger.error("a held step could not be written down: %s", error)
            return None
        return number

    def listing(self) -> list[HeldStep]:
        """All held steps, the oldest first; one that cannot be read is logged and left out."""
        return [held for number in self._numbers() if (held := self._read(number)) is not None]

    def load(self, number: int) -> tuple[HeldStep, list[Entry]] | None:
        """A held step and its log entries, as `EntryDecoder.decode_entry` takes them.

        None if there is none, or it cannot be read.
        """
        held = self._read(number)
        if held is None:
            return None
        try:
            entries = json.loads((self._path(number) / EVENTS).read_bytes())
            return held, [(entry["id"], {_decoded(k): _decoded(v) for k, v in entry["fields"]}) for entry in entries]
        except (OSError, ValueError, KeyError, TypeError) as error:
            logger.error("the events of held step %d cannot be read: %s", number, error)
            return None

    def _write(self, held: HeldStep, entries: Sequence[Entry]) -> None:
        unfinished = self._directory / f"{durable.UNFINISHED}{PREFIX}{held.number}"
        shutil.rmtree(unfinished, ignore_errors=True)
        try:
            unfinished.mkdir(mode=0o700)
            durable.write(unfinished / EVENTS, json.dumps([_plain(*entry) for entry in entries]).encode())
            durable.write(unfinished / REASON, json.dumps({"version": VERSION, **asdict(held)}, indent=2).encode())
            durable.sync(unfinished)
            unfinished.replace(self._path(held.number))
            durable.sync(self._directory)
        except OSError:
            shutil.rmtree(unfinished, ignore_errors=True)
            raise

    def _read(self, number: int) -> HeldStep | None:
        try:
            about: dict[str, Any] = json.loads((self._path(number) / REASON).read_bytes())
            version, findings = about.pop("version"), about.pop("findings")
            if version != VERSION:
                raise ValueError(f"version {version}, wanted {VERSION}")
            return HeldStep(**about, findings=tuple(Finding(**finding) for finding in findings))
        except FileNotFoundError:
            return None
        except (OSError, ValueError, KeyError, TypeError) as error:
            logger.error("held step %d cannot be read: %s", number, error)
            return None

    def _numbers(self) -> list[int]:
        names = (path.name.removeprefix(PREFIX) for path in self._directory.glob(f"{PREFIX}*"))
        return sorted(int(name) for name in names if name.isdigit())

    def _path(self, number: int) -> Path:
        return self._directory / f"{PREFIX}{number}"


def _within(entries: Sequence[Entry], max_bytes: int) -> list[Entry]:
    """The first entries, up to a size in all."""
    kept, size = [], 0
    for entry_id, fields in entries:
        size += sum(len(name) + len(value) for name, value in fields.items())
        if size > max_bytes:
            break
        kept.append((entry_id, fields))
    return kept


def _plain(entry_id: str, fields: dict[bytes, bytes]) -> dict[str, Any]:
    return {"id": entry_id, "fields": [[_encoded(name), _encoded(value)] for name, value in fields.items()]}


def _encoded(content: bytes) -> str:
    return base64.b64encode(content).decode()


def _decoded(text: str) -> bytes:
    return base64.b64decode(text, validate=True)
