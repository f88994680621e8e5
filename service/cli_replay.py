"""`livebed train --replay`: a progress bar while it runs, then what was rebuilt."""

import json
import sys
from pathlib import Path

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

from trainer.replay import replay
from trainer.settings import Settings


def run_replay(settings: Settings, log: str, *, until: str | None, out: Path, as_json: bool) -> None:
    """Rebuild a model from a log and print what came of it."""
    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeRemainingColumn())
    quiet = as_json or not sys.stderr.isatty()
    with Progress(*columns, console=Console(stderr=True), disable=quiet) as progress:
        task = progress.add_task("entries", total=None)
        figures = replay(
            settings,
            log,
            until=until,
            out=out,
            progress=lambda done, total: progress.update(task, completed=done, total=total),
        )
    if as_json:
        sys.stdout.write(json.dumps(figures) + "\n")
        return
    for name, value in figures.items():
        sys.stdout.write(f"{name}\t{value if isinstance(value, str) else json.dumps(value)}\n")
