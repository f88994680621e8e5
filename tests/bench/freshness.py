"""From an event accepted to its effect in a served score, measured twice at 1,000 events/s.

Inside: for every event, accepted -> visible in the live store, from the trainer's own histogram. Outside: a client
posts an event and asks for a score on another connection, again and again, until the score has moved; that includes
both requests, the log, learning, publishing and the polling itself.
"""

import http.client
import json
import tempfile
import threading
import time
from pathlib import Path
from typing import Any

from tests.bench.harness import arguments, emit, goal, percentiles_ms
from tests.bench.kuairand import raw_rows
from tests.stack import Stack
from trainer import board

EVENTS_PER_S = 1000
POSTS_PER_S = 200  # five events a post: what a page of impressions looks like
PROBE_EVERY_S = 0.05
PROBE_DEADLINE_S = 5.0


def event(row: dict[str, Any]) -> dict[str, Any]:
    """One impression as the API takes it."""
    features = {name: row[name] for name in ("user_id", "video_id", "duration_ms")}
    return {"features": features, "label": row["is_click"], "time_ms": row["time_ms"]}


def post(connection: http.client.HTTPConnection, path: str, body: bytes) -> Any:
    """POST JSON on a kept connection."""
    connection.request("POST", path, body, {"content-type": "application/json"})
    response = connection.getresponse()
    content = response.read()
    if response.status >= 300:
        raise RuntimeError(f"{path} answered {response.status}: {content[:300]!r}")
    return json.loads(content)


class Load(threading.Thread):
    """Posts events at a steady rate until told to stop; what it sends is not answered late because it was sent late."""

    def __init__(self, stack: Stack, rows: list[dict[str, Any]]) -> None:
        super().__init__(daemon=True)
        self.stack, self.rows = stack, rows
        self.stopped = threading.Event()
        self.num_sent = 0
        self.error: Exception | None = None

    def run(self) -> None:
        """Send."""
        connection = self.stack.connection()
        per_post = EVENTS_PER_S // POSTS_PER_S
        bodies = [
            json.dumps([event(row) for row in self.rows[at : at + per_post]]).encode()
            for at in range(0, len(self.rows) - per_post, per_post)
        ]
        started = time.perf_counter()
        try:
            for k in range(1_000_000):
                wait = started + k / POSTS_PER_S - time.perf_counter()
                if self.stopped.wait(max(wait, 0)):
                    return
                post(connection, "/v1/events", bodies[k % len(bodies)])
                self.num_sent += per_post
        except (OSError, RuntimeError, http.client.HTTPException) as error:
            self.error = error


def probe(stack: Stack, num_probes: int, name: str) -> list[float]:
    """Seconds from sending an event of ids never seen until a score on another connection uses their rows."""
    writer, reader = stack.connection(), stack.connection()
    seconds = []
    for k in range(num_probes):
        row = {"user_id": f"{name}-{k}", "video_id": f"{name}-{k}", "duration_ms": 1000}
        question = json.dumps({"rows": [row], "time_ms": 1}).encode()
        # Dense weights move all the time under load; that its own rows are used is what only this event can cause.
        known = post(reader, "/v1/score", question)["unknown"]
        answer = json.dumps([{"features": row, "label": k % 2, "time_ms": 1}]).encode()
        started = time.perf_counter()
        post(writer, "/v1/events", answer)
        while post(reader, "/v1/score", question)["unknown"] == known:
            if time.perf_counter() - started > PROBE_DEADLINE_S:
                raise RuntimeError(f"the score had not moved {PROBE_DEADLINE_S:g} s after its event")
        seconds.append(time.perf_counter() - started)
        time.sleep(PROBE_EVERY_S)
    return seconds


def main() -> None:
    """Measure and print."""
    options = arguments(__doc__ or "").parse_args()
    num_probes = 200 if options.quick else 1000
    with tempfile.TemporaryDirectory(prefix="livebed-") as directory, Stack(Path(directory)) as stack:
        load = Load(stack, raw_rows())
        load.start()
        probe(stack, 20, "warm")  # warm connections and caches
        before = board.read(stack.settings.metrics_path)
        started, sent = time.perf_counter(), load.num_sent
        outside = percentiles_ms(probe(stack, num_probes, "probe"))
        rate = (load.num_sent - sent) / (time.perf_counter() - started)
        load.stopped.set()
        load.join()
        if load.error is not None:
            raise load.error
        after = board.read(stack.settings.metrics_path)
        name = "livebed_event_to_visible_seconds"
        inside = {f"p{100 * q:g}": 1e3 * after.since(before).quantile(name, q) for q in (0.5, 0.99)}
    results = {"events_per_s": rate, "accepted_to_visible_ms": inside, "posted_to_score_moved_ms": outside}
    goals = [
        goal("event accepted -> visible, p50", inside["p50"], "ms", at_most=15),
        goal("event accepted -> visible, p99", inside["p99"], "ms", at_most=50),
        goal("event posted -> score moved, p50", outside["p50"], "ms", at_most=15),
        goal("event posted -> score moved, p99", outside["p99"], "ms", at_most=50),
        goal("events/s during the measurement", rate, "1/s", at_least=0.95 * EVENTS_PER_S),
    ]
    emit("freshness", results, goals, options.json)


if __name__ == "__main__":
    main()
