"""A whole `livebed up` at half load for half an hour: does memory grow, do descriptors leak, does latency creep up?

    python -m tests.bench.soak --minutes 30 --json

Events at half of what the trainer can take, scores of 100 candidates at half of what the service answers beside that,
and lookups of 100 ids. Every second the resident memory and open descriptors of each process are noted; the slope is
Theil and Sen's (the median of the slopes between all pairs: single jumps do not move it) after a warm-up. The broker
keeps the log from the oldest kept checkpoint on, so that its memory is flat only after some minutes.
"""

import json
import os
import tempfile
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import yaml
from scipy.stats import theilslopes

from tests.bench import frozen_world as world
from tests.bench.feed import feeding
from tests.bench.harness import arguments, emit, goal
from tests.bench.load import Load, percentiles_ms
from tests.bench.serving_peers import OPEN_CONNECTIONS, Bodies, capacity, train
from tests.stack import Stack
from tests.system.running import descendants

SAMPLE_S = 1.0
WARM_UP_SHARE = 0.25  # of the run: allocators and page tables fill up first
MAX_FIT_POINTS = 600  # pairs grow with the square
LOOKUPS_PER_S, IDS = 50.0, 100
LOOKUP_PATH = "/v1/tables/video_id/embeddings:lookup"
NAMES = {"-m trainer": "trainer", "-m service --worker": "worker", "valkey-server": "broker", "service.cli up": "up"}
MB_PER_H, P99_RATIO = 5.0, 1.25  # what still counts as flat


@dataclass
class Process:
    """One process and what was seen of it. `own`: memory that it shares with no file (the live store is one)."""

    pid: int
    at_s: list[float] = field(default_factory=list)
    rss_mb: list[float] = field(default_factory=list)
    own_mb: list[float] = field(default_factory=list)
    descriptors: list[int] = field(default_factory=list)

    def sample(self, at_s: float) -> None:
        """Note where it stands. Raises FileNotFoundError: it is gone."""
        status = dict(line.split(":", 1) for line in Path(f"/proc/{self.pid}/status").read_text().splitlines())
        self.at_s.append(at_s)
        self.rss_mb.append(int(status["VmRSS"].split()[0]) / 1024)
        self.own_mb.append(int(status["RssAnon"].split()[0]) / 1024)
        self.descriptors.append(sum(1 for _ in Path(f"/proc/{self.pid}/fd").iterdir()))

    def report(self) -> dict[str, Any]:
        """Slopes in MB/h with their 95 % intervals, and the descriptors of the first and the last third."""
        third = max(1, len(self.descriptors) // 3)
        return {
            "rss_mb": [round(self.rss_mb[0], 1), round(self.rss_mb[-1], 1)],
            "rss_mb_per_h": slope(self.at_s, self.rss_mb),
            "own_mb": [round(self.own_mb[0], 1), round(self.own_mb[-1], 1)],
            "own_mb_per_h": slope(self.at_s, self.own_mb),
            "descriptors": [int(np.median(self.descriptors[:third])), int(np.median(self.descriptors[-third:]))],
            "most_descriptors": max(self.descriptors),
        }


def slope(at_s: Sequence[float], values: Sequence[float]) -> list[float]:
    """Slope an hour after the warm-up, and its interval."""
    first = int(len(at_s) * WARM_UP_SHARE)
    every = max(1, (len(at_s) - first) // MAX_FIT_POINTS)
    fit = theilslopes(values[first::every], np.asarray(at_s[first::every]) / 3600)
    return [round(float(one), 2) for one in (fit.slope, fit.low_slope, fit.high_slope)]


def processes(pid: int) -> dict[str, Process]:
    """The system's processes by name."""
    found = {}
    for one in sorted({pid} | descendants(pid)):
        command = Path(f"/proc/{one}/cmdline").read_bytes().decode().replace("\0", " ")
        name = next((name for words, name in NAMES.items() if words in command), None)
        if name is not None:
            found.setdefault(name if name not in found else f"{name}-{one}", Process(one))
    return found


def by_minute(samples: Sequence[tuple[float, float]]) -> list[dict[str, float]]:
    """Percentiles in ms of each minute."""
    first = samples[0][0]
    minutes: dict[int, list[float]] = {}
    for due, took in samples:
        minutes.setdefault(int((due - first) / 60), []).append(took)
    return [percentiles_ms(minutes[minute]) for minute in sorted(minutes)]


def thirds(samples: Sequence[tuple[float, float]]) -> list[dict[str, float]]:
    """Percentiles in ms of the first, the second and the last third."""
    size = len(samples) // 3
    return [percentiles_ms([took for _, took in samples[k * size : (k + 1) * size]]) for k in range(3)]


def run(stack: Stack, directory: Path, minutes: float) -> dict[str, Any]:
    """Load, watch, report."""
    before = os.getloadavg()[0]
    rows, labels = world.log_rows()
    entries, ids = directory / "entries", directory / "ids"
    train(stack, rows, labels)
    world.write_log(stack.settings, rows, labels, entries)
    videos = [row["video_id"] for row in rows]
    ids.write_text("\n".join(json.dumps({"ids": videos[k : k + IDS]}) for k in range(0, 64 * IDS, IDS)))
    bodies = Bodies(rows, directory)
    url, key = f"unix://{stack.settings.run_path / 'valkey.sock'}", stack.settings.stream.key
    events_per_s = capacity(stack, url, entries) / 2
    with feeding(url, key, entries, events_per_s):
        most = bodies.load(stack.http_port, "/v1/score", 100, seconds=3.0, connections=8).summary()["requests_per_s"]
        seconds, rate = 60 * minutes, most / 2
        watched = processes(stack.pid)
        loads = [
            bodies.load(stack.http_port, "/v1/score", 100, seconds=seconds, connections=OPEN_CONNECTIONS, rate=rate),
            Load(stack.http_port, LOOKUP_PATH, ids, seconds=seconds, connections=4, rate=LOOKUPS_PER_S),
        ]
        started = time.monotonic()
        while (now := time.monotonic() - started) < seconds:
            for process in watched.values():
                process.sample(now)
            time.sleep(SAMPLE_S)
        ends = [load.finish() for load in loads]
    names = ("score", "lookup")
    return {
        "minutes": minutes,
        "load_average": [before, os.getloadavg()[0]],  # the second has our own two cores' worth in it
        "events_per_s": events_per_s,
        "score_requests_per_s": rate,
        "processes": {name: process.report() for name, process in watched.items()},
        "load": {
            name: {**summary, "by_minute": by_minute(samples), "thirds": thirds(samples)}
            for name, (summary, samples) in zip(names, ends, strict=True)
        },
    }


def goals(results: dict[str, Any]) -> list[dict[str, Any]]:
    """Flat is what is asked for; a slope counts from where its interval begins."""
    asked = []
    for name, process in results["processes"].items():
        asked.append(goal(f"memory of {name}", process["own_mb_per_h"][1], "MB/h at least", at_most=MB_PER_H))
        drift = process["descriptors"][1] - process["descriptors"][0]
        asked.append(goal(f"descriptors of {name}, last third over first", drift, "", at_most=0))
    for name, load in results["load"].items():
        ratio = load["thirds"][2]["p99"] / load["thirds"][0]["p99"]
        asked.append(goal(f"{name} p99, last third over first", ratio, "x", at_most=P99_RATIO))
        asked.append(goal(f"{name} errors", sum(load["errors"].values()), "", at_most=0))
    return asked


def main() -> None:
    """Run and print."""
    parser = arguments(__doc__ or "")
    parser.add_argument("--minutes", type=float, default=30.0)
    options = parser.parse_args()
    with tempfile.TemporaryDirectory(prefix="livebed-") as name:
        directory = Path(name)
        configuration = directory / "livebed.yaml"
        configuration.write_text(yaml.safe_dump(world.configuration()))
        with Stack(directory, configuration=configuration) as stack:
            results = run(stack, directory, 0.5 if options.quick else options.minutes)
    emit("soak", results, goals(results), options.json)


if __name__ == "__main__":
    main()
