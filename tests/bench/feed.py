"""Events into the log at a steady rate, from a process of its own, as a producer that speaks Redis sends them.

    python -m tests.bench.feed --url unix:///.../valkey.sock --key livebed:events --file ENTRIES --rate 10000

ENTRIES holds ready-made entries (protobuf `EventBatch`, `write_entries`), sent in turn until the process is ended.
"""

import argparse
import itertools
import struct
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

from trainer.stream import EventLog

ENTRY_EVENTS = 64
TICK_S = 0.005


def write_entries(path: Path, entries: Sequence[bytes]) -> None:
    """Each with its length before it."""
    path.write_bytes(b"".join(struct.pack("<I", len(entry)) + entry for entry in entries))


def read_entries(path: Path) -> Iterator[bytes]:
    """What `write_entries` wrote."""
    content, at = path.read_bytes(), 0
    while at < len(content):
        (size,) = struct.unpack_from("<I", content, at)
        yield content[at + 4 : at + 4 + size]
        at += 4 + size


@contextmanager
def feeding(url: str, key: str, file: Path, events_per_s: float) -> Iterator[None]:
    """Events at a steady rate meanwhile. Raises RuntimeError if the feeder ended by itself."""
    command = [sys.executable, "-m", "tests.bench.feed", "--url", url, "--key", key, "--file", str(file)]
    process = subprocess.Popen([*command, "--rate", str(events_per_s)])
    try:
        yield
        if process.poll() is not None:
            raise RuntimeError(f"the feeder ended with {process.returncode}")
    finally:
        process.terminate()
        process.wait()


def main() -> None:
    """Send until ended."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--url", required=True)
    parser.add_argument("--key", required=True)
    parser.add_argument("--file", type=Path, required=True)
    parser.add_argument("--rate", type=float, required=True, help="events/s")
    options = parser.parse_args()
    entries = itertools.cycle(list(read_entries(options.file)))
    per_s = options.rate / ENTRY_EVENTS
    with EventLog(options.url, options.key) as log:
        started, sent = time.perf_counter(), 0
        while True:
            due = int((time.perf_counter() - started) * per_s)
            if due > sent:
                log.append([{"proto": next(entries)} for _ in range(min(due - sent, 64))])
                sent = min(due, sent + 64)
            time.sleep(TICK_S)


if __name__ == "__main__":
    main()
