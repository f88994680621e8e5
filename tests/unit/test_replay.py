"""The demo's replay: what is sent, in which order, and the figures made of what comes back."""

from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from service.demo import percentiles_ms, served_quality
from service.examples import KUAIRAND
from service.replay import HOUR_MS, ClickLog
from trainer.settings import Settings


@pytest.fixture(scope="module")
def settings() -> Settings:
    return Settings.load(KUAIRAND / "livebed.yaml", environment={})


def click_log(settings: Settings, directory: Path, times_ms: list[int], video_ids: list[int]) -> ClickLog:
    columns = {
        "time_ms": times_ms,
        "user_id": [7] * len(times_ms),
        "video_id": video_ids,
        "duration_ms": [1000 * video for video in video_ids],
        "is_click": [k % 2 for k in range(len(times_ms))],
    }
    pq.write_table(pa.table(columns), directory / "log.parquet")
    return ClickLog(settings, directory / "log.parquet", time_column="time_ms", slate_rows=3)


def test_slates_cover_the_log_in_order_and_never_span_two_hours(settings: Settings, tmp_path: Path) -> None:
    times_ms = [0, 1, 2, 3, HOUR_MS, HOUR_MS + 1]
    slates = list(click_log(settings, tmp_path, times_ms, [1, 2, 3, 4, 5, 6]).slates())
    assert [slate.times_ms for slate in slates] == [[0, 1, 2], [3], [HOUR_MS, HOUR_MS + 1]]
    assert [label for slate in slates for label in slate.labels] == [0, 1, 0, 1, 0, 1]


def test_a_row_names_user_and_video_and_not_what_is_kept_of_the_video(settings: Settings, tmp_path: Path) -> None:
    (slate,) = click_log(settings, tmp_path, [5], [9]).slates()
    assert slate.rows == [{"user_id": 7, "video_id": 9}]


def test_a_video_is_described_once_at_its_first_impression(settings: Settings, tmp_path: Path) -> None:
    first, second = click_log(settings, tmp_path, [1, 2, 3, 4], [8, 9, 8, 9]).slates()
    described = {"entity": "video", "id": 8, "features": {"duration_ms": 8000}, "time_ms": 1}
    assert first.facts[0] == described
    assert [fact["id"] for fact in first.facts] == [8, 9]
    assert second.facts == []


def test_served_quality_is_that_of_the_probabilities() -> None:
    quality = served_quality([1, 0, 1, 0], [0.9, 0.2, 0.6, 0.7])
    assert quality is not None
    assert quality.auc == 0.75
    assert quality.calibration == pytest.approx(2.4 / 2)
    assert quality.logloss == pytest.approx(0.5109, abs=1e-3)
    assert served_quality([], []) is None


def test_percentiles_are_in_milliseconds() -> None:
    assert percentiles_ms([0.001] * 99 + [0.1]) == {"p50": 1.0, "p99": pytest.approx(1.99)}
    assert percentiles_ms([]) == {"p50": None, "p99": None}
