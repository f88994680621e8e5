"""One save on disk: tensors in safetensors files, and a manifest that vouches for every byte of them.

The manifest carries its own SHA-256 and that of every file. Formats: 2 is written; 1 (before optimizers had a choice
and tables a sketch) is read; any other is refused, for what the other version knows of the state is not known here.
"""

import hashlib
import json
import time
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict
from pathlib import Path
from typing import Any

import safetensors.numpy

from trainer.durable import sync, write
from trainer.errors import CheckpointError
from trainer.snapshot import Progress, Snapshot, Tensors

FORMAT = 2
READS = (1, 2)
MANIFEST = "manifest.json"
SUFFIX = ".safetensors"


class UnknownFormat(CheckpointError):  # noqa: N818 -- a leaf of the tree in errors.py, named as its others
    """A save that another version of Livebed wrote; the bytes are as they were written."""


def write_save(path: Path, snapshot: Snapshot) -> None:
    """Write a save's directory; when this returns, all of it is on disk.

    Raises:
        OSError, SafetensorError: the disk is full or not writable.
    """
    created_us = time.time_ns() // 1000
    path.mkdir()
    files = {}
    for group, tensors in snapshot.tensors.items():
        file = path / (group + SUFFIX)
        safetensors.numpy.save_file(tensors, file)  # from where they lie: no copy of them in memory
        files[file.name] = {"bytes": file.stat().st_size, "sha256": _sha256_of(file)}
        sync(file)
    manifest = {
        "format": FORMAT,
        "created_us": created_us,
        "settings": snapshot.settings,
        "progress": asdict(snapshot.progress),
        "about": snapshot.about,
        "num_rows": {group: len(tensors["ids"]) for group, tensors in snapshot.tensors.items() if "ids" in tensors},
        "files": files,
    }
    manifest["checksum"] = _checksum(manifest)
    write(path / MANIFEST, json.dumps(manifest, indent=1, sort_keys=True).encode())
    sync(path)


def load(path: Path) -> Snapshot:
    """Read one save and verify it (a million rows of 16 floats: about 0.2 s, one copy of them in memory).

    Raises:
        UnknownFormat: written by another version of Livebed.
        CheckpointError: a file is missing, cut off or changed; the sentence names it.
    """
    manifest = read_manifest(path)
    files = {path / name: expected for name, expected in manifest["files"].items()}
    with ThreadPoolExecutor(2) as threads:  # hashing and copying both run without the GIL
        contents = list(threads.map(_load_file, files, files.values()))
    tensors = {file.name.removesuffix(SUFFIX): content for file, content in zip(files, contents, strict=True)}
    about = manifest["about"] if manifest["format"] > 1 else _about_of_format_1(manifest["about"])
    return Snapshot(Progress(**manifest["progress"]), about, tensors, manifest.get("settings", {}))


def verify(path: Path) -> list[str]:
    """Read every byte of a save and say in sentences what is wrong with it, one per file; empty when all is well."""
    try:
        manifest = read_manifest(path)
    except CheckpointError as error:
        return [str(error)]
    problems = [_problem_of(path / name, expected) for name, expected in manifest["files"].items()]
    return [problem for problem in problems if problem is not None]


def read_manifest(path: Path) -> dict[str, Any]:
    """The manifest as written. Its checksum is verified before its format, in every format to come."""
    where = f"{path.name}/{MANIFEST}"
    try:
        content = (path / MANIFEST).read_bytes()
    except OSError as error:
        raise CheckpointError(f"{where} cannot be read: {error.strerror}") from None
    try:
        manifest = json.loads(content)
        checksum = manifest.pop("checksum")
    except (ValueError, KeyError, AttributeError):
        raise CheckpointError(f"{where} is cut off or not a manifest") from None
    if checksum != _checksum(manifest):
        raise CheckpointError(f"{where} was changed: its checksum does not match")
    if manifest["format"] not in READS:
        raise UnknownFormat(
            f"{where} has format {manifest['format']}, this version reads formats {READS[0]} to {READS[-1]}: "
            "start the version that wrote it, or move the checkpoint away to start without it"
        )
    return dict(manifest)


def _about_of_format_1(about: dict[str, Any]) -> dict[str, Any]:
    """What format 2 would have written: there was one optimizer then, and no table changed while running."""
    tables = {
        name: saved | {"optimizer": "adagrad", "configured": saved["capacity"]}
        for name, saved in about["tables"].items()
    }
    scalars = {"clock": about["table_clock"], "sweep_position": about["sweep_position"]}
    return about | {"tables": tables, "scalars": scalars, "dense_optimizer": "adagrad"}


def _load_file(path: Path, expected: dict[str, Any]) -> Tensors:
    if (problem := _problem_of(path, expected)) is not None:
        raise CheckpointError(problem)
    tensors: Tensors = safetensors.numpy.load_file(path)
    return tensors


def _problem_of(path: Path, expected: dict[str, Any]) -> str | None:
    """What is wrong with a file, by its manifest's entry."""
    where = f"{path.parent.name}/{path.name}"
    try:
        num_bytes = path.stat().st_size
        if num_bytes != expected["bytes"]:
            return f"{where} has {num_bytes} bytes, wanted {expected['bytes']}"
        if _sha256_of(path) != expected["sha256"]:
            return f"{where} was changed: its SHA-256 is not the one in the manifest"
    except OSError as error:
        return f"{where} cannot be read: {error.strerror}"
    return None


def _checksum(manifest: dict[str, Any]) -> str:
    return hashlib.sha256(json.dumps(manifest, sort_keys=True).encode()).hexdigest()


def _sha256_of(path: Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()
