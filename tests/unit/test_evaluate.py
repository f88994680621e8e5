import gzip
import json
import re
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet
import pytest

from service import evaluate_report
from service.examples import KUAIRAND
from tests.unit.worlds import EVERY_KIND
from trainer.errors import SettingsError
from trainer.evaluate import compare, evaluate, validate
from trainer.event_json import EventParser
from trainer.events import derive
from trainer.schema import Schema
from trainer.settings import Settings
from trainer.table_file import chunks, read_table

PAIR = {
    "tables": {"a": {"width": 8}, "b": {"width": 8}},
    "features": {"a": {"kind": "categorical"}, "b": {"kind": "categorical"}},
}
WORLD = Settings.load(None, PAIR, {})


def write_world(path: Path, count: int = 6000) -> None:
    """Labels that are a fair coin, but for half of the pairs (a, b), in which they are certain."""
    rng = np.random.default_rng(1)
    a, b = rng.integers(0, 6, (2, count))
    sure = (a + b) % 2 == 0
    label = np.where(sure, a % 2, rng.integers(0, 2, count))
    table = pa.table({"a": a, "b": b, "label": label, "t": np.arange(count)[::-1]})
    pyarrow.parquet.write_table(table, path)


def test_a_world_whose_answer_is_known_is_learned_to_near_its_entropy(tmp_path: Path) -> None:
    write_world(tmp_path / "world.parquet")
    figures = evaluate(WORLD, tmp_path / "world.parquet", label="label")
    assert 0.5 * np.log(2) < figures["logloss"] < 0.5 * np.log(2) + 0.06
    assert figures["rows"] == {"a": 6, "b": 6}
    assert figures["calibration"] == pytest.approx(1, abs=0.05)


def test_learning_later_costs_quality(tmp_path: Path) -> None:
    write_world(tmp_path / "world.parquet", 2000)
    losses = [evaluate(WORLD, tmp_path / "world.parquet", label="label", batch=b)["logloss"] for b in (1, 256)]
    assert losses[0] < losses[1]


def test_the_real_log_is_learned_as_well_as_the_readme_says() -> None:
    settings = Settings.load(KUAIRAND / "livebed.yaml", environment={})
    figures = evaluate(settings, KUAIRAND / "impressions.parquet", label="is_click", time="time_ms")
    assert figures["events"] == 41_828
    assert figures["auc"] >= 0.81
    assert figures["logloss"] <= 0.497


def test_rows_are_taken_in_the_order_of_their_time(tmp_path: Path) -> None:
    write_world(tmp_path / "world.parquet", 50)
    table = read_table(tmp_path / "world.parquet", time="t", max_rows=10)
    assert table["t"].to_pylist() == list(range(10))


def test_a_file_and_the_api_make_the_same_features(tmp_path: Path) -> None:
    settings = Settings.load(None, EVERY_KIND, {})
    schema = Schema.from_settings(settings)
    rows = [
        {"user_id": 1, "item_id": "x", "previous": ["a", "b"], "price": 2.5, "tags": ["t"], "content": [1.0, 2.0, 3.0]},
        {"user_id": 2, "item_id": "é", "previous": None, "price": None, "tags": [], "content": None},
    ]
    columns = {name: [row[name] for row in rows] for name in rows[0]}
    pyarrow.parquet.write_table(pa.table({**columns, "label": [0, 1], "ms": [1, 2]}), tmp_path / "f.parquet")
    (chunk,) = chunks(schema, read_table(tmp_path / "f.parquet", time="ms"), label="label", time="ms")
    parser = EventParser(schema)
    import msgspec  # noqa: PLC0415

    by_api = derive(schema, parser.inputs(msgspec.convert(rows, list[parser.Row])), chunk.time_ms_B)
    by_file = derive(schema, chunk.inputs, chunk.time_ms_B)
    for name in ("ids_BC", "lengths_BF", "floats_BM", "present_BA"):
        np.testing.assert_array_equal(getattr(by_api, name), getattr(by_file, name))


@pytest.mark.parametrize("name", ["log.csv", "log.csv.gz"])
def test_delimited_text_is_read_whatever_its_delimiter(tmp_path: Path, name: str) -> None:
    text = 'a;b;label\n1;"x";yes\n2;"y";no\n'
    path = tmp_path / name
    path.write_bytes(gzip.compress(text.encode()) if name.endswith("gz") else text.encode())
    assert evaluate(WORLD, path, label="label")["events"] == 2


@pytest.mark.parametrize(
    ("columns", "label", "said"),
    [
        ({"a": [1], "b": [1]}, "label", "a column of the file: a, b"),
        ({"a": [1], "label": [1]}, "label", "input b"),
        ({"a": [1.5], "b": [1], "label": [1]}, "label", "use a transform for numbers"),
        ({"a": [1], "b": [1], "label": [3]}, "label", "label.threshold"),
        ({"a": [1], "b": [1], "label": ["maybe"]}, "label", "yes or no"),
    ],
)
def test_a_file_that_does_not_fit_is_refused_by_column(
    tmp_path: Path, columns: dict[str, list[object]], label: str, said: str
) -> None:
    pyarrow.parquet.write_table(pa.table(columns), tmp_path / "f.parquet")
    with pytest.raises(SettingsError, match=said):
        evaluate(WORLD, tmp_path / "f.parquet", label=label)


def test_a_file_that_is_not_there_is_named(tmp_path: Path) -> None:
    with pytest.raises(SettingsError, match=r"nothing\.csv"):
        evaluate(WORLD, tmp_path / "nothing.csv", label="label")


def test_a_delay_is_exactly_so_many_events(tmp_path: Path) -> None:
    """Labels change for good at event 600: with a delay of k the first k + 1 predictions after it cannot know."""
    labels = np.repeat([0, 1], 600)
    pyarrow.parquet.write_table(pa.table({"a": [1] * 1200, "b": [1] * 1200, "label": labels}), tmp_path / "w.parquet")
    for delay in (0, 1, 7, 40):
        logits = validate(WORLD, tmp_path / "w.parquet", label="label", delay=delay).logits_N
        assert np.argmax(np.diff(logits[600:]) > 0) == delay  # it falls until the first 1 is learned
    undelayed = validate(WORLD, tmp_path / "w.parquet", label="label").logits_N
    assert np.array_equal(validate(WORLD, tmp_path / "w.parquet", label="label", delay=0).logits_N, undelayed)


def test_an_id_is_not_known_before_its_event_is_learned(tmp_path: Path) -> None:
    write_world(tmp_path / "world.parquet", 50)
    first = validate(WORLD, tmp_path / "world.parquet", label="label", delay=10).logits_N
    assert len(set(first[:10].tolist())) == 1  # nothing is learned yet, so every event reads zeros


def test_a_configuration_compared_with_itself_does_not_differ(tmp_path: Path) -> None:
    write_world(tmp_path / "world.parquet")
    one, other = (validate(WORLD, tmp_path / "world.parquet", label="label") for _ in range(2))
    difference = compare(one, other)
    assert (difference["logloss_mean_difference"], difference["logloss_standard_error"]) == (0, 0)
    later = compare(one, validate(WORLD, tmp_path / "world.parquet", label="label", delay=1500))
    assert later["logloss_mean_difference"] > 2 * later["logloss_standard_error"] > 0


def test_the_report_loads_nothing_and_escapes_what_it_is_given(tmp_path: Path) -> None:
    write_world(tmp_path / "<b>world.parquet", 2000)
    validation = validate(WORLD, tmp_path / "<b>world.parquet", label="label")
    runs = [evaluate_report.Run("<script>alert(1)</script>", WORLD, validation)]
    content = evaluate_report.report(runs, {}, tmp_path / "<b>world.parquet", ["livebed", "evaluate", "'\"><i>"])
    page, beside = evaluate_report.write(content, tmp_path / "out" / "report.html")
    text = page.read_text()
    assert "<script" not in text
    assert "<b>world" not in text
    assert "'\"><i>" not in text
    assert not re.search(r"(src|href|url\(|@import|https?:)", text)
    assert json.loads(beside.read_text())["runs"][0]["figures"]["auc"] == validation.figures["auc"]
    assert text.count("<svg") == 5


@pytest.mark.parametrize(("option", "value"), [("batch", 0), ("delay", -1), ("max_rows", 0)])
def test_an_option_out_of_range_is_refused_by_name(tmp_path: Path, option: str, value: int) -> None:
    write_world(tmp_path / "world.parquet", 50)
    with pytest.raises(SettingsError, match=option):
        evaluate(WORLD, tmp_path / "world.parquet", label="label", **{option: value})
