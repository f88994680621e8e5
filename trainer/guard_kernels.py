"""The guard's kernels: they look at every number that a step changed, and judge its predictions event by event.

Sums are of integers (fixed point), so that they neither drift in a stream without end nor depend on where steps were
cut. What `scan_events` writes is provisional: it notes what it overwrites, and `take_back` restores it.

Legend: G all slots, T tables, K slots touched, N events of a step, W and V events of the loss and calibration windows,
R windows remembered, P pairs touched.
"""
# ruff: noqa: PLR0917, PLR1730 -- numba unpacks no objects; a `max` in place of an `if` is not made into vector code.

from typing import Any

import numpy as np
import numpy.typing as npt
from numba.core import types
from numba.experimental import structref

from trainer.index import Int64s
from trainer.kernel import kernel
from trainer.live_atomics import address_of, prefetch
from trainer.probe import EMPTY, REMOVED

Float32s = npt.NDArray[np.float32]
Float64s = npt.NDArray[np.float64]
UInt32s = npt.NDArray[np.uint32]

MAGNITUDE = np.uint32(0x7FFFFFFF)  # all but the sign: as integers, magnitudes of floats are in their order
INFINITY = np.uint32(0x7F800000)  # this and above are infinities and NaNs
AHEAD = 16  # rows asked for in advance
LINE_BYTES = 64

MAX_LOGIT = 13.8155  # of a probability of 1e-6, as in the progressive metrics: one event costs at most this
LOSS_UNIT = 2.0**27  # fixed point beside the label's bit in 32 bits: a loss is below 16,
PREDICTION_UNIT = 2.0**30  # and a prediction at most 1
REMEMBERED = 64  # windows whose median is the estimate
MIN_WINDOWS = 8  # no loss is judged before so many have been accepted: a new model knows nothing yet
SMOOTHING = 8.0  # events added to both sides of the calibration ratio: with rare labels few may come by chance

# Places in `totals_6`.
NUM_EVENTS, LOSSES, LOSS_POSITIVES, PREDICTIONS, CALIBRATION_POSITIVES, NUM_WINDOWS = range(6)
# Places in `found_8`: how many, or which event of the step (-1: none), and which of the touched slots.
BAD_ROWS, BAD_ROW, LONG_ROWS, LONGEST_ROW, BAD_PREDICTIONS, SPIKE_AT, DRIFT_AT, NUM_SEEN = range(8)
# Places in `measured_4`: norm of the longest row, loss over entropy at the spike, what is usual, calibration ratio.
NORM, SPIKE, USUAL, DRIFT = range(4)


@structref.register
class WatchedType(types.StructRef):
    """numba's type of `Watched`."""

    def preprocess_fields(self, fields: Any) -> Any:
        """No field's type may depend on a value."""
        return tuple((name, types.unliteral(kind)) for name, kind in fields)  # type: ignore[no-untyped-call] # numba


class Watched(structref.StructRefProxy):
    """All arrays that stay the same from step to step, as one argument: 0.2 us less a call for each of them."""


FIELDS = (
    "keys", "weights", "moments", "accumulators", "wide_z", "wide_n", "layout_T3", "suspect_T", "losses_W",
    "predictions_V", "ratios_R", "totals_6", "before_R", "before_6", "found_8", "measured_4",
)  # fmt: skip
structref.define_proxy(Watched, WatchedType, list(FIELDS))  # type: ignore[no-untyped-call] # numba's


@kernel
def make_watched(
    keys: Int64s,
    weights: UInt32s,
    moments: UInt32s,
    accumulators: UInt32s,
    wide_z: UInt32s,
    wide_n: UInt32s,
    layout_T3: Int64s,
    suspect_T: UInt32s,
    losses_W: UInt32s,
    predictions_V: UInt32s,
    ratios_R: Float64s,
    totals_6: Int64s,
    before_R: Float64s,
    before_6: Int64s,
    found_8: Int64s,
    measured_4: Float64s,
) -> Watched:
    """Box the arrays; it keeps them alive. Floats of the tables come as bits.

    `layout_T3`: slot base, row base, width. `suspect_T`: a row without an element of this magnitude is not too long.
    """
    return Watched(
        keys, weights, moments, accumulators, wide_z, wide_n, layout_T3, suspect_T, losses_W, predictions_V, ratios_R,
        totals_6, before_R, before_6, found_8, measured_4,
    )  # type: ignore[no-untyped-call] # numba's  # fmt: skip


@kernel
def largest_magnitude(bits: UInt32s) -> np.uint32:
    """The largest magnitude of floats, as bits.

    Written so that it becomes vector code (0.14 ns a float): `max` of two in its place takes twice as long.
    """
    largest = np.uint32(0)
    for k in range(bits.shape[0]):
        magnitude = np.uint32(bits[k] & MAGNITUDE)
        if magnitude > largest:
            largest = magnitude
    return largest


@kernel
def largest_of(bits: UInt32s, places_P: Int64s) -> np.uint32:
    """The largest magnitude of the floats at some places, as bits."""
    largest = np.uint32(0)
    for i in range(places_P.shape[0]):
        largest = max(largest, bits[places_P[i]] & MAGNITUDE)
    return largest


@kernel
def scan_step(
    watched: Any,
    touched_K: Int64s,
    touched_table_K: Int64s,
    labels_N: Float32s,
    logits_N: Float32s,
    overwritten_2N: UInt32s,
    max_row_norm: float,
    max_loss_ratio: float,
    max_calibration_ratio: float,
) -> bool:
    """Look at a step; limits may be infinite. Fills `found_8` and `measured_4`; true if there is anything in them."""
    found_8 = watched.found_8
    found_8[:] = 0
    found_8[SPIKE_AT] = found_8[DRIFT_AT] = -1
    watched.measured_4[:] = 0
    scan_rows(watched, touched_K, touched_table_K, max_row_norm)
    scan_events(watched, labels_N, logits_N, overwritten_2N, max_loss_ratio, max_calibration_ratio)
    problems = found_8[BAD_ROWS] + found_8[LONG_ROWS] + found_8[BAD_PREDICTIONS]
    return bool(problems > 0 or found_8[SPIKE_AT] >= 0 or found_8[DRIFT_AT] >= 0)


@kernel
def scan_rows(  # noqa: PLR0912 -- one pass over memory, and each array may be missing
    watched: Any, touched_K: Int64s, touched_table_K: Int64s, max_row_norm: float
) -> None:
    """Find touched slots with a number that is not finite, and rows that are too long.

    A row's norm is only worked out where its largest element allows it to be past the limit.
    """
    weights, moments, keys = watched.weights, watched.moments, watched.keys
    accumulators, wide_z, wide_n = watched.accumulators, watched.wide_z, watched.wide_n
    layout_T3, suspect_T = watched.layout_T3, watched.suspect_T
    found_8, measured_4 = watched.found_8, watched.measured_4
    weights_at, keys_at, accumulators_at = address_of(weights), address_of(keys), address_of(accumulators)
    has_accumulators, has_wide, has_moments = len(accumulators) > 0, len(wide_z) > 0, len(moments) > 0
    for i in range(touched_K.shape[0]):
        if i + AHEAD < touched_K.shape[0]:
            ahead, t = touched_K[i + AHEAD], touched_table_K[i + AHEAD]
            width = layout_T3[t, 2]
            row_at = weights_at + 4 * (layout_T3[t, 1] + (ahead - layout_T3[t, 0]) * width)
            for at in range(row_at, row_at + 4 * width, LINE_BYTES):
                prefetch(at)
            prefetch(keys_at + 8 * ahead)
            if has_accumulators:
                prefetch(accumulators_at + 4 * ahead)
        slot, t = touched_K[i], touched_table_K[i]
        if keys[slot] == EMPTY or keys[slot] == REMOVED:
            continue
        width = layout_T3[t, 2]
        start = layout_T3[t, 1] + (slot - layout_T3[t, 0]) * width
        largest, beside = np.uint32(0), np.uint32(0)
        for k in range(start, start + width):
            magnitude = np.uint32(weights[k] & MAGNITUDE)
            if magnitude > largest:
                largest = magnitude
        if has_accumulators:
            beside = np.uint32(accumulators[slot] & MAGNITUDE)
        if has_wide:
            beside = np.uint32(max(beside, np.uint32(wide_z[slot] & MAGNITUDE), np.uint32(wide_n[slot] & MAGNITUDE)))
        if has_moments:
            for k in range(start, start + width):
                magnitude = np.uint32(moments[k] & MAGNITUDE)
                if magnitude > beside:
                    beside = magnitude
        if largest >= INFINITY or beside >= INFINITY:
            if found_8[BAD_ROWS] == 0:
                found_8[BAD_ROW] = i
            found_8[BAD_ROWS] += 1
        elif largest >= suspect_T[t]:
            norm = norm_of(weights[start : start + width].view(np.float32))
            found_8[LONG_ROWS] += norm > max_row_norm
            if norm > measured_4[NORM]:
                measured_4[NORM], found_8[LONGEST_ROW] = norm, i


@kernel
def norm_of(row_D: Float32s) -> float:
    """Length of a row, in double precision so that no square overflows."""
    total = 0.0
    for k in range(row_D.shape[0]):
        total += float(row_D[k]) ** 2
    return float(np.sqrt(total))


@kernel
def scan_events(
    watched: Any,
    labels_N: Float32s,
    logits_N: Float32s,
    overwritten_2N: UInt32s,
    max_loss_ratio: float,
    max_calibration_ratio: float,
) -> None:
    """Take the events into both windows, one by one, and judge after each; those without a label are passed over.

    Loss: the window's mean over the entropy of its own label rate (1: as good as a constant that knew the rate),
    against what that usually is, or 1 if that is more. The entropy is what makes rare labels and a drifting rate no
    alarm. Calibration is first judged a whole window after the first one, which holds a new model's beginning.
    """
    losses_W, predictions_V, totals_6 = watched.losses_W, watched.predictions_V, watched.totals_6
    ratios_R, found_8, measured_4 = watched.ratios_R, watched.found_8, watched.measured_4
    watched.before_6[:] = totals_6
    watched.before_R[:] = ratios_R
    W, V = losses_W.shape[0], predictions_V.shape[0]
    for i in range(labels_N.shape[0]):
        if np.isnan(labels_N[i]):
            continue
        logit, positive = float(logits_N[i]), int(labels_N[i] > 0.5)
        if not np.isfinite(logit):
            found_8[BAD_PREDICTIONS] += 1
            logit = -MAX_LOGIT if positive else MAX_LOGIT  # as wrong as can be
        loss, prediction = loss_and_prediction(min(max(logit, -MAX_LOGIT), MAX_LOGIT), positive)
        at_W, at_V = totals_6[NUM_EVENTS] % W, totals_6[NUM_EVENTS] % V
        old_loss, old_prediction = int(losses_W[at_W]), int(predictions_V[at_V])
        overwritten_2N[0, found_8[NUM_SEEN]], overwritten_2N[1, found_8[NUM_SEEN]] = old_loss, old_prediction
        losses_W[at_W], predictions_V[at_V] = loss * 2 + positive, prediction * 2 + positive
        totals_6[LOSSES] += loss - (old_loss >> 1)
        totals_6[LOSS_POSITIVES] += positive - (old_loss & 1)
        totals_6[PREDICTIONS] += prediction - (old_prediction >> 1)
        totals_6[CALIBRATION_POSITIVES] += positive - (old_prediction & 1)
        totals_6[NUM_EVENTS] += 1
        found_8[NUM_SEEN] += 1
        if totals_6[NUM_EVENTS] >= 2 * V and found_8[DRIFT_AT] < 0:
            predicted = totals_6[PREDICTIONS] / PREDICTION_UNIT + SMOOTHING
            drift = predicted / (totals_6[CALIBRATION_POSITIVES] + SMOOTHING)
            if drift > max_calibration_ratio or drift * max_calibration_ratio < 1:
                found_8[DRIFT_AT], measured_4[DRIFT] = i, drift
        if totals_6[NUM_EVENTS] < W:
            continue
        spike = totals_6[LOSSES] / LOSS_UNIT / (W * entropy((totals_6[LOSS_POSITIVES] + 1) / (W + 2)))
        usual = ratios_R[REMEMBERED]
        if totals_6[NUM_WINDOWS] >= MIN_WINDOWS and spike > max_loss_ratio * max(usual, 1.0) and found_8[SPIKE_AT] < 0:
            found_8[SPIKE_AT], measured_4[SPIKE], measured_4[USUAL] = i, spike, usual
        if totals_6[NUM_EVENTS] % W == 0:
            ratios_R[totals_6[NUM_WINDOWS] % REMEMBERED] = spike
            totals_6[NUM_WINDOWS] += 1
            ratios_R[REMEMBERED] = median_of(ratios_R[: min(totals_6[NUM_WINDOWS], REMEMBERED)])


@kernel
def take_back(watched: Any, overwritten_2N: UInt32s) -> None:
    """Undo the last `scan_events`: a held step is never part of what is usual."""
    losses_W, predictions_V, totals_6 = watched.losses_W, watched.predictions_V, watched.totals_6
    W, V, first = losses_W.shape[0], predictions_V.shape[0], watched.before_6[NUM_EVENTS]
    for back in range(totals_6[NUM_EVENTS] - first):
        k = totals_6[NUM_EVENTS] - first - 1 - back  # the newest first: in a long step an event may overwrite another
        losses_W[(first + k) % W], predictions_V[(first + k) % V] = overwritten_2N[0, k], overwritten_2N[1, k]
    totals_6[:] = watched.before_6
    watched.ratios_R[:] = watched.before_R


@kernel
def loss_and_prediction(logit: float, positive: int) -> tuple[int, int]:
    """-log p(label) and p(1), in fixed point."""
    small = np.exp(-abs(logit))
    loss = np.log1p(small) + max(logit, 0.0) - logit * positive
    prediction = (1.0 if logit >= 0 else small) / (1.0 + small)
    return int(loss * LOSS_UNIT + 0.5), int(prediction * PREDICTION_UNIT + 0.5)


@kernel
def entropy(rate: float) -> float:
    """Mean loss of a constant that knew the rate; strictly between 0 and 1."""
    return float(-rate * np.log(rate) - (1 - rate) * np.log1p(-rate))


@kernel
def median_of(values_R: Float64s) -> float:
    """The lower median."""
    return float(np.sort(values_R)[(values_R.shape[0] - 1) // 2])
