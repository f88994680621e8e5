"""Half a system: what can go on goes on, says so, and mends by itself when the other half is back."""

import os
import resource
import signal
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
import redis

from service.keepalive import KeepAlive
from tests.system.running import Running, alive, system, wait_until

pytestmark = pytest.mark.alone

SCORE = {"rows": [{"user_id": 1, "video_id": 2}]}
EVENT = [{"features": {"user_id": 1, "video_id": 1}, "label": 1}]
MENDED_S = 20.0


@pytest.fixture(scope="module")
def running() -> Iterator[Running]:
    with system(serving__workers=2) as started:
        started.learn(10)
        yield started


@contextmanager
def unattended(running: Running) -> Iterator[None]:
    """The supervisor stands still: what dies stays dead."""
    os.kill(running.pid, signal.SIGSTOP)
    try:
        yield
    finally:
        os.kill(running.pid, signal.SIGCONT)


def failed_checks(running: Running) -> list[str]:
    _, body = running.get("/readyz?verbose")
    assert body["status"] != "not_ready"
    return [check["name"] for check in body["checks"] if not check["ok"]]


def is_well(running: Running) -> bool:
    status, body = running.get("/readyz")
    return status == 200 and body["status"] == "ok"


def post(running: Running) -> tuple[int, str]:
    status, body = running.post("/v1/events", EVENT)
    return status, body.get("code", "")


def killed(running: Running, words: str) -> None:
    pid = running.pid_of(words)
    os.kill(pid, signal.SIGKILL)
    wait_until(lambda: not alive(pid), timeout_s=5.0, why=f"{words} is dead")


def test_without_a_trainer_reads_and_ingest_go_on_and_the_age_grows(running: Running) -> None:
    with unattended(running):
        killed(running, "-m trainer")
        scores = running.post("/v1/score", SCORE)[1]
        running.wait_until(lambda: failed_checks(running) == ["trainer"], "readiness to notice")
        later = running.post("/v1/score", SCORE)[1]
        assert later["scores"] == scores["scores"]
        assert later["model"]["age_ms"] > scores["model"]["age_ms"] + 1000
        assert post(running) == (202, "")
    running.wait_until(lambda: is_well(running), "the trainer to come back", MENDED_S)
    running.learn(1)


def test_without_a_broker_events_are_refused_and_reads_go_on(running: Running) -> None:
    with unattended(running):
        killed(running, "valkey-server")
        assert post(running) == (503, "log_unavailable")
        assert running.post("/v1/score", SCORE)[0] == 200
        assert failed_checks(running) == ["log"]
    running.wait_until(lambda: is_well(running), "the broker to come back", MENDED_S)
    running.learn(1)


def test_a_full_disk_under_the_log_stops_writes_alone(running: Running) -> None:
    pid = running.pid_of("valkey-server")
    log_files = [path.stat().st_size for path in (running.directory / "data").rglob("*.aof")]
    unlimited = resource.prlimit(pid, resource.RLIMIT_FSIZE)
    resource.prlimit(pid, resource.RLIMIT_FSIZE, (max(log_files), unlimited[1]))  # no file of its grows any more
    try:
        running.wait_until(lambda: post(running) == (507, "log_full"), "the disk to be full")
        assert running.post("/v1/score", SCORE)[0] == 200
        running.wait_until(lambda: failed_checks(running) == ["log"], "readiness to notice")
    finally:
        resource.prlimit(pid, resource.RLIMIT_FSIZE, unlimited)
    running.wait_until(lambda: post(running) == (202, ""), "events to be accepted again", MENDED_S)
    running.wait_until(lambda: is_well(running), "readiness", MENDED_S)
    running.learn(1)


def test_a_broker_without_memory_stops_writes_alone(running: Running) -> None:
    with redis.Redis(unix_socket_path=str(running.run_dir / "valkey.sock")) as broker:
        broker.config_set("maxmemory", 1)
        try:
            assert post(running) == (507, "log_full")
            assert running.post("/v1/score", SCORE)[0] == 200
        finally:
            broker.config_set("maxmemory", 0)
    running.learn(1)


def test_a_worker_killed_under_load_costs_its_own_connections_alone(running: Running) -> None:
    right = running.post("/v1/score", SCORE)[1]["scores"]
    over = threading.Event()
    wrong: list[bytes] = []
    broken: list[OSError] = []
    num_right = [0]

    def ask() -> None:
        body = b'{"rows": [{"user_id": 1, "video_id": 2}]}'
        with KeepAlive("127.0.0.1", running.http_port) as client:
            while not over.is_set():
                try:
                    status, answer = client.post("/v1/score", body)
                except OSError as error:  # it was on the one that was killed; the next call connects again
                    broken.append(error)
                    continue
                if status != 200 or f'"scores":{right}'.replace(" ", "").encode() not in answer:
                    wrong.append(answer)
                num_right[0] += 1

    clients = [threading.Thread(target=ask) for _ in range(4)]
    for client in clients:
        client.start()
    running.wait_until(lambda: num_right[0] > 100, "load")
    worker = running.pid_of("-m service --worker 0")
    os.kill(worker, signal.SIGKILL)
    seen = num_right[0]
    running.wait_until(lambda: num_right[0] > seen + 100, "the other worker to go on")
    assert running.pid_of("-m service --worker 0") != worker
    running.wait_until(lambda: running.log.count("ready: version") >= 3, "the worker to come back")
    over.set()
    for client in clients:
        client.join()
    assert wrong == []
    assert len(broken) <= len(clients)


@pytest.mark.parametrize("name", ["run", "data"])
def test_a_directory_that_cannot_be_used_ends_the_start_with_a_sentence(tmp_path: Path, name: str) -> None:
    occupied = tmp_path / name
    occupied.write_text("a file where a directory is wanted")
    start = Running(tmp_path)
    began_s = time.monotonic()
    with pytest.raises(AssertionError, match="livebed up ended with 1") as raised, start:
        pass
    assert time.monotonic() - began_s < 20
    assert f"{name}_dir: cannot use {occupied}" in str(raised.value)
    assert "Traceback" not in start.log
