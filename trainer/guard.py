"""The guard looks at what a step did before readers may see it, and says what is wrong with it.

Rules, and from where they come (`settings.GuardSettings` holds the limits):

    not finite      dense weights and their optimizer's state, touched rows with theirs, hashed pairs, predictions
    norm            of a touched row; of the largest gradient of a row
    loss            mean loss of the last `loss_window` events over the entropy of their label rate, against the median
                    of that over the windows accepted before, or 1 if that is more: as good as a constant
    calibration     mean prediction of the last `calibration_window` events over their mean label

What is usual is learned from accepted steps alone, event by event, so that where batches were cut changes nothing.

Legend: N labelled events of a step, K touched slots, W and V events of the windows, R windows remembered.
"""

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Literal, get_args

import numpy as np
import numpy.typing as npt

from trainer import guard_kernels as kernels
from trainer.dense import LearnerState
from trainer.index import Int64s
from trainer.schema import Schema
from trainer.settings import GuardSettings, Settings
from trainer.tables import Assignment, Ids, Tables

Float32s = npt.NDArray[np.float32]

Reason = Literal[
    "dense_not_finite",
    "row_not_finite",
    "pair_not_finite",
    "prediction_not_finite",
    "row_norm",
    "gradient_norm",
    "loss_spike",
    "calibration",
]
REASONS: tuple[Reason, ...] = get_args(Reason)  # a small fixed set: they label a metric

NO_SLOTS = np.empty(0, np.int64)


@dataclass(frozen=True)
class Finding:
    """Why a step must not be shown. `detail`: what was got, where, and the limit; it names ids by their hash."""

    reason: Reason
    detail: str


class Guard:
    """Checks each step of one trainer on the memory of `tables` and `learner`; changes neither.

    Usage: `check` after learning; if it finds nothing, publish and `accept`. A step that was not accepted before the
    next `check` leaves no trace.
    """

    def __init__(self, settings: GuardSettings, tables: Tables, learner: LearnerState) -> None:
        self._settings, self._tables = settings, tables
        self._dense_bits = {name: _bits(array) for name, array in learner.arrays.items() if array.dtype == np.float32}
        self._offset_4 = learner.offset
        self._pair_bits = (_bits(learner.pair_z), _bits(learner.pair_n))
        self._losses_W = np.zeros(settings.loss_window, np.uint32)
        self._predictions_V = np.zeros(settings.calibration_window, np.uint32)
        self._ratios_R = np.zeros(kernels.REMEMBERED + 1)  # the last one is the median of the others
        self._totals_6 = np.zeros(6, np.int64)
        self._found_8, self._measured_4 = np.zeros(8, np.int64), np.zeros(4)
        self._max_row_norm = _limit(settings.max_row_norm)
        self._max_loss_ratio = _limit(settings.max_loss_ratio)
        self._max_calibration_ratio = _limit(settings.max_calibration_ratio)
        self._watched = kernels.make_watched(
            tables.keys, _bits(tables.weights), _bits(tables.moments), _bits(tables.accumulators),
            _bits(tables.wide_z), _bits(tables.wide_n), _layout(tables), self._suspect(), self._losses_W,
            self._predictions_V, self._ratios_R, self._totals_6, self._ratios_R.copy(), self._totals_6.copy(),
            self._found_8, self._measured_4,
        )  # fmt: skip
        self._overwritten_2N = np.empty((2, 256), np.uint32)
        self._is_provisional = False  # whether the windows hold a step that has not been accepted

    def check(
        self,
        assignment: Assignment,
        labels_N: Float32s,
        logits_N: Float32s,
        *,
        max_gradient_norm: float,
        touched_pairs: Int64s = NO_SLOTS,
    ) -> list[Finding]:
        """What is wrong with a step, at most one finding for each reason; empty if it may be shown.

        labels_N, logits_N: of the step's events, in order, as predicted before they were learned; NaN labels are
        passed over. max_gradient_norm: of any row in this step, before clipping.
        """
        self._forget_held()
        if len(labels_N) > self._overwritten_2N.shape[1]:
            self._overwritten_2N = np.empty((2, 2 * len(labels_N)), np.uint32)
        findings = self._check_dense(touched_pairs)
        self._is_provisional = True
        has_found = kernels.scan_step(
            self._watched, assignment.touched_K, assignment.touched_table_K, labels_N, logits_N, self._overwritten_2N,
            self._max_row_norm, self._max_loss_ratio, self._max_calibration_ratio,
        )  # fmt: skip
        if has_found:
            findings += self._row_findings(assignment) + self._event_findings(len(labels_N))
        limit = self._settings.max_gradient_norm
        if limit is not None and not max_gradient_norm <= limit:
            findings.append(Finding("gradient_norm", f"got {max_gradient_norm:.4g} in one row, limit {limit:g}"))
        return findings

    def accept(self) -> None:
        """Make the step that was checked last part of what is usual."""
        self._is_provisional = False

    @property
    def arrays(self) -> dict[str, npt.NDArray[Any]]:
        """What is usual, without a step that has not been accepted: copies, for a checkpoint."""
        self._forget_held()
        return {name: array.copy() for name, array in self._state.items()}

    def load(self, arrays: Mapping[str, npt.NDArray[Any]]) -> None:
        """Go on from what `arrays` gave; under other window lengths (or with nothing) the estimates begin anew."""
        self._is_provisional = False
        is_same = all(name in arrays and arrays[name].shape == array.shape for name, array in self._state.items())
        for name, array in self._state.items():
            array[:] = arrays[name] if is_same else 0

    @property
    def _state(self) -> dict[str, npt.NDArray[Any]]:
        return {
            "losses": self._losses_W,
            "predictions": self._predictions_V,
            "ratios": self._ratios_R,
            "totals": self._totals_6,
        }

    def _forget_held(self) -> None:
        if self._is_provisional:
            kernels.take_back(self._watched, self._overwritten_2N)
            self._is_provisional = False

    def _suspect(self) -> npt.NDArray[np.uint32]:
        """Of each table the magnitude that one element of a row at the norm's limit has at least, as bits."""
        with np.errstate(over="ignore"):  # a limit beyond float32 is none
            return _bits((self._max_row_norm / np.sqrt(self._tables.width_T)).astype(np.float32))

    def _check_dense(self, touched_pairs: Int64s) -> list[Finding]:
        findings = []
        bad = [name for name, bits in self._dense_bits.items() if kernels.largest_magnitude(bits) >= kernels.INFINITY]
        if not all(map(math.isfinite, self._offset_4.tolist())):
            bad.append("offset")
        if bad:
            findings.append(Finding("dense_not_finite", f"a number that is not finite in {' and '.join(bad)}"))
        if len(touched_pairs) and any(
            kernels.largest_of(bits, touched_pairs) >= kernels.INFINITY for bits in self._pair_bits
        ):
            findings.append(Finding("pair_not_finite", "a number that is not finite in the hashed pairs of this step"))
        return findings

    def _row_findings(self, assignment: Assignment) -> list[Finding]:
        found, findings = self._found_8.tolist(), []
        if count := found[kernels.BAD_ROWS]:
            where = self._where(assignment, found[kernels.BAD_ROW])
            detail = f"{where}: a number that is not finite in the row or its optimizer's state ({count} such rows)"
            findings.append(Finding("row_not_finite", detail))
        if count := found[kernels.LONG_ROWS]:
            where, norm = self._where(assignment, found[kernels.LONGEST_ROW]), self._measured_4[kernels.NORM]
            detail = f"{where}: got a row of norm {norm:.4g}, limit {self._max_row_norm:g} ({count} such rows)"
            findings.append(Finding("row_norm", detail))
        return findings

    def _event_findings(self, num_events: int) -> list[Finding]:
        found, findings, settings = self._found_8.tolist(), [], self._settings
        _, spike, usual, drift = self._measured_4.tolist()
        if count := found[kernels.BAD_PREDICTIONS]:
            findings.append(Finding("prediction_not_finite", f"{count} of {num_events} predictions are not finite"))
        if found[kernels.SPIKE_AT] >= 0:
            detail = (
                f"the last {settings.loss_window} events cost {spike:.3g} times what a constant would, "
                f"usually {usual:.3g}; limit {settings.max_loss_ratio:g} times the larger of that and 1"
            )
            findings.append(Finding("loss_spike", detail))
        if found[kernels.DRIFT_AT] >= 0:
            detail = (
                f"mean prediction over mean label of the last {settings.calibration_window} events is {drift:.3g}, "
                f"limit {settings.max_calibration_ratio:g} and its inverse"
            )
            findings.append(Finding("calibration", detail))
        return findings

    def _where(self, assignment: Assignment, place: int) -> str:
        table = self._tables.schema.tables[int(assignment.touched_table_K[place])]
        return f"table {table.name}, id {self._tables.keys[assignment.touched_K[place]]}"


def _bits(floats: Float32s) -> npt.NDArray[np.uint32]:
    return floats.view(np.uint32)


def _limit(limit: float | None) -> float:
    return math.inf if limit is None else limit


def _layout(tables: Tables) -> Int64s:
    return np.stack([tables.slot_base_T, tables.weight_base_T, tables.width_T], axis=1)


def warm() -> None:
    """Compile the kernels."""
    settings = Settings.model_validate({"tables": {"a": {"capacity": 64}}, "features": {"a": {"kind": "categorical"}}})
    schema = Schema.from_settings(settings)
    tables, learner = Tables(schema, settings.model), LearnerState.initial(schema, settings.model)
    guard = Guard(settings.guard, tables, learner)
    one = np.ones(1, np.float32)
    assignment = tables.assign(Ids(np.zeros((1, 1), np.int64)), None, 0)
    guard.check(assignment, one, one, max_gradient_norm=0)
    kernels.largest_of(_bits(one), np.zeros(1, np.int64))
    guard.load(guard.arrays)  # takes the step back
