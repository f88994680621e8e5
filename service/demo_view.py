"""How the demo shows what it measures: a live table on a terminal, plain lines elsewhere."""

import io
import json
import math
import sys
import time
from collections.abc import Mapping
from pathlib import Path
from types import TracebackType
from typing import Any, Final, Protocol, Self

from rich.console import Console
from rich.live import Live
from rich.table import Table

REFRESH_S: Final = 0.25
PLAIN_LINE_EVERY_S: Final = 5.0


class View(Protocol):
    """Takes the figures a few times a second."""

    def show(self, figures: Mapping[str, Any]) -> None:
        """Show these figures if it is time to."""

    def __enter__(self) -> Self:
        """Begin."""

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        """End, leaving the last figures in view."""


class LiveTable:
    """A table that is drawn again in place."""

    def __init__(self, console: Console) -> None:
        """Take the terminal."""
        self._live = Live(console=console, auto_refresh=False)
        self._due_s = 0.0

    def show(self, figures: Mapping[str, Any]) -> None:
        """Draw the table, at most four times a second."""
        if time.monotonic() >= self._due_s:
            self._due_s = time.monotonic() + REFRESH_S
            self._live.update(as_table(figures), refresh=True)

    def __enter__(self) -> Self:
        """Begin drawing."""
        self._live.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        """Leave the last table on the screen."""
        self._live.stop()


class PlainLines:
    """A line every few seconds, for logs and pipes."""

    def __init__(self) -> None:
        """Write to standard error: standard output is for the result."""
        self._due_s = time.monotonic() + PLAIN_LINE_EVERY_S

    def show(self, figures: Mapping[str, Any]) -> None:
        """Write one line if the last one is old enough."""
        if time.monotonic() >= self._due_s:
            self._due_s = time.monotonic() + PLAIN_LINE_EVERY_S
            sys.stderr.write(as_line(figures) + "\n")
            sys.stderr.flush()

    def __enter__(self) -> Self:
        """Nothing to begin."""
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        """Nothing to end."""


def as_table(figures: Mapping[str, Any]) -> Table:
    """All figures, one a row, with what each means."""
    table = Table(title="Livebed: learning from a click log while it serves", title_justify="left")
    table.add_column("")
    table.add_column("now", justify="right")
    table.add_column("what it is", style="dim")
    freshness, score = figures["freshness_ms"], figures["score_ms"]
    for name, value, meaning in (
        ("events trained", f"{figures['events_trained']:,} of {figures['events_in_log']:,}", "impressions learned"),
        ("events/s", number(figures["events_per_s"], 0), "scored, sent and learned"),
        ("AUC", number(figures["served_auc"], 4), "of scores served before the label was sent"),
        ("logloss", number(figures["served_logloss"], 4), "of the same scores"),
        ("calibration", number(figures["calibration"], 3), "mean prediction over mean label; 1 is right"),
        ("freshness", pair(freshness), "event accepted -> visible to readers, p50 / p99"),
        ("score latency", pair(score), "HTTP, a slate of impressions, p50 / p99"),
        ("rows", "  ".join(f"{name} {rows:,}" for name, rows in figures["rows"].items()), "in each embedding table"),
        ("errors", str(figures["errors"]), "refused or failed requests"),
        ("restarts", str(figures["restarts"]), "processes that died and were started again"),
    ):
        table.add_row(name, value, meaning)
    return table


def as_line(figures: Mapping[str, Any]) -> str:
    """The same in one line."""
    rows = ", ".join(f"{name} {count}" for name, count in figures["rows"].items())
    return (
        f"livebed demo: {figures['events_trained']}/{figures['events_in_log']} events, "
        f"{number(figures['events_per_s'], 0)}/s, AUC {number(figures['served_auc'], 4)}, "
        f"logloss {number(figures['served_logloss'], 4)}, calibration {number(figures['calibration'], 3)}, "
        f"freshness {pair(figures['freshness_ms'])}, score {pair(figures['score_ms'])}, rows {rows}, "
        f"errors {figures['errors']}"
    )


def number(value: float | None, digits: int) -> str:
    """A figure with so many digits, or a dash before there is one."""
    return "-" if value is None or math.isnan(value) else f"{value:,.{digits}f}"


def pair(quantiles: Mapping[str, float | None]) -> str:
    """Two latencies in ms."""
    return f"{number(quantiles['p50'], 1)} / {number(quantiles['p99'], 1)} ms"


def examples(*, http_url: str, grpc_port: int, broker_socket: Path, stream_key: str) -> str:
    """Commands to copy and paste while the demo keeps serving."""
    curl = f"curl -s {http_url}"
    json_header = "-H 'content-type: application/json'"
    return f"""
Still serving. Try, in another terminal (Ctrl-C here ends everything):

  # what will user 4854 click?
  {curl}/v1/score {json_header} \\
    -d '{{"context": {{"user_id": 4854}}, "candidates": [{{"video_id": 3431182}}, {{"video_id": 526117}}]}}'

  # the user clicked; score again and see it move
  {curl}/v1/events {json_header} \\
    -d '[{{"features": {{"user_id": 4854, "video_id": 526117}}, "label": 1}}]'

  # the embeddings of two videos
  {curl}/v1/tables/video/embeddings:lookup {json_header} -d '{{"ids": [3431182, 526117]}}'

  # the model, its tables, and the HTTP API in full
  {curl}/v1/model
  {curl}/v1/tables
  {curl}/openapi.json

  # the same score over gRPC (reflection is on)
  grpcurl -plaintext -d '{{"context": {{"values": {{"user_id": {{"integer": 4854}}}}}},
    "candidates": [{{"values": {{"video_id": {{"integer": 526117}}}}}}]}}' \\
    127.0.0.1:{grpc_port} livebed.v1.ScoringService/Score

  # an event from any program that speaks Redis
  redis-cli -s {broker_socket} XADD {stream_key} '*' \\
    json '{{"features": {{"user_id": 4854, "video_id": 3431182}}, "label": 0}}'
"""


def main() -> None:
    """`livebed demo --all --json | python -m service.demo_view FILE.svg`: the last table as a picture."""
    console = Console(record=True, width=110, file=io.StringIO())
    console.print(as_table(json.loads(sys.stdin.readlines()[-1])))
    console.save_svg(sys.argv[1], title="livebed demo")


if __name__ == "__main__":
    main()
