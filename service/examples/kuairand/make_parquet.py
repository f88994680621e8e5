"""Makes impressions.parquet and users.parquet from the two source files that README.md names.

Run: python service/examples/kuairand/make_parquet.py SOURCE_DIRECTORY [TARGET_DIRECTORY]
"""

import sys
from pathlib import Path

import pyarrow as pa
import pyarrow.csv as pa_csv
import pyarrow.parquet as pq

# Known before the outcome: time, user, video, duration. The two labels are outcomes; so is all that was left out.
IMPRESSION_TYPES = {
    "time_ms": pa.int64(),
    "user_id": pa.int32(),
    "video_id": pa.int32(),
    "duration_ms": pa.int32(),
    "is_click": pa.int8(),
    "long_view": pa.int8(),
}
USER_TYPES = {
    "user_id": pa.int32(),
    "user_active_degree": pa.string(),
    "follow_user_num_range": pa.string(),
    "fans_user_num_range": pa.string(),
    "friend_user_num_range": pa.string(),
    "register_days_range": pa.string(),
}


def read(path: Path, types: dict[str, pa.DataType], delimiter: str) -> pa.Table:
    """Read just the columns of `types`, in that order."""
    return pa_csv.read_csv(
        path,
        parse_options=pa_csv.ParseOptions(delimiter=delimiter),
        convert_options=pa_csv.ConvertOptions(include_columns=list(types), column_types=types),
    )


def main(source: Path, target: Path) -> None:
    """Write both files; the sort by time is stable, so impressions of one millisecond keep the source's order."""
    impressions = read(source / "processed_standard_kcore_15.tsv", IMPRESSION_TYPES, "\t")
    row = pa.array(range(len(impressions)), pa.int32())
    ordered = impressions.append_column("row", row).sort_by([("time_ms", "ascending"), ("row", "ascending")])
    users = read(source / "user_features_664.csv", USER_TYPES, ",").sort_by("user_id")
    pq.write_table(
        ordered.drop_columns("row"), target / "impressions.parquet", compression="zstd", compression_level=19
    )
    pq.write_table(users, target / "users.parquet", compression="zstd", compression_level=19)


if __name__ == "__main__":
    main(Path(sys.argv[1]), Path(sys.argv[2]) if len(sys.argv) > 2 else Path(__file__).parent)
