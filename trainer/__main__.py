"""`python -m trainer --settings FILE`: the trainer process, as the supervisor starts it.

Exit status: 0 told to stop; 1 a fault (the supervisor starts it again); 2 what is configured or on disk cannot be used.
"""

import argparse
import logging
import signal
import sys
import threading
from pathlib import Path

from trainer.errors import CheckpointError, LogTruncated, SchemaMismatch, SettingsError, UnsupportedByEventEngine
from trainer.log_lines import log_to_stderr
from trainer.loop import Trainer
from trainer.settings import Settings

USAGE = 2
logger = logging.getLogger("trainer")


def main() -> int:
    """Train until SIGTERM or SIGINT."""
    parser = argparse.ArgumentParser(
        prog="python -m trainer", description="Learn from an event log, publish every step."
    )
    parser.add_argument("--settings", type=Path, required=True, help="resolved settings as JSON (livebed config print)")
    options = parser.parse_args()
    log_to_stderr("trainer")
    stop = threading.Event()
    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, lambda *_: stop.set())
    try:
        settings = Settings.model_validate_json(options.settings.read_bytes())
        log_to_stderr("trainer", form=settings.logging.format)
        Trainer(settings).run(stop)
    except (SettingsError, SchemaMismatch, CheckpointError, LogTruncated, UnsupportedByEventEngine) as error:
        logger.error("%s", error)
        return USAGE
    return 0


if __name__ == "__main__":
    sys.exit(main())
