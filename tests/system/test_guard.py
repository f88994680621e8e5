"""Steps that do harm: held back, kept for inspection, and got over; on a real trainer and broker."""

import json
import signal
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import redis

from tests.system.test_trainer import TrainerProcess, example, make, until
from tests.unit.worlds import EVERY_KIND
from trainer import board
from trainer.board import Snapshot
from trainer.broker import Broker
from trainer.commands import COMMAND_FIELD, MAX_CAPACITY, Forget, Resize, encode
from trainer.control import ask
from trainer.errors import ControlRefused
from trainer.hashing import hash_values
from trainer.held import HeldSteps
from trainer.publish import row_section
from trainer.quarantine import Quarantine
from trainer.replay import digest, replay
from trainer.schema import Schema
from trainer.stream import EventLog

__all__ = ["make"]  # the fixture
POISON = {"features": {"user_id": 1, "item_id": "i1", "content": [1e6, -1e6, 1e6]}, "label": 1}


def entry(*events: dict[str, Any]) -> dict[bytes, bytes]:
    return {b"json": json.dumps(list(events)).encode()}


def metrics(process: TrainerProcess) -> Snapshot:
    return board.read(process.settings.metrics_path)


def held_steps(process: TrainerProcess) -> HeldSteps:
    settings = process.settings
    return HeldSteps(settings.data_dir / settings.name / "held", settings.guard.keep)


def learn(process: TrainerProcess, log: EventLog, first: int, last: int) -> None:
    log.append([entry(*(example(k) for k in range(start, start + 10))) for start in range(first, last, 10)])
    process.wait_for(last)


def test_a_harmful_step_is_got_over_and_its_events_are_kept(make: Callable[..., TrainerProcess], log: EventLog) -> None:
    process = make(checkpoint__every_s=0.1, guard__max_gradient_norm=100.0)
    process.start()
    learn(process, log, 0, 200)
    until(lambda: process.settings.checkpoint_path.glob("save-*"), "a checkpoint")
    (poisoned,) = log.append([entry(POISON)])
    until(lambda: metrics(process).value("livebed_guard_rewinds_total") >= 1, "a rewind")
    learn(process, log, 200, 400)  # it goes on, without the poison
    assert process.state().step == 400
    assert np.isfinite(process.reader.dense()[0]).all()
    assert poisoned in Quarantine(process.settings.data_dir / process.settings.name / "quarantine.json")
    (held,) = held_steps(process).listing()
    assert {"gradient_norm"} <= {finding.reason for finding in held.findings}
    kept = held_steps(process).load(held.number)
    assert kept is not None
    assert json.loads(kept[1][0][1][b"json"]) == [POISON]
    assert ask(process.settings.run_path, "status")["publishing"] == "live"


def test_what_the_guard_made_it_skip_is_skipped_after_a_kill_too(
    make: Callable[..., TrainerProcess], log: EventLog
) -> None:
    process = make(checkpoint__every_s=3600, guard__max_gradient_norm=100.0)
    process.start()
    learn(process, log, 0, 100)
    log.append([entry(POISON)])
    learn(process, log, 100, 200)  # from the first entry on, for there is no checkpoint yet
    process.end(signal.SIGKILL)
    process.start()
    learn(process, log, 200, 300)
    assert len(held_steps(process).listing()) == 1
    assert process.state().step == 300


def test_told_to_hold_it_shows_nothing_and_saves_nothing_until_released(
    make: Callable[..., TrainerProcess], log: EventLog
) -> None:
    process = make(checkpoint__every_s=0.05, guard__max_gradient_norm=100.0, guard__on_hold="hold")
    process.start()
    learn(process, log, 0, 100)
    before = process.state()
    log.append([entry(POISON)])
    run_path = process.settings.run_path
    until(lambda: ask(run_path, "status")["publishing"] == "held", "the hold")
    log.append([entry(*(example(k) for k in range(100, 150)))])
    until(lambda: ask(run_path, "status")["step"] == 151, "learning to go on")
    assert process.state().step == before.step
    with pytest.raises(ControlRefused, match="gradient_norm"):
        ask(run_path, "checkpoint")
    until(lambda: metrics(process).value("livebed_publishing_held") == 1, "the gauge")
    ask(run_path, "release")
    process.wait_for(151)


def test_it_goes_back_only_so_often_before_it_holds(make: Callable[..., TrainerProcess], log: EventLog) -> None:
    process = make(checkpoint__every_s=3600, guard__max_gradient_norm=100.0, guard__max_rewinds=2)
    process.start()
    learn(process, log, 0, 50)
    log.append([entry(POISON), entry(POISON)])
    held = "livebed_guard_held_total"
    until(lambda: metrics(process).value(held, reason="gradient_norm") == 2, "two held steps")
    learn(process, log, 50, 100)
    log.append([entry(POISON)])
    until(lambda: ask(process.settings.run_path, "status")["publishing"] == "held", "the hold")
    assert metrics(process).value("livebed_guard_held_total", reason="gradient_norm") == 3


def test_going_back_does_not_age_what_was_restored(make: Callable[..., TrainerProcess], broker: Broker) -> None:
    """By the log's clock the harmful entry comes after every row has outlived its time; it does not count."""
    tables = EVERY_KIND["tables"] | {"user": {"width": 8, "capacity": 1000, "ttl_s": 50}}
    limits = {"guard__max_gradient_norm": 100.0, "checkpoint__every_s": 0.05}
    process = make(deterministic=True, tables=tables, **limits)
    process.start()
    client, key = redis.Redis.from_url(broker.url), process.settings.stream.key
    for k in range(20):
        client.xadd(key, entry(example(k)), id=f"{1_700_000_000_000 + k}-0")  # type: ignore[arg-type]
    process.wait_for(20)
    run_path = process.settings.run_path
    until(lambda: ask(run_path, "checkpoint")["step"] == 20, "a checkpoint of all")
    client.xadd(key, entry(POISON), id="1700001000000-0")  # type: ignore[arg-type]
    until(lambda: metrics(process).value("livebed_guard_rewinds_total") >= 1, "a rewind")
    until(lambda: ask(run_path, "status")["position"] == "1700001000000-0", "the entry passed over")
    user = process.settings.tables["user"]
    assert user.ttl_s == 50
    assert ask(run_path, "inspect", table="user", key=int(hash_values([3])[0]))["found"]
    client.close()


def test_a_harmful_step_while_rolled_back_is_kept_and_got_over_too(
    make: Callable[..., TrainerProcess], log: EventLog
) -> None:
    process = make(checkpoint__every_s=3600, guard__max_gradient_norm=100.0)
    process.start()
    learn(process, log, 0, 100)
    run_path = process.settings.run_path
    number = ask(run_path, "checkpoint")["checkpoint"]
    ask(run_path, "activate", checkpoint=number)
    log.append([entry(POISON), entry(*(example(k) for k in range(100, 150)))])
    until(lambda: ask(run_path, "status")["step"] == 150, "learning to go on without the poison")
    assert len(held_steps(process).listing()) == 1
    assert ask(run_path, "status")["publishing"] == "rolled_back"
    ask(run_path, "release")
    process.wait_for(150)


def test_an_id_forgotten_since_a_checkpoint_does_not_come_back_with_it(
    make: Callable[..., TrainerProcess], log: EventLog
) -> None:
    process = make(checkpoint__every_s=3600)
    process.start()
    learn(process, log, 0, 100)
    run_path = process.settings.run_path
    number = ask(run_path, "checkpoint")["checkpoint"]
    keys = hash_values([3, 4])
    section = row_section(Schema.from_settings(process.settings).tables[0])
    log.append([{COMMAND_FIELD: encode(Forget("user", int(keys[0])))}])

    def statuses() -> list[int]:
        process.state()
        found: list[int] = process.reader.gather(section, keys)[1].tolist()
        return found

    assert until(lambda: statuses() == [0, 1], "the id to be forgotten")
    ask(run_path, "activate", checkpoint=number)
    assert statuses() == [0, 1]
    process.end(signal.SIGKILL)
    process.start()
    assert statuses() == [0, 1]


def test_nothing_that_is_asked_or_ordered_ends_the_trainer(make: Callable[..., TrainerProcess], log: EventLog) -> None:
    process = make()
    process.start()
    log.append([{COMMAND_FIELD: encode(Resize("user", MAX_CAPACITY))}])
    learn(process, log, 0, 50)
    with pytest.raises(ControlRefused, match="int64"):
        ask(process.settings.run_path, "inspect", table="user", key=2**70)
    learn(process, log, 50, 100)
    assert process.running
    process.end(signal.SIGKILL)
    process.start()  # the order is still in the log
    process.wait_for(100)


def test_a_replay_of_the_log_ends_with_the_bits_of_the_trainer(
    make: Callable[..., TrainerProcess], log: EventLog, tmp_path: Path
) -> None:
    process = make(deterministic=True, checkpoint__every_s=3600)
    process.start()
    learn(process, log, 0, 200)
    ask(process.settings.run_path, "checkpoint")
    rebuilt = replay(process.settings, "configured", until=None, out=tmp_path / "rebuilt")
    assert rebuilt["digest"] == digest(process.snapshot())
    assert (rebuilt["step"], rebuilt["would_be_held"]) == (200, 0)
    earlier = replay(process.settings, "configured", until=log.read("0-0")[9][0], out=tmp_path / "earlier")
    assert earlier["step"] == 100
