"""The report of `livebed evaluate`: one JSON file, and one HTML page that needs nothing else.

JSON: {"log": {name, bytes, sha256}, "command": [...], "runs": [{"name", "figures", "settings", "over_time":
[{"events", "auc", "logloss", "calibration", "cumulative_auc", "cumulative_logloss"}], "rows_over_time": [[events,
{table: rows}]], "calibration_curve": [{"predicted", "real", "events"}]}], "differences": {name: {...}}}. A number that
is not finite is null.
"""

import hashlib
import html
import json
import math
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from trainer.evaluate import Validation
from trainer.metrics import summary
from trainer.settings import Settings

NUM_POINTS = 40  # of each line over time
NUM_BINS = 10  # of the calibration curve, each with equally many events
WIDTH, HEIGHT, MARGIN = 640, 220, 46
COLOURS = ("#2563eb", "#d97706", "#059669", "#9333ea", "#dc2626", "#0891b2")
STYLE = """
:root { color-scheme: light dark; font: 15px/1.5 system-ui, sans-serif; }
body { max-width: 46rem; margin: 2rem auto; padding: 0 1rem; }
table { border-collapse: collapse; } td, th { padding: .15rem .8rem .15rem 0; text-align: right; }
td:first-child, th:first-child { text-align: left; }
svg text { fill: currentColor; font-size: 11px; } svg .axis { stroke: currentColor; opacity: .4; }
pre { overflow: auto; padding: .6rem; border: 1px solid #8886; }
"""
FIGURES = ("auc", "logloss", "ne", "calibration", "events", "events_per_s", "engine", "batch", "delay")


@dataclass(frozen=True)
class Run:
    """One configuration's validation."""

    name: str
    settings: Settings
    validation: Validation


def report(
    runs: Sequence[Run], differences: dict[str, dict[str, float]], log: Path, command: Sequence[str]
) -> dict[str, Any]:
    """Everything that the two files say."""
    content: dict[str, Any] = finite(
        {
            "log": {"name": log.name, "bytes": log.stat().st_size, "sha256": _sha256(log)},
            "command": list(command),
            "runs": [_run(run) for run in runs],
            "differences": differences,
        }
    )
    return content


def write(content: dict[str, Any], path: Path) -> tuple[Path, Path]:
    """Write the page to `path` and the JSON beside it; returns both paths."""
    beside = path.with_suffix(".json")
    path.parent.mkdir(parents=True, exist_ok=True)
    beside.write_text(json.dumps(content, indent=1) + "\n", encoding="utf-8")
    path.write_text(page(content), encoding="utf-8")
    return path, beside


def finite(value: Any) -> Any:
    """The same JSON value with null for every number that is not finite, which JSON does not have.

    >>> finite({"auc": float("nan"), "n": [1.5]})
    {'auc': None, 'n': [1.5]}
    """
    if isinstance(value, dict):
        return {key: finite(one) for key, one in value.items()}
    if isinstance(value, list | tuple):
        return [finite(one) for one in value]
    return None if isinstance(value, float) and not math.isfinite(value) else value


def page(content: dict[str, Any]) -> str:
    """The HTML page: figures, lines over time, calibration, configurations. Loads nothing, escapes everything."""
    runs, log = content["runs"], content["log"]
    parts = [
        "<!doctype html><html lang=en><meta charset=utf-8><meta name=viewport content='width=device-width'>",
        f"<title>Progressive validation of {_text(log['name'])}</title><style>{STYLE}</style>",
        f"<h1>Progressive validation of {_text(log['name'])}</h1>",
        f"<p>{log['bytes']:,} bytes, SHA-256 <code>{log['sha256']}</code></p>",
        f"<pre>{_text(' '.join(content['command']))}</pre>",
        _figures(runs),
    ]
    if content["differences"]:
        parts.append(_differences(content["differences"]))
    for name, title in (("auc", "AUC"), ("logloss", "Logloss"), ("calibration", "Mean prediction over mean label")):
        lines = {run["name"]: [(p["events"], p[name]) for p in run["over_time"]] for run in runs}
        parts.append(_chart(f"{title}, of each part of the log", lines, "events"))
    for run in runs:
        tables = run["rows_over_time"][-1][1] if run["rows_over_time"] else {}
        lines = {table: [(events, rows[table]) for events, rows in run["rows_over_time"]] for table in tables}
        parts.append(_chart(f"Rows per table, {run['name']}", lines, "events"))
    curves = {run["name"]: [(b["predicted"], b["real"]) for b in run["calibration_curve"]] for run in runs}
    parts.append(_chart("Share of positives over prediction", curves, "prediction"))
    parts += [f"<h2>{_text(run['name'])}</h2><pre>{_text(json.dumps(run['settings'], indent=1))}</pre>" for run in runs]
    return "\n".join(parts) + "\n</html>\n"


def _run(run: Run) -> dict[str, Any]:
    validation = run.validation
    return {
        "name": run.name,
        "figures": validation.figures,
        "settings": run.settings.model_dump(mode="json", exclude={"stream", "serving", "data_dir", "run_dir"}),
        "over_time": _over_time(validation),
        "rows_over_time": [[events, rows] for events, rows in validation.rows_over_time],
        "calibration_curve": _calibration_curve(validation),
    }


def _over_time(validation: Validation) -> list[dict[str, Any]]:
    labels, logits = validation.labels_N, validation.logits_N
    edges = np.unique(np.linspace(0, len(labels), NUM_POINTS + 1).astype(int))
    points = []
    for first, last in zip(edges[:-1].tolist(), edges[1:].tolist(), strict=True):
        part, so_far = summary(labels[first:last], logits[first:last]), summary(labels[:last], logits[:last])
        points.append(
            {
                "events": last,
                "auc": part.auc,
                "logloss": part.logloss,
                "calibration": part.calibration,
                "cumulative_auc": so_far.auc,
                "cumulative_logloss": so_far.logloss,
            }
        )
    return points


def _calibration_curve(validation: Validation) -> list[dict[str, Any]]:
    probabilities = 1.0 / (1.0 + np.exp(-validation.logits_N.astype(np.float64).clip(-40, 40)))
    order = np.argsort(probabilities, kind="stable")
    return [
        {
            "predicted": float(probabilities[part].mean()),
            "real": float(validation.labels_N[part].mean()),
            "events": len(part),
        }
        for part in np.array_split(order, NUM_BINS)
        if len(part)
    ]


def _figures(runs: Sequence[dict[str, Any]]) -> str:
    head = "".join(f"<th>{_text(run['name'])}" for run in runs)
    rows = [f"<tr><td>{name}" + "".join(f"<td>{_number(run['figures'][name])}" for run in runs) for name in FIGURES]
    return f"<table><tr><th>{head}{''.join(rows)}</table>"


def _differences(differences: dict[str, dict[str, Any]]) -> str:
    text = "<h2>Against the first</h2><p>A difference of less than two standard errors may be chance.</p><table>"
    names = list(next(iter(differences.values())))
    text += "<tr><th>" + "".join(f"<th>{_text(one)}" for one in differences)
    for name in names:
        text += f"<tr><td>{_text(name)}" + "".join(f"<td>{_number(one[name])}" for one in differences.values())
    return text + "</table>"


def _chart(title: str, lines: dict[str, list[tuple[float, float | None]]], x_label: str) -> str:
    points = [(x, y) for line in lines.values() for x, y in line if y is not None]
    if not points:
        return ""
    (x_low, x_high), (y_low, y_high) = (_range([point[axis] for point in points]) for axis in (0, 1))

    def place(x: float, y: float) -> str:
        across = MARGIN + (x - x_low) / (x_high - x_low) * (WIDTH - 2 * MARGIN)
        down = HEIGHT - MARGIN / 2 - (y - y_low) / (y_high - y_low) * (HEIGHT - MARGIN)
        return f"{across:.1f},{down:.1f}"

    body, legend = [], []
    for number, (name, line) in enumerate(lines.items()):
        colour = COLOURS[number % len(COLOURS)]
        path = " ".join(place(x, y) for x, y in line if y is not None)
        body.append(f"<polyline fill=none stroke='{colour}' stroke-width=1.6 points='{path}'/>")
        legend.append(f"<span style='color:{colour}'>&#9644;</span> {_text(name)}")
    low, high = place(x_low, y_low).split(","), place(x_high, y_high).split(",")
    axes = (
        f"<path class=axis fill=none d='M{low[0]} {high[1]}V{low[1]}H{high[0]}'/>"
        f"<text x=2 y={float(high[1]) + 4:.0f}>{_number(y_high)}</text><text x=2 y={low[1]}>{_number(y_low)}</text>"
        f"<text x={low[0]} y={HEIGHT - 4}>{_number(x_low)}</text>"
        f"<text x={high[0]} y={HEIGHT - 4} text-anchor=end>{_number(x_high)} {_text(x_label)}</text>"
    )
    described = f"<title>{_text(title)}</title><desc>{_text(title)}: {_number(y_low)} to {_number(y_high)}</desc>"
    svg = f"<svg role=img viewBox='0 0 {WIDTH} {HEIGHT}'>{described}{axes}{''.join(body)}</svg>"
    return f"<h2>{_text(title)}</h2>{svg}<p>{' &nbsp; '.join(legend)}</p>"


def _range(values: Sequence[float]) -> tuple[float, float]:
    low, high = min(values), max(values)
    return (low, high) if high > low else (low - 0.5, high + 0.5)


def _number(value: object) -> str:
    if isinstance(value, float):
        return f"{value:,.0f}" if abs(value) >= 1000 else f"{value:.4g}"
    return "–" if value is None else f"{value:,}" if isinstance(value, int) else _text(str(value))


def _text(value: str) -> str:
    return html.escape(value, quote=True)


def _sha256(path: Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()
