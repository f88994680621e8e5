"""The demo: a whole system, a real click log replayed against it, and what came of it.

Everything it makes is its own: a fresh model in a temporary directory, removed at the end, so that no run begins
with a model that has already seen the log.
"""

import math
import sys
import tempfile
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

import numpy as np
from rich.console import Console

from service.demo_view import LiveTable, PlainLines, View, examples
from service.examples import KUAIRAND
from service.replay import ClickLog, Outcome, Replay
from service.supervisor import TEND_EVERY_S, Supervisor
from trainer.board import Snapshot, read
from trainer.metrics import Summary, summary
from trainer.settings import Settings

# The log is 41,828 impressions long: about a minute.
DEFAULT_RATE: Final = 700.0
LEARNED_TIMEOUT_S: Final = 30.0
# The trainer puts its row counts on the metric board four times a second.
GAUGES_S: Final = 0.5


@dataclass(frozen=True)
class DemoOptions:
    """How to replay, and what to do afterwards."""

    rate: float | None = DEFAULT_RATE  # impressions a second; None: as fast as answers come
    seconds: float | None = None  # None: the whole log
    keep_serving: bool = False
    live: bool = False  # draw on a terminal


def run_demo(settings: Settings, options: DemoOptions) -> dict[str, Any]:
    """Start everything, replay, stop everything; returns the figures. Raises LivebedError if it cannot start."""
    console = Console(stderr=True)
    with tempfile.TemporaryDirectory(prefix="livebed-demo-") as directory:
        stream = settings.stream.model_copy(update={"url": None})  # a broker of our own, with nothing in it yet
        own = settings.model_copy(update={"data_dir": Path(directory), "stream": stream})
        supervisor = Supervisor(own, forward=None if options.live else sys.stderr)
        log = ClickLog(own, KUAIRAND / "impressions.parquet", time_column="time_ms")
        console.print("livebed demo: starting broker, trainer and service", highlight=False)
        with supervisor.signals(), supervisor:
            console.print(f"livebed demo: ready at {supervisor.http_url}, replaying {log.num_rows:,} impressions")
            with LiveTable(console) if options.live else PlainLines() as view:
                figures = _replay(supervisor, log, options, view)
            if options.keep_serving and not supervisor.stop_asked:
                console.print(_examples(supervisor), markup=False, highlight=False, soft_wrap=True)
                while not supervisor.wait(TEND_EVERY_S):
                    supervisor.tend()
            console.print("livebed demo: stopping", highlight=False)
    return figures


def _replay(supervisor: Supervisor, log: ClickLog, options: DemoOptions, view: View) -> dict[str, Any]:
    serving = supervisor.settings.serving
    metrics_path = supervisor.settings.metrics_path
    replay = Replay(log, serving.host, serving.http_port, rate=options.rate, seconds=options.seconds)
    before = read(metrics_path)
    replay.start()

    def figures() -> dict[str, Any]:
        return measure(replay.outcome, read(metrics_path).since(before), log.num_rows, supervisor.num_restarts)

    while replay.is_alive() and not supervisor.wait(TEND_EVERY_S):
        supervisor.tend()
        view.show(figures())
    replay.stop()
    replay.join()
    deadline_s = time.monotonic() + LEARNED_TIMEOUT_S
    while not _all_learned(replay.outcome, read(metrics_path).since(before)) and time.monotonic() < deadline_s:
        if supervisor.wait(TEND_EVERY_S):
            break
        supervisor.tend()
    supervisor.wait(GAUGES_S)
    final = figures()
    view.show(final)
    for error, count in replay.outcome.errors.most_common(5):
        sys.stderr.write(f"livebed demo: {count} x {error}\n")
    return final


def _all_learned(outcome: Outcome, board: Snapshot) -> bool:
    return board.value("livebed_events_applied_total") >= outcome.num_sent + outcome.num_facts


def measure(outcome: Outcome, board: Snapshot, events_in_log: int, restarts: int) -> dict[str, Any]:
    """The figures of a replay so far; None where there is nothing to say yet."""
    count = len(outcome.scores)
    served = served_quality(outcome.labels[:count], outcome.scores[:count])
    trained = max(0, int(board.value("livebed_events_applied_total")) - outcome.num_facts)
    freshness = "livebed_event_to_visible_seconds"
    return {
        "events_trained": trained,
        "served_auc": _rounded(served.auc if served else None, 5),
        "served_logloss": _rounded(served.logloss if served else None, 5),
        "calibration": _rounded(served.calibration if served else None, 4),
        "freshness_ms": {f"p{q:.0f}": _rounded(board.quantile(freshness, q / 100) * 1e3, 3) for q in (50, 99)},
        "score_ms": percentiles_ms(list(outcome.score_s)),
        "events_per_s": _rounded(outcome.num_sent / outcome.seconds if outcome.seconds else None, 1),
        "rows": rows_of(board),
        "errors": sum(outcome.errors.values()),
        "events_scored": count,
        "feature_events": outcome.num_facts,
        "events_in_log": events_in_log,
        "seconds": round(outcome.seconds, 3),
        "restarts": restarts,
    }


def served_quality(labels: Sequence[int], scores: Sequence[float]) -> Summary | None:
    """AUC, logloss and calibration of probabilities as they were served."""
    if not scores:
        return None
    p = np.clip(np.asarray(scores, dtype=np.float64), 1e-7, 1.0 - 1e-7)
    return summary(labels, np.log(p / (1.0 - p)))


def rows_of(board: Snapshot) -> dict[str, int]:
    """Rows in use by table."""
    return {key[1][0]: int(values[0]) for key, values in board.series.items() if key[0] == "livebed_table_rows"}


def percentiles_ms(seconds: Sequence[float]) -> dict[str, float | None]:
    """p50 and p99 in milliseconds."""
    if not seconds:
        return {"p50": None, "p99": None}
    p50, p99 = np.percentile(np.asarray(seconds) * 1e3, [50, 99])
    return {"p50": round(float(p50), 3), "p99": round(float(p99), 3)}


def _rounded(value: float | None, digits: int) -> float | None:
    """Rounded, for JSON: NaN is no JSON number and means "nothing yet"."""
    return None if value is None or math.isnan(value) else round(value, digits)


def _examples(supervisor: Supervisor) -> str:
    settings = supervisor.settings
    return examples(
        http_url=supervisor.http_url,
        grpc_port=settings.serving.grpc_port,
        broker_socket=settings.run_path / "valkey.sock",
        stream_key=settings.stream.key,
    )
