"""Progressive validation of KuaiRand `is_click`: Livebed, and Vowpal Wabbit with pairs through its Python parser.

Both start from the raw file and predict each event before they learn it; runs alternate, so that a slow minute
slows both. Label delay: none, each prediction is made by a model that has learned every event before it.
"""

import math
import time
from typing import Any

import numpy as np
from vowpalwabbit import Workspace

from tests.bench.harness import arguments, emit, goal
from tests.bench.kuairand import CONFIGURATION, IMPRESSIONS, MS_PER_HOUR, raw_rows
from trainer.evaluate import evaluate
from trainer.metrics import summary
from trainer.settings import Settings

NAMESPACES = "abcd"  # user, video, hour, duration


def livebed(max_rows: int | None) -> dict[str, Any]:
    """The event engine, as `livebed evaluate` runs it."""
    settings = Settings.load(CONFIGURATION, environment={})
    return evaluate(settings, IMPRESSIONS, label="is_click", time="time_ms", max_rows=max_rows)


def vowpal_wabbit(max_rows: int | None) -> dict[str, Any]:
    """Logistic regression with all pairs, line by line."""
    started = time.perf_counter()
    pairs = " ".join(f"-q {a}{b}" for i, a in enumerate(NAMESPACES) for b in NAMESPACES[i + 1 :])
    workspace = Workspace(f"--loss_function logistic -b 22 --quiet {pairs}")
    labels, logits = [], []
    for row in raw_rows()[:max_rows]:
        hour = row["time_ms"] // MS_PER_HOUR % 24
        duration = round(math.log2(max(row["duration_ms"], 1)))
        label = 1 if row["is_click"] else -1
        line = f"{label} |a {row['user_id']} |b {row['video_id']} |c {hour} |d {duration}"
        example = workspace.parse(line)
        workspace.learn(example)  # predicts first: the kept prediction is the one made before the update
        logits.append(example.get_simplelabel_prediction())
        labels.append(row["is_click"])
        workspace.finish_example(example)
    seconds = time.perf_counter() - started
    workspace.finish()
    figures = summary(np.array(labels, np.float32), np.array(logits, np.float32))
    return {"auc": figures.auc, "logloss": figures.logloss, "events_per_s": len(labels) / seconds}


def main() -> None:
    """Measure and print."""
    options = arguments(__doc__ or "").parse_args()
    repeats, max_rows = (2, None) if options.quick else (5, None)
    livebed(2000)  # loads the compiled kernels
    runs: list[tuple[dict[str, Any], dict[str, Any]]] = []
    for _ in range(repeats):
        runs.append((livebed(max_rows), vowpal_wabbit(max_rows)))
    ratio = float(np.median([ours["events_per_s"] / theirs["events_per_s"] for ours, theirs in runs]))
    ours, theirs = runs[-1]
    results = {"livebed": ours, "vowpal_wabbit_pairs_python": theirs, "ratio": ratio, "label_delay_events": 0}
    goals = [
        goal("KuaiRand is_click logloss", ours["logloss"], "nats", at_most=0.497),
        goal("events/s over Vowpal Wabbit's Python parser with pairs", ratio, "x", at_least=1.0),
    ]
    emit("evaluate", results, goals, options.json)


if __name__ == "__main__":
    main()
