"""Recovery: kill points that end bit-equal, what a checkpoint costs the learning, restoring and rolling back 1M rows.

    python -m tests.bench.recovery [--json] [--quick]

The kill points are those of tests/system/test_recovery.py, more of them. The pause is what the loop sees: the time of
the fork, and how much longer the longest step is while a checkpoint of a million rows is being written than without.
"""

import json
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import numpy as np

from tests.bench.harness import arguments, emit, goal
from tests.system import recovery_worlds as worlds
from tests.system.kill_points import EFFECTS
from trainer.board import Board
from trainer.broker import Broker
from trainer.checkpoint import load, load_latest, number_of
from trainer.events import EventBatch, Features
from trainer.outlet import Outlet
from trainer.saver import Saver
from trainer.settings import Settings
from trainer.training import TrainingState

NUM_ROWS = 1_000_000
STEP_EVENTS = 64
MAX_PAUSE_MS, MAX_RESTORE_S, MAX_ROLLBACK_S = 25.0, 2.0, 2.0


def kill_trials(count: int) -> dict[str, Any]:
    """Trainers that are killed at one point each; how many ended with the bits of one that was not."""
    with tempfile.TemporaryDirectory(prefix="lb-") as name:
        directory = Path(name)
        with Broker(directory / "files", directory / "valkey.sock") as broker:
            settings = {**worlds.SETTINGS, "stream": {**worlds.SETTINGS["stream"], "url": broker.url}}
            trials = [{"name": "whole", "kills": [], "every_s": 0.01}, {"name": "unsaved", "kills": [], "every_s": 1e9}]
            points = worlds.kills(count, seed=29)
            trials += [{"name": f"k{n}", "kills": [vars(kill)], "every_s": 0.01} for n, kill in enumerate(points)]
            plan = {"settings": settings, "entries": worlds.entries(), "directory": str(directory), "trials": trials}
            (directory / "plan.json").write_text(json.dumps(plan))
            command = [sys.executable, "-m", "tests.system.kill_points", str(directory / "plan.json")]
            done = subprocess.run(command, check=True, stdout=subprocess.PIPE, text=True)
    results = [json.loads(line) for line in done.stdout.splitlines()]
    whole, killed = results[0], [result for result in results[2:] if result["died"] == [True]]
    return {
        "tried": len(killed),
        "bit_equal": sum(result["digest"] == whole["digest"] for result in killed),
        "without_checkpoints_bit_equal": results[1]["digest"] == whole["digest"],
        "effects": len({result["kills"][0]["effect"] for result in killed}),
        "of_effects": len(EFFECTS),
    }


def settings_in(directory: Path) -> Settings:
    """Four features over one table that is about to hold a million rows of 16 floats."""
    features = {f"f{k}": {"kind": "categorical", "table": "id"} for k in range(4)}
    paths = {"data_dir": str(directory / "data"), "run_dir": str(directory / "run")}
    return Settings.model_validate(
        {"tables": {"id": {"capacity": 4 * NUM_ROWS // 3}}, "features": features, "checkpoint": {"keep": 2}, **paths}
    )


def batch_of(ids_BC: Any) -> EventBatch:
    """Events that were accepted a moment ago, with labels from their ids."""
    count = len(ids_BC)
    features = Features(
        ids_BC=ids_BC,
        lengths_BF=np.ones((count, 4), np.int32),
        floats_BM=np.zeros((count, 0), np.float32),
        present_BA=np.ones((count, 4), np.uint8),
    )
    zero_B = np.zeros(count, np.int64)
    return EventBatch(
        features=features,
        labels_B=(ids_BC[:, 0] % 3 == 0).astype(np.float32),
        event_time_ms_B=zero_B,
        accepted_us_B=np.full(count, time.time_ns() // 1000),
        event_key_B=zero_B.view(np.uint64),
        entity_B=np.full(count, -1, np.int16),
        entity_id_B=zero_B,
    )


def steps_ms(
    state: TrainingState, outlet: Outlet, seconds: float, random: np.random.Generator, saver: Saver
) -> tuple[Any, float]:
    """Learn and publish for so long, or while a checkpoint is being written; each step's time, and that of the fork."""
    times, pause_s = [], 0.0
    end_s = time.perf_counter() + seconds
    while time.perf_counter() < end_s or saver.is_running:
        batch = batch_of(random.integers(1, NUM_ROWS, (STEP_EVENTS, 4)))
        began_s = time.perf_counter()
        if (result := saver.poll()) is not None:
            assert result.error is None, result.error
            pause_s = result.pause_s
        learned = state.learn(batch)
        state.judge(learned)
        state.count(learned)
        outlet.publish(learned, state.place)
        times.append(time.perf_counter() - began_s)
    return np.array(times) * 1e3, pause_s * 1e3


def measure_state(directory: Path, quick: bool) -> dict[str, Any]:
    """Checkpoint, restore and rollback of a model of a million rows, while it learns."""
    settings, random = settings_in(directory), np.random.default_rng(1)
    state = TrainingState(settings)
    for start in range(1, NUM_ROWS, 4 * 8192):
        ids = np.arange(start, start + 4 * 8192).reshape(-1, 4)
        state.count(state.learn(batch_of(ids)))
    board = Board.open(settings.metrics_path, "bench")
    saver = Saver(settings.checkpoint_path, settings.checkpoint, board)
    outlet = Outlet(settings, state, after_version=0)
    outlet.release(state)
    seconds = 1.0 if quick else 5.0
    quiet, _ = steps_ms(state, outlet, seconds, random, saver)
    saved = []
    for _ in range(1 if quick else 3):
        saver.start(lambda: state.capture(version=outlet.version))
        saved.append(steps_ms(state, outlet, 0.0, random, saver))
    busy = np.concatenate([times for times, _ in saved])
    path = load_latest(settings.checkpoint_path).path
    assert path is not None
    began_s = time.perf_counter()
    restored, _ = TrainingState.from_snapshot(settings, load(path))
    restore_s = time.perf_counter() - began_s
    assert restored.tables.num_rows(0) > NUM_ROWS // 2
    del restored
    began_s = time.perf_counter()
    older, _ = TrainingState.from_snapshot(settings, load(path))
    outlet.roll_back(older, number_of(path))
    rollback_s = time.perf_counter() - began_s
    began_s = time.perf_counter()
    outlet.release(state)
    release_s = time.perf_counter() - began_s
    saver.finish(None)
    outlet.close()
    board.close()
    return {
        "rows": state.tables.num_rows(0),
        "fork_ms": max(pause for _, pause in saved),
        "step_ms_quiet": {"p50": float(np.median(quiet)), "p99": float(np.quantile(quiet, 0.99)), "max": quiet.max()},
        "step_ms_saving": {"p50": float(np.median(busy)), "p99": float(np.quantile(busy, 0.99)), "max": busy.max()},
        "restore_s": restore_s,
        "rollback_s": rollback_s,
        "release_s": release_s,
    }


def main() -> None:
    """Measure and print."""
    options = arguments(__doc__ or "").parse_args()
    kills = kill_trials(40 if options.quick else 120)
    shared = Path("/dev/shm") if Path("/dev/shm").is_dir() else None
    with tempfile.TemporaryDirectory(prefix="lb-bench-", dir=shared) as name:
        sizes = measure_state(Path(name), options.quick)
    results = {"kills": kills, **sizes}
    longest_ms = max(sizes["fork_ms"], sizes["step_ms_saving"]["max"] - sizes["step_ms_quiet"]["p50"])
    goals = [
        goal("kill points tried", kills["tried"], "", at_least=30 if options.quick else 50),
        goal("kill points that did not end bit-equal", kills["tried"] - kills["bit_equal"], "", at_most=0),
        goal("fork for a checkpoint of 1M rows", sizes["fork_ms"], "ms", at_most=MAX_PAUSE_MS),
        goal("longest delay of a step while it is written", longest_ms, "ms", at_most=MAX_PAUSE_MS),
        goal("restore of 1M rows", sizes["restore_s"], "s", at_most=MAX_RESTORE_S),
        goal("rollback of serving to a checkpoint of 1M rows", sizes["rollback_s"], "s", at_most=MAX_ROLLBACK_S),
    ]
    emit("recovery", results, goals, options.json)


if __name__ == "__main__":
    main()
