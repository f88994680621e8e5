"""What readers see: the live store's generations, and whether what is learned goes out to them.

    live         every step is published as it is learned
    held         the last good version stays: the guard held a step, or the trainer catches up after a rewind
    rolled_back  a kept checkpoint is served, until released; this outlasts a restart

While held or rolled back nothing is published at all. Going live again is always the same: a new generation with
everything in it, filled beside the old one and made current in one step, so that no request fails and none sees half.
"""

import json
import logging
from pathlib import Path
from typing import Literal

import numpy as np
import numpy.typing as npt

from trainer import durable
from trainer.checkpoint import choosing, path_of
from trainer.errors import ControlRefused, StoreUnavailable
from trainer.live import Writer
from trainer.publish import Publisher, PublishReport, entity_section, layout_for, row_section
from trainer.schema import Table
from trainer.settings import Settings
from trainer.training import Forgotten, Learned, Place, TrainingState

logger = logging.getLogger(__name__)

Mode = Literal["live", "held", "rolled_back"]


class Outlet:
    """The one writer of a live store, generation after generation."""

    def __init__(self, settings: Settings, state: TrainingState, *, after_version: int) -> None:
        """Take the store's directory; nothing is visible before `release` or `roll_back`."""
        self._settings = settings
        self.mode: Mode = "held"
        self.reasons: list[str] = []
        self.serving_checkpoint: int | None = None
        self._watermark_us = 0  # of what readers see
        self._publisher: Publisher | None = None
        layout = layout_for(state.schema, settings.model, settings.store.num_shards)
        self._writer = Writer.create(settings.store_path, layout, after_version=after_version)
        self._is_new = True  # nothing has been published into this generation yet

    @property
    def version(self) -> int:
        """The newest version that was made visible."""
        return self._writer.version

    @property
    def is_live(self) -> bool:
        """Whether steps are published."""
        return self.mode == "live"

    def publish(self, learned: Learned, place: Place) -> PublishReport | None:
        """Make a step visible; None while nothing is shown."""
        if self._publisher is None:
            return None
        report = self._publisher.publish(
            learned.assignment,
            learned.changes,
            learned.touched_pairs,
            step=place.step,
            watermark_us=place.watermark_us,
        )
        if not report.held_dense:
            self._watermark_us = place.watermark_us
        return report

    def remove(self, slots_N: npt.NDArray[np.int64], place: Place) -> None:
        """Stop serving what has been freed (global slots)."""
        if self._publisher is not None and len(slots_N):
            self._publisher.remove(slots_N, step=place.step, watermark_us=place.watermark_us)

    def forget(self, table: Table, key: int, forgotten: Forgotten, place: Place) -> None:
        """Stop serving an id and the records of the entities that it names, also where something older is served."""
        if self._publisher is None:
            self._writer.remove_id(row_section(table), key)
            for entity in forgotten.entities:
                self._writer.remove_id(entity_section(entity), key)
            return
        self.remove(forgotten.slots_N, place)
        if len(forgotten.records.slots_K):
            self._publisher.remove_records(forgotten.records, step=place.step, watermark_us=place.watermark_us)

    def hold(self, reasons: list[str]) -> None:
        """Show nothing more of what is learned; what readers have stays."""
        self._publisher = None
        self.mode, self.reasons = "held", reasons

    def release(self, state: TrainingState) -> int:
        """Show the state as it is now, and every step from here on. Returns the version.

        Raises:
            ControlRefused: no reader could use it.
            StoreUnavailable: there is no room for a second generation; what is served stays.
        """
        if not np.isfinite(state.learner.live_dense()).all():
            raise ControlRefused("not_finite", "the dense weights are not finite: activate a checkpoint, then restart")
        if num_bad := state.tables.num_not_finite():
            raise ControlRefused(
                "not_finite", f"{num_bad} numbers of rows are not finite: activate a checkpoint, then restart"
            )
        publisher = self._fill(state)
        rollback_file(self._settings).unlink(missing_ok=True)
        self._publisher, self.mode, self.reasons, self.serving_checkpoint = publisher, "live", [], None
        return self.version

    def roll_back(self, saved: TrainingState, checkpoint: int) -> int:
        """Show a saved state, and nothing else until released. Returns the version.

        1. a restart would serve it too   2. readers get it

        Raises:
            OSError, CheckpointError: the first could not be written down.
            StoreUnavailable: there is no room for a second generation.
            After either what is served is what was, and so it is after a restart.
        """
        before = rolled_back_to(self._settings)
        remember_rollback(self._settings, checkpoint)  # 1
        try:
            self._fill(saved)  # 2
        except StoreUnavailable:
            if before is None:
                rollback_file(self._settings).unlink()
            else:
                remember_rollback(self._settings, before)
            raise
        self._publisher, self.mode = None, "rolled_back"
        self.reasons, self.serving_checkpoint = [f"rolled back to checkpoint {checkpoint}"], checkpoint
        return self.version

    def heartbeat(self, now_us: int, watermark_us: int) -> None:
        """Say that the trainer lives and, while live, that all events up to the watermark are visible."""
        if self.is_live:
            self._watermark_us = max(self._watermark_us, watermark_us)
        self._writer.heartbeat(now_us, self._watermark_us)

    def close(self) -> None:
        """Stop in good order; readers go on with what they have."""
        self._writer.close()

    def _fill(self, state: TrainingState) -> Publisher:
        """A generation that holds all of a state, made current.

        1. a new generation beside the old one   2. everything is put into it   3. it becomes the current one
        """
        model = self._settings.model
        if not self._is_new:
            self._writer = self._writer.succeed(layout_for(state.schema, model, self._settings.store.num_shards))
        self._is_new = False
        publisher = Publisher(self._writer, state.tables, state.entities, state.learner, model)
        publisher.publish_all(step=state.place.step, watermark_us=state.place.watermark_us)
        self._writer.activate()
        self._watermark_us = state.place.watermark_us
        return publisher


def rollback_file(settings: Settings) -> Path:
    """Where it is kept that a checkpoint is to be served, so that a restart does not undo it."""
    return settings.data_dir / settings.name / "serving.json"


def remember_rollback(settings: Settings, checkpoint: int) -> None:
    """Have a restart serve that checkpoint too, and no save drop it. Raises CheckpointError if it has been dropped."""
    path = rollback_file(settings)
    path.parent.mkdir(parents=True, exist_ok=True)
    with choosing(settings.checkpoint_path):
        path_of(settings.checkpoint_path, checkpoint)
        durable.replace(path, json.dumps({"checkpoint": checkpoint}).encode())


def rolled_back_to(settings: Settings) -> int | None:
    """Number of the checkpoint that is to be served; None: what is being learned."""
    try:
        return int(json.loads(rollback_file(settings).read_text())["checkpoint"])
    except FileNotFoundError:
        return None
    except (ValueError, KeyError, TypeError):
        logger.error("%s cannot be read and is passed over: what is learned is served", rollback_file(settings))
        return None
