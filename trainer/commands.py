"""Commands that change what is learned: entries of the event log, so that they have a place among the events.

A trainer that is killed and started again replays them with the events around them, exactly where they stood. What
changes only what is served (rolling back, releasing) or writes a checkpoint has no place in the log: see `control`.
"""

import json
from dataclasses import asdict, dataclass

from trainer.errors import BadEvent
from trainer.schema import Schema

COMMAND_FIELD = b"command"  # the one field of such an entry; its value is JSON
MIN_CAPACITY, MAX_CAPACITY = 64, 2**31 - 1


@dataclass(frozen=True)
class Forget:
    """Take an id out of a table, with its optimizer state and counters, and out of the entities it is the key of."""

    table: str
    key: int  # hashed, see trainer.hashing


@dataclass(frozen=True)
class Resize:
    """Give a table another number of slots; ids that then have no room are the least useful ones."""

    table: str
    capacity: int


Command = Forget | Resize
KINDS: dict[str, type[Command]] = {"forget": Forget, "resize": Resize}


def encode(command: Command) -> bytes:
    """A command -> the value of its entry's field.

    >>> encode(Resize("user", 1000))
    b'{"op": "resize", "table": "user", "capacity": 1000}'
    """
    op = next(name for name, kind in KINDS.items() if isinstance(command, kind))
    return json.dumps({"op": op, **asdict(command)}).encode()


def decode(value: bytes, schema: Schema) -> Command:
    """The value of an entry's field -> the command.

    Raises:
        BadEvent: it is none, or names a table that is not there or a capacity that no table can have.
    """
    try:
        content = json.loads(value)
        kind = KINDS[content.pop("op")]
        command = kind(**content)
    except (ValueError, KeyError, TypeError, AttributeError):
        raise BadEvent("bad_command", f"wanted JSON with `op` one of {', '.join(KINDS)} and its fields") from None
    if schema.table(command.table) is None:
        raise BadEvent("bad_command", f"there is no table {command.table[:64]!r}")
    if isinstance(command, Forget) and not (type(command.key) is int and -(2**63) <= command.key < 2**63):
        raise BadEvent("bad_command", "key: wanted an integer of 64 bits, signed")
    if isinstance(command, Resize) and not (
        type(command.capacity) is int and MIN_CAPACITY <= command.capacity <= MAX_CAPACITY
    ):
        raise BadEvent("bad_command", f"capacity: wanted an integer of {MIN_CAPACITY} to {MAX_CAPACITY}")
    return command
