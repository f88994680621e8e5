"""What a table costs in bytes, all in all, and how many rows a budget pays for.

    training   a row's floats (twice with Adam: its first moments), and SLOT_BYTES beside them, the index included;
               the wide part's two floats, if there is one
    sketch     of count admission
    publishing the list of slots that readers have not seen yet
    live copy  records and tags in shared memory, whole pages

Counted exactly, page ends included, so that a budget is not passed by a byte. A resize and the start of a new
generation hold the old and the new copy for as long as they take; that is on top.
"""

from dataclasses import dataclass
from pathlib import Path

from trainer.errors import SettingsError
from trainer.live_layout import Section, section_bytes
from trainer.settings import AdmissionSettings, Settings, TableSettings
from trainer.sketch import LINE

SLOT_BYTES = 8 + 4 + 4 + 4 + 4  # key, stamp, last seen, count, the optimizer's one float
WIDE_BYTES = 4 + 4  # FTRL's z and n
PUBLISH_BYTES = 1 + 8  # a mark and a place in the list
FEWEST_ROWS, MOST_ROWS = 64, 2**31 - 1
SLOTS_A_LINE = 8  # of a sketch that is not sized by hand: 8 bytes a slot


@dataclass(frozen=True)
class Costs:
    """What the settings make every row of a model cost besides its own table's."""

    wide: bool
    moments: bool  # some table has Adam: they lie beside the rows of all tables
    num_shards: int

    @classmethod
    def of(cls, settings: Settings) -> "Costs":
        """As configured."""
        moments = any(table.optimizer.kind == "adam" for table in settings.tables.values())
        return cls(settings.model.wide, moments, settings.store.num_shards)


def sketch_lines(admission: AdmissionSettings, capacity: int) -> int:
    """Lines of a table's sketch; 0 without count admission."""
    if admission.kind != "count":
        return 0
    if admission.sketch_bytes is not None:
        return int(admission.sketch_bytes) // LINE
    return -(-capacity // SLOTS_A_LINE)


def training_bytes(spec: TableSettings, capacity: int, costs: Costs) -> int:
    """Rows, optimizer state, index and sketch, as the trainer allocates them."""
    row = 4 * spec.width * (1 + costs.moments) + SLOT_BYTES + WIDE_BYTES * costs.wide
    lines = sketch_lines(spec.admission, capacity)
    return capacity * row + LINE * (lines + (lines > 0))  # one line more, to align it


def live_bytes(spec: TableSettings, capacity: int, costs: Costs) -> int:
    """The table's sections in the live store, over all shards."""
    section = Section("", "rows", -(-capacity // costs.num_shards), spec.width + 1)
    return costs.num_shards * section_bytes(section)


def table_bytes(spec: TableSettings, capacity: int, costs: Costs) -> int:
    """Everything that a table of this capacity takes at once."""
    return training_bytes(spec, capacity, costs) + PUBLISH_BYTES * capacity + live_bytes(spec, capacity, costs)


def capacity_for(name: str, spec: TableSettings, costs: Costs) -> int:
    """The most rows that a table's `budget_bytes` pays for. Raises SettingsError if that is no table."""
    budget = int(spec.budget_bytes or 0)
    fits, too_many = FEWEST_ROWS - 1, MOST_ROWS + 1
    while too_many - fits > 1:  # the cost only rises with the capacity
        middle = (fits + too_many) // 2
        if table_bytes(spec, middle, costs) <= budget:
            fits = middle
        else:
            too_many = middle
    if fits < FEWEST_ROWS:
        wanted = f"at least the {table_bytes(spec, FEWEST_ROWS, costs)} bytes of {FEWEST_ROWS} rows"
        raise SettingsError(f"tables.{name}.budget_bytes", got=budget, wanted=wanted)
    return fits


def check_capacity(name: str, spec: TableSettings, capacity: int, costs: Costs) -> None:
    """Raise SettingsError if a table may not have this capacity."""
    if not FEWEST_ROWS <= capacity <= MOST_ROWS:
        raise SettingsError(f"tables.{name}.capacity", got=capacity, wanted=f"{FEWEST_ROWS} to 2^31 - 1 rows")
    if spec.budget_bytes is not None and table_bytes(spec, capacity, costs) > spec.budget_bytes:
        most = capacity_for(name, spec, costs)
        wanted = f"at most the {most} rows that its budget of {int(spec.budget_bytes)} bytes pays for"
        raise SettingsError(f"tables.{name}.capacity", got=capacity, wanted=wanted)


def available_bytes() -> int | None:
    """Memory that this machine can still give away; None where it does not say."""
    try:
        lines = Path("/proc/meminfo").read_text().splitlines()
    except OSError:
        return None
    return next((1024 * int(line.split()[1]) for line in lines if line.startswith("MemAvailable:")), None)
