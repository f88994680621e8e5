"""The KuaiRand log as every benchmark and peer sees it: the same rows, the same four columns, the same order."""

from typing import Any

import pyarrow.parquet

from service.examples import KUAIRAND

EXAMPLE = KUAIRAND
CONFIGURATION = EXAMPLE / "livebed.yaml"
IMPRESSIONS = EXAMPLE / "impressions.parquet"
MS_PER_HOUR = 3_600_000


def raw_rows() -> list[dict[str, Any]]:
    """Impressions in time order: user_id, video_id, duration_ms, time_ms, is_click."""
    rows: list[dict[str, Any]] = pyarrow.parquet.read_table(IMPRESSIONS).to_pylist()
    return rows
