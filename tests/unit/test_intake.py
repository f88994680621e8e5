"""How a log is cut into portions, whatever happens on the way."""

import json
from pathlib import Path
from typing import Any

import numpy as np

from tests.unit.worlds import every_kind
from trainer.board import Board
from trainer.commands import COMMAND_FIELD, Resize, encode
from trainer.intake import Intake, Portion, Quiet
from trainer.stream import EventLog

SETTINGS, SCHEMA = every_kind(stream__max_batch=4)


def entry(*users: int) -> dict[bytes, bytes]:
    events = [{"features": {"user_id": user}, "label": user % 2} for user in users]
    return {b"json": json.dumps(events).encode()}


def portions(log: EventLog, url: str, directory: Path, **options: Any) -> list[Portion]:
    board = Board.open(directory, "test")
    options = {"after": "0-0", "num_read": 0, **options}
    intake = Intake(EventLog(url, log.key), SCHEMA, SETTINGS.stream, board, **options)
    taken = []
    while not isinstance(one := intake.take(), Quiet):
        taken.append(one)
    intake.close()
    board.close()
    return taken


def sizes(taken: list[Portion]) -> list[tuple[int, int, bool]]:
    return [(len(one.entries), 0 if one.batch is None else len(one.batch), one.is_whole) for one in taken]


def test_small_entries_come_together_large_ones_in_parts_and_commands_alone(
    log: EventLog, broker: Any, tmp_path: Path
) -> None:
    resize = {COMMAND_FIELD: encode(Resize("user", 100))}
    log.append([entry(1, 2), entry(3), entry(4, 5), entry(*range(10)), resize, entry(6), {b"json": b"{"}])
    taken = portions(log, broker.url, tmp_path)
    assert sum(size for _, size, _ in sizes(taken)) == 16
    assert all(size <= 4 for _, size, _ in sizes(taken))
    parts = [one for one in taken if not one.is_whole]
    assert [len(one.entries) for one in parts] == [1, 1]
    assert {one.last_id for one in parts} == {parts[0].last_id}
    assert [one.command for one in taken if one.command] == [Resize("user", 100)]
    assert [one.num_read for one in taken if one.is_whole][-1] == 7
    assert log.length() == 7


def test_one_by_one_each_entry_is_a_portion(log: EventLog, broker: Any, tmp_path: Path) -> None:
    ids = log.append([entry(1), entry(2), entry(3)])
    assert sizes(portions(log, broker.url, tmp_path, entry_by_entry=True)) == [(1, 1, True)] * 3
    careful = portions(log, broker.url, tmp_path, careful_to=ids[0])
    assert [one.last_id for one in careful] == [ids[0], ids[2]]


def test_what_was_handed_over_of_an_entry_is_not_handed_over_again(log: EventLog, broker: Any, tmp_path: Path) -> None:
    log.append([entry(*range(10)), entry(11)])
    whole = portions(log, broker.url, tmp_path)
    rest = portions(log, broker.url, tmp_path, parts_done=2)
    assert sizes(rest) == sizes(whole)[2:]
    assert whole[2].batch is not None
    assert rest[0].batch is not None
    np.testing.assert_array_equal(rest[0].batch.features.ids_BC, whole[2].batch.features.ids_BC)


def test_entries_to_be_passed_over_hand_on_no_events(log: EventLog, broker: Any, tmp_path: Path) -> None:
    ids = log.append([entry(1), entry(2)])
    taken = portions(log, broker.url, tmp_path, passed_over=frozenset(ids[:1]))
    assert sum(size for _, size, _ in sizes(taken)) == 1
    assert taken[-1].last_id == ids[1]
