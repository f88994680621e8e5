"""One command runs a whole system, repairs it, and leaves nothing behind. Real processes throughout."""

import json
import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager

import pytest

from tests.system.running import Running, alive, descendants, short_directory, system, wait_until
from trainer.broker import Broker

SCORE = {"rows": [{"user_id": 1, "video_id": 2}]}
EVENT = [{"features": {"user_id": 1, "video_id": 1}, "label": 1}]


@pytest.fixture(scope="module")
def running() -> Iterator[Running]:
    with system() as started:
        yield started


def test_children_read_what_was_resolved_from_one_private_file(running: Running) -> None:
    path = running.run_dir / "settings.json"
    settings = json.loads(path.read_text())
    assert settings["stream"]["url"] == f"unix://{running.run_dir}/valkey.sock"
    assert settings["serving"]["http_port"] == running.http_port
    assert oct(path.stat().st_mode & 0o777) == "0o600"


def test_a_killed_trainer_comes_back_and_scores_are_answered_meanwhile(running: Running) -> None:
    os.kill(running.pid_of("-m trainer"), signal.SIGKILL)
    while "trainer started again" not in running.log:
        assert running.post("/v1/score", SCORE)[0] == 200
    assert "trainer was ended by SIGKILL; starting it again in 0.2 s" in running.log
    running.learn(10)


def test_a_killed_worker_refuses_no_connection(running: Running) -> None:
    worker = running.pid_of("-m service")
    os.kill(worker, signal.SIGKILL)
    wait_until(lambda: not alive(worker), timeout_s=10.0, why="the worker is dead")
    # Nobody accepts now: the connection waits in the supervisor's socket until the next worker does.
    assert running.post("/v1/score", SCORE)[0] in {200, 503}
    assert running.pid_of("-m service") != worker
    running.wait_until(lambda: running.post("/v1/score", SCORE)[0] == 200, "the next worker")


def test_a_killed_broker_comes_back_and_events_are_learned_again(running: Running) -> None:
    os.kill(running.pid_of("valkey-server"), signal.SIGKILL)
    running.wait_until(lambda: "broker started again" in running.log, "the broker")
    running.wait_until(lambda: running.post("/v1/events", EVENT)[0] == 202, "events to be accepted")
    running.learn(10)


def test_a_second_system_in_the_same_run_directory_is_refused(running: Running) -> None:
    second = Running(running.directory)
    second.output = running.directory / "second"
    with pytest.raises(AssertionError, match=f"a trainer already runs in {running.run_dir}"), second:
        pass
    assert second.stop() == 1


def test_a_port_in_use_is_named_by_its_setting_and_nothing_is_left(running: Running) -> None:
    with short_directory() as directory:
        refused = Running(directory, serving__http_port=running.http_port)
        with pytest.raises(AssertionError) as failed, refused:
            pass
        assert refused.stop() == 1
        assert not refused.run_dir.exists()
    assert f"serving.http_port: port {running.http_port} on 127.0.0.1 is in use by another process" in str(failed.value)
    assert "LIVEBED_SERVING__HTTP_PORT" in str(failed.value)


def test_a_trainer_that_cannot_start_is_reported_with_its_own_words() -> None:
    with pytest.raises(AssertionError) as failed, system(engine="event", model__family="dlrm"):
        pass
    said = str(failed.value)
    assert "livebed: trainer ended with status 2 while starting; its last log lines:" in said
    assert "dlrm" in said.split("its last log lines:")[1]


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_a_stopped_system_leaves_no_process_no_socket_and_no_shared_memory(number: int) -> None:
    with system(serving__workers=2) as running:
        pids = descendants(running.pid)
        running.learn(5)
        assert len(pids) >= 4
        assert running.stop(number) == 0
        assert [pid for pid in pids if alive(pid)] == []
        assert not running.run_dir.exists()
        with pytest.raises(ConnectionRefusedError):
            running.get("/livez")


def test_children_die_with_a_killed_supervisor_and_the_next_start_goes_on_from_there() -> None:
    with system() as running:
        running.learn(20)
        pids = descendants(running.pid)
        assert running.stop(signal.SIGKILL) == -signal.SIGKILL
        wait_until(lambda: not any(alive(pid) for pid in pids), timeout_s=30.0, why="the children are gone")
        assert running.run_dir.exists()
        with Running(running.directory) as again:
            wait_until(lambda: again.step() == 20, timeout_s=30.0, why="nothing is lost, nothing learned twice")
        assert not again.run_dir.exists()


def test_trainer_and_service_run_apart_over_one_log_and_the_last_to_leave_cleans_up(broker: Broker) -> None:
    with short_directory() as directory:
        running = Running(directory, stream__url=broker.url, stream__key="test:apart")
        with part(running, "train") as trainer, part(running, "serve") as service:
            running.wait_until(lambda: answers(running), "trainer and service", 90.0)
            running.learn(10)
            assert stopped(trainer) == 0
            assert running.post("/v1/score", SCORE)[0] == 200
            assert (running.run_dir / "store").is_dir()
            assert stopped(service) == 0
        assert not running.run_dir.exists()


def test_parts_that_run_apart_need_a_log_between_them() -> None:
    with short_directory() as directory:
        running = Running(directory)
        with part(running, "train") as trainer:
            assert trainer.wait(30) == 1
        assert "LIVEBED_REDIS_URL" in running.log


@contextmanager
def part(running: Running, command: str) -> Iterator["subprocess.Popen[bytes]"]:
    """`livebed train` or `livebed serve` with the settings of a system that is not started as a whole."""
    words = [sys.executable, "-m", "service.cli", command, "-c", str(running.configuration)]
    with running.output.open("ab") as output:
        process = subprocess.Popen(words, env=os.environ | running.environment, stdout=output, stderr=output)
    with process:
        try:
            yield process
        finally:
            process.terminate()


def stopped(process: "subprocess.Popen[bytes]") -> int:
    process.terminate()
    return process.wait(30)


def answers(running: Running) -> bool:
    try:
        return running.get("/readyz")[0] == 200
    except OSError:
        return False
