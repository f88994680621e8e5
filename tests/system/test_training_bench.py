"""The training benchmark runs, and says all that it is asked for."""

import json
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]


@pytest.mark.timeout(400)
def test_a_quick_run_prints_every_figure() -> None:
    command = [sys.executable, "-m", "tests.bench.training", "--quick", "--json"]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=True)
    results = json.loads(done.stdout)["results"]
    by_batch = {
        f"{who}_{b}" for who in ("pytorch", "event_exact", "event_delayed", "torchrec") for b in (16, 256, 4096)
    }
    once = {"vw_pairs_python", "vw_pairs_file", "river_fm_prefix", "event_exact_prefix"}
    assert set(results["events_per_s"]) == set(results["logloss"]) == by_batch | once
    assert results["logloss"]["event_exact_16"] == results["logloss"]["event_exact_4096"]  # batches cost it nothing
    assert 0 < results["logloss"]["event_exact_16"] < results["logloss"]["torchrec_4096"]
    for stage in ("read_and_hash", "index", "learn", "publish"):
        assert all(split[f"{stage}_ns_per_event"] > 0 for split in results["stages"].values())
    assert results["row_update"].keys() == {"event_ns", "torchrec_ns"}
    assert results["dynamic_over_static"].keys() == {"event", "torchrec"}
    assert results["bytes_beside_the_row"] > 0
