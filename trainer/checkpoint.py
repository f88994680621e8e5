"""Checkpoints on disk: written whole or not at all, verified on loading, the previous one used when the last is bad.

    <directory>/LATEST                     name of the newest save
    <directory>/save-<n>/manifest.json     format, progress, what the tables were, SHA-256 of every file and of itself
    <directory>/save-<n>/*.safetensors     tensors (see `trainer.snapshot`)

No pickle anywhere. The order of effects in `save` is numbered; a process killed between any two of them leaves the
earlier save intact and in use.
"""

import hashlib
import json
import os
import shutil
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import safetensors
import safetensors.numpy

from trainer.errors import CheckpointError
from trainer.snapshot import Progress, Snapshot, Tensors

FORMAT = 1
POINTER = "LATEST"
MANIFEST = "manifest.json"
PREFIX = "save-"
UNFINISHED = ".unfinished-"  # directories of this name are leftovers of a killed process
SUFFIX = ".safetensors"


@dataclass(frozen=True)
class Loaded:
    """The newest good save, or None where there is none yet; `problems` says what was wrong with newer ones."""

    snapshot: Snapshot | None
    path: Path | None
    problems: list[str]


def save(directory: Path, snapshot: Snapshot, *, keep: int) -> Path:
    """Write a snapshot as the newest save and keep the `keep` newest. One process may write in a directory.

    1. tensors and manifest into an unfinished directory, each file and the directory itself forced to disk
    2. that directory gets its name
    3. LATEST points to it
    4. saves beyond `keep` go

    Raises:
        CheckpointError: the disk is full or not writable; earlier saves are untouched.
    """
    try:
        directory.mkdir(parents=True, exist_ok=True)
        _sweep(directory)
        number = max([_number(path) for path in _saves(directory)], default=0) + 1
        target = directory / f"{PREFIX}{number:08d}"
        unfinished = directory / f"{UNFINISHED}{target.name}"
        try:
            _write(unfinished, snapshot)
            unfinished.rename(target)
            _sync_directory(directory)
            _point_to(directory, target.name)
        except BaseException:
            shutil.rmtree(unfinished, ignore_errors=True)
            raise
    except OSError as error:
        reason = error.strerror or str(error)
        raise CheckpointError(f"cannot save a checkpoint in {directory}: {reason}; the earlier ones are kept") from error
    for old in _saves(directory)[keep:]:
        _discard(old)
    return target


def load_latest(directory: Path) -> Loaded:
    """Load the save that LATEST names, or the newest earlier one that passes its checks.

    Raises:
        CheckpointError: there are saves but none can be used, or the newest has a format that this version does not
            know (falling back would throw away what a newer version has learned).
    """
    problems: list[str] = []
    paths = _saves(directory)
    latest = _pointed_at(directory)
    if latest in paths:
        paths.remove(latest)
        paths.insert(0, latest)
    elif paths or latest is not None:
        problems.append(f"{POINTER} names no save; trying the newest first")
    for path in paths:
        try:
            return Loaded(load(path), path, problems)
        except CheckpointError as error:
            problems.append(str(error))
    if problems:
        raise CheckpointError("no checkpoint can be used: " + "; ".join(problems))
    return Loaded(None, None, problems)


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
            raise CheckpointError(f"{path.name}/{name} has {len(content)} bytes, not {expected['bytes']}")
        if hashlib.sha256(content).hexdigest() != expected["sha256"]:
            raise CheckpointError(f"{path.name}/{name} was changed: its SHA-256 is not the one in the manifest")
        tensors[name.removesuffix(SUFFIX)] = safetensors.numpy.load(content)
    return Snapshot(Progress(**manifest["progress"]), manifest["about"], tensors)
