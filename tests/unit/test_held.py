import errno
import json
import logging
from pathlib import Path

import pytest

from tests.unit.worlds import every_kind
from trainer import durable
from trainer.codec import EntryDecoder
from trainer.guard import Finding
from trainer.held import EVENTS, MAX_BYTES, HeldSteps

FINDINGS = [Finding("row_norm", "table a, id 5: got a row of norm 1e+06, limit 100 (1 such rows)")]
ENTRIES = [("17-0", {b"event": b"\x00\xff secret"}), ("17-1", {b"json": b"{}", b"k": b""})]


def test_a_held_step_comes_back_as_it_was(tmp_path: Path) -> None:
    steps = HeldSteps(tmp_path / "held", keep=3)
    assert steps.keep(FINDINGS, ENTRIES, step=70, position="16-3") == 1
    loaded = steps.load(1)
    assert loaded is not None
    held, entries = loaded
    assert entries == ENTRIES
    assert (held.step, held.position, list(held.findings), held.num_entries) == (70, "16-3", FINDINGS, 2)
    assert steps.listing() == [held]
    assert steps.load(2) is None


def test_its_events_can_be_decoded_again(tmp_path: Path) -> None:
    _, schema = every_kind()
    body = json.dumps({"features": {"user_id": "u1", "price": 3.5}, "label": 1}).encode()
    steps = HeldSteps(tmp_path, keep=1)
    steps.keep(FINDINGS, [("17-0", {b"json": body})], step=1, position="0-0")
    loaded = steps.load(1)
    assert loaded is not None
    raw, rejected = EntryDecoder(schema).decode_entry(loaded[1][0][1], 17_000)
    assert (raw.inputs.count, rejected) == (1, [])


def test_only_the_newest_are_kept_and_numbers_go_on(tmp_path: Path) -> None:
    for _ in range(2):
        steps = HeldSteps(tmp_path, keep=2)  # as after a restart
        numbers = [steps.keep(FINDINGS, ENTRIES, step=k, position="0-0") for k in range(3)]
    assert numbers == [4, 5, 6]
    assert [held.number for held in steps.listing()] == [5, 6]
    assert sorted(path.name for path in tmp_path.iterdir()) == ["held-5", "held-6"]


def test_what_is_kept_is_bounded_and_says_so(tmp_path: Path) -> None:
    large = {b"event": bytes(MAX_BYTES // 2 - 100)}
    steps = HeldSteps(tmp_path, keep=1)
    steps.keep(FINDINGS, [(f"{k}-0", large) for k in range(4)], step=1, position="0-0")
    (held,) = steps.listing()
    assert (held.num_entries, held.num_left_out) == (2, 2)


def test_only_the_owner_may_read_the_events(tmp_path: Path) -> None:
    HeldSteps(tmp_path / "held", keep=1).keep(FINDINGS, ENTRIES, step=1, position="0-0")
    for path in ((tmp_path / "held"), (tmp_path / "held" / "held-1"), (tmp_path / "held" / "held-1" / EVENTS)):
        assert path.stat().st_mode & 0o077 == 0


def test_a_full_disk_costs_the_record_alone(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def full(path: Path, content: bytes) -> None:
        path.write_bytes(content[:1])
        raise OSError(errno.ENOSPC, "No space left on device")

    steps = HeldSteps(tmp_path, keep=2)
    monkeypatch.setattr(durable, "write", full)
    with caplog.at_level(logging.ERROR):
        assert steps.keep(FINDINGS, ENTRIES, step=1, position="0-0") is None
    assert "No space left" in caplog.text
    assert "secret" not in caplog.text
    assert list(tmp_path.iterdir()) == []
    monkeypatch.undo()
    assert steps.keep(FINDINGS, ENTRIES, step=1, position="0-0") == 1


def test_a_record_that_cannot_be_read_is_left_out_of_the_list(tmp_path: Path) -> None:
    steps = HeldSteps(tmp_path, keep=5)
    for step in range(2):
        steps.keep(FINDINGS, ENTRIES, step=step, position="0-0")
    (tmp_path / "held-1" / "reason.json").write_text("{")
    (tmp_path / "held-2" / EVENTS).write_text("[")
    assert [held.number for held in steps.listing()] == [2]
    assert steps.load(1) is None
    assert steps.load(2) is None
