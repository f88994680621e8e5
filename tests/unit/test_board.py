"""The metric board: sums over processes, killed ones included, and the text that Prometheus reads."""

import math
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
from prometheus_client.parser import text_string_to_metric_families

from trainer import board as board_module
from trainer.board import FAMILIES, Board, read, render
from trainer.errors import LivebedError

FRESHNESS = "livebed_event_to_visible_seconds"

KILLED_WORKER = """
import os, signal, sys
from pathlib import Path
from trainer.board import Board
board = Board.open(Path(sys.argv[1]), sys.argv[2])
board.counter("livebed_events_received_total").inc(5)
board.gauge("livebed_model_age_seconds").set(100.0)
board.gauge("livebed_progressive_auc").set(0.75)
board.histogram("livebed_queue_wait_seconds").observe(0.001)
os.kill(os.getpid(), signal.SIGKILL)
"""


def killed_worker(directory: Path, process: str) -> None:
    subprocess.run([sys.executable, "-c", KILLED_WORKER, str(directory), process], check=False)


def test_every_name_of_the_contract_is_declared() -> None:
    assert {
        *("livebed_event_to_visible_seconds", "livebed_model_age_seconds", "livebed_request_duration_seconds"),
        *("livebed_queue_wait_seconds", "livebed_rejected_requests_total", "livebed_embedding_lookups_total"),
        *("livebed_table_rows", "livebed_table_bytes", "livebed_evictions_total", "livebed_stream_lag_entries"),
        *(f"livebed_events_{what}_total" for what in ("received", "accepted", "duplicate", "rejected", "applied")),
        *("livebed_dead_letter_total", "livebed_progressive_logloss", "livebed_progressive_auc"),
        *("livebed_calibration_ratio", "livebed_guard_held_total", "livebed_checkpoint_duration_seconds"),
        "livebed_build_info",
    } <= set(FAMILIES)


def test_counters_and_histograms_add_up_over_processes(tmp_path: Path) -> None:
    boards = [Board.open(tmp_path, f"worker-{number}") for number in range(3)]
    for number, board in enumerate(boards):
        board.counter("livebed_embedding_lookups_total", table="items", status="learned").inc(number)
        board.counter("livebed_embedding_lookups_total", table="items", status="unknown").inc(10)
        board.counter("livebed_embedding_lookups_total", table="users", status="unknown").inc(100)
        board.histogram(FRESHNESS).observe_many([0.001, 0.004])
    snapshot = read(tmp_path)
    assert snapshot.value("livebed_embedding_lookups_total", table="items", status="learned") == 3
    assert snapshot.value("livebed_embedding_lookups_total", table="items") == 33
    assert snapshot.value("livebed_embedding_lookups_total") == 333
    assert snapshot.count(FRESHNESS) == 6
    assert snapshot.mean(FRESHNESS) == pytest.approx(0.0025)


def test_a_killed_process_keeps_its_counts_and_the_next_of_its_name_continues(tmp_path: Path) -> None:
    killed_worker(tmp_path, "worker-0")
    killed_worker(tmp_path, "worker-0")
    board = Board.open(tmp_path, "worker-0")
    board.counter("livebed_events_received_total").inc(2)
    assert read(tmp_path).value("livebed_events_received_total") == 12
    assert read(tmp_path).count("livebed_queue_wait_seconds") == 2


def test_a_gauge_is_the_largest_of_the_living_or_what_was_set_last(tmp_path: Path) -> None:
    killed_worker(tmp_path, "worker-0")
    snapshot = read(tmp_path)
    assert math.isnan(snapshot.value("livebed_model_age_seconds"))
    assert snapshot.value("livebed_progressive_auc") == 0.75
    boards = [Board.open(tmp_path, f"worker-{number}") for number in range(1, 4)]
    for board, age_s in zip(boards, [2.0, 3.0, 1.0], strict=True):
        board.gauge("livebed_model_age_seconds").set(age_s)
        board.gauge("livebed_progressive_auc").set(age_s)
    assert read(tmp_path).value("livebed_model_age_seconds") == 3.0
    assert read(tmp_path).value("livebed_progressive_auc") == 1.0


def test_one_observation_and_an_array_of_them_fill_the_same_buckets(tmp_path: Path) -> None:
    values = [*FAMILIES[FRESHNESS].buckets, 0.0, -1.0, 0.0123, 99.0, math.nan]
    one, many = Board.open(tmp_path / "one", "p"), Board.open(tmp_path / "many", "p")
    for value in values:
        one.histogram(FRESHNESS).observe(value)
    many.histogram(FRESHNESS).observe_many(np.array(values))
    (one_series,), (many_series,) = read(tmp_path / "one").series.values(), read(tmp_path / "many").series.values()
    assert one_series[1:].tolist() == many_series[1:].tolist()
    assert one_series[1:].sum() == len(values) - 1
    assert one_series[0] == pytest.approx(many_series[0])


def test_quantiles_of_a_known_distribution_are_within_five_percent(tmp_path: Path) -> None:
    times_s = np.random.default_rng(0).lognormal(math.log(0.008), 0.5, 50_000)
    Board.open(tmp_path, "trainer").histogram(FRESHNESS).observe_many(times_s)
    snapshot = read(tmp_path)
    for q in (0.1, 0.5, 0.9, 0.99):
        assert snapshot.quantile(FRESHNESS, q) == pytest.approx(np.quantile(times_s, q), rel=0.05)
    assert math.isnan(snapshot.quantile("livebed_queue_wait_seconds", 0.5))


def test_a_later_snapshot_minus_an_earlier_one_is_what_happened_between(tmp_path: Path) -> None:
    board = Board.open(tmp_path, "trainer")
    board.histogram(FRESHNESS).observe_many([0.001] * 100)
    earlier = read(tmp_path)
    board.histogram(FRESHNESS).observe_many([0.02] * 10)
    board.counter("livebed_events_applied_total").inc(10)
    recent = read(tmp_path).since(earlier)
    assert recent.count(FRESHNESS) == recent.value("livebed_events_applied_total") == 10
    assert recent.quantile(FRESHNESS, 0.5) > 0.018


def test_prometheus_reads_what_is_rendered(tmp_path: Path) -> None:
    for number in range(2):
        board = Board.open(tmp_path, f"worker-{number}")
        board.counter("livebed_rejected_requests_total", reason='a "quoted"\nreason').inc(4)
        board.histogram(FRESHNESS).observe_many([0.0004, 0.0021, 60.0])
    families = {family.name: family for family in text_string_to_metric_families(render(tmp_path).decode())}
    assert {family.removesuffix("_total") for family in FAMILIES} == set(families)
    (sample,) = families["livebed_rejected_requests"].samples
    assert (sample.labels, sample.value) == ({"reason": 'a "quoted"\nreason'}, 8.0)
    buckets = {
        sample.labels["le"]: sample.value for sample in families[FRESHNESS].samples if sample.name.endswith("bucket")
    }
    assert (buckets["0.0005"], buckets["0.002"], buckets["0.0025"], buckets["10.0"], buckets["+Inf"]) == (2, 2, 4, 4, 6)
    assert [sample.value for sample in families["livebed_events_received"].samples] == [0.0]


def test_a_name_kind_or_label_that_is_not_declared_is_refused(tmp_path: Path) -> None:
    board = Board.open(tmp_path, "p")
    with pytest.raises(ValueError, match="no counter is called livebed_typo_total"):
        board.counter("livebed_typo_total")
    with pytest.raises(ValueError, match="no gauge is called livebed_evictions_total"):
        board.gauge("livebed_evictions_total", table="items", reason="ttl")
    with pytest.raises(ValueError, match=r"has the labels \['reason', 'table'\], got \['user'\]"):
        board.counter("livebed_evictions_total", user="u1")


def test_two_living_processes_cannot_hold_one_name(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(board_module, "LOCK_WAIT_S", 0.05)
    board = Board.open(tmp_path, "worker-0")
    with pytest.raises(LivebedError, match="belongs to a living process"):
        Board.open(tmp_path, "worker-0")
    board.close()
    Board.open(tmp_path, "worker-0")


def test_a_label_that_takes_too_many_values_says_so(tmp_path: Path) -> None:
    board = Board.open(tmp_path, "p")
    with pytest.raises(LivebedError, match="some label takes too many values"):
        for number in range(40_000):
            board.counter("livebed_rejected_requests_total", reason=f"reason-{number}")
    assert len(read(tmp_path).series) > 10_000


def test_a_file_of_another_version_is_begun_anew_and_left_out_of_the_sums(tmp_path: Path) -> None:
    for process in ("old", "older"):
        (tmp_path / f"{process}.board").write_bytes(b"LBBOARD0" + bytes(4096))
    Board.open(tmp_path, "old").counter("livebed_events_applied_total").inc()
    assert read(tmp_path).value("livebed_events_applied_total") == 1
