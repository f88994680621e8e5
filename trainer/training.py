"""Everything that learning changes, as one thing: what a checkpoint holds and a rewind puts back.

No log, no live store, no clock: from the same state, the same portions make the same state, bit for bit. That is what
`loop` (live), `replay` (from a log) and every recovery test stand on.
"""

import logging
import time
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cached_property

import numpy as np
import numpy.typing as npt

from trainer.commands import Forget, Resize
from trainer.dedup import Dedup
from trainer.dense import LearnerState
from trainer.engines import Engine, build_engine
from trainer.entities import Entities, EntityChanges
from trainer.events import EventBatch
from trainer.guard import Finding, Guard
from trainer.metrics import Progressive
from trainer.schema import Entity, Schema, check_memory
from trainer.settings import Settings
from trainer.snapshot import Progress, Snapshot, capture, restore, saved_capacities
from trainer.stream import START
from trainer.tables import Assignment, Tables

logger = logging.getLogger(__name__)

US = 1_000_000


@dataclass(frozen=True)
class Place:
    """Where in the log the state stands."""

    entry_id: str = START  # newest log entry applied
    step: int = 0  # examples learned
    watermark_us: int = 0  # every event acknowledged before this is in the state
    num_read: int | None = 0  # entries ever added to the log up to entry_id, None if not known


@dataclass(frozen=True)
class Learned:
    """What one batch did: predictions made before learning, slots touched, and how long index and learning took."""

    batch: EventBatch
    examples_B: npt.NDArray[np.bool_]
    logits_B: npt.NDArray[np.float32]
    assignment: Assignment
    changes: EntityChanges
    touched_pairs: npt.NDArray[np.int64]
    num_duplicates: int
    index_s: float
    learn_s: float

    @property
    def labels_N(self) -> npt.NDArray[np.float32]:
        """Labels of the examples."""
        return self.batch.labels_B[self.examples_B]

    @property
    def logits_N(self) -> npt.NDArray[np.float32]:
        """Predictions of the examples."""
        return self.logits_B[self.examples_B]


@dataclass(frozen=True)
class Forgotten:
    """What `forget` freed: global slots of the tables, and the entity records' slots with their entities.

    `entities`: all whose ids are the table's.
    """

    slots_N: npt.NDArray[np.int64]
    records: EntityChanges
    entities: tuple[Entity, ...]


class TrainingState:
    """The state of one trainer. `learn` and the commands change it, `capture` copies it, nothing else does.

    >>> from trainer.settings import Settings
    >>> settings = Settings.model_validate({"tables": {"user": {}}, "features": {"user": {"kind": "categorical"}}})
    >>> TrainingState(settings).place.step
    0
    """

    def __init__(self, settings: Settings, capacities: dict[str, int] | None = None) -> None:
        """The state before the first event. `capacities`: slots of tables that have been resized since.

        Raises:
            SettingsError, UnsupportedByEventEngine: the configuration cannot be learned.
        """
        self.settings = settings
        self.schema = Schema.from_settings(settings).with_capacities(capacities or {})
        self.tables = Tables(self.schema, settings.model)
        self.entities = Entities(self.schema)
        self.learner = LearnerState.initial(self.schema, settings.model)
        self.metrics = Progressive()
        self.dedup = Dedup(settings.stream.dedup_window)
        self.guard = Guard(settings.guard, self.tables, self.learner)
        self.place = Place()

    @cached_property
    def engine(self) -> Engine:
        """What learns, in place on tables and dense weights; made when first used, for torch's takes seconds."""
        return build_engine(self.settings, self.schema, self.tables, self.learner)

    @classmethod
    def from_snapshot(cls, settings: Settings, snapshot: Snapshot | None) -> tuple["TrainingState", list[str]]:
        """The state that was saved (None: the first one), and what of it could not be kept, in sentences.

        A table that was resized while it ran keeps that size, unless the configuration has been changed since.

        Raises:
            SchemaMismatch: a table has another width than the saved one.
        """
        if snapshot is None:
            return cls(settings), []
        configured = {table.name: table.capacity for table in Schema.from_settings(settings).tables}
        saved = saved_capacities(snapshot)
        resized = {name: now for name, (now, then) in saved.items() if configured.get(name) == then}
        state = cls(settings, resized)
        notes = restore(snapshot, state.tables, state.entities, state.learner, settings.model)
        groups = snapshot.tensors
        state.metrics.load_state(groups["metrics"])
        if "dedup" in groups:
            state.dedup.load(groups["dedup"])
        if "guard" in groups:
            state.guard.load(groups["guard"])
        progress = snapshot.progress
        state.place = Place(progress.position, progress.step, progress.watermark_us, progress.num_read)
        return state, notes

    def learn(self, batch: EventBatch) -> Learned:
        """Drop what was sent twice, fill in entity state, predict, learn."""
        fresh_B = self.dedup.fresh(batch.event_key_B)
        num_duplicates = len(batch) - int(np.count_nonzero(fresh_B))
        if num_duplicates:
            batch = batch.only(fresh_B)
        started_s = time.perf_counter()
        changes = self.entities.apply(batch)
        examples_B = batch.entity_B < 0
        now_s = int(batch.accepted_us_B[-1]) // US if len(batch) else 0
        assignment = self.tables.assign(batch.features, examples_B, now_s)
        indexed_s = time.perf_counter()
        logits_B = self.engine.learn(assignment.slots_BC, batch.features, batch.labels_B)
        done_s = time.perf_counter()
        return Learned(
            batch=batch,
            examples_B=examples_B,
            logits_B=logits_B,
            assignment=assignment,
            changes=changes,
            touched_pairs=self.engine.touched_pairs,
            num_duplicates=num_duplicates,
            index_s=indexed_s - started_s,
            learn_s=done_s - indexed_s,
        )

    def judge(self, learned: Learned) -> list[Finding]:
        """Why what was learned must not be shown; nothing if it may, and then it counts."""
        findings = self.guard.check(
            learned.assignment,
            learned.labels_N,
            learned.logits_N,
            max_gradient_norm=self.engine.max_gradient_norm,
            touched_pairs=learned.touched_pairs,
        )
        if not findings:
            self.guard.accept()
        return findings

    def count(self, learned: Learned) -> None:
        """Take a batch into place and metrics, once it is settled."""
        self.metrics.update(learned.labels_N, learned.logits_N)
        watermark_us = int(learned.batch.accepted_us_B.max(initial=0))
        self.place = replace(
            self.place,
            step=self.place.step + int(np.count_nonzero(learned.examples_B)),
            watermark_us=max(self.place.watermark_us, watermark_us),
        )

    def saw_quiet(self, read_us: int) -> None:
        """Nothing had come by then: all that was acknowledged before is in the state."""
        self.place = replace(self.place, watermark_us=max(self.place.watermark_us, read_us))

    def moved_to(self, entry_id: str, num_read: int | None) -> None:
        """Everything up to this log entry is in the state."""
        self.place = replace(self.place, entry_id=entry_id, num_read=num_read)

    def expire(self, now_s: int, max_slots: int) -> npt.NDArray[np.int64]:
        """Free what has outlived its table's TTL, among the next slots of the sweep; the global slots freed."""
        return self.tables.expire(now_s, max_slots)

    def forget(self, command: Forget) -> Forgotten:
        """Take out one id: its row and all that is kept beside it, and the records of the entities it names."""
        table = self.schema.table(command.table)
        assert table is not None  # noqa: S101 -- `commands.decode` has looked
        key_1 = np.array([command.key], np.int64)
        slots_N = self.tables.remove(table.index, key_1)
        slots: list[int] = []
        entities: list[int] = []
        named = tuple(e for e in self.schema.entities if self._table_of_key(e.key_feature) == table.index)
        for entity in named:
            for slot in self.entities.remove(entity.index, key_1).tolist():
                slots.append(slot)
                entities.append(entity.index)
        return Forgotten(slots_N, EntityChanges(np.array(slots, np.int64), np.array(entities, np.int64)), named)

    def resize(self, command: Resize) -> int:
        """Give a table another capacity; all arrays are new ones afterwards. Returns how many ids had no room.

        Raises:
            SettingsError: the table's budget or this machine's memory does not pay for it; nothing has changed.
        """
        table = self.schema.table(command.table)
        assert table is not None  # noqa: S101 -- `commands.decode` has looked
        check_memory(self.schema.with_capacities({table.name: command.capacity}), f"tables.{table.name}.capacity")
        self.tables, num_dropped = self.tables.resized(table.index, command.capacity)
        self.schema = self.tables.schema
        self.__dict__.pop("engine", None)  # it works on the old arrays
        usual = self.guard.arrays
        self.guard = Guard(self.settings.guard, self.tables, self.learner)
        self.guard.load(usual)
        return num_dropped

    def capture(self, *, version: int) -> Snapshot:
        """A copy of it all; `version` of the live store."""
        place = self.place
        progress = Progress(place.step, place.entry_id, version, place.watermark_us, place.num_read)
        groups = {"metrics": self.metrics.state(), "dedup": self.dedup.arrays, "guard": self.guard.arrays}
        return capture(self.tables, self.entities, self.learner, self.settings, progress=progress, groups=groups)

    def _table_of_key(self, feature: int) -> int:
        return int(self.schema.feature_table_F[self.schema.features[feature].id_index])


def describe(findings: Sequence[Finding]) -> str:
    """Findings in one line."""
    return "; ".join(f"{finding.reason}: {finding.detail}" for finding in findings)
