"""How good the predictions were that were made before learning (progressive validation).

`Progressive` runs along with the learner in bounded memory: totals from a histogram of logits, and the
most recent events exactly. `summary` judges a whole log at once. Probabilities are clipped to
[1e-6, 1 - 1e-6] in both, so that one sure mistake costs 13.8 nats and not infinity.

N: events. Labels are 0 or 1; an event whose label is NaN has none and is left out.
"""

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Final

import numpy as np
from numpy.typing import ArrayLike, NDArray

Floats = NDArray[np.float64]

CLIP: Final = 1e-6
MAX_LOGIT: Final = math.log((1.0 - CLIP) / CLIP)
# Equal bins over [-MAX_LOGIT, MAX_LOGIT], 0.0017 wide. Within a bin, logits count as ties, which is an
# error of second order in the width over the spread: 4,096 bins would do unless all logits lie close.
NUM_BINS: Final = 16_384
WINDOW: Final = 10_000
# Sums are of whole numbers of 2^-32, the same bits however the events were grouped: adding floats is not associative.
# An event is rounded by at most 1.2e-10.
FIXED_BITS: Final = 32
# Updates are gathered and counted together: numpy costs as much for one event as for hundreds.
PENDING: Final = 4_096


@dataclass(frozen=True)
class Quality:
    """Of some events: their number, AUC, logloss, and mean prediction over mean label (NaN if undefined)."""

    count: int
    auc: float
    logloss: float
    calibration_ratio: float


@dataclass(frozen=True)
class Summary:
    """Of a whole log, in order. `ne` is logloss over that of the running base rate; 2nd half without warm-up."""

    n: int
    rate: float
    auc: float
    logloss: float
    base_logloss: float
    ne: float
    calibration: float
    auc_2nd_half: float
    logloss_2nd_half: float


class Progressive:
    """Running quality of a stream of predictions, in total and over the last `window` events.

    >>> progressive = Progressive()
    >>> progressive.update([1, 0, 1, 0], [2.0, -1.0, 0.5, 0.75])
    >>> progressive.total().auc
    0.75
    """

    def __init__(self, *, window: int = WINDOW) -> None:
        """Begin with nothing seen."""
        # Events with label 0 and 1 in each bin of logits.
        self._counts_2K = np.zeros((2, NUM_BINS), dtype=np.int64)
        # Sums over all events, in units of 2^-32: logloss, prediction.
        self._sums_2 = [0, 0]
        # The most recent events, as a ring: the next one goes to num_seen % window.
        self._recent_labels_W = np.zeros(window, dtype=np.float32)
        self._recent_logits_W = np.zeros(window, dtype=np.float32)
        self._num_seen = 0
        # Predictions that were NaN or infinite: counted, and left out of everything else.
        self._num_nonfinite = 0
        self._pending_2P = np.empty((2, PENDING), dtype=np.float32)
        self._num_pending = 0

    def update(self, labels_N: ArrayLike, logits_N: ArrayLike) -> None:
        """Take in events with the logits that were predicted before they were learned (about 2 us a call)."""
        labels = np.asarray(labels_N, dtype=np.float32)
        logits = np.asarray(logits_N, dtype=np.float32)
        if labels.shape != logits.shape or labels.ndim != 1:
            raise ValueError(f"got labels {labels.shape} and logits {logits.shape}, wanted two vectors of one length")
        begin = 0
        while begin < len(labels):
            taken = min(PENDING - self._num_pending, len(labels) - begin)
            place = slice(self._num_pending, self._num_pending + taken)
            self._pending_2P[0, place] = labels[begin : begin + taken]
            self._pending_2P[1, place] = logits[begin : begin + taken]
            self._num_pending += taken
            begin += taken
            if self._num_pending == PENDING:
                self._count_pending()

    def total(self) -> Quality:
        """Judge all events; the AUC is binned, within 0.001 of the exact one."""
        self._count_pending()
        negatives_K, positives_K = self._counts_2K
        count, num_positives = int(self._counts_2K.sum()), int(positives_K.sum())
        logloss, prediction = (total / (1 << FIXED_BITS) for total in self._sums_2)
        return Quality(
            count=count,
            auc=_auc_of_ranks(negatives_K, positives_K),
            logloss=logloss / count if count else math.nan,
            calibration_ratio=prediction / num_positives if num_positives else math.nan,
        )

    def recent(self) -> Quality:
        """Judge the last `window` events, exactly (about 1 ms for 10,000)."""
        self._count_pending()
        count = min(self._num_seen, len(self._recent_labels_W))
        if count == 0:
            return Quality(count=0, auc=math.nan, logloss=math.nan, calibration_ratio=math.nan)
        labels, logits = _pair(self._recent_labels_W[:count], self._recent_logits_W[:count])
        return Quality(
            count=count,
            auc=exact_auc(labels, logits),
            logloss=float(_losses(labels, logits).mean()),
            calibration_ratio=_calibration(labels, logits),
        )

    @property
    def num_nonfinite(self) -> int:
        """How many predictions were NaN or infinite; they are in no other number."""
        self._count_pending()
        return self._num_nonfinite

    def state(self) -> dict[str, NDArray[np.generic]]:
        """Return everything as arrays, for a checkpoint."""
        self._count_pending()
        return {
            "counts": self._counts_2K.copy(),
            # Each as its high part and its low 32 bits: 64 would overflow after 130 million events.
            "fixed_sums": np.array([divmod(total, 1 << FIXED_BITS) for total in self._sums_2], dtype=np.int64),
            "recent_labels": self._recent_labels_W.copy(),
            "recent_logits": self._recent_logits_W.copy(),
            "seen": np.array([self._num_seen, self._num_nonfinite], dtype=np.int64),
        }

    def load_state(self, state: Mapping[str, NDArray[np.generic]]) -> None:
        """Continue from a checkpoint's arrays; the window's length comes from there."""
        if state["counts"].shape != self._counts_2K.shape:
            raise ValueError(f"got metrics with {state['counts'].shape} bins, wanted {self._counts_2K.shape}")
        self._counts_2K = state["counts"].astype(np.int64)
        if "fixed_sums" in state:
            self._sums_2 = [(high << FIXED_BITS) + low for high, low in state["fixed_sums"].tolist()]
        else:  # as floats, which earlier versions summed
            self._sums_2 = [round(total * (1 << FIXED_BITS)) for total in state["sums"].tolist()]
        self._recent_labels_W = state["recent_labels"].astype(np.float32)
        self._recent_logits_W = state["recent_logits"].astype(np.float32)
        self._num_seen, self._num_nonfinite = (int(value) for value in state["seen"].astype(np.int64))
        self._num_pending = 0

    def _count_pending(self) -> None:
        """Move what is gathered into the totals and the ring."""
        labels, logits = self._pending_2P[:, : self._num_pending]
        self._num_pending = 0
        has_label = ~np.isnan(labels)
        usable = has_label & np.isfinite(logits)
        self._num_nonfinite += int(has_label.sum() - usable.sum())
        if not usable.any():
            return
        labels, logits = labels[usable], logits[usable]
        self._remember(labels, logits)
        labels_N, logits_N = _pair(labels, logits)
        bins_N = ((logits_N + MAX_LOGIT) * (NUM_BINS / (2.0 * MAX_LOGIT))).astype(np.int64).clip(0, NUM_BINS - 1)
        bins_N += NUM_BINS * (labels_N > 0.5)
        self._counts_2K += np.bincount(bins_N, minlength=2 * NUM_BINS).reshape(2, NUM_BINS)
        for which, values_N in enumerate((_losses(labels_N, logits_N), _probabilities(logits_N))):
            self._sums_2[which] += int(np.rint(values_N * (1 << FIXED_BITS)).astype(np.int64).sum())

    def _remember(self, labels: NDArray[np.float32], logits: NDArray[np.float32]) -> None:
        window = len(self._recent_labels_W)
        places = np.arange(self._num_seen, self._num_seen + len(labels))[-window:] % window
        self._recent_labels_W[places] = labels[-window:]
        self._recent_logits_W[places] = logits[-window:]
        self._num_seen += len(labels)


def exact_auc(labels_N: ArrayLike, logits_N: ArrayLike) -> float:
    """Return the area under the ROC curve, ties counted half; NaN unless both classes occur.

    >>> exact_auc([0, 1, 0, 1], [0.1, 0.1, 0.0, 0.9])
    0.875
    """
    labels, logits = np.asarray(labels_N), np.asarray(logits_N)
    distinct, ranks_N = np.unique(logits, return_inverse=True)
    positives_K = np.bincount(ranks_N[labels > 0.5], minlength=len(distinct))
    negatives_K = np.bincount(ranks_N[labels <= 0.5], minlength=len(distinct))
    return _auc_of_ranks(negatives_K, positives_K)


def event_losses(labels_N: ArrayLike, logits_N: ArrayLike) -> Floats:
    """Log-loss of each prediction."""
    return _losses(*_pair(np.asarray(labels_N, np.float64), np.asarray(logits_N, np.float64)))


def summary(labels_N: ArrayLike, logits_N: ArrayLike) -> Summary:
    """Judge the predictions for a whole log, given in its order.

    The base rate that `ne` compares with is running too: Laplace's (positives + 1) / (events + 2) before
    each event (He et al. 2014, "Practical lessons from predicting clicks on ads").
    """
    labels, logits = np.asarray(labels_N, dtype=np.float64), np.asarray(logits_N, dtype=np.float64)
    has_label = ~np.isnan(labels)
    labels, logits = _pair(labels[has_label], logits[has_label])
    if len(labels) == 0:
        raise ValueError("got no labelled event, wanted one at least")
    half = len(labels) // 2
    losses = _losses(labels, logits)
    num_positives_before = np.cumsum(labels) - labels
    base = np.clip((num_positives_before + 1.0) / (np.arange(len(labels)) + 2.0), CLIP, 1.0 - CLIP)
    base_losses = -np.where(labels > 0.5, np.log(base), np.log1p(-base))
    return Summary(
        n=len(labels),
        rate=float(labels.mean()),
        auc=exact_auc(labels, logits),
        logloss=float(losses.mean()),
        base_logloss=float(base_losses.mean()),
        ne=float(losses.mean() / base_losses.mean()),
        calibration=_calibration(labels, logits),
        auc_2nd_half=exact_auc(labels[half:], logits[half:]),
        logloss_2nd_half=float(losses[half:].mean()),
    )


def _pair(labels: NDArray[np.floating], logits: NDArray[np.floating]) -> tuple[Floats, Floats]:
    """Return both in double precision, the logits clipped."""
    return labels.astype(np.float64), logits.astype(np.float64).clip(-MAX_LOGIT, MAX_LOGIT)


def _probabilities(logits: Floats) -> Floats:
    probabilities: Floats = 1.0 / (1.0 + np.exp(-logits))
    return probabilities


def _losses(labels: Floats, logits: Floats) -> Floats:
    """Return -log p(label), from clipped logits."""
    losses: Floats = np.log1p(np.exp(logits)) - labels * logits
    return losses


def _calibration(labels: Floats, logits: Floats) -> float:
    num_positives = float(labels.sum())
    return float(_probabilities(logits).sum()) / num_positives if num_positives else math.nan


def _auc_of_ranks(negatives_K: NDArray[np.int64], positives_K: NDArray[np.int64]) -> float:
    """Return the AUC from the counts of each class at each of K scores, ascending."""
    num_pairs = float(negatives_K.sum()) * float(positives_K.sum())
    if num_pairs == 0.0:
        return math.nan
    below_K = np.cumsum(negatives_K) - negatives_K
    return float((positives_K * (below_K + 0.5 * negatives_K)).sum()) / num_pairs
