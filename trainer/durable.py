"""Small files that are on disk, whole, when a call returns; after a crash there is the old one or the new one."""

import os
from pathlib import Path

UNFINISHED = "unfinished-"  # begins the name of what is not whole yet


def write(path: Path, content: bytes) -> None:
    """Write a file that only its owner may read, and wait for the disk."""
    path.touch(0o600)
    with path.open("wb") as file:
        file.write(content)
        file.flush()
        os.fsync(file.fileno())


def replace(path: Path, content: bytes) -> None:
    """Write a file beside `path`, then put it in its place."""
    unfinished = path.with_name(f"{UNFINISHED}{path.name}")
    write(unfinished, content)
    unfinished.replace(path)
    sync(path.parent)


def sync(path: Path) -> None:
    """Wait until a file, or the names in a directory, are on disk: a rename alone may be lost with the power."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
