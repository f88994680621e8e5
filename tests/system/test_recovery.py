"""SIGKILL anywhere: what the trainer knows in the end is, bit for bit, what an uninterrupted run learns."""

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from tests.system import recovery_worlds as worlds
from tests.system.kill_points import EFFECTS, NEVER_S, Kill
from trainer.broker import Broker

pytestmark = pytest.mark.alone

NUM_KILLS = 3 * len(EFFECTS)  # each effect before, after and in the middle: about one in five calls never comes
TWICE = 10  # trials that are killed twice


def run_trials(directory: Path, broker_url: str, trials: list[dict[str, Any]]) -> list[dict[str, Any]]:
    settings = {**worlds.SETTINGS, "stream": {**worlds.SETTINGS["stream"], "url": broker_url}}
    plan = {"settings": settings, "entries": worlds.entries(), "directory": str(directory), "trials": trials}
    file = directory / "plan.json"
    file.write_text(json.dumps(plan, default=vars))
    command = [sys.executable, "-m", "tests.system.kill_points", str(file)]
    ended = subprocess.run(command, capture_output=True, text=True, check=False, timeout=600)
    assert ended.returncode == 0, ended.stderr[-4000:]
    return [json.loads(line) for line in ended.stdout.splitlines()]


def trial(name: str, kills: list[Kill], every_s: float = 0.01) -> dict[str, Any]:
    return {"name": name, "kills": [vars(kill) for kill in kills], "every_s": every_s}


@pytest.fixture(scope="module")
def results(broker: Broker, tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, Any]]:
    """Two whole runs, one that saves all the time and one that never does; then the killed ones."""
    points = worlds.kills(NUM_KILLS)
    pairs = zip(worlds.kills(TWICE, seed=5), worlds.kills(TWICE, seed=6), strict=True)
    trials = [trial("whole", []), trial("unsaved", [], NEVER_S)]
    trials += [trial(f"k{number}", [kill]) for number, kill in enumerate(points)]
    trials += [trial(f"t{number}", list(two)) for number, two in enumerate(pairs)]
    return run_trials(tmp_path_factory.mktemp("recovery"), broker.url, trials)


@pytest.mark.timeout(600)
def test_a_run_that_saves_learns_what_a_run_without_learns(results: list[dict[str, Any]]) -> None:
    whole, unsaved = results[:2]
    assert whole["step"] > 1500
    assert whole == {**unsaved}


@pytest.mark.timeout(600)
def test_a_killed_trainer_ends_bit_equal_to_one_that_was_not(results: list[dict[str, Any]]) -> None:
    whole = results[0]
    different = [result for result in results[2:] if result["digest"] != whole["digest"]]
    assert different == []
    assert {result["position"] for result in results} == {whole["position"]}


@pytest.mark.timeout(600)
def test_the_kills_did_happen_at_every_effect(results: list[dict[str, Any]]) -> None:
    killed = [
        kill["effect"] for result in results for kill, died in zip(result["kills"], result["died"], strict=True) if died
    ]
    assert len(killed) >= 50
    assert set(killed) == set(EFFECTS)


@pytest.mark.timeout(600)
def test_no_kill_leaves_a_checkpoint_that_cannot_be_read(results: list[dict[str, Any]]) -> None:
    assert [result["problems"] for result in results if result["problems"]] == []
