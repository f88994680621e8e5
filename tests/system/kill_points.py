"""`python -m tests.system.kill_points FILE`: trainers that are killed at chosen points, and end as if they were not.

One process takes everything up once, then forks a real trainer (real broker, live store and checkpoints) for each
trial: SIGKILL at the chosen call of the chosen effect, a second trainer that goes on to the end of the log, and the
digest of the checkpoint it leaves. The points are put in from here, by wrapping the functions that make the numbered
effects of `loop`, `outlet`, `publish` and `checkpoint`; the project's code knows nothing of it.
"""

import functools
import json
import logging
import os
import shutil
import signal
import sys
import threading
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import redis

from trainer import checkpoint, manifest
from trainer.checkpoint import load_latest
from trainer.live import Writer
from trainer.loop import Trainer
from trainer.outlet import Outlet
from trainer.replay import digest
from trainer.saver import Saver
from trainer.settings import Settings
from trainer.stream import EventLog
from trainer.training import TrainingState
from trainer.warm import MODULES, warm

# What is wrapped, in the order of the effects; those of `checkpoint` run in the process that writes it.
EFFECTS: dict[str, tuple[Any, str]] = {
    "dead_letter": (EventLog, "dead_letter"),  # 1
    "learn": (TrainingState, "learn"),  # 2
    "forget": (TrainingState, "forget"),
    "resize": (TrainingState, "resize"),
    "judge": (TrainingState, "judge"),  # 3
    "publish": (Outlet, "publish"),  # 4
    "put_rows": (Writer, "put"),
    "remove_rows": (Writer, "remove"),
    "put_dense": (Writer, "put_dense"),
    "commit": (Writer, "commit"),
    "activate": (Writer, "activate"),
    "moved_to": (TrainingState, "moved_to"),  # 5
    "trim": (EventLog, "trim_before"),  # 6
    "fork": (Saver, "start"),
    "sync_file": (manifest, "sync"),
    "write_manifest": (manifest, "write"),
    "sync_directory": (checkpoint, "sync"),
    "rename_save": (Path, "rename"),
    "point_to_save": (checkpoint, "_point_to"),
    "discard_save": (checkpoint, "_discard"),
}
NEVER_S = 1e9


@dataclass(frozen=True)
class Kill:
    """SIGKILL before, after, or so many microseconds into the n-th call (from 1) of an effect."""

    effect: str
    call: int
    when: str  # before | after | during
    delay_us: int = 0


def arm(kill: Kill, trainer_pid: int) -> None:
    """Make the point deadly; if it is in the process that writes a checkpoint, the trainer dies with it."""
    owner, name = EFFECTS[kill.effect]
    real: Callable[..., Any] = getattr(owner, name)
    calls = 0

    def die() -> None:
        os.kill(trainer_pid, signal.SIGKILL)
        os.kill(os.getpid(), signal.SIGKILL)

    @functools.wraps(real)
    def deadly(*arguments: Any, **options: Any) -> Any:
        nonlocal calls
        calls += 1
        if calls == kill.call and kill.when == "before":
            die()
        if calls == kill.call and kill.when == "during":
            threading.Thread(target=lambda: (time.sleep(kill.delay_us / 1e6), die()), daemon=True).start()
        result = real(*arguments, **options)
        if calls == kill.call and kill.when == "after":
            die()
        return result

    setattr(owner, name, deadly)


def stop_at(last_id: str, stop: threading.Event) -> None:
    """Tell the trainer to stop once the whole log is learned."""
    real = TrainingState.moved_to

    def moved_to(state: TrainingState, entry_id: str, num_read: int | None) -> None:
        real(state, entry_id, num_read)
        if entry_id == last_id:
            stop.set()

    TrainingState.moved_to = moved_to  # type: ignore[method-assign]


def in_child(work: Callable[[], None]) -> int:
    """Run something in a process of its own; how that ended (negative: by that signal)."""
    pid = os.fork()
    if pid == 0:
        status = 1
        try:
            work()
            status = 0
        except BaseException:
            logging.exception("trial failed")
        finally:
            os._exit(status)
    return os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])


class Trials:
    """One log, learned again and again."""

    def __init__(self, settings: Settings, entries: list[tuple[str, dict[bytes, bytes]]], directory: Path) -> None:
        self.settings, self.entries, self.directory = settings, entries, directory

    def run(self, name: str, kills: list[Kill], *, every_s: float) -> dict[str, Any]:
        """Learn the log, killed at each of the points in turn; the digest of the last checkpoint."""
        home = self.directory / name
        run = Path(os.environ.get("TMPDIR", "/tmp")) / f"lbk-{os.getpid()}-{name}"
        settings = self.settings.model_copy(
            update={
                "data_dir": home,
                "run_dir": run,
                "checkpoint": self.settings.checkpoint.model_copy(update={"every_s": every_s}),
                "stream": self.settings.stream.model_copy(update={"key": f"kill:{name}"}),
            }
        )
        run.mkdir(mode=0o700)
        try:
            self._fill(settings)
            died = []
            for kill in kills:
                status = in_child(lambda: self._learn(settings, kill))  # noqa: B023 -- called at once
                died.append(status == -signal.SIGKILL)
                if not died[-1] and status != 0:
                    raise RuntimeError(f"{kill}: the trainer ended with {status}")
            if not kills or died[-1]:
                status = in_child(lambda: self._learn(settings, None))
                if status != 0:
                    raise RuntimeError(f"{name} after {kills}: the trainer ended with {status}")
            loaded = load_latest(settings.checkpoint_path)
            assert loaded.snapshot is not None
            return {
                "kills": [asdict(kill) for kill in kills],
                "died": died,
                "digest": digest(loaded.snapshot),
                "step": loaded.snapshot.progress.step,
                "position": loaded.snapshot.progress.position,
                "problems": loaded.problems,
            }
        finally:
            self._empty(settings)
            shutil.rmtree(run, ignore_errors=True)
            shutil.rmtree(home, ignore_errors=True)

    def _fill(self, settings: Settings) -> None:
        """The log with the same ids each time, for they say when an event was accepted."""
        with redis.Redis.from_url(str(settings.stream.url)) as client, client.pipeline(transaction=False) as pipeline:
            for entry_id, fields in self.entries:
                pipeline.xadd(settings.stream.key, fields, id=entry_id)  # type: ignore[arg-type]
            pipeline.execute()

    def _empty(self, settings: Settings) -> None:
        with redis.Redis.from_url(str(settings.stream.url)) as client:
            client.delete(settings.stream.key, f"{settings.stream.key}:dead")

    def _learn(self, settings: Settings, kill: Kill | None) -> None:
        stop = threading.Event()
        stop_at(self.entries[-1][0], stop)
        if kill is not None:
            arm(kill, os.getpid())
        Trainer(settings).run(stop)


def main() -> None:
    """Read {settings, entries, trials: [{name, kills, every_s}]} from a file, print one JSON line a trial."""
    logging.basicConfig(level=logging.ERROR)
    for module in MODULES:
        warm(module)
    plan = json.loads(Path(sys.argv[1]).read_text())
    entries = [(i, {k.encode(): v.encode() for k, v in fields.items()}) for i, fields in plan["entries"]]
    trials = Trials(Settings.model_validate(plan["settings"]), entries, Path(plan["directory"]))
    for trial in plan["trials"]:
        kills = [Kill(**kill) for kill in trial["kills"]]
        result = trials.run(trial["name"], kills, every_s=trial["every_s"])
        sys.stdout.write(json.dumps(result) + "\n")
        sys.stdout.flush()


if __name__ == "__main__":
    main()
