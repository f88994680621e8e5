"""Which engine learns: the event engine wherever its kernels know the model, else torchrec's."""

from typing import Protocol

import numpy as np
import numpy.typing as npt

from trainer.dense import LearnerState
from trainer.engine_event import EventEngine
from trainer.errors import SettingsError, UnsupportedByEventEngine
from trainer.events import Features
from trainer.schema import Schema
from trainer.settings import Settings
from trainer.tables import Tables

Float32s = npt.NDArray[np.float32]
Int64s = npt.NDArray[np.int64]


class Engine(Protocol):
    """What learns. It works in place on the memory of the tables and the state that it was built on."""

    name: str

    def learn(self, slots_BC: Int64s, features: Features, labels_B: Float32s, *, micro_batch: int = ...) -> Float32s:
        """Predict and learn; returns the logits made before learning, NaN where the label is NaN.

        micro_batch: examples to one update. Default: 1 on the event engine, the whole batch on torchrec's.
        """

    def predict(self, slots_BC: Int64s, features: Features) -> Float32s:
        """Logits of B rows; changes nothing."""

    @property
    def max_gradient_norm(self) -> float:
        """Length of the longest gradient of a row in the last `learn`."""

    @property
    def touched_pairs(self) -> Int64s:
        """Slots of the hashed pairs that the last `learn` changed."""


def build_engine(settings: Settings, schema: Schema, tables: Tables, state: LearnerState) -> Engine:
    """The engine that the settings ask for; torch is imported only if that is torchrec's.

    Raises:
        UnsupportedByEventEngine: `engine: event`, and its kernels do not know the model.
        SettingsError: the torchrec engine is needed and cannot run, by its field.
    """
    if settings.engine != "torchrec":
        try:
            return EventEngine(schema, settings.model, tables, state)
        except UnsupportedByEventEngine:
            if settings.engine == "event":
                raise
    try:
        from trainer.engine_torchrec import TorchrecEngine  # noqa: PLC0415 - 5 s and 330 MiB, and may be absent
    except ImportError as error:
        wanted = f"an installation of torchrec that works ({error}); see requirements/install.sh"
        raise SettingsError("engine", got=settings.engine, wanted=wanted) from error
    return TorchrecEngine(schema, settings.model, tables, state)
