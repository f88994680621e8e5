"""The live model as the service sees it: attach to the store, look rows up, score candidates.

Legend: B candidates, N ids, C id columns, F id features, A features, D row width.
"""

import time
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from service.errors import ServiceError
from trainer.entities import RecordLayout
from trainer.errors import StoreUnavailable
from trainer.events import Features, Inputs, derive, merge_context
from trainer.live import LEARNED, Reader
from trainer.publish import entity_section, row_section
from trainer.schema import Schema, Table
from trainer.scorer import Scorer
from trainer.settings import Settings

Float32s = npt.NDArray[np.float32]
UInt8s = npt.NDArray[np.uint8]

STATUS_NAMES = ("unknown", "learned", "default")  # by the byte that stands for each


@dataclass(frozen=True)
class Stamp:
    """Which model an answer came from; `watermark_us`: every event accepted before it is in the answer (0: none yet)."""

    version: int
    watermark_us: int
    age_ms: float | None


@dataclass(frozen=True)
class Candidates:
    """What to score: inputs of B rows, inputs of one row that hold for all of them, and the time to score for."""

    inputs: Inputs
    context: Inputs | None
    time_ms: int


@dataclass(frozen=True)
class Scores:
    """Probabilities of B candidates; `unknown`: rows with ids that the model has no row for, and their features.

    `gather_s` and `model_s`: how long inputs and entity state, and the net took.
    """

    probabilities_B: Float32s
    unknown: list[tuple[int, list[str]]]
    stamp: Stamp
    gather_s: float
    model_s: float


@dataclass(frozen=True)
class Rows:
    """Looked-up rows; `status_N` indexes STATUS_NAMES. The row of an id that is not learned is the table's default."""

    table: Table
    vectors_ND: Float32s
    status_N: UInt8s
    stamp: Stamp


class LiveModel:
    """Reads one live store. Every call first moves to the newest generation; nothing here waits or writes."""

    def __init__(self, settings: Settings, schema: Schema) -> None:
        self.settings = settings
        self.schema = schema
        self.supported = settings.model.family == "ctr"
        self._records = RecordLayout(schema)
        self._entity_sections = [entity_section(entity) for entity in schema.entities]
        self._reader = Reader(settings.store_path, schema_hash=schema.layout_hash)
        self._scorer: Scorer | None = None
        self._unknown_names: dict[bytes, list[str]] = {}

    @property
    def attached(self) -> bool:
        """Whether there is a store to answer from."""
        return self._scorer is not None

    def attach(self) -> None:
        """Map the store if it is there now. Raises StoreUnavailable or SchemaMismatch: try again later."""
        self._reader.attach(0)
        self._scorer = Scorer(self.schema, self.settings.model, self._reader)

    def stamp(self) -> Stamp:
        """The version that an answer made now comes from."""
        self._ready()
        return self._stamp()
