"""Saving beside the learning: the loop goes on, and whatever dies or fills up, a whole save is there afterwards."""

import os
import resource
import signal
import subprocess
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from tests.unit.saving import Trainer, assert_same_state
from tests.unit.test_checkpoint import die_before
from trainer import board as boards
from trainer.board import Board
from trainer.checkpoint import LOCK, exclusive, listing, load, load_latest, save
from trainer.errors import CheckpointError
from trainer.saver import Saver, SaveResult
from trainer.settings import CheckpointSettings
from trainer.snapshot import Snapshot

EVERY_30_S = CheckpointSettings(every_s=30, keep=2)


@pytest.fixture
def make(tmp_path: Path) -> Iterator[Callable[..., Saver]]:
    """Makes savers into `tmp_path / "saves"`; ends them."""
    board = Board.open(tmp_path / "metrics", "trainer")
    made: list[Saver] = []

    def one(settings: CheckpointSettings = EVERY_30_S, **more: Any) -> Saver:
        made.append(Saver(tmp_path / "saves", settings, board, **more))
        return made[-1]

    yield one
    for saver in made:
        saver.finish(None)
    board.close()


def result_of(saver: Saver) -> SaveResult:
    end = time.monotonic() + 30
    while (result := saver.poll()) is None:
        assert time.monotonic() < end
        time.sleep(0.002)
    return result


def test_the_save_is_of_the_moment_it_began_and_learning_goes_on(tmp_path: Path, make: Callable[..., Saver]) -> None:
    saver, trainer, uninterrupted = make(), Trainer().run(10), Trainer().run(40)

    def capture() -> Snapshot:
        while not (tmp_path / "far ahead").exists():
            time.sleep(0.001)
        return trainer.capture("10-0")

    saver.start(capture)
    trainer.run(30)
    (tmp_path / "far ahead").touch()
    result = result_of(saver)
    assert result == SaveResult(result.seconds, result.pause_s, number=1, step=10, position="10-0")
    assert 0 < result.pause_s < result.seconds
    assert_same_state(trainer, uninterrupted)
    restored = Trainer()
    restored.restored(load(tmp_path / "saves" / "save-00000001"))
    restored.run(30)
    assert restored.rows_by_id(1) == uninterrupted.rows_by_id(1)
    assert boards.read(tmp_path / "metrics").count("livebed_checkpoint_duration_seconds") == 1
    assert boards.read(tmp_path / "metrics").count("livebed_checkpoint_pause_seconds") == 1


def test_one_save_at_a_time_and_the_next_when_due(make: Callable[..., Saver]) -> None:
    saver, trainer = make(CheckpointSettings(every_s=0.01)), Trainer().run(1)
    until_due(saver)
    saver.start(trainer.capture)
    time.sleep(0.02)
    assert saver.is_running and not saver.is_due
    with pytest.raises(ValueError, match="a checkpoint is being written"):
        saver.start(trainer.capture)
    assert result_of(saver).number == 1
    assert saver.poll() is None
    until_due(saver)


def until_due(saver: Saver) -> None:
    end = time.monotonic() + 5
    while not saver.is_due:
        assert time.monotonic() < end
        time.sleep(0.002)


def test_finish_waits_for_the_save_under_way_and_writes_the_last_one(
    tmp_path: Path, make: Callable[..., Saver]
) -> None:
    saver, trainer = make(), Trainer().run(1)
    saver.start(lambda: trainer.capture("1-0"))
    trainer.run(1)
    result = saver.finish(lambda: trainer.capture("2-0"))
    assert result is not None and (result.number, result.position, result.error) == (2, "2-0", None)
    assert [info.position for info in listing(tmp_path / "saves")] == ["2-0", "1-0"]
    with exclusive(tmp_path / "saves", wait_s=0):
        pass


def test_what_goes_wrong_in_the_child_is_said_and_the_next_save_is_fine(make: Callable[..., Saver]) -> None:
    saver, trainer = make(), Trainer().run(1)

    def broken() -> Snapshot:
        raise ZeroDivisionError("of this test")

    saver.start(broken)
    error = result_of(saver).error
    assert error is not None and "ZeroDivisionError: of this test" in error
    saver.start(lambda: signal.raise_signal(signal.SIGKILL))  # type: ignore[arg-type, return-value]
    assert result_of(saver).error == (
        "the process that saved a checkpoint died: killed by SIGKILL; earlier ones are kept"
    )
    saver.start(trainer.capture)
    assert result_of(saver).number == 1


def test_a_child_that_hangs_is_stopped(make: Callable[..., Saver]) -> None:
    saver = make(deadline_s=0.1)
    saver.start(lambda: time.sleep(100))  # type: ignore[arg-type, return-value]
    error = result_of(saver).error
    assert error is not None and "was stopped after 0.1 s" in error
    saver.start(lambda: time.sleep(100))  # type: ignore[arg-type, return-value]
    last = saver.finish(None)
    assert last is not None and last.error == error


def test_the_child_ignores_ctrl_c_ends_on_sigterm_and_gives_way(make: Callable[..., Saver]) -> None:
    saver, trainer = make(), Trainer().run(1)
    own = os.nice(0)

    def interrupted() -> Snapshot:
        os.kill(os.getpid(), signal.SIGINT)
        assert os.nice(0) == min(own + 10, 19)
        return trainer.capture()

    saver.start(interrupted)
    assert result_of(saver).error is None
    saver.start(lambda: signal.raise_signal(signal.SIGTERM))  # type: ignore[arg-type, return-value]
    assert "killed by SIGTERM" in (result_of(saver).error or "")


def test_two_savers_never_write_in_one_directory(tmp_path: Path, make: Callable[..., Saver]) -> None:
    first = make()
    wanted = f"process {os.getpid()} writes checkpoints in .*: stop that trainer"
    with pytest.raises(CheckpointError, match=wanted), exclusive(tmp_path / "saves", wait_s=0.05):
        pytest.fail("the lock was given twice")
    first.finish(None)
    make().finish(Trainer().capture)


def test_the_child_holds_none_of_the_parents_files_but_the_lock(tmp_path: Path, make: Callable[..., Saver]) -> None:
    (tmp_path / "other").touch()
    saver, trainer = make(), Trainer().run(1)
    with (tmp_path / "other").open() as other:

        def listed() -> Snapshot:
            names = {str(fd.resolve()) for fd in Path("/proc/self/fd").iterdir() if int(fd.name) > 2}
            assert not any(name.endswith(("other", ".board")) for name in names), names
            assert any(name.endswith(LOCK) for name in names), names
            return trainer.capture()

        saver.start(listed)
        assert result_of(saver).error is None
        assert not other.closed and other.read() == ""


@pytest.fixture
def tiny_disk(tmp_path: Path) -> Iterator[Path]:
    """A file system of 1 MB."""
    path = tmp_path / "tiny"
    path.mkdir()
    mount = ["mount", "-t", "tmpfs", "-o", "size=1m", "tmpfs", str(path)]
    if subprocess.run(mount, capture_output=True, check=False).returncode != 0:
        pytest.skip("mounting needs root")
    yield path
    subprocess.run(["umount", "-l", str(path)], check=True)


def test_a_disk_that_fills_up_costs_nothing_but_that_save(tiny_disk: Path, tmp_path: Path) -> None:
    board, trainer = Board.open(tmp_path / "metrics", "trainer"), Trainer().run(1)
    saver = Saver(tiny_disk, EVERY_30_S, board)
    saver.start(lambda: trainer.capture("1-0"))
    assert result_of(saver).error is None
    filler = tiny_disk / "filler"
    filler.write_bytes(bytes(_free(tiny_disk) - 16_000))  # the first files of a save fit, the rest does not
    saver.start(lambda: trainer.capture("2-0"))
    result = result_of(saver)
    assert result.error is not None
    assert "No space left on device" in result.error and "earlier ones are kept" in result.error
    loaded = load_latest(tiny_disk)
    assert loaded.problems == [] and loaded.snapshot is not None and loaded.snapshot.progress.position == "1-0"
    assert not list(tiny_disk.glob(".unfinished*"))
    filler.unlink()
    last = saver.finish(lambda: trainer.capture("3-0"))
    assert last is not None and last.error is None and last.position == "3-0"
    board.close()


def _free(path: Path) -> int:
    at = os.statvfs(path)
    return at.f_bavail * at.f_bsize


def test_files_that_may_not_grow_are_a_full_disk_too(tmp_path: Path, make: Callable[..., Saver]) -> None:
    saver, trainer = make(), Trainer().run(1)

    def limited() -> Snapshot:
        resource.setrlimit(resource.RLIMIT_FSIZE, (4096, 4096))
        return trainer.capture()

    saver.start(limited)
    assert "File too large" in (result_of(saver).error or "")
    saver.start(trainer.capture)
    assert result_of(saver).error is None


def test_the_parent_killed_at_any_point_of_a_save_leaves_a_whole_one(tmp_path: Path) -> None:
    """The child kills its parent before each forced write, rename and removal in turn, and is ended with it."""
    trainer = Trainer().run(1)
    saves = tmp_path / "saves"
    save(saves, trainer.capture("1-0"), keep=1)
    trainer.run(1)
    for effects in range(100):
        parent = os.fork()
        if parent == 0:
            _be_a_trainer_killed_before(effects, trainer, tmp_path)
        finished = os.waitstatus_to_exitcode(os.waitpid(parent, 0)[1]) == 0
        with exclusive(saves):  # as soon as the orphan is gone
            loaded = load_latest(saves)
            assert loaded.problems == [] and loaded.snapshot is not None
            assert loaded.snapshot.progress.position in ({"2-0"} if finished else {"1-0", "2-0"})
            restored = Trainer()
            restored.restored(loaded.snapshot)
            np.testing.assert_array_equal(
                restored.tables.keys, Trainer().run(int(loaded.snapshot.progress.position[0])).tables.keys
            )
            for path in saves.glob("save-*"):
                load(path)
        if finished:
            break
    assert effects > 10


def _be_a_trainer_killed_before(effects: int, trainer: Trainer, directory: Path) -> None:
    saver = Saver(directory / "saves", EVERY_30_S, Board.open(directory / "metrics", "trainer"))

    def kill_the_parent() -> None:
        os.kill(os.getppid(), signal.SIGKILL)
        time.sleep(60)  # the kernel ends this process long before

    def capture() -> Snapshot:
        snapshot = trainer.capture("2-0")
        die_before(effects, kill_the_parent)
        return snapshot

    result = saver.finish(capture)
    os._exit(0 if result is not None and result.error is None else 1)


def test_the_earliest_position_counts_however_saves_are_numbered(tmp_path: Path, make: Callable[..., Saver]) -> None:
    saver, trainer = make(), Trainer().run(1)
    for position in ("1490-0", "300-0"):  # after a rewind a later save may stand at an earlier place
        save(tmp_path / "saves", trainer.capture(position), keep=2)
    assert saver.oldest_position() == "300-0"
    save(tmp_path / "saves", trainer.capture("1500-0"), keep=2)
    assert saver.oldest_position() == "300-0"


def test_a_save_that_is_served_is_not_dropped(tmp_path: Path, make: Callable[..., Saver]) -> None:
    served: list[int | None] = [1]
    saver, trainer = make(CheckpointSettings(every_s=30, keep=1), spared=lambda: served[0]), Trainer()
    for step in range(3):
        saver.start(lambda step=step: trainer.run(1).capture(f"{step}-0"))  # type: ignore[misc]
        assert result_of(saver).error is None
    assert [info.number for info in listing(tmp_path / "saves")] == [3, 1]
    served[0] = None
    saver.start(lambda: trainer.run(1).capture("9-0"))
    result_of(saver)
    assert [info.number for info in listing(tmp_path / "saves")] == [4]
