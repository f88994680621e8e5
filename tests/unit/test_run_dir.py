"""The run directory: held by whoever runs, cleaned by whoever leaves last, and after those who were killed."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

from service.run_dir import MARK, RunDirectory, remove_stale
from trainer.errors import LivebedError


def test_it_is_private_and_gone_after_release(tmp_path: Path) -> None:
    held = RunDirectory(tmp_path / "run", ["trainer", "service"])
    assert oct(held.path.stat().st_mode & 0o777) == "0o700"
    (held.path / "store").mkdir()
    held.release()
    assert not held.path.exists()


def test_a_second_holder_of_a_part_is_refused_by_name(tmp_path: Path) -> None:
    held = RunDirectory(tmp_path / "run", ["trainer"])
    with pytest.raises(LivebedError, match=f"a trainer already runs in .*process {os.getpid()}"):
        RunDirectory(tmp_path / "run", ["trainer", "service"], lock_wait_s=0.0)
    held.release()


def test_the_store_stays_while_the_other_part_runs_and_goes_with_the_last(tmp_path: Path) -> None:
    trainer, service = (RunDirectory(tmp_path / "run", [part]) for part in ("trainer", "service"))
    (trainer.path / "store").mkdir()
    trainer.release()
    assert (service.path / "store").is_dir()
    service.release()
    assert not service.path.exists()


def test_a_whole_system_clears_what_a_dead_one_left_and_a_part_does_not(tmp_path: Path) -> None:
    leftover = tmp_path / "run" / "store" / "shard"
    leftover.parent.mkdir(parents=True)
    leftover.touch()
    (tmp_path / "run" / MARK).touch()
    part = RunDirectory(tmp_path / "run", ["trainer"])
    assert leftover.exists()
    held = RunDirectory(tmp_path / "run", ["service"])
    part.release()
    held.release()
    leftover.parent.mkdir(parents=True)
    (tmp_path / "run" / MARK).touch()
    whole = RunDirectory(tmp_path / "run", ["trainer", "service"])
    assert not leftover.parent.exists()
    whole.release()


def test_a_lock_lives_as_long_as_a_child_that_inherited_it(tmp_path: Path) -> None:
    held = RunDirectory(tmp_path / "run", ["trainer"])
    command = [sys.executable, "-c", "input()"]
    with subprocess.Popen(command, stdin=subprocess.PIPE, pass_fds=held.lock_fds.values()) as child:
        os.close(held.lock_fds.pop("trainer"))  # as if we had been killed
        with pytest.raises(LivebedError, match="already runs"):
            RunDirectory(tmp_path / "run", ["trainer"], lock_wait_s=0.0)
        assert remove_stale(tmp_path, "run") == []
        child.communicate(b"\n")
    assert remove_stale(tmp_path, "run") == [tmp_path / "run"]


def test_only_directories_with_a_free_lock_are_stale(tmp_path: Path) -> None:
    held = RunDirectory(tmp_path / "livebed-0-lives", ["trainer", "service"])
    (tmp_path / "livebed-0-dead").mkdir()
    (tmp_path / "livebed-0-dead" / "trainer.lock").touch()
    (tmp_path / "livebed-0-just-made").mkdir()
    assert remove_stale(tmp_path, "livebed-0-") == [tmp_path / "livebed-0-dead"]
    held.release()


def test_a_directory_with_somebodys_files_is_refused_and_left_alone(tmp_path: Path) -> None:
    (tmp_path / "thesis.txt").write_text("precious")
    with pytest.raises(LivebedError, match="not empty"):
        RunDirectory(tmp_path, ("trainer", "service"))
    assert [entry.name for entry in tmp_path.iterdir()] == ["thesis.txt"]
