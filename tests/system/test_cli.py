"""The command line as a person or a script uses it."""

import json
import re
import shlex
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import grpc
import pytest
import redis
from google.protobuf import json_format

from service.demo_view import examples
from service.examples import KUAIRAND
from service.scoring_service_pb2 import ScoreRequest
from service.scoring_service_pb2_grpc import ScoringServiceStub
from tests.system.running import Running, system, wait_until

LIVEBED = Path(sys.executable).with_name("livebed")
FREE_PORTS = ["--http-port", "0", "--admin-port", "0", "--grpc-port", "0"]
COMMANDS = [
    "demo",
    "up",
    "train",
    "serve",
    "send",
    "score",
    "lookup",
    "status",
    "evaluate",
    "config",
    "doctor",
    "version",
]
CONFIG = ["-c", str(KUAIRAND / "livebed.yaml")]


def livebed(*arguments: str, stdin: str = "", wanted: int = 0) -> "subprocess.CompletedProcess[str]":
    command = [str(LIVEBED), *arguments]
    done = subprocess.run(command, input=stdin, capture_output=True, text=True, timeout=110, check=False)
    assert done.returncode == wanted, done.stderr
    return done


def as_json(*arguments: str, stdin: str = "", wanted: int = 0) -> Any:
    return json.loads(livebed(*arguments, "--json", stdin=stdin, wanted=wanted).stdout)


@pytest.fixture(scope="module")
def running() -> Iterator[Running]:
    with system() as started:
        yield started


def test_help_names_every_command_without_importing_the_heavy_parts() -> None:
    said = livebed("--help").stdout
    for command in (
        "demo",
        "up",
        "train",
        "serve",
        "send",
        "score",
        "lookup",
        "status",
        "evaluate",
        "config",
        "doctor",
    ):
        assert command in said
    program = (
        "import sys, service.cli; print(sorted({'numpy', 'numba', 'torch', 'httpx', 'pyarrow'} & set(sys.modules)))"
    )
    python = LIVEBED.with_name("python")
    assert subprocess.run([python, "-c", program], capture_output=True, text=True, check=True).stdout == "[]\n"


def test_flags_show_their_variable_and_their_default() -> None:
    said = livebed("up", "--help").stdout
    assert "LIVEBED_SERVING__HTTP_PORT" in said
    assert "8080" in said


def test_a_missing_configuration_key_is_named(tmp_path: Path) -> None:
    (tmp_path / "bad.yaml").write_text("tables: {user: {width: 8}}\n")
    said = livebed("config", "check", "-c", str(tmp_path / "bad.yaml"), wanted=2).stderr
    assert "features" in said
    assert "this key is required" in said


def test_evaluate_says_what_a_value_and_a_delay_do_and_writes_a_report(tmp_path: Path) -> None:
    log = ["--data", str(KUAIRAND / "impressions.parquet"), "--label", "is_click", "--time", "time_ms"]
    page = tmp_path / "report.html"
    compared = as_json(
        "evaluate", *CONFIG, *log, "--set", "model.hidden=[2]", "--set", "model.cross_layers=0", "--compare", CONFIG[1],
        "--max-rows", "4000", "--delay", "200", "--report", str(page),
    )  # fmt: skip
    assert compared["delay"] == 200
    assert compared["logloss"] > compared["compared"]["livebed 2"]["logloss"]  # a smaller net is worse
    assert compared["differences"]["livebed 2"]["logloss"] < 0
    at_once = as_json("evaluate", *CONFIG, *log, "--max-rows", "4000")
    assert at_once["logloss"] < compared["compared"]["livebed 2"]["logloss"]
    assert json.loads(page.with_suffix(".json").read_text())["runs"]
    assert "http" not in re.sub(r"http://www.w3.org/\S+", "", page.read_text())  # loads nothing from elsewhere


def test_a_report_that_is_no_page_is_refused_before_the_work() -> None:
    log = ["--data", str(KUAIRAND / "impressions.parquet")]
    said = livebed("evaluate", *CONFIG, *log, "--report", "report.pdf", wanted=2).stderr
    assert "--report" in said
    assert ".html" in said


def test_a_configuration_that_this_machine_is_too_small_for_is_good_and_says_so() -> None:
    checked = as_json("config", "check", *CONFIG, "--set", "tables.user.capacity=2000000000")
    assert "memory that is available" in checked["warnings"][0]
    assert as_json("config", "check", *CONFIG)["warnings"] == []


def test_wrong_use_exits_with_2() -> None:
    livebed("demo", "--all", "--seconds", "3", wanted=2)
    livebed("no-such-command", wanted=2)
    assert "KEY=VALUE" in livebed("config", "print", *CONFIG, "--set", "nonsense", wanted=2).stderr


def test_a_flag_wins_over_the_environment_and_that_over_the_file(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("LIVEBED_MODEL__CROSS_RANK", "5")
    monkeypatch.setenv("LIVEBED_NAME", "from-the-environment")
    printed = as_json("config", "print", *CONFIG, "--set", "model.cross_rank=7")
    assert printed["model"]["cross_rank"] == 7
    assert printed["name"] == "from-the-environment"


def test_doctor_finds_this_machine_fit(monkeypatch: pytest.MonkeyPatch) -> None:
    for port in ("HTTP_PORT", "ADMIN_PORT", "GRPC_PORT"):
        monkeypatch.setenv(f"LIVEBED_SERVING__{port}", "0")
    findings = as_json("doctor", *CONFIG)
    assert {"python", "packages", "kernels", "broker", "shared memory", "ports"} <= {
        found["check"] for found in findings
    }


def test_evaluate_prints_the_figures_of_a_progressive_validation() -> None:
    data = ["--data", str(KUAIRAND / "impressions.parquet"), "--label", "is_click", "--time", "time_ms"]
    figures = as_json("evaluate", *CONFIG, *data, "--max-rows", "3000")
    assert figures["events"] == 3000
    assert 0.55 < figures["auc"] < 0.9
    assert figures["ne"] < 1.0
    assert set(figures) >= {"logloss", "calibration", "events_per_s", "rows"}


def test_evaluate_names_a_column_that_is_not_there() -> None:
    data = ["--data", str(KUAIRAND / "impressions.parquet"), "--label", "no_such_column"]
    assert "no_such_column" in livebed("evaluate", *CONFIG, *data, wanted=2).stderr


def test_send_score_lookup_and_status_speak_to_a_running_system(running: Running) -> None:
    url = ["--url", running.url]
    lines = "".join(f'{{"features": {{"user_id": 1, "video_id": {k}}}, "label": {k % 2}}}\n' for k in range(600))
    assert as_json("send", "-", *url, stdin=lines)["accepted"] == 600
    wait_until(lambda: running.step() >= 600, timeout_s=30.0, why="all are learned")
    answer = as_json("score", '{"context": {"user_id": 1}, "candidates": [{"video_id": 1}, {"video_id": 2}]}', *url)
    assert len(answer["scores"]) == 2
    found = as_json("lookup", "video", "1", "no-such-id", *url)
    assert found["status"] == ["learned", "unknown"]
    assert as_json("status", *url)["ready"] is True
    assert as_json("status", "--local", str(running.run_dir))["step"] >= 600


def test_rejected_events_are_listed_with_their_line_and_the_exit_status_says_so(running: Running) -> None:
    lines = '{"features": {"user_id": 1}, "label": 1}\n{"features": {"colour": "red"}, "label": 1}\n'
    totals = as_json("send", "-", "--url", running.url, stdin=lines, wanted=1)
    assert totals["accepted"] == 1
    assert [one["index"] for one in totals["rejected"]] == [1]


def test_every_example_that_the_demo_prints_works(running: Running) -> None:
    running.post("/v1/events", [{"features": {"user_id": 4854, "video_id": 526117}, "label": 1}])
    socket_path = running.run_dir / "valkey.sock"
    text = examples(
        http_url=running.url, grpc_port=running.grpc_port, broker_socket=socket_path, stream_key="livebed:events"
    )
    lines = text.split("ends everything):")[1].replace("\\\n", " ")
    commands = [shlex.split(line) for line in re.split(r"\n(?=  \w|  #)", lines) if line.strip()[:1] not in {"", "#"}]
    assert [words[0] for words in commands] == ["curl"] * 6 + ["grpcurl", "redis-cli"]
    for words in commands[:6]:
        url, body = next(word for word in words if word.startswith("http")), words[-1] if "-d" in words else None
        status, answer = running.request(
            "POST" if body else "GET", url.removeprefix(running.url), body and body.encode()
        )
        assert status in {200, 202}, (words, answer)
    score = json_format.Parse(commands[6][commands[6].index("-d") + 1], ScoreRequest())
    with grpc.insecure_channel(commands[6][-2]) as channel:
        assert commands[6][-1] == "livebed.v1.ScoringService/Score"
        assert len(ScoringServiceStub(channel).Score(score).scores) == 4
    before = running.step()
    with redis.Redis(unix_socket_path=commands[7][2]) as client:
        client.execute_command(*commands[7][3:])
    wait_until(lambda: running.step() > before, timeout_s=10.0, why="the entry is learned")


def test_a_service_that_is_not_there_is_one_sentence() -> None:
    said = livebed("status", "--url", "http://127.0.0.1:9", wanted=1).stderr
    assert said.startswith("livebed: no answer from http://127.0.0.1:9")
    assert said.count("\n") == 1


def test_a_demo_without_a_terminal_ends_with_one_json_object_and_no_errors() -> None:
    figures = as_json("demo", "--seconds", "6", *FREE_PORTS)
    assert figures["errors"] == 0
    assert figures["events_trained"] == figures["events_scored"] > 1000
    assert figures["served_auc"] > 0.6
    assert 0.0 < figures["freshness_ms"]["p50"] <= figures["freshness_ms"]["p99"]
    assert 0.0 < figures["score_ms"]["p50"] <= figures["score_ms"]["p99"]
    assert figures["rows"]["video"] > 500
    assert not list(Path("/dev/shm").glob("livebed-*-kuairand"))


def test_a_batch_that_is_refused_as_a_whole_does_not_keep_the_next_ones_from_being_sent(running: Running) -> None:
    bad = '{"features": {"colour": "red"}, "label": 1}\n' * 500
    good = "".join(f'{{"features": {{"user_id": 2, "video_id": {k}}}, "label": 1}}\n' for k in range(70))
    totals = as_json("send", "-", "--url", running.url, stdin=bad + good, wanted=1)
    assert (totals["accepted"], len(totals["rejected"])) == (70, 500)
    assert totals["rejected"][499]["index"] == 499
    assert totals["rejected"][0]["code"] == "unknown_feature"
