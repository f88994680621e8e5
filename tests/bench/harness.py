"""What every benchmark shares: the machine's description, goals, and one JSON object printed last."""

import argparse
import json
import os
import platform
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np


def machine() -> dict[str, Any]:
    """What the figures were measured on."""
    cpuinfo = Path("/proc/cpuinfo")
    models = [line.split(":")[1].strip() for line in cpuinfo.read_text().splitlines() if "model name" in line]
    return {
        "processor": models[0] if models else platform.processor(),
        "cores": len(os.sched_getaffinity(0)),
        "python": platform.python_version(),
        "system": platform.system(),
    }


def goal(
    name: str, value: float, unit: str, *, at_most: float | None = None, at_least: float | None = None
) -> dict[str, Any]:
    """One figure that an issue asks for, and whether it was reached; without a bound it is only reported."""
    ok = (at_most is None or value <= at_most) and (at_least is None or value >= at_least)
    wanted = "" if at_least is None else f">= {at_least:g}"
    wanted = wanted if at_most is None else f"<= {at_most:g}"
    return {"name": name, "value": round(float(value), 5), "unit": unit, "goal": wanted, "ok": bool(ok)}


def emit(bench: str, results: dict[str, Any], goals: Sequence[dict[str, Any]], as_json: bool) -> None:
    """Print a readable summary (not with --json), then one JSON object as the last line."""
    if not as_json:
        for one in goals:
            bound = f" (goal {one['goal']})" if one["goal"] else ""
            print(f"{'ok  ' if one['ok'] else 'MISS'} {one['name']}: {one['value']:g} {one['unit']}{bound}")
    print(json.dumps({"bench": bench, "machine": machine(), "results": results, "goals": list(goals)}))
    sys.stdout.flush()


def arguments(description: str) -> argparse.ArgumentParser:
    """The two flags that every benchmark takes."""
    parser = argparse.ArgumentParser(description=description)
    parser.add_argument("--json", action="store_true", help="print the JSON object only")
    parser.add_argument("--quick", action="store_true", help="finish within 60 s")
    return parser


def median_s(call: Callable[[], object], *, repeats: int) -> float:
    """Median wall time of a call in seconds, after one that is not counted."""
    call()
    times = []
    for _ in range(repeats):
        start = time.perf_counter()
        call()
        times.append(time.perf_counter() - start)
    return float(np.median(times))


def percentiles_ms(seconds: Sequence[float]) -> dict[str, float]:
    """p50, p99 and p99.9 in milliseconds."""
    values = np.percentile(np.asarray(seconds) * 1e3, [50, 99, 99.9])
    return dict(zip(("p50", "p99", "p99.9"), np.round(values, 3).tolist(), strict=True))
