"""How all processes log: one line a record, as text for people or as JSON for machines.

A JSON line has `time` (RFC 3339, UTC), `level`, `process` (trainer, service-0, supervisor), `logger` and `message`;
of a request also `request_id`, and `trace_id` where its client sent a W3C `traceparent`; of an exception `exception`.
Never a token, never the value of a feature.
"""

import json
import logging
import sys
from datetime import UTC, datetime
from types import TracebackType
from typing import Final, Literal

Format = Literal["text", "json"]
EXTRA: Final = ("request_id", "trace_id")  # what a record may carry as `extra`


class JsonLines(logging.Formatter):
    """One JSON object a line.

    >>> record = logging.LogRecord("livebed.service", logging.INFO, "", 0, "ready: %s", ("version 7",), None)
    >>> record.created = 0.0
    >>> JsonLines("service-0").format(record)[:70]
    '{"time": "1970-01-01T00:00:00.000Z", "level": "info", "process": "serv'
    """

    def __init__(self, process: str) -> None:
        super().__init__()
        self._process = process

    def format(self, record: logging.LogRecord) -> str:
        """The line, without its end."""
        moment = datetime.fromtimestamp(record.created, UTC).isoformat(timespec="milliseconds")
        line: dict[str, object] = {
            "time": moment.replace("+00:00", "Z"),
            "level": record.levelname.lower(),
            "process": self._process,
            "logger": record.name,
            "message": record.getMessage(),
        }
        line |= {name: record.__dict__[name] for name in EXTRA if record.__dict__.get(name)}
        if record.exc_info:
            line["exception"] = self.formatException(record.exc_info)
        return json.dumps(line)


def log_to_stderr(process: str, *, form: Format = "text", level: int = logging.INFO) -> None:
    """Let this process log, and an error that ends it too."""
    handler = logging.StreamHandler()
    if form == "json":
        handler.setFormatter(JsonLines(process))
        sys.excepthook = _log_the_end
    else:
        handler.setFormatter(logging.Formatter(f"%(asctime)s {process} %(levelname)s %(message)s"))
    logging.basicConfig(level=level, handlers=[handler], force=True)


def _log_the_end(kind: type[BaseException], error: BaseException, trace: TracebackType | None) -> None:
    logging.getLogger("livebed").critical("ended by %s", kind.__name__, exc_info=(kind, error, trace))
