"""Commands in the log."""

import json

import pytest

from tests.unit.worlds import EVERY_KIND
from trainer.commands import Command, Forget, Resize, decode, encode
from trainer.errors import BadEvent
from trainer.schema import Schema
from trainer.settings import Settings

SCHEMA = Schema.from_settings(Settings.model_validate(EVERY_KIND))
TABLE = SCHEMA.tables[0].name


@pytest.mark.parametrize("command", [Forget(TABLE, -(2**63)), Resize(TABLE, 64)])
def test_a_command_comes_back_as_it_was(command: Command) -> None:
    assert decode(encode(command), SCHEMA) == command


@pytest.mark.parametrize(
    "content",
    [
        {"op": "drop", "table": TABLE},
        {"op": "forget", "table": "nowhere", "key": 1},
        {"op": "forget", "table": TABLE, "key": 2**63},
        {"op": "forget", "table": TABLE, "key": True},
        {"op": "resize", "table": TABLE, "capacity": 63},
        {"op": "resize", "table": TABLE, "capacity": 100, "more": 1},
        [],
    ],
)
def test_what_is_no_command_is_refused(content: object) -> None:
    with pytest.raises(BadEvent, match="bad_command"):
        decode(json.dumps(content).encode(), SCHEMA)
