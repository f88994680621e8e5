"""The load generator of the serving benchmarks: HTTP/1.1 over raw sockets, in a process of its own.

    python -m tests.bench.load --port 8080 --path /v1/score --bodies FILE --connections 1 --seconds 3 [--rate 300]

Closed loop (no rate): each connection sends its next request when the answer to the last has come. Open loop: requests
are due at a steady rate, whatever the answers do; one that is due while every connection waits is sent when the first
is free, and its latency counts from when it was *due* (Tene: no coordinated omission). `select` keeps time in
microseconds, where asyncio and epoll round up to milliseconds. Prints one JSON object. Imports little, so that it
starts at once and takes little of the two cores that it shares with the server.
"""

import argparse
import itertools
import json
import select
import socket
import subprocess
import sys
import tempfile
import time
from collections import deque
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from hdrh.histogram import HdrHistogram

GIVE_UP_S = 10.0  # without any answer
HIGHEST_US, DIGITS = 120_000_000, 3  # what the histogram can hold, and how finely
WARM_UP_S = 0.5


@dataclass
class Samples:
    """What came of a run: when each answered request was due and how long it took, and what went wrong."""

    due_s: list[float] = field(default_factory=list)
    took_s: list[float] = field(default_factory=list)
    errors: dict[str, int] = field(default_factory=dict)
    seconds: float = 0.0

    def summary(self) -> dict[str, Any]:
        """Requests/s and percentiles in ms."""
        answered = len(self.took_s)
        return {
            "requests_per_s": round(answered / self.seconds, 1),
            "ms": percentiles_ms(self.took_s),
            "answered": answered,
            "errors": self.errors,
        }


def percentiles_ms(took_s: Iterable[float]) -> dict[str, float]:
    """p50, p99, p99.9 and the longest, out of an HDR histogram; of nothing, nothing."""
    histogram = HdrHistogram(1, HIGHEST_US, DIGITS)
    for one in took_s:
        histogram.record_value(max(1, round(one * 1e6)))
    if not histogram.get_total_count():
        return {}
    marks = {"p50": 50.0, "p99": 99.0, "p99.9": 99.9, "max": 100.0}
    return {name: histogram.get_value_at_percentile(mark) / 1e3 for name, mark in marks.items()}


class Connection:
    """One kept connection with at most one request under way."""

    def __init__(self, port: int) -> None:
        self._socket = socket.create_connection(("127.0.0.1", port), timeout=GIVE_UP_S)
        self._socket.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        self._received = b""
        self._missing = -1  # bytes of the answer still to come; -1: its head has not ended
        self.status = 0
        self.due_s = 0.0

    def fileno(self) -> int:
        return self._socket.fileno()

    def send(self, request: bytes, due_s: float) -> None:
        """Send one request whole."""
        self.due_s, self._received, self._missing = due_s, b"", -1
        self._socket.sendall(request)

    def receive(self) -> bool:
        """Take what has come; whether the answer is complete."""
        part = self._socket.recv(262_144)
        if not part:
            raise ConnectionError("the server closed the connection")
        if self._missing >= 0:
            self._missing -= len(part)
            return self._missing <= 0
        self._received += part
        end = self._received.find(b"\r\n\r\n")
        if end < 0:
            return False
        head = self._received[:end].lower()
        self.status = int(head[9:12])
        self._missing = int(head.split(b"content-length:", 1)[1].split(b"\r\n", 1)[0])
        self._missing -= len(self._received) - end - 4
        return self._missing <= 0

    def close(self) -> None:
        self._socket.close()


def requests(path: str, bodies: Iterable[bytes]) -> list[bytes]:
    """Ready-made requests."""
    head = f"POST {path} HTTP/1.1\r\nhost: 127.0.0.1\r\ncontent-type: application/json\r\ncontent-length: "
    return [f"{head}{len(body)}\r\n\r\n".encode() + body for body in bodies]


def run(port: int, ready: Sequence[bytes], *, connections: int, seconds: float, rate: float | None) -> Samples:
    """Send the ready-made requests in turn for so long. Raises ConnectionError and TimeoutError."""
    opened = [Connection(port) for _ in range(connections)]
    idle, waiting, due = deque(opened), set[Connection](), deque[float]()
    upcoming, samples = itertools.cycle(ready), Samples()
    started = last_answer = time.perf_counter()
    num_due, num_total = 0, int(seconds * rate) if rate else 0
    while True:
        now = time.perf_counter()
        if rate is None and now - started < seconds:
            due.extend([now] * (len(idle) - len(due)))
        while rate is not None and num_due < num_total and started + num_due / rate <= now:
            due.append(started + num_due / rate)
            num_due += 1
        while due and idle:
            connection = idle.popleft()
            connection.send(next(upcoming), due.popleft())
            waiting.add(connection)
        is_over = now - started >= seconds if rate is None else num_due >= num_total
        if is_over and not waiting and not due:
            break
        if waiting and now - last_answer > GIVE_UP_S:
            raise TimeoutError(f"no answer for {GIVE_UP_S:g} s")
        pause_s = 1.0
        if rate is not None and num_due < num_total:
            pause_s = max(0.0, started + num_due / rate - now)
        for connection in select.select(waiting, [], [], pause_s)[0]:
            if connection.receive():
                last_answer = time.perf_counter()
                waiting.discard(connection)
                idle.append(connection)
                _note(samples, connection, last_answer)
    samples.seconds = time.perf_counter() - started
    for connection in opened:
        connection.close()
    return samples


def _note(samples: Samples, connection: Connection, now: float) -> None:
    if 200 <= connection.status < 300:
        samples.due_s.append(connection.due_s)
        samples.took_s.append(now - connection.due_s)
    else:
        samples.errors[str(connection.status)] = samples.errors.get(str(connection.status), 0) + 1


class Load:
    """The generator as a child process, for whoever measures."""

    def __init__(
        self,
        port: int,
        path: str,
        bodies: Path,
        *,
        seconds: float,
        connections: int = 1,
        rate: float | None = None,
    ) -> None:
        self._raw = Path(tempfile.mkstemp(prefix="livebed-load-")[1])
        command = [sys.executable, "-m", "tests.bench.load", f"--port={port}", f"--path={path}", f"--bodies={bodies}"]
        command += [f"--connections={connections}", f"--seconds={seconds}", f"--raw={self._raw}"]
        command += [f"--rate={rate}"] if rate else []
        self._process = subprocess.Popen(command, stdout=subprocess.PIPE)
        self._limit_s = seconds + WARM_UP_S + 60

    def summary(self) -> dict[str, Any]:
        """Wait for its end: requests/s and percentiles."""
        return self.finish()[0]

    def finish(self) -> tuple[dict[str, Any], list[tuple[float, float]]]:
        """Wait for its end: the summary, and (due, took) in s of each request, on `time.perf_counter`'s clock."""
        out, _ = self._process.communicate(timeout=self._limit_s)
        text = self._raw.read_text()
        self._raw.unlink()
        if self._process.returncode:
            raise RuntimeError(f"the load generator ended with {self._process.returncode}")
        raw = json.loads(text)
        summary: dict[str, Any] = json.loads(out)
        return summary, list(zip(raw["due_s"], raw["took_s"], strict=True))


def main() -> None:
    """Warm up, send, print."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--port", type=int, required=True)
    parser.add_argument("--path", required=True)
    parser.add_argument("--bodies", type=Path, required=True, help="one JSON body a line")
    parser.add_argument("--connections", type=int, default=1)
    parser.add_argument("--seconds", type=float, default=3.0)
    parser.add_argument("--rate", type=float, help="requests/s; without it a closed loop")
    parser.add_argument("--raw", type=Path, help="write due times and latencies here")
    options = parser.parse_args()
    ready = requests(options.path, options.bodies.read_bytes().splitlines())
    run(options.port, ready, connections=options.connections, seconds=WARM_UP_S, rate=options.rate)
    samples = run(options.port, ready, connections=options.connections, seconds=options.seconds, rate=options.rate)
    if options.raw:
        options.raw.write_text(json.dumps({"due_s": samples.due_s, "took_s": samples.took_s}))
    print(json.dumps(samples.summary()))


if __name__ == "__main__":
    main()
