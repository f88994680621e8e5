"""Checkpoints on disk: written whole or not at all, verified on loading, the previous one used when the last is bad.

    <directory>/LATEST                     name of the save that a start begins from
    <directory>/save-<n>/manifest.json     format, configuration, progress, what the tables were, SHA-256 of every file
    <directory>/save-<n>/*.safetensors     tensors (see `trainer.snapshot`)
    <directory>/lock                       held by the one process that may write here
    <directory>/choice                     held for a moment, see `choosing`

No pickle anywhere. The order of effects in `save` is numbered; a process killed between any two of them leaves the
earlier save intact and in use. A save's number only grows.
"""

import contextlib
import fcntl
import os
import shutil
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

from safetensors import SafetensorError

from trainer.durable import sync, write
from trainer.errors import CheckpointError
from trainer.manifest import MANIFEST, UnknownFormat, load, read_manifest, verify, write_save
from trainer.snapshot import Progress, Snapshot

__all__ = [
    "Loaded", "SaveInfo", "UnknownFormat", "choosing", "exclusive", "listing", "load", "load_latest", "lock",
    "number_of", "path_of", "point_to", "save", "saved_progress", "verify",
]  # fmt: skip

POINTER = "LATEST"
LOCK = "lock"
CHOICE = "choice"  # locked while saves are dropped, and while it is said which one is served
PREFIX = "save-"
UNFINISHED = ".unfinished-"  # entries of this name are leftovers of a killed process
# A process that is ending, or whose parent was killed, gives the lock up within milliseconds.
LOCK_WAIT_S = 10.0


@dataclass(frozen=True)
class Loaded:
    """The newest good save, or None where there is none yet; `problems` says what was wrong with newer ones."""

    snapshot: Snapshot | None
    path: Path | None
    problems: list[str]


@dataclass(frozen=True)
class SaveInfo:
    """One save as its manifest tells it; with a `problem` it cannot be used, and what could not be read is None."""

    number: int
    path: Path
    is_latest: bool
    num_bytes: int  # of all files, as they are on disk
    problem: str | None
    format: int | None = None
    created_us: int | None = None  # when its writing began
    step: int | None = None
    position: str | None = None
    store_version: int | None = None


@contextlib.contextmanager
def exclusive(directory: Path, *, wait_s: float = LOCK_WAIT_S) -> Iterator[None]:
    """Be the only one that writes in a directory, as a trainer is while it runs.

    Raises:
        CheckpointError: another process still is after `wait_s` seconds, or the directory cannot be written.
    """
    descriptor = lock(directory, wait_s=wait_s)
    try:
        yield
    finally:
        os.close(descriptor)


@contextlib.contextmanager
def choosing(directory: Path) -> Iterator[None]:
    """Say which save is to be spared, or drop those that are not: one after the other, whoever does it."""
    directory.mkdir(parents=True, exist_ok=True)
    descriptor = os.open(directory / CHOICE, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX)
        yield
    finally:
        os.close(descriptor)


def lock(directory: Path, *, wait_s: float = LOCK_WAIT_S) -> int:
    """Take the directory's lock; it lasts until every copy of this descriptor is closed, those of forks included.

    Raises:
        CheckpointError: as `exclusive`.
    """
    deadline_s = time.monotonic() + wait_s
    try:
        directory.mkdir(parents=True, exist_ok=True)
        descriptor = os.open(directory / LOCK, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
    except OSError as error:
        raise CheckpointError(f"cannot write checkpoints in {directory}: {error.strerror}") from error
    while True:
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            if time.monotonic() < deadline_s:
                time.sleep(0.005)
                continue
            owner = os.pread(descriptor, 20, 0).decode(errors="replace") or "unknown"
            os.close(descriptor)
            raise CheckpointError(
                f"process {owner} writes checkpoints in {directory}: stop that trainer, or give this one another "
                "name or data_dir"
            ) from None
        os.ftruncate(descriptor, 0)
        os.pwrite(descriptor, str(os.getpid()).encode(), 0)
        return descriptor


def save(directory: Path, snapshot: Snapshot, *, keep: int, spared: Callable[[], int | None] = lambda: None) -> Path:
    """Write a snapshot as the newest save and keep the `keep` newest; only one process may write in a directory.

    1. tensors and manifest into an unfinished directory, every file and the directory forced to disk
    2. that directory gets its name
    3. LATEST points to it
    4. saves beyond `keep` go, and those that `point_to` or a kill between 2 and 3 had left out of use; never the one of
       the number that `spared` says then

    Raises:
        CheckpointError: the disk is full or not writable; the earlier saves are as they were.
    """
    try:
        directory.mkdir(parents=True, exist_ok=True)
        _sweep(directory)
        before = _saves(directory)
        begun_from = _pointed_at(directory)
        target = directory / f"{PREFIX}{number_of(before[0]) + 1 if before else 1:08d}"
        unfinished = directory / f"{UNFINISHED}{target.name}"
        try:
            write_save(unfinished, snapshot)
            unfinished.rename(target)
            sync(directory)
            _point_to(directory, target.name)
        except BaseException:
            _sweep(directory)
            raise
        unused = [path for path in before if begun_from in before and number_of(path) > number_of(begun_from)]
        kept = [target, *(path for path in before if path not in unused)][:keep]
        with choosing(directory):
            number = spared()
            for old in before:
                if old not in kept and number_of(old) != number:
                    _discard(old)
    except (OSError, SafetensorError) as error:
        reason = getattr(error, "strerror", None) or str(error)
        raise CheckpointError(f"cannot save a checkpoint in {directory}: {reason}; earlier ones are kept") from error
    return target


def load_latest(directory: Path) -> Loaded:
    """Load the save that LATEST names, or else the newest before it that passes its checks, or else any.

    Raises:
        CheckpointError: there are saves but none can be used, or the newest has a format that this version does not
            know (falling back would throw away what the other version has learned since).
    """
    problems: list[str] = []
    paths = _saves(directory)
    latest = _pointed_at(directory)
    if latest is not None and latest in paths:
        paths.sort(key=lambda path: path > latest)  # what lies after it was left on purpose, or never came into use
    elif paths or latest is not None:
        problems.append(f"{POINTER} names no save; trying the newest first")
    for path in paths:
        try:
            return Loaded(load(path), path, problems)
        except UnknownFormat:
            raise
        except CheckpointError as error:
            problems.append(str(error))
    if problems:
        raise CheckpointError("no checkpoint can be used: " + "; ".join(problems))
    return Loaded(None, None, problems)


def saved_progress(directory: Path) -> list[Progress]:
    """Where each save stands whose manifest can be read, the newest first."""
    found = []
    for path in _saves(directory):
        with contextlib.suppress(CheckpointError):
            found.append(Progress(**read_manifest(path)["progress"]))
    return found


def listing(directory: Path) -> list[SaveInfo]:
    """All saves, the newest first, by their manifests and the sizes of their files (`verify` reads every byte)."""
    latest, found = _pointed_at(directory), []
    for path in _saves(directory):
        with contextlib.suppress(FileNotFoundError):  # a running trainer has just dropped it
            found.append(_info(path, is_latest=path == latest))
    return found


def path_of(directory: Path, number: int) -> Path:
    """Directory of a save by its number.

    Raises:
        CheckpointError: there is none of that number; the sentence says which there are.
    """
    paths = {number_of(path): path for path in _saves(directory)}
    if number not in paths:
        known = ", ".join(map(str, sorted(paths))) or "none"
        raise CheckpointError(f"there is no checkpoint {number} in {directory}, only {known}")
    return paths[number]


def point_to(directory: Path, number: int) -> Path:
    """Make the next start begin from this save; the ones after it go with the first save of that run.

    The caller holds the directory's lock (`exclusive`).

    Raises:
        CheckpointError: there is no such save, or it does not pass its checks; nothing has changed then.
    """
    path = path_of(directory, number)
    if problems := verify(path):
        raise CheckpointError("; ".join(problems))
    try:
        _point_to(directory, path.name)
    except OSError as error:
        raise CheckpointError(f"cannot write {directory / POINTER}: {error.strerror}") from error
    return path


def _info(path: Path, *, is_latest: bool) -> SaveInfo:
    sizes = {file.name: file.stat().st_size for file in path.iterdir()}
    number, num_bytes = number_of(path), sum(sizes.values())
    try:
        manifest = read_manifest(path)
    except CheckpointError as error:
        return SaveInfo(number, path, is_latest, num_bytes, problem=str(error))
    wrong = [name for name, expected in manifest["files"].items() if sizes.get(name) != expected["bytes"]]
    written_us = (path / MANIFEST).stat().st_mtime_ns // 1000  # format 1 does not say when it began
    progress = Progress(**manifest["progress"])
    return SaveInfo(
        number,
        path,
        is_latest,
        num_bytes,
        problem=f"{path.name}/{wrong[0]} is missing or cut off" if wrong else None,
        format=manifest["format"],
        created_us=manifest.get("created_us", written_us),
        step=progress.step,
        position=progress.position,
        store_version=progress.store_version,
    )


def _point_to(directory: Path, name: str) -> None:
    unfinished = directory / f"{UNFINISHED}{POINTER}"
    write(unfinished, name.encode())
    unfinished.replace(directory / POINTER)
    sync(directory)


def _pointed_at(directory: Path) -> Path | None:
    try:
        return directory / (directory / POINTER).read_text(errors="replace").replace("\0", "")
    except OSError:
        return None


def _saves(directory: Path) -> list[Path]:
    """Finished saves, the newest first."""
    return sorted((path for path in directory.glob(f"{PREFIX}*") if path.name[len(PREFIX) :].isdigit()), reverse=True)


def number_of(path: Path) -> int:
    """The number of a save by its name."""
    return int(path.name[len(PREFIX) :])


def _discard(path: Path) -> None:
    """Remove a save; under another name first, so that half of one is never taken for a whole."""
    doomed = path.with_name(f"{UNFINISHED}{path.name}")
    path.rename(doomed)
    shutil.rmtree(doomed)


def _sweep(directory: Path) -> None:
    """Remove what a killed process left."""
    for path in directory.glob(f"{UNFINISHED}*"):
        if path.is_dir():
            shutil.rmtree(path, ignore_errors=True)
        else:
            path.unlink(missing_ok=True)
