"""The embedded broker: one server a directory, ended with its parent, nothing acknowledged lost."""

import os
import signal
import stat
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from trainer.broker import Broker
from trainer.errors import BrokerError, LogFull, LogUnavailable
from trainer.stream import EventLog

PARENT = """
import signal, sys
from pathlib import Path
from trainer.broker import Broker
broker = Broker(Path(sys.argv[1]), Path(sys.argv[2]))
broker.start()
sys.stdout.write(f"{broker.pid}\\n")
sys.stdout.flush()
signal.pause()
"""


def wait_until(condition: Callable[[], bool], *, deadline_s: float = 10.0) -> None:
    """Wait for a condition, at most so long."""
    end_s = time.monotonic() + deadline_s
    while not condition():
        assert time.monotonic() < end_s, "the condition did not come true before the deadline"
        time.sleep(0.01)


def is_gone(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(") ")[2].startswith("Z")
    except FileNotFoundError:
        return True


def test_a_parent_killed_with_sigkill_leaves_no_server(tmp_path: Path) -> None:
    command = [sys.executable, "-c", PARENT, str(tmp_path / "files"), str(tmp_path / "s")]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as parent:
        assert parent.stdout is not None
        pid = int(parent.stdout.readline())
        assert not is_gone(pid)
        parent.kill()
    wait_until(lambda: is_gone(pid))


def test_a_second_broker_on_one_directory_is_refused(broker: Broker, tmp_path: Path) -> None:
    with pytest.raises(BrokerError, match=f"in use by another broker .process {broker.pid}"):
        Broker(broker.data_dir, tmp_path / "s").start()


def test_the_lock_outlives_the_parent_and_ends_with_the_server(tmp_path: Path) -> None:
    command = [sys.executable, "-c", PARENT, str(tmp_path / "files"), str(tmp_path / "s")]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as parent:
        assert parent.stdout is not None
        pid = int(parent.stdout.readline())
        os.kill(pid, signal.SIGSTOP)
        parent.kill()
        parent.wait()
        with pytest.raises(BrokerError, match="in use"):
            Broker(tmp_path / "files", tmp_path / "t").start()
        os.kill(pid, signal.SIGKILL)
        with Broker(tmp_path / "files", tmp_path / "t") as broker:
            assert broker.pid


def test_a_socket_that_answers_is_not_taken_over(broker: Broker, tmp_path: Path) -> None:
    with pytest.raises(BrokerError, match="another server already answers"):
        Broker(tmp_path / "files", broker.socket_path).start()


def test_a_broker_killed_and_started_again_keeps_what_it_acknowledged(tmp_path: Path) -> None:
    with Broker(tmp_path / "files", tmp_path / "s") as broker, EventLog(broker.url, "k") as log:
        ids = log.append([{b"n": b"%d" % n} for n in range(1000)])
        assert broker.pid
        os.kill(broker.pid, signal.SIGKILL)
        wait_until(lambda: broker.poll() is not None)
        with pytest.raises(LogUnavailable):
            log.append([{b"n": b"lost"}])
        broker.start()
        ids += log.append([{b"n": b"after"}])
        assert [entry_id for entry_id, _ in log.read("0-0")] == ids[:1024]


def test_a_full_server_refuses_events_and_still_reads(tmp_path: Path) -> None:
    broker = Broker(tmp_path / "files", tmp_path / "s", max_memory_bytes=16 * 1024 * 1024)
    with broker, EventLog(broker.url, "k") as log:
        entries = [{b"payload": b"x" * 100_000}] * 10
        with pytest.raises(LogFull):
            for _ in range(100):
                log.append(entries)
        assert log.length() > 10
        assert log.read("0-0")


def test_stop_flushes_and_leaves_no_socket(tmp_path: Path) -> None:
    broker = Broker(tmp_path / "files", tmp_path / "s")
    with broker, EventLog(broker.url, "k") as log:
        log.append([{b"a": b"1"}])
        pid = broker.pid
    assert pid and is_gone(pid) and not broker.socket_path.exists()
    with broker, EventLog(broker.url, "k") as log:
        assert log.length() == 1


def test_only_its_owner_may_connect(broker: Broker) -> None:
    assert stat.S_IMODE(broker.socket_path.stat().st_mode) == 0o700
    assert stat.S_IMODE(broker.data_dir.stat().st_mode) == 0o700


def test_a_socket_path_too_long_for_the_kernel_says_so(tmp_path: Path) -> None:
    with pytest.raises(BrokerError, match="allows 103: choose a shorter run directory"):
        Broker(tmp_path, tmp_path / ("x" * 100) / "s")


def test_a_server_that_cannot_start_gives_its_own_reason(tmp_path: Path) -> None:
    (tmp_path / "appendonlydir").write_text("a file where the server wants a directory")
    with pytest.raises(BrokerError, match=r"ended with status 1 .*appendonlydir"):
        Broker(tmp_path, tmp_path / "s").start()
