"""Rebuild a model from an event log, deterministically: the same entries make the same model, bit for bit.

Nothing is published and nothing else is read: the result is one checkpoint, in a directory of its own, and a digest of
everything in it to compare two rebuilds by.
"""

import contextlib
import hashlib
from collections.abc import Callable
from pathlib import Path
from typing import Any
from urllib.parse import parse_qs, urlsplit

import numpy as np

from trainer.board import Board
from trainer.checkpoint import save
from trainer.commands import Forget
from trainer.errors import SettingsError
from trainer.intake import Intake, Portion, Quiet
from trainer.quarantine import Quarantine
from trainer.settings import Settings
from trainer.snapshot import Snapshot
from trainer.stream import EventLog, parse_id
from trainer.training import TrainingState

EXPIRE_SLOTS = 4096
US = 1_000_000
Progress = Callable[[int, int | None], None]  # entries done, entries in all
# Groups that say when something was done, not what was learned.
TIMES = frozenset({"progress"})


def parse_log(log: str, settings: Settings) -> tuple[str, str]:
    """`redis://host:port/db?key=NAME` or `configured` -> the broker's URL and the stream's key.

    >>> from trainer.settings import Settings
    >>> settings = Settings.model_validate({"tables": {"a": {}}, "features": {"a": {"kind": "categorical"}}})
    >>> parse_log("redis://cache:6379/1?key=clicks", settings)
    ('redis://cache:6379/1', 'clicks')
    """
    if log == "configured":
        if settings.stream.url is None:
            raise SettingsError(
                "--replay", got=log, wanted="stream.url in the configuration, or redis://HOST/DB?key=NAME"
            )
        return settings.stream.url, settings.stream.key
    parts = urlsplit(log)
    if parts.scheme not in {"redis", "rediss", "unix"}:
        raise SettingsError("--replay", got=log, wanted="redis://HOST:PORT/DB?key=NAME, or `configured`")
    query = parse_qs(parts.query)
    key = query.pop("key", [settings.stream.key])[0]
    rest = "&".join(f"{name}={value}" for name, values in query.items() for value in values)
    return parts._replace(query=rest).geturl(), key


def replay(
    settings: Settings, log: str, *, until: str | None, out: Path, progress: Progress | None = None
) -> dict[str, Any]:
    """Learn a log from its first entry up to the entry `until` (none: its present end) and save the model in `out`.

    Returns step, position, checkpoint (its path), digest, auc, logloss, calibration, would_be_held (entries whose step
    the guard would have held; they are learned all the same) and rows per table.

    Raises:
        SettingsError: `log` or `until` cannot be used.
        LogTruncated: the first entries are gone; the log as it is now cannot rebuild the model.
        LogUnavailable: no answer from the broker.
    """
    settings = settings.model_copy(update={"deterministic": True})
    url, key = parse_log(log, settings)
    with EventLog(url, key) as reader:
        state_of_log = reader.state()
        end = state_of_log.last_id if until is None else until
        _check_until(end)
        reader.check_position("0-0", num_read=0)
    state = TrainingState(settings)
    quarantine = Quarantine(settings.data_dir / settings.name / "quarantine.json")
    board = Board.open(out / "metrics", "replay")
    intake = Intake(
        EventLog(url, key),
        state.schema,
        settings.stream,
        board,
        after="0-0",
        num_read=0,
        passed_over=quarantine,
        until=end,
        entry_by_entry=True,
    )
    try:
        num_held = _learn(state, intake, end, lambda done: progress and progress(done, state_of_log.num_added))
    finally:
        intake.close()
        board.close()
    snapshot = state.capture(version=0)
    path = save(out / "checkpoints", snapshot, keep=1)
    quality = state.metrics.total()
    return {
        "step": state.place.step,
        "position": state.place.entry_id,
        "checkpoint": str(path),
        "digest": digest(snapshot),
        "auc": quality.auc,
        "logloss": quality.logloss,
        "calibration": quality.calibration_ratio,
        "would_be_held": num_held,
        "rows": {table.name: state.tables.num_rows(table.index) for table in state.schema.tables},
    }


def digest(snapshot: Snapshot) -> str:
    """SHA-256 of everything learned: names, types, shapes and bytes of all tensors, and the place in the log."""
    progress = snapshot.progress
    total = hashlib.sha256(f"{progress.step} {progress.position}".encode())
    for group, tensors in sorted(snapshot.tensors.items()):
        for name, values in sorted(tensors.items()):
            total.update(f"{group}/{name} {values.dtype} {values.shape}".encode())
            total.update(np.ascontiguousarray(values).tobytes())
    return total.hexdigest()


def apply(state: TrainingState, portion: Portion) -> bool:
    """Learn one portion as the loop does in its deterministic mode, without showing it to anybody.

    Whether the guard found something in it.
    """
    found = False
    if isinstance(portion.command, Forget):
        state.forget(portion.command)
    elif portion.command is not None:
        with contextlib.suppress(SettingsError):  # beyond the table's budget: refused, as it was then
            state.resize(portion.command)
    elif portion.batch is not None:
        learned = state.learn(portion.batch)
        found = bool(state.judge(learned))
        state.count(learned)
        if len(portion.batch):
            state.expire(int(portion.batch.accepted_us_B[-1]) // US, EXPIRE_SLOTS)
    if portion.is_whole:
        state.moved_to(portion.last_id, portion.num_read)
    return found


def _learn(state: TrainingState, intake: Intake, end: str, progress: Callable[[int], Any]) -> int:
    """Learn up to an entry; how many portions the guard would have held."""
    done = num_held = 0
    while parse_id(state.place.entry_id) < parse_id(end):
        taken = intake.take()
        if isinstance(taken, Quiet):
            break  # `end` lies beyond the last entry
        num_held += apply(state, taken)
        done += len(taken.entries) * taken.is_whole
        progress(done)
    return num_held


def _check_until(entry_id: str) -> None:
    try:
        parse_id(entry_id)
    except ValueError:
        raise SettingsError("--until", got=entry_id, wanted="an entry id of the log, such as 1700000000000-0") from None
