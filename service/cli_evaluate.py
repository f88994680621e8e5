"""`livebed evaluate`: a progress bar while it runs, then the figures."""

import json
import sys
from pathlib import Path

from rich.console import Console
from rich.progress import Progress
from rich.table import Table

from trainer.evaluate import evaluate
from trainer.settings import Settings

SHOWN = ("n", "auc", "logloss", "ne", "calibration", "events_per_s", "engine", "batch", "rows")


def run_evaluate(
    settings: Settings,
    path: Path,
    *,
    label: str | None,
    time: str | None,
    batch: int | None,
    max_rows: int | None,
    as_json: bool,
) -> None:
    """Validate the file and print the figures; raises SettingsError for a file or column that cannot be used."""
    with Progress(console=Console(stderr=True), disable=as_json or not sys.stderr.isatty()) as progress:
        task = progress.add_task("predict, then learn", total=None)
        figures = evaluate(
            settings,
            path,
            label=label or settings.label.name,
            time=time,
            batch=batch,
            max_rows=max_rows,
            progress=lambda done, total: progress.update(task, completed=done, total=total),
        )
    if as_json:
        sys.stdout.write(json.dumps(figures) + "\n")
        return
    table = Table(title=f"{path.name}, progressive validation", title_justify="left", show_header=False)
    for name in SHOWN:
        table.add_row(name, _text(figures[name]))
    Console().print(table)


def _text(value: object) -> str:
    if isinstance(value, float):
        return f"{value:,.0f}" if value >= 1000 else f"{value:.4f}"
    if isinstance(value, dict):
        return "  ".join(f"{name} {count:,}" for name, count in value.items())
    return str(value)
