"""`livebed evaluate`: a progress bar while it runs, then the figures; other configurations beside, and a report."""

import json
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.progress import Progress
from rich.table import Table

from service import evaluate_report
from service.evaluate_report import Run
from trainer.errors import SettingsError
from trainer.evaluate import compare, validate
from trainer.settings import Settings

SHOWN = ("n", "auc", "logloss", "ne", "calibration", "events_per_s", "engine", "batch", "delay", "rows")


def run_evaluate(
    settings: Sequence[tuple[str, Settings]], path: Path, *, report: Path | None, as_json: bool, **options: Any
) -> None:
    """Validate the file under each configuration (name, settings) and print the figures; the first one is the base.

    Raises:
        SettingsError: a file, a column or an option cannot be used.
    """
    if report is not None and report.suffix not in {".html", ".htm"}:
        raise SettingsError("--report", got=str(report), wanted="a file that ends in .html; the JSON goes beside it")
    if report is not None:
        _check_writable(report, path)
    names = _names([name for name, _ in settings])
    runs = []
    label = options.pop("label") or settings[0][1].label.name  # one label for all, or nothing could be compared
    with Progress(console=Console(stderr=True), disable=as_json or not sys.stderr.isatty()) as progress:
        for name, (_, one) in zip(names, settings, strict=True):
            task = progress.add_task(f"{name}: predict, then learn", total=None)

            def show(done: int, total: int, task: Any = task) -> None:
                progress.update(task, completed=done, total=total)

            validation = validate(one, path, label=label, progress=show, **options)
            runs.append(Run(name, one, validation))
    base, *others = runs
    differences = {run.name: compare(base.validation, run.validation) for run in others}
    if report is not None:
        content = evaluate_report.report(runs, differences, path, ["livebed", *sys.argv[1:]])
        page, beside = evaluate_report.write(content, report)
        sys.stderr.write(f"the report is in {page} and {beside}\n")
    if as_json:
        figures: dict[str, Any] = dict(base.validation.figures)
        if others:
            figures["compared"] = {run.name: run.validation.figures for run in others}
            figures["differences"] = differences
        sys.stdout.write(json.dumps(evaluate_report.finite(figures)) + "\n")
        return
    table = Table(title=f"{path.name}, progressive validation", title_justify="left", show_header=bool(others))
    for column in ("", *names):
        table.add_column(column)
    for figure in SHOWN:
        table.add_row(figure, *(_text(run.validation.figures[figure]) for run in runs))
    for figure in next(iter(differences.values()), {}):
        table.add_row(f"difference: {figure}", "", *(f"{one[figure]:+.5f}" for one in differences.values()))
    Console().print(table)


def _check_writable(report: Path, log: Path) -> None:
    """Before minutes of work: the page and the JSON beside it can be written, and replace nothing that is read."""
    if report.with_suffix(".json") == log:
        raise SettingsError("--report", got=str(report), wanted="a name whose .json is not the log itself")
    try:
        report.parent.mkdir(parents=True, exist_ok=True)
        for path in (report, report.with_suffix(".json")):
            path.open("a").close()
    except OSError as error:
        raise SettingsError(
            "--report", got=str(report), wanted=f"a file that can be written ({error.strerror})"
        ) from None


def _names(paths: Sequence[str]) -> list[str]:
    """Short names that differ: a file's own, and its number where two are alike."""
    stems = [Path(path).stem for path in paths]
    return [stem if stems.count(stem) == 1 else f"{stem} {place}" for place, stem in enumerate(stems, 1)]


def _text(value: object) -> str:
    if isinstance(value, float):
        return f"{value:,.0f}" if value >= 1000 else f"{value:.4f}"
    if isinstance(value, dict):
        return "  ".join(f"{name} {count:,}" for name, count in value.items())
    return str(value)
