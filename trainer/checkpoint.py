"""Checkpoints on disk: written whole or not at all, verified on loading, the previous one used when the last is bad.

    <directory>/LATEST                     name of the newest save
    <directory>/save-<n>/manifest.json     format, progress, what the tables were, SHA-256 of every file and of itself
    <directory>/save-<n>/*.safetensors     tensors (see `trainer.snapshot`)

No pickle anywhere. The order of effects in `save` is numbered; a process killed between any two of them leaves the
earlier save intact and in use.
"""

import contextlib
import hashlib
import json
import os
import shutil
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import safetensors.numpy

from trainer.errors import CheckpointError
from trainer.snapshot import Progress, Snapshot, Tensors

FORMAT = 1
POINTER = "LATEST"
MANIFEST = "manifest.json"
PREFIX = "save-"
UNFINISHED = ".unfinished-"  # entries of this name are leftovers of a killed process
SUFFIX = ".safetensors"


class UnknownFormat(CheckpointError):  # noqa: N818 -- a leaf of the tree in errors.py, named as its others
    """A save that another version of Livebed wrote; the bytes are as they were written."""


@dataclass(frozen=True)
class Loaded:
    """The newest good save, or None where there is none yet; `problems` says what was wrong with newer ones."""

    snapshot: Snapshot | None
    path: Path | None
    problems: list[str]


def save(directory: Path, snapshot: Snapshot, *, keep: int) -> Path:
    """Write a snapshot as the newest save and keep the `keep` newest; only one process may write in a directory.

    1. tensors and manifest into an unfinished directory, every file and the directory forced to disk
    2. that directory gets its name
    3. LATEST points to it
    4. saves beyond `keep` go

    Raises:
        CheckpointError: the disk is full or not writable; the earlier saves are as they were.
    """
    try:
        directory.mkdir(parents=True, exist_ok=True)
        _sweep(directory)
        target = directory / f"{PREFIX}{_number(_saves(directory)) + 1:08d}"
        unfinished = directory / f"{UNFINISHED}{target.name}"
        try:
            _write_save(unfinished, snapshot)
            unfinished.rename(target)
            _sync_directory(directory)
            _point_to(directory, target.name)
        except BaseException:
            _sweep(directory)
            raise
        for old in _saves(directory)[keep:]:
            _discard(old)
    except OSError as error:
        reason = error.strerror or str(error)
        raise CheckpointError(f"cannot save a checkpoint in {directory}: {reason}; earlier ones are kept") from error
    return target


def load_latest(directory: Path) -> Loaded:
    """Load the save that LATEST names, or else the newest one that passes its checks.

    Raises:
        CheckpointError: there are saves but none can be used, or the newest has a format that this version does not
            know (falling back would throw away what the other version has learned since).
    """
    problems: list[str] = []
    paths = _saves(directory)
    latest = _pointed_at(directory)
    if latest in paths:
        paths.sort(key=lambda path: path != latest)
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
            found.append(Progress(**_read_manifest(path)["progress"]))
    return found


def load(path: Path) -> Snapshot:
    """Read one save and verify it.

    Raises:
        UnknownFormat: written by another version of Livebed.
        CheckpointError: a file is missing, cut off or changed; the sentence names it.
    """
    manifest = _read_manifest(path)
    tensors: dict[str, Tensors] = {}
    for name, expected in manifest["files"].items():
        content = _read(path / name)
        if len(content) != expected["bytes"]:
            raise CheckpointError(f"{path.name}/{name} has {len(content)} bytes, wanted {expected['bytes']}")
        if hashlib.sha256(content).hexdigest() != expected["sha256"]:
            raise CheckpointError(f"{path.name}/{name} was changed: its SHA-256 is not the one in the manifest")
        tensors[name.removesuffix(SUFFIX)] = safetensors.numpy.load(content)
    return Snapshot(Progress(**manifest["progress"]), manifest["about"], tensors)


def _write_save(path: Path, snapshot: Snapshot) -> None:
    path.mkdir()
    files = {}
    for group, tensors in snapshot.tensors.items():
        content = safetensors.numpy.save(tensors)
        _write(path / (group + SUFFIX), content)
        files[group + SUFFIX] = {"bytes": len(content), "sha256": hashlib.sha256(content).hexdigest()}
    manifest = {
        "format": FORMAT,
        "progress": asdict(snapshot.progress),
        "about": snapshot.about,
        "files": files,
    }
    manifest["checksum"] = _checksum(manifest)
    _write(path / MANIFEST, json.dumps(manifest, indent=1, sort_keys=True).encode())
    _sync_directory(path)


def _read_manifest(path: Path) -> dict[str, Any]:
    """The manifest as written. Its checksum is verified before its format, in every format to come."""
    where = f"{path.name}/{MANIFEST}"
    content = _read(path / MANIFEST)
    try:
        manifest = json.loads(content)
        checksum = manifest.pop("checksum")
    except (ValueError, KeyError, AttributeError):
        raise CheckpointError(f"{where} is cut off or not a manifest") from None
    if checksum != _checksum(manifest):
        raise CheckpointError(f"{where} was changed: its checksum does not match")
    if manifest["format"] != FORMAT:
        raise UnknownFormat(
            f"{where} has format {manifest['format']}, this version reads format {FORMAT}: "
            "start the version that wrote it, or move the checkpoint away to start without it"
        )
    return dict(manifest)


def _checksum(manifest: dict[str, Any]) -> str:
    return hashlib.sha256(json.dumps(manifest, sort_keys=True).encode()).hexdigest()


def _read(path: Path) -> bytes:
    try:
        return path.read_bytes()
    except OSError as error:
        raise CheckpointError(f"{path.parent.name}/{path.name} cannot be read: {error.strerror}") from None


def _write(path: Path, content: bytes) -> None:
    with path.open("wb") as file:
        file.write(content)
        file.flush()
        os.fsync(file.fileno())


def _point_to(directory: Path, name: str) -> None:
    unfinished = directory / f"{UNFINISHED}{POINTER}"
    _write(unfinished, name.encode())
    unfinished.replace(directory / POINTER)
    _sync_directory(directory)


def _pointed_at(directory: Path) -> Path | None:
    try:
        return directory / (directory / POINTER).read_text(errors="replace").replace("\0", "")
    except OSError:
        return None


def _sync_directory(path: Path) -> None:
    """Force a directory's entries to disk: a rename alone may be lost with the power."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def _saves(directory: Path) -> list[Path]:
    """Finished saves, the newest first."""
    return sorted((path for path in directory.glob(f"{PREFIX}*") if path.name[len(PREFIX) :].isdigit()), reverse=True)


def _number(saves: list[Path]) -> int:
    return int(saves[0].name[len(PREFIX) :]) if saves else 0


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
