"""What the README says to type works, as it stands there; its tour leads to files that exist."""

import json
import re
import shutil
import subprocess
import sys
from collections.abc import Iterator
from fnmatch import fnmatch
from pathlib import Path

import pytest

from tests.system.running import Running, system, wait_until
from trainer.schema import Schema
from trainer.settings import Settings

ROOT = Path(__file__).parents[2]
README = (ROOT / "README.md").read_text()
TESTED = re.findall(r"<!-- tested: (\w+) -->\n```\w+\n(.*?)```", README, re.DOTALL)


@pytest.fixture(scope="module")
def running() -> Iterator[Running]:
    with system() as one:
        yield one


def adapted(text: str, running: Running) -> str:
    """The README's ports and paths, replaced by those of the test's own system."""
    ports = text.replace(":8080", f":{running.http_port}").replace(":50051", f":{running.grpc_port}")
    return re.sub(r"/dev/shm/livebed-\d+-\w+", str(running.run_dir), ports)


def run(kind: str, text: str, running: Running) -> str:
    command = ["sh", "-c", text] if kind == "sh" else [sys.executable, "-c", text]
    done = subprocess.run(
        [command[0], command[1], adapted(text, running)], capture_output=True, check=True, timeout=60, cwd=ROOT
    )
    return done.stdout.decode()


def test_all_three_ways_to_use_it_are_shown() -> None:
    assert [kind for kind, _ in TESTED] == ["sh", "sh", "sh", "python", "python", "sh", "sh", "python"]


@pytest.mark.skipif(shutil.which("curl") is None, reason="the examples use curl")
def test_the_http_examples_answer_as_the_readme_says(running: Running) -> None:
    score, event, fact = (json.loads(run(kind, text, running)) for kind, text in TESTED[:3])
    assert len(score["scores"]) == 2
    assert event["accepted"] == fact["accepted"] == 1
    wait_until(lambda: running.step() >= 1, timeout_s=20, why="the event is learned")
    assert json.loads(run(*TESTED[0], running))["scores"] != score["scores"]


def test_the_stream_example_trains_the_model(running: Running) -> None:
    before = running.step()
    run(*TESTED[3], running)
    wait_until(lambda: running.step() == before + 1, timeout_s=20, why="the entry is learned")


def test_the_grpc_example_prints_what_it_found(running: Running) -> None:
    assert "(3, 16)" in run(*TESTED[4], running)


def test_the_example_of_a_search_finds_what_is_known(running: Running) -> None:
    event = """curl -s http://127.0.0.1:8080/v1/events -H 'content-type: application/json' \\
      -d '[{"features": {"user_id": 1, "video_id": 3431182}, "label": 1},
           {"features": {"user_id": 1, "video_id": 526117}, "label": 0}]'"""
    assert json.loads(run("sh", event, running))["accepted"] == 2
    wait_until(lambda: "526117" in run(*TESTED[5], running), timeout_s=20, why="both rows to be found")


def test_the_examples_of_the_open_inference_protocol_score(running: Running) -> None:
    answered = json.loads(run(*TESTED[6], running))
    assert answered["outputs"][0]["shape"] == [2]
    assert run(*TESTED[7], running).startswith("[")


def test_the_guided_tour_leads_to_six_files_that_exist() -> None:
    tour = re.findall(r"^\d\. \[`([\w/.]+)`\]\(([\w/.]+)\)", README, re.MULTILINE)
    assert len(tour) == 6
    for name, target in tour:
        assert name == target
        assert (ROOT / target).is_file()


def test_every_file_that_a_page_names_exists() -> None:
    for page in ("README.md", "trainer/README.md", "service/README.md", "proto/README.md"):
        text = (ROOT / page).read_text()
        for target in re.findall(r"\]\((?!http)([^)#]+)\)", text):
            assert ((ROOT / page).parent / target).exists(), f"{page} links to {target}"


@pytest.mark.parametrize("package", ["trainer", "service"])
def test_the_package_pages_name_every_file(package: str) -> None:
    text = (ROOT / package / "README.md").read_text()
    named = re.findall(r"`([\w*]+\.py)`", text)
    ours = {path.name for path in (ROOT / package).glob("[a-z]*.py") if "_pb2" not in path.name}
    assert {name for name in ours if not any(fnmatch(name, pattern) for pattern in named)} == set()


def test_the_configuration_that_the_readme_shows_can_be_used(tmp_path: Path) -> None:
    file = tmp_path / "livebed.yaml"
    file.write_text(re.findall(r"```yaml\n(.*?)```", README, re.DOTALL)[0])
    assert Schema.from_settings(Settings.load(file, environment={})).id_features
