"""`python -m service --settings FILE --worker K --http-fd N --admin-fd M`: one worker, as the supervisor starts it.

Exit status: 0 told to stop, and drained; 1 a fault (the supervisor starts it again); 2 a configuration of no use.
"""

import argparse
import logging
import socket
import sys
from pathlib import Path

import uvloop

from service.app import Listeners, Worker
from trainer.errors import LivebedError, SettingsError
from trainer.log_lines import log_to_stderr
from trainer.settings import Settings

FAULT, USAGE = 1, 2
logger = logging.getLogger("livebed.service")


def main() -> int:
    """Serve until SIGTERM or SIGINT."""
    parser = argparse.ArgumentParser(prog="python -m service", description="Answer from the live model.")
    parser.add_argument("--settings", type=Path, required=True, help="resolved settings as JSON")
    parser.add_argument("--worker", type=int, required=True, help="number of this worker, from 0")
    parser.add_argument("--http-fd", type=int, required=True, help="listening socket of the public API, inherited")
    parser.add_argument("--admin-fd", type=int, required=True, help="listening socket of metrics and health, inherited")
    options = parser.parse_args()
    process = f"service-{options.worker}"
    log_to_stderr(process)
    logging.getLogger("uvicorn.error").setLevel(logging.WARNING)
    status = 0
    try:
        settings = Settings.model_validate_json(options.settings.read_bytes())
        log_to_stderr(process, form=settings.logging.format)
        uvloop.run(_serve(settings, options.worker, options.http_fd, options.admin_fd))
    except* SettingsError as group:  # alone, or out of the worker's group of tasks
        status = _say(group, USAGE)
    except* LivebedError as group:
        status = _say(group, FAULT)
    return status


def _say(group: BaseExceptionGroup[LivebedError], status: int) -> int:
    for error in group.exceptions:
        logger.error("%s", error)
    return status


async def _serve(settings: Settings, worker: int, http_fd: int, admin_fd: int) -> None:
    listeners = Listeners(socket.socket(fileno=http_fd), socket.socket(fileno=admin_fd))
    await Worker(settings, worker=worker, listeners=listeners).run()


if __name__ == "__main__":
    sys.exit(main())
