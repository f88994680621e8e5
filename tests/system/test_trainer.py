"""A real trainer process on a real broker: what it learns from, what it survives."""

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import redis

from tests.unit.worlds import EVERY_KIND
from trainer import board
from trainer.broker import Broker
from trainer.checkpoint import load_latest
from trainer.errors import StoreUnavailable
from trainer.hashing import hash_values
from trainer.live import Reader
from trainer.publish import entity_section, row_section
from trainer.schema import Schema
from trainer.settings import Settings
from trainer.snapshot import Snapshot
from trainer.stream import EventLog

DEADLINE_S = 30.0


def until(condition: Callable[[], Any], what: str) -> Any:
    """The condition's first true value."""
    end = time.monotonic() + DEADLINE_S
    while not (value := condition()):
        assert time.monotonic() < end, f"waited {DEADLINE_S:g} s for {what}"
        time.sleep(0.005)
    return value


class TrainerProcess:
    """`python -m trainer` over one directory; started, killed and started again."""

    def __init__(self, directory: Path, settings: Settings) -> None:
        self.settings = settings
        self.file = directory / "settings.json"
        self.file.write_text(settings.model_dump_json())
        self.output = directory / "trainer.txt"
        self.reader = Reader(settings.store_path)
        self._process: subprocess.Popen[bytes] | None = None

    def start(self) -> None:
        generation = self.state().generation if self.state() else 0
        with self.output.open("ab") as output:
            command = [sys.executable, "-m", "trainer", "--settings", str(self.file)]
            self._process = subprocess.Popen(command, stdout=output, stderr=output)
        until(lambda: self.state() and self.state().generation > generation, "the store's next generation")

    @property
    def running(self) -> bool:
        return self._process is not None and self._process.poll() is None

    def end(self, number: int) -> int:
        assert self._process is not None
        self._process.send_signal(number)
        return self._process.wait(DEADLINE_S)

    def state(self) -> Any:
        try:
            self.reader.attach(0)
            self.reader.refresh()
            return self.reader.state()
        except StoreUnavailable:
            return None

    def wait_for(self, step: int) -> None:
        def learned() -> bool:
            state = self.state()  # none for a moment while one generation takes another's place
            return state is not None and state.step >= step

        until(learned, f"{step} examples learned")

    def snapshot(self) -> Snapshot:
        loaded = load_latest(self.settings.checkpoint_path)
        assert loaded.snapshot is not None
        return loaded.snapshot

    def stop_if_running(self) -> None:
        if self._process is not None and self._process.poll() is None:
            self._process.kill()
            self._process.wait()


@pytest.fixture
def make(broker: Broker, log: EventLog, tmp_path: Path) -> Iterator[Callable[..., TrainerProcess]]:
    """Makes trainer processes on the test's own log."""
    made: list[TrainerProcess] = []

    def one(name: str = "one", **overrides: Any) -> TrainerProcess:
        directory = tmp_path / name
        (directory / "run").mkdir(parents=True)
        paths = {"data_dir": str(directory / "data"), "run_dir": str(directory / "run")}
        dotted = {key.replace("__", "."): value for key, value in overrides.items()}
        stream = {"stream.url": broker.url, "stream.key": log.key}
        made.append(TrainerProcess(directory, Settings.load(None, {**EVERY_KIND, **stream, **paths, **dotted}, {})))
        return made[-1]

    yield one
    for process in made:
        process.stop_if_running()


def example(k: int) -> dict[str, Any]:
    features = {"user_id": k % 17, "item_id": f"i{k % 29}", "price": k % 5, "previous": [k % 3, k % 7]}
    return {"features": features, "label": int(k % 17 > 8), "event_id": f"e{k}", "time_ms": 1000 * k + 1}


def test_a_plain_xadd_from_any_client_trains_the_model(
    make: Callable[..., TrainerProcess], broker: Broker, log: EventLog
) -> None:
    process = make()
    process.start()
    client = redis.Redis.from_url(broker.url)
    client.execute_command("XADD", log.key, "*", "json", json.dumps(example(1)))
    client.xadd(log.key, {"json": json.dumps([example(2), example(3)])})
    process.wait_for(3)
    schema = Schema.from_settings(process.settings)
    _, status = process.reader.gather(row_section(schema.tables[0]), hash_values([1, 2, 3, 4]))
    assert status.tolist() == [1, 1, 1, 0]
    client.close()


def test_a_bad_entry_goes_to_the_dead_letters_with_its_reason_and_the_stream_goes_on(
    make: Callable[..., TrainerProcess], broker: Broker, log: EventLog
) -> None:
    process = make()
    process.start()
    client = redis.Redis.from_url(broker.url)
    for fields in (
        {"json": "{"},
        {"proto": b"\xff"},
        {"other": "x"},
        {"json": '{"label": 1, "features": {"colour": 1}}'},
    ):
        client.xadd(log.key, fields)  # type: ignore[arg-type]
    mixed = [example(1), {"label": 7}, example(2)]
    client.xadd(log.key, {"json": json.dumps(mixed)})
    process.wait_for(2)
    letters = [fields for _, fields in client.xrange(log.dead_key)]
    assert [letter[b"code"] for letter in letters] == [
        b"malformed",
        b"malformed",
        b"no_payload",
        b"unknown_feature",
        b"bad_label",
    ]
    assert b"event 1: label is 7" in letters[-1][b"detail"]
    client.close()


def test_training_sees_what_was_known_of_an_item_at_that_point_of_the_log(
    make: Callable[..., TrainerProcess], log: EventLog
) -> None:
    process = make()
    process.start()
    say = [
        {"entity": "item", "id": "x", "features": {"price": 1, "tags": ["a"]}},
        {"features": {"item_id": "x"}, "label": 1},
        {"entity": "item", "id": "x", "features": {"price": 9}},
        {"features": {"item_id": "x"}, "label": 1},
    ]
    log.append([{b"json": json.dumps(event).encode()} for event in say])
    process.wait_for(2)
    schema = Schema.from_settings(process.settings)
    (entity,) = schema.entities
    words, status = process.reader.gather(entity_section(entity), hash_values(["x", "y"]))
    assert status.tolist() == [1, 0]
    price_word, tags_word = (int(word) for word in entity.word_E[:2])
    assert words[0, price_word : price_word + 1].view(np.float32)[0] == pytest.approx(np.log1p(9))
    assert words[0, tags_word] == 1  # the list told first is still known
    assert words[0, 0] == 0b011  # price and tags are known, content is not


def test_a_killed_trainer_goes_on_from_its_checkpoint_and_loses_nothing(
    make: Callable[..., TrainerProcess], log: EventLog
) -> None:
    """Killed three times at random places; what it knows in the end is, bit for bit, what one run learns."""
    events = [{name: value for name, value in example(k).items() if name != "event_id"} for k in range(4000)]
    entries = [{b"json": json.dumps(events[k : k + 2]).encode()} for k in range(0, 4000, 2)]
    killed, whole = make("killed", checkpoint__every_s=0.05), make("whole")
    random = np.random.default_rng(5)
    whole.start()  # before the other one trims their log
    log.append(entries[:200])
    for part in range(3):
        killed.start()
        log.append(entries[200 + 500 * part : 700 + 500 * part])
        killed.wait_for(int(random.integers(1, 1000 * part + 800)))
        killed.end(signal.SIGKILL)
    log.append(entries[1700:])
    killed.start()
    for process in (killed, whole):
        process.wait_for(4000)
        assert process.end(signal.SIGTERM) == 0
    ours, theirs = killed.snapshot(), whole.snapshot()
    assert ours.progress.step == theirs.progress.step == 4000
    for group in theirs.tensors:
        if group.startswith(("table", "entity", "learner")):
            for name, values in theirs.tensors[group].items():
                if name not in {"stamps", "seen_s"}:  # where batches begin depends on when entries came
                    np.testing.assert_array_equal(ours.tensors[group][name], values, err_msg=f"{group}/{name}")


def test_reads_go_on_while_the_trainer_is_dead_and_versions_never_go_back(
    make: Callable[..., TrainerProcess], log: EventLog
) -> None:
    process = make()
    process.start()
    log.append([{b"json": json.dumps(example(k)).encode()} for k in range(50)])
    process.wait_for(50)
    before = process.state()
    process.end(signal.SIGKILL)
    table = row_section(Schema.from_settings(process.settings).tables[0])
    assert process.reader.gather(table, hash_values([1]))[1].tolist() == [1]
    process.start()
    process.wait_for(50)
    assert process.state().version > before.version


def test_a_trainer_waits_for_its_broker_and_goes_on(tmp_path: Path, make: Callable[..., TrainerProcess]) -> None:
    """The broker dies and comes back on the same files."""
    files, socket = tmp_path / "files", tmp_path / "b.sock"
    with Broker(files, socket) as broker:
        process = make(stream__url=broker.url, stream__key="own")
        process.start()
        with EventLog(broker.url, "own") as log:
            log.append([{b"json": json.dumps(example(1)).encode()}])
            process.wait_for(1)
            os.kill(broker.pid, signal.SIGKILL)
    until(lambda: "does not answer" in process.output.read_text(), "the trainer to say so")
    assert process.state().step == 1
    with Broker(files, socket) as broker, EventLog(broker.url, "own") as log:
        log.append([{b"json": json.dumps(example(2)).encode()}])
        process.wait_for(2)


def test_what_cannot_be_used_ends_the_trainer_with_one_sentence(make: Callable[..., TrainerProcess]) -> None:
    process = make(model__fm=True)  # the tables of this world have two widths
    with process.output.open("ab") as output:
        command = [sys.executable, "-m", "trainer", "--settings", str(process.file)]
        assert subprocess.run(command, stdout=output, stderr=output, check=False, timeout=60).returncode == 2
    assert "model.fm: got [4, 8], wanted tables of one width" in process.output.read_text()


def test_a_log_that_lost_entries_is_never_skipped_in_silence(
    make: Callable[..., TrainerProcess], broker: Broker, log: EventLog
) -> None:
    """FLUSHALL, then new entries: the trainer ends and says why; told to continue, it says so and goes on."""
    process = make()
    process.start()
    log.append([{b"json": json.dumps(example(k)).encode()} for k in range(5)])
    process.wait_for(5)
    assert process.end(signal.SIGTERM) == 0
    client = redis.Redis.from_url(broker.url)
    client.delete(log.key)
    log.append([{b"json": json.dumps(example(6)).encode()}])
    log.append([{b"json": json.dumps(example(7)).encode()}])
    client.xtrim(log.key, maxlen=1, approximate=False)
    client.close()
    command = [sys.executable, "-m", "trainer", "--settings", str(process.file)]
    with process.output.open("ab") as output:
        assert subprocess.run(command, stdout=output, stderr=output, check=False, timeout=60).returncode == 2
    assert f"the log {log.key}" in process.output.read_text()
    told = process.settings.stream.model_copy(update={"on_gap": "continue"})
    process.file.write_text(process.settings.model_copy(update={"stream": told}).model_dump_json())
    process.start()
    process.wait_for(6)
    assert "going on after" in process.output.read_text()


def test_a_learning_rate_that_explodes_never_reaches_a_reader(
    make: Callable[..., TrainerProcess], log: EventLog
) -> None:
    """What is held back does not count as seen: the model that is served says how old it is."""
    process = make(model__optimizer={"kind": "sgd", "lr": 1e30})
    process.start()
    for k in range(40):
        log.append([{b"json": json.dumps([example(k + j) for j in range(8)]).encode()}])
    held = "livebed_guard_held_total"
    until(lambda: board.read(process.settings.metrics_path).value(held, reason="dense_not_finite"), "a publish held")
    watermark = process.state().watermark_us
    beat = process.state().heartbeat_us
    until(lambda: process.state().heartbeat_us > beat + 100_000, "the trainer going on")
    assert process.state().watermark_us == watermark
    assert np.isfinite(process.reader.dense()[0]).all()
    assert "dense_not_finite" in process.output.read_text()
    process.end(signal.SIGTERM)
    saved = load_latest(process.settings.checkpoint_path).snapshot
    assert saved is None or np.isfinite(saved.tensors["learner"]["params"]).all()


def test_nothing_that_a_client_writes_stops_the_stream(
    make: Callable[..., TrainerProcess], broker: Broker, log: EventLog
) -> None:
    process = make()
    process.start()
    client = redis.Redis.from_url(broker.url)
    deep = '{"columns": ' + "[" * 100_000 + "]" * 100_000 + "}"
    for payload in (deep, "[" * 100_000, '{"features": ' * 5_000):
        client.xadd(log.key, {"json": payload})
    client.xadd(log.key, {"command": '{"op": "drop everything"}'})
    client.xadd(log.key, {"json": json.dumps(example(1))}, id="1800000000000000000-0")  # nanoseconds
    client.xadd(log.key, {"json": json.dumps(example(2))}, id="1800000000000000001-0")
    letters = until(lambda: len(client.xrange(log.dead_key)) >= 6 and client.xrange(log.dead_key), "six dead letters")
    assert {fields[b"code"] for _, fields in letters} == {b"malformed", b"bad_command", b"undecodable"}
    assert process.running
    client.close()
