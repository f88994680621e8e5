import logging
from pathlib import Path

import pytest

from trainer.errors import CheckpointError
from trainer.quarantine import Quarantine


def test_ids_outlive_the_process_and_are_forgotten_once_passed(tmp_path: Path) -> None:
    path = tmp_path / "new" / "quarantine.json"
    Quarantine(path).add(["99-1", "100-0", "100-2"])
    quarantine = Quarantine(path)
    assert "100-0" in quarantine
    assert "100-1" not in quarantine
    quarantine.drop_before("100-2")  # by number: 99 is before 100
    assert len(quarantine) == 1
    assert "100-2" in Quarantine(path)
    assert len(Quarantine(path)) == 1


def test_a_file_that_cannot_be_read_is_refused_rather_than_taken_as_empty(tmp_path: Path) -> None:
    path = tmp_path / "quarantine.json"
    for content in ("", "[]", '{"version": 2, "ids": []}', '{"version": 1, "ids": ["x"]}', '{"version": 1}'):
        path.write_text(content)
        with pytest.raises(CheckpointError, match="delete it"):
            Quarantine(path)


def test_a_disk_that_refuses_is_logged_and_the_ids_still_hold(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    (tmp_path / "file").write_text("")
    quarantine = Quarantine(tmp_path / "quarantine.json")
    quarantine._path = tmp_path / "file" / "quarantine.json"  # no directory there
    with caplog.at_level(logging.ERROR):
        quarantine.add(["1-0"])
    assert "1-0" in quarantine
    assert "quarantine" in caplog.text
