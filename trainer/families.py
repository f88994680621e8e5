"""The one registry of metrics: every name, what it means, its unit, labels and buckets.

Never a label by id, user or raw path: each label has a small set of values known in advance.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Final, Literal

Kind = Literal["counter", "gauge", "histogram"]
# Over processes, a gauge is the sum or the largest of the living ones, or what any process set last.
Combine = Literal["sum", "max", "latest"]


@dataclass(frozen=True)
class Family:
    """One metric."""

    name: str
    kind: Kind
    help: str
    labels: tuple[str, ...] = ()
    unit: str = ""
    buckets: tuple[float, ...] = ()
    combine: Combine = "latest"

    @property
    def num_values(self) -> int:
        """How many float64 one series takes on the board."""
        return {"counter": 1, "gauge": 2, "histogram": len(self.buckets) + 2}[self.kind]


# Bounds in seconds. Dense where the goals lie (8, 15, 25 and 50 ms), so that a quantile read from the
# buckets is within a few percent there.
FRESHNESS_S: Final = (
    *(0.0005, 0.00075, 0.001, 0.00125, 0.0015, 0.00175, 0.002, 0.0025, 0.003, 0.0035, 0.004, 0.0045, 0.005),
    *(0.006, 0.007, 0.008, 0.009, 0.01, 0.011, 0.012, 0.0135, 0.015, 0.0165, 0.018, 0.02, 0.0225, 0.025, 0.0275),
    *(0.03, 0.035, 0.04, 0.045, 0.05, 0.06, 0.075, 0.1, 0.15, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0),
)
REQUEST_S: Final = (
    *(0.00025, 0.0005, 0.00075, 0.001, 0.0015, 0.002, 0.003, 0.004, 0.005, 0.0075, 0.01),
    *(0.015, 0.02, 0.03, 0.05, 0.075, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0),
)
STAGE_S: Final = (
    *(0.00001, 0.00002, 0.00005, 0.0001, 0.0002, 0.0005, 0.001, 0.002, 0.005),
    *(0.01, 0.02, 0.05, 0.1, 0.2, 0.5, 1.0),
)
CHECKPOINT_S: Final = (0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0, 60.0, 120.0)


def _seconds(name: str, text: str, buckets: tuple[float, ...], *labels: str) -> Family:
    return Family(name, "histogram", text, labels, unit="seconds", buckets=buckets)


def _counter(name: str, text: str, *labels: str) -> Family:
    return Family(name, "counter", text, labels)


def _gauge(name: str, text: str, *labels: str, unit: str = "", combine: Combine = "latest") -> Family:
    return Family(name, "gauge", text, labels, unit=unit, combine=combine)


_ALL: Final = (
    _seconds(
        "livebed_event_to_visible_seconds", "From an event's acceptance to its effect in the live store.", FRESHNESS_S
    ),
    _gauge(
        "livebed_model_age_seconds",
        "Now minus the newest event in the model that is served.",
        unit="seconds",
        combine="max",
    ),
    _seconds(
        "livebed_request_duration_seconds",
        "From a request's arrival to its answer, by face (http, grpc), route template and status code.",
        REQUEST_S,
        *("face", "route", "code"),
    ),
    _seconds("livebed_queue_wait_seconds", "How long a request waited for its turn.", REQUEST_S),
    _seconds("livebed_stage_duration_seconds", "One stage of a trainer's step, over its batch.", STAGE_S, "stage"),
    _seconds("livebed_checkpoint_duration_seconds", "Writing one checkpoint, until it is on disk.", CHECKPOINT_S),
    _counter("livebed_rejected_requests_total", "Requests refused before any work.", "reason"),
    _counter("livebed_embedding_lookups_total", "Rows looked up, and what was found.", "table", "status"),
    _counter("livebed_events_received_total", "Events that arrived at the service."),
    _counter("livebed_events_accepted_total", "Events written to the log by the service."),
    _counter("livebed_events_duplicate_total", "Events whose event_id was seen within the window."),
    _counter("livebed_events_rejected_total", "Events refused one by one, the rest of their batch kept."),
    _counter("livebed_events_applied_total", "Events that the trainer applied."),
    _counter("livebed_dead_letter_total", "Entries of the log that could not be learned from.", "reason"),
    _counter("livebed_evictions_total", "Rows removed from a table.", "table", "reason"),
    _counter("livebed_guard_held_total", "Rows or whole publishes held back as unsafe.", "reason"),
    _counter("livebed_guard_rewinds_total", "Times that training began again from a checkpoint, without a held step."),
    _counter("livebed_admissions_refused_total", "Sightings of ids that were given no row."),
    _gauge(
        "livebed_publishing_held",
        "1 while readers do not get what is learned: held by the guard, or rolled back.",
        combine="max",
    ),
    _seconds("livebed_checkpoint_pause_seconds", "How long learning stood still for a checkpoint.", STAGE_S),
    _gauge("livebed_table_rows", "Rows in use.", "table"),
    _gauge("livebed_table_bytes", "Memory of a table, its optimizer state included.", "table", unit="bytes"),
    _gauge("livebed_stream_lag_entries", "Entries of the log that the trainer has not applied yet."),
    _gauge("livebed_progressive_logloss", "Logloss of the predictions made before learning, recent."),
    _gauge("livebed_progressive_auc", "AUC of the predictions made before learning, recent."),
    _gauge("livebed_calibration_ratio", "Mean prediction over mean label, recent.", unit="ratio"),
    _gauge("livebed_ready", "1 while a worker answers from the live model.", combine="max"),
    _gauge("livebed_build_info", "Always 1; the label says what runs.", "version"),
)
FAMILIES: Final[Mapping[str, Family]] = {family.name: family for family in _ALL}


def family_of(name: str, kind: Kind, labels: Mapping[str, str]) -> Family:
    """Return a family; ValueError if the name, the kind or the labels are not as declared.

    >>> family_of("livebed_table_rows", "gauge", {"table": "items"}).help
    'Rows in use.'
    """
    family = FAMILIES.get(name)
    if family is None or family.kind != kind:
        raise ValueError(f"no {kind} is called {name}: metrics are declared in trainer/families.py")
    if set(labels) != set(family.labels):
        raise ValueError(f"{name} has the labels {sorted(family.labels)}, got {sorted(labels)}")
    return family
