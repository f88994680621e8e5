"""The demo over the whole KuaiRand log, as a user runs it: quality of the scores that were served while it learned.

Every impression is scored over HTTP before its label is sent: progressive validation through broker, trainer,
live store and service, with a label delay of a slate and the freshness of the system. --quick plays faster.
"""

import json
import subprocess
import sys
from typing import Any

from tests.bench.harness import arguments, emit, goal

LIMIT_S = 300.0


def main() -> None:
    """Measure and print."""
    options = arguments(__doc__ or "").parse_args()
    rate = ["--rate", "1000"] if options.quick else []
    command = [sys.executable, "-m", "service.cli", "demo", "--all", "--json", *rate]
    done = subprocess.run(command, check=True, capture_output=True, timeout=LIMIT_S)
    figures: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    goals = [
        goal("served AUC on KuaiRand is_click", figures["served_auc"], "", at_least=0.805),
        goal("served logloss on KuaiRand is_click", figures["served_logloss"], "nats", at_most=0.502),
        goal("errors over the whole log", figures["errors"], "", at_most=0),
    ]
    emit("demo", figures, goals, options.json)


if __name__ == "__main__":
    main()
