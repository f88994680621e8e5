"""The live model as the service sees it: attach to the store, look rows up, score candidates.

Legend: B candidates, N ids, C id columns, F id features, A features, D row width.
"""

import importlib
import time
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from service.changes import Changes
from service.errors import ServiceError
from trainer.entities import RecordLayout
from trainer.errors import SchemaMismatch, SettingsError, StoreUnavailable, UnsupportedByEventEngine
from trainer.events import Features, Inputs, derive, merge_context
from trainer.hashing import MISSING_ID
from trainer.live import LEARNED, UNKNOWN, Reader, ShardView, StoreState
from trainer.probe import EMPTY
from trainer.publish import entity_section, missing_status, row_section
from trainer.schema import Schema, Table
from trainer.scorer import Scorer
from trainer.settings import ModelSettings, Settings

Float32s = npt.NDArray[np.float32]
UInt8s = npt.NDArray[np.uint8]

MAX_COMBINATIONS = (
    4096  # of unknown features whose names are kept: what a request's answer is made of, at most so often
)
STATUS_NAMES = ("unknown", "learned", "default")  # by the byte that stands for each


@dataclass(frozen=True)
class Stamp:
    """Which model an answer came from; every event accepted before `watermark_us` is in it (0: none yet)."""

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

    def best(self, top_k: int | None) -> npt.NDArray[np.int64]:
        """Indices of the best candidates (None: of all), best first; of equals the earlier one."""
        return np.argsort(-self.probabilities_B, kind="stable")[:top_k]


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
        self._records = RecordLayout(schema)
        self._entity_sections = [entity_section(entity) for entity in schema.entities]
        self._reader = Reader(settings.store_path, schema_hash=schema.layout_hash)
        self._scorer: Scorer | None = None
        self._unknown_names: dict[bytes, list[str]] = {}

    def prepare(self) -> None:
        """Take up what scores the configured family; for one that needs torch some seconds. Raises SettingsError."""
        self._scorer = build_scorer(self.schema, self.settings.model, self._reader)

    def attach(self) -> None:
        """Map the store if it is there now. Raises StoreUnavailable or SchemaMismatch: try again later."""
        self._reader.attach(0)

    def stamp(self) -> Stamp:
        """The version that an answer made now comes from."""
        self._ready()
        return self._stamp()

    def stamp_if_any(self) -> Stamp | None:
        """The same; None where there is no model."""
        try:
            return self.stamp()
        except (StoreUnavailable, SchemaMismatch):
            return None

    def state(self) -> StoreState:
        """Everything the store says of itself."""
        self._ready()
        return self._reader.state()

    def table(self, name: str) -> Table:
        """The table of that name. Raises ServiceError("unknown_table")."""
        table = self.schema.table(name)
        if table is None:
            known = ", ".join(table.name for table in self.schema.tables)
            raise ServiceError("unknown_table", f"there is no table {name[:64]!r}; tables: {known}")
        return table

    def lookup(self, table: Table, ids_N: npt.NDArray[np.int64]) -> Rows:
        """Rows of hashed ids."""
        self._ready()
        stamp = self._stamp()
        words_NW, status_N = self._reader.gather(row_section(table), ids_N)
        missing = missing_status(table)
        if missing != UNKNOWN:
            status_N[status_N != LEARNED] = missing
        vectors_ND = words_NW[:, : table.width].view(np.float32)  # the last word is the id's wide weight
        return Rows(table, np.ascontiguousarray(vectors_ND), status_N, stamp)

    def shards(self, table: Table) -> tuple[Stamp, list[ShardView], int]:
        """For kernels that read a table by slot: the version they will see, the files, and the section's place in them.

        The files stay mapped, and readable, while they are referred to.
        """
        self._ready()
        stamp, names = self._stamp(), [section.name for section in self._reader.layout.sections]
        return stamp, self._reader.shards, names.index(row_section(table))

    @property
    def reader(self) -> Reader:
        """The store's reader. Other threads may ask it for `state` and `shards`; `refresh` belongs to this one."""
        return self._reader

    def capacity(self, table: Table) -> int:
        """Slots that a table has in the store, over all shards; it may have been resized since it was configured."""
        self._ready()
        layout = self._reader.layout
        section = next(one for one in layout.sections if one.name == row_section(table))
        return section.capacity * layout.num_shards

    def changes(self, table: Table) -> Changes:
        """What changes in a table from now on; copies 12 bytes a slot, so rather in a thread."""
        return Changes(self._reader, row_section(table))

    def seen(self, table: Table, key: int) -> tuple[int, int] | None:
        """When a hashed id was last seen (s since 1970) and how often; None where there is no row."""
        return self._reader.peek(row_section(table), key)

    def score(self, candidates: Candidates) -> Scores:
        """Probabilities of candidates; nothing is learned or created."""
        self._ready()
        if self._scorer is None:
            raise StoreUnavailable("the model is still being loaded")
        stamp, began_s = self._stamp(), time.perf_counter()
        features = self.features(candidates)
        gathered_s = time.perf_counter()
        scored = self._scorer.score(features)
        unknown = self._unknown(features, scored.status_BC)
        done_s = time.perf_counter()
        return Scores(scored.probabilities_B, unknown, stamp, gathered_s - began_s, done_s - gathered_s)

    def features(self, candidates: Candidates) -> Features:
        """What the net sees: a candidate's values win over the context's, both over what is known of its entities."""
        count = candidates.inputs.count
        features = derive(self.schema, candidates.inputs, np.full(count, candidates.time_ms, np.int64))
        if candidates.context is not None:
            time_1 = np.full(1, candidates.time_ms, np.int64)
            merge_context(self.schema, features, derive(self.schema, candidates.context, time_1))
        for entity, section in enumerate(self._entity_sections):
            records_BW, known_B = self._reader.gather(section, self._records.keys_of(features, entity))
            self._records.fill(features, entity, records_BW, known_B)
        return features

    def canary(self) -> str:
        """Look up and score what every model has: a row of missing values. Raises what a request would meet."""
        rows = self.lookup(self.schema.tables[0], np.array([MISSING_ID]))
        score = float(self.score(Candidates(Inputs(1, {}), None, 0)).probabilities_B[0])
        if not 0.0 <= score <= 1.0:  # false for NaN too
            raise ServiceError("not_ready", f"the model scores a row of missing values as {score}")
        return f"version {rows.stamp.version}, a row of missing values scores {score:.4f}"

    def _ready(self) -> None:
        """Move to the newest generation. Raises StoreUnavailable or SchemaMismatch."""
        self._reader.refresh()

    def _stamp(self) -> Stamp:
        """To be taken before any row is read, so that an answer holds what its stamp promises, or more."""
        state = self._reader.state()
        age_ms = None
        if state.watermark_us:
            age_ms = max(0.0, (time.time_ns() // 1000 - state.watermark_us) / 1000)
        return Stamp(state.version, state.watermark_us, age_ms)

    def _unknown(self, features: Features, status_BC: UInt8s) -> list[tuple[int, list[str]]]:
        """Rows with ids that are not learned, and the names of those features; one list per combination, shared."""
        if status_BC.all():  # UNKNOWN is 0
            return []
        missing_BC = (status_BC != LEARNED) & (features.ids_BC != EMPTY) & (features.ids_BC != MISSING_ID)
        if not missing_BC.any():
            return []
        missing_BF = np.logical_or.reduceat(missing_BC, self.schema.feature_column_F, axis=1)
        packed_BK = np.packbits(missing_BF, axis=1)
        return [
            (index, self._names(packed_BK[index].tobytes())) for index in np.flatnonzero(missing_BF.any(1)).tolist()
        ]

    def _names(self, packed: bytes) -> list[str]:
        names = self._unknown_names.get(packed)
        if names is None:
            if len(self._unknown_names) >= MAX_COMBINATIONS:
                self._unknown_names.clear()
            bits_F = np.unpackbits(np.frombuffer(packed, np.uint8), count=len(self.schema.id_features))
            names = [f.name for f, bit in zip(self.schema.id_features, bits_F.tolist(), strict=True) if bit]
            self._unknown_names[packed] = names
        return names


def build_scorer(schema: Schema, model: ModelSettings, reader: Reader) -> Scorer:
    """The event engine's forward pass where its kernels know the family, else torch's, which is imported only then.

    Raises:
        SettingsError: the family needs torch, and there is none.
    """
    try:
        return Scorer(schema, model, reader)
    except UnsupportedByEventEngine:
        try:
            torch_scorer = importlib.import_module("service.torch_scorer")
        except ImportError as error:
            wanted = f"ctr, or an installation of torch that works ({error})"
            raise SettingsError("model.family", got=model.family, wanted=wanted) from error
        scorer: Scorer = torch_scorer.TorchScorer(schema, model, reader)
        return scorer
