"""What an operator does to a running system: inspect, forget, resize, save, roll back, release. Real processes."""

import json
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from service.examples import KUAIRAND
from tests.system.running import Running, system, wait_until
from trainer.checkpoint import load_latest
from trainer.hashing import hash_values

pytestmark = pytest.mark.alone

ROWS = {"rows": [{"user_id": user, "video_id": user} for user in range(20)]}


@pytest.fixture(scope="module")
def running() -> Iterator[Running]:
    with system(checkpoint={"every_s": 3600, "keep": 3}) as started:
        started.learn(300)
        yield started


def livebed(running: Running, *arguments: str, wanted: int = 0) -> Any:
    urls = {"url": running.url, "admin-url": f"http://127.0.0.1:{running.admin_port}"}
    takes = "url" if arguments[0] in {"table", "model"} and arguments[1] in READING else "admin-url"
    command = [sys.executable, "-m", "service.cli", *arguments, f"--{takes}", urls[takes], "--json"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=100, check=False)
    assert done.returncode == wanted, done.stderr
    return json.loads(done.stdout) if wanted == 0 else done.stderr


READING = {"list", "inspect", "status", "versions"}


def admin(running: Running, method: str, path: str, body: Any = None) -> tuple[int, Any]:
    content = None if body is None else json.dumps(body).encode()
    return running.request(method, path, content, admin=True, content_type="application/json")


def status_of(running: Running, table: str, id_: Any) -> str:
    answer = running.post(f"/v1/tables/{table}/embeddings:lookup", {"ids": [id_]})[1]
    return str(answer["status"][0])


def scores(running: Running) -> list[float]:
    status, answer = running.post("/v1/score", ROWS)
    assert status == 200, answer
    return [float(value) for value in answer["scores"]]


class Load:
    """Scores all the time from a thread of its own, on one connection; remembers what was not 200."""

    def __init__(self, running: Running) -> None:
        self._running, self._stop = running, threading.Event()
        self.count, self.failed, self.slowest_s = 0, list[tuple[int, bytes]](), 0.0
        self._thread = threading.Thread(target=self._run)

    def _run(self) -> None:
        connection, body = self._running.connection(), json.dumps(ROWS).encode()
        while not self._stop.is_set():
            began_s = time.perf_counter()
            connection.request("POST", "/v1/score", body, {"content-type": "application/json"})
            reply = connection.getresponse()
            content = reply.read()
            self.slowest_s = max(self.slowest_s, time.perf_counter() - began_s)
            self.count += 1
            if reply.status != 200:
                self.failed.append((reply.status, content))
        connection.close()

    def __enter__(self) -> "Load":
        self._thread.start()
        wait_until(lambda: self.count > 20, timeout_s=10, why="the load runs")
        return self

    def __exit__(self, *_: object) -> None:
        before = self.count
        wait_until(lambda: self.count > before + 20, timeout_s=10, why="the load goes on")
        self._stop.set()
        self._thread.join()
        assert self.failed == []


def test_an_id_is_inspected_with_its_optimizer_state(running: Running) -> None:
    answer = livebed(running, "table", "inspect", "user", "1")
    assert (answer["status"], answer["key"]) == ("learned", str(hash_values([1])[0]))
    assert answer["count"] >= 300
    assert answer["optimizer"]["accumulator"] > 0.03
    assert len(answer["vector"]) == 16
    assert abs(answer["last_seen_ms"] / 1000 - time.time()) < 100
    assert running.get("/v1/tables/user/embeddings/nobody")[1]["code"] == "unknown_id"
    assert "unknown_id" in livebed(running, "table", "inspect", "user", "nobody", wanted=1)


def test_a_table_grows_and_shrinks_under_load_without_one_failed_request(running: Running) -> None:
    before = scores(running)
    with Load(running):
        for capacity in (50_000, 1_000):
            assert livebed(running, "table", "resize", "video", str(capacity))["stream_id"]

            def resized(wanted: int = capacity) -> bool:
                tables = running.get("/v1/tables")[1]["tables"]
                return wanted in {table["capacity"] for table in tables if table["name"] == "video"}

            wait_until(resized, timeout_s=20, why=f"{capacity} slots")
    assert scores(running) == pytest.approx(before, abs=1e-6)
    running.learn(50)


@pytest.mark.parametrize(
    ("body", "status", "code"),
    [
        ({"capacity": 3}, 422, "invalid"),
        ({"capacity": "x"}, 422, "invalid"),
        ({}, 422, "invalid"),
        ([], 422, "invalid"),
    ],
)
def test_a_size_that_cannot_be_is_refused_by_name(running: Running, body: Any, status: int, code: str) -> None:
    got, problem = admin(running, "POST", "/v1/tables/video:resize", body)
    assert (got, problem["code"]) == (status, code)
    assert "capacity" in problem["detail"] or "object" in problem["detail"]


def test_what_is_forgotten_is_served_no_more_and_the_next_checkpoint_lacks_it(running: Running) -> None:
    event = {"features": {"user_id": "forget me", "video_id": 3}, "label": 1}
    assert running.post("/v1/events", [event])[0] == 202
    wait_until(lambda: status_of(running, "user", "forget me") == "learned", timeout_s=10, why="it is learned")
    older = livebed(running, "checkpoint", "create")["version"]
    answer = livebed(running, "table", "forget", "user", "forget me")
    assert older in answer["checkpoints"]
    wait_until(lambda: status_of(running, "user", "forget me") != "learned", timeout_s=10, why="it is forgotten")
    key = hash_values(["forget me"])[0]
    newer = livebed(running, "checkpoint", "create")["version"]
    assert newer > older
    saved = load_latest(running.settings.checkpoint_path).snapshot
    assert saved is not None
    assert key not in saved.tensors["table-user"]["ids"]


def test_serving_rolls_back_in_time_holds_and_is_released_under_load(running: Running) -> None:
    version, kept = livebed(running, "checkpoint", "create")["version"], scores(running)
    running.learn(400)
    assert scores(running) != pytest.approx(kept, abs=1e-6)
    with Load(running):
        answer = livebed(running, "model", "activate", str(version))
        assert answer["seconds"] < 2
        wait_until(lambda: scores(running) == pytest.approx(kept, abs=1e-6), timeout_s=5, why="the old scores")
    listed = livebed(running, "model", "versions")
    assert listed["publishing"] == "rolled_back"
    assert [one["version"] for one in listed["versions"] if one["active"]] == [version]
    wait_until(lambda: running.get("/readyz")[1]["status"] == "degraded", timeout_s=5, why="it says so")
    event = {"features": {"user_id": 1, "video_id": 1}, "label": 1}
    assert running.post("/v1/events", [event] * 50)[0] == 202
    time.sleep(0.2)  # longer than an event takes to be seen
    assert scores(running) == pytest.approx(kept, abs=1e-6)
    assert "held" in livebed(running, "checkpoint", "create", wanted=1)
    with Load(running):
        livebed(running, "model", "release")
        wait_until(lambda: scores(running) != pytest.approx(kept, abs=1e-6), timeout_s=5, why="the learned scores")
    wait_until(lambda: running.get("/readyz")[1]["status"] == "ok", timeout_s=5, why="all is well again")


def test_a_version_that_is_not_kept_is_refused(running: Running) -> None:
    assert admin(running, "POST", "/v1/model/versions/999:activate")[1]["code"] == "unknown_version"
    assert admin(running, "POST", "/v1/model/versions/x:activate")[1]["code"] == "unknown_version"
    assert "unknown_version" in livebed(running, "model", "activate", "999", wanted=1)


def test_a_rollback_outlasts_the_trainer(running: Running) -> None:
    version, kept = livebed(running, "checkpoint", "create")["version"], scores(running)
    livebed(running, "model", "activate", str(version))
    os.kill(running.pid_of("-m trainer"), signal.SIGKILL)
    wait_until(lambda: "trainer started again" in running.log, timeout_s=20, why="the next trainer")
    wait_until(
        lambda: running.get("/v1/model/versions")[1]["publishing"] == "rolled_back", timeout_s=30, why="it answers"
    )
    assert scores(running) == pytest.approx(kept, abs=1e-6)
    livebed(running, "model", "release")
    running.learn(10)


def test_checkpoints_are_listed_verified_and_restored_on_disk(tmp_path: Path) -> None:
    with system(checkpoint={"every_s": 3600, "keep": 5}) as running:
        data = ["--config", str(KUAIRAND / "livebed.yaml"), "--data-dir", str(running.settings.data_dir)]
        running.learn(20)
        first = livebed(running, "checkpoint", "create")["version"]
        running.learn(20)
        livebed(running, "checkpoint", "create")
        environment = running.environment
        environment = {"LIVEBED_RUN_DIR": environment["LIVEBED_RUN_DIR"]}
        listed = offline("list", *data, environment=environment)["checkpoints"]
        assert [one["number"] for one in listed] == [first + 1, first]
        assert "the trainer runs" in offline("restore", str(first), *data, environment=environment, wanted=1)
        running.stop()
        assert offline("verify", *data, environment=environment)["problems"][str(first)] == []
        assert offline("restore", str(first), *data, environment=environment) == {"restored": first}
        assert load_latest(running.settings.checkpoint_path).snapshot is not None
        loaded = load_latest(running.settings.checkpoint_path)
        assert loaded.path is not None
        assert loaded.path.name.endswith(str(first))
        damaged = next(running.settings.checkpoint_path.glob(f"save-*{first}")) / "learner.safetensors"
        content = bytearray(damaged.read_bytes())
        content[-1] ^= 1
        damaged.write_bytes(content)
        assert "learner" in json.dumps(offline("verify", str(first), *data, environment=environment, wanted=1))


def offline(*arguments: str, environment: dict[str, str], wanted: int = 0) -> Any:
    command = [sys.executable, "-m", "service.cli", "checkpoint", *arguments, "--json"]
    done = subprocess.run(
        command, capture_output=True, text=True, timeout=60, check=False, env={**os.environ, **environment}
    )
    assert done.returncode == wanted, done.stderr
    return json.loads(done.stdout) if done.stdout else done.stderr
