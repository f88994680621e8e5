"""Progressive metrics against scikit-learn and worlds whose answer is known."""

import math

import numpy as np
import pytest
from numpy.typing import NDArray
from sklearn.metrics import log_loss, roc_auc_score

from trainer.metrics import Progressive, exact_auc, summary

Floats = NDArray[np.float64]


def clicks(
    num: int, *, spread: float = 1.0, bias: float = -1.5, seed: int = 0
) -> tuple[NDArray[np.float32], NDArray[np.float32]]:
    """Labels drawn from their own logits: calibrated by construction."""
    rng = np.random.default_rng(seed)
    logits = (bias + spread * rng.standard_normal(num)).astype(np.float32)
    return (rng.random(num) < probabilities(logits)).astype(np.float32), logits


def probabilities(logits: NDArray[np.float32]) -> Floats:
    return np.clip(1.0 / (1.0 + np.exp(-logits.astype(np.float64))), 1e-6, 1 - 1e-6)


@pytest.mark.parametrize(("spread", "bias"), [(1.0, -1.5), (0.01, 0.0), (0.02, -3.0), (6.0, 2.0)])
def test_binned_auc_is_within_a_thousandth_of_the_exact_one(spread: float, bias: float) -> None:
    labels, logits = clicks(20_000, spread=spread, bias=bias)
    logits += (0.5 * spread * labels).astype(np.float32)
    progressive = Progressive()
    progressive.update(labels, logits)
    assert progressive.total().auc == pytest.approx(roc_auc_score(labels, logits), abs=1e-3)


def test_totals_agree_with_scikit_learn_whatever_the_batches() -> None:
    labels, logits = clicks(9_001)
    progressive = Progressive()
    for begin, end in [(0, 1), (1, 2), (2, 5_000), (5_000, 5_000), (5_000, 9_001)]:
        progressive.update(labels[begin:end], logits[begin:end])
    total = progressive.total()
    assert total.count == 9_001
    assert total.logloss == pytest.approx(log_loss(labels, probabilities(logits)), rel=1e-9)
    assert total.calibration_ratio == pytest.approx(
        probabilities(logits).mean() / labels.mean(dtype=np.float64), rel=1e-9
    )


def test_a_calibrated_model_has_a_ratio_of_one_and_a_doubled_one_of_two() -> None:
    labels, logits = clicks(200_000, bias=-4.0, spread=0.5)
    calibrated, doubled = Progressive(), Progressive()
    calibrated.update(labels, logits)
    doubled.update(labels, np.log(2 * probabilities(logits) / (1 - 2 * probabilities(logits))))
    assert calibrated.total().calibration_ratio == pytest.approx(1.0, abs=0.03)
    assert doubled.total().calibration_ratio == pytest.approx(2 * calibrated.total().calibration_ratio, rel=1e-6)


def test_the_recent_view_is_exact_and_forgets() -> None:
    labels, logits = clicks(25_000)
    progressive = Progressive(window=1_000)
    for begin in range(0, 25_000, 137):
        progressive.update(labels[begin : begin + 137], logits[begin : begin + 137])
    recent = progressive.recent()
    assert recent.count == 1_000
    assert recent.auc == pytest.approx(roc_auc_score(labels[-1_000:], logits[-1_000:]), abs=1e-12)
    assert recent.logloss == pytest.approx(log_loss(labels[-1_000:], probabilities(logits[-1_000:])), rel=1e-9)


def test_events_without_a_label_and_nonfinite_predictions_are_left_out() -> None:
    labels, logits = clicks(100)
    progressive, clean = Progressive(), Progressive()
    clean.update(labels, logits)
    progressive.update(np.append(labels, [np.nan, 1.0, 0.0]), np.append(logits, [9.0, np.nan, np.inf]))
    assert progressive.total() == clean.total()
    assert progressive.recent() == clean.recent()
    assert progressive.num_nonfinite == 2


def test_one_class_alone_has_no_auc_and_nothing_has_no_numbers() -> None:
    progressive = Progressive()
    assert progressive.total().count == 0 and math.isnan(progressive.total().logloss)
    progressive.update([0.0, 0.0], [1.0, 2.0])
    assert math.isnan(progressive.total().auc) and math.isnan(progressive.recent().calibration_ratio)


def test_a_restored_state_continues_as_if_nothing_had_happened() -> None:
    labels, logits = clicks(12_345)
    straight, interrupted, restored = Progressive(), Progressive(), Progressive()
    straight.update(labels, logits)
    interrupted.update(labels[:7_001], logits[:7_001])
    restored.load_state(interrupted.state())
    restored.update(labels[7_001:], logits[7_001:])
    assert restored.total().auc == straight.total().auc
    assert restored.total() == straight.total()
    assert restored.recent() == straight.recent()


@pytest.mark.parametrize("seed", range(4))
def test_totals_are_the_same_bits_wherever_events_are_cut_and_whenever_they_are_looked_at(seed: int) -> None:
    rng = np.random.default_rng(seed)
    labels, logits = clicks(20_000, spread=4.0, seed=seed)
    straight, cut = Progressive(), Progressive()
    straight.update(labels, logits)
    for part in np.split(np.arange(20_000), np.sort(rng.integers(0, 20_000, 2_000))):
        cut.update(labels[part], logits[part])
        if rng.random() < 0.2:
            (cut.recent, cut.total, cut.state)[rng.integers(3)]()
        if rng.random() < 0.01:
            state, cut = cut.state(), Progressive()
            cut.load_state(state)
    assert cut.total() == straight.total()
    for name, array in straight.state().items():
        np.testing.assert_array_equal(cut.state()[name], array, name)


def test_sums_go_on_beyond_what_64_bits_hold() -> None:
    labels, logits = clicks(1_000)
    long, restored = Progressive(), Progressive()
    long.update(labels, logits)
    once = long.total()
    state = long.state()
    state["counts"] = state["counts"].astype(np.int64) * 10**9
    state["fixed_sums"][:] = [
        divmod(((high << 32) + low) * 10**9, 1 << 32) for high, low in state["fixed_sums"].tolist()
    ]
    restored.load_state(state)
    assert restored.total().count == 10**12
    assert restored.total().logloss == pytest.approx(once.logloss, rel=1e-12)
    again = Progressive()
    again.load_state(restored.state())
    assert again.total() == restored.total()


def test_state_of_an_earlier_version_with_float_sums_is_read() -> None:
    labels, logits = clicks(5_000)
    now, earlier = Progressive(), Progressive()
    now.update(labels, logits)
    state = now.state()
    del state["fixed_sums"]
    p = probabilities(logits)
    earlier.load_state(state | {"sums": np.array([log_loss(labels, p) * 5_000, p.sum()])})
    assert earlier.total().logloss == pytest.approx(now.total().logloss, rel=1e-9)
    assert earlier.total().calibration_ratio == pytest.approx(now.total().calibration_ratio, rel=1e-9)


def test_exact_auc_counts_ties_half() -> None:
    rng = np.random.default_rng(3)
    labels, scores = rng.integers(0, 2, 500), rng.integers(0, 20, 500)
    assert exact_auc(labels, scores) == pytest.approx(roc_auc_score(labels, scores), abs=1e-12)


def test_summary_of_a_log_agrees_with_its_definition() -> None:
    labels, logits = clicks(5_001, spread=3.0)
    logits[:3] = [40.0, -40.0, 20.0]
    result, p, half = summary(labels, logits), probabilities(logits), 2_500
    positives_before = np.concatenate(([0.0], np.cumsum(labels)[:-1]))
    base_logloss = log_loss(labels, (positives_before + 1) / (np.arange(5_001) + 2))
    assert result.n == 5_001
    assert result.rate == pytest.approx(labels.mean(dtype=np.float64))
    assert result.auc == pytest.approx(roc_auc_score(labels, p), abs=1e-9)
    assert result.logloss == pytest.approx(log_loss(labels, p), rel=1e-9)
    assert result.base_logloss == pytest.approx(base_logloss, rel=1e-9)
    assert result.ne == pytest.approx(log_loss(labels, p) / base_logloss, rel=1e-9)
    assert result.calibration == pytest.approx(p.mean() / labels.mean(dtype=np.float64), rel=1e-9)
    assert result.auc_2nd_half == pytest.approx(roc_auc_score(labels[half:], p[half:]), abs=1e-9)
    assert result.logloss_2nd_half == pytest.approx(log_loss(labels[half:], p[half:]), rel=1e-9)


def test_predicting_the_running_base_rate_has_a_normalised_entropy_of_one() -> None:
    labels, _ = clicks(2_000)
    positives_before = np.concatenate(([0.0], np.cumsum(labels.astype(np.float64))[:-1]))
    rate = (positives_before + 1) / (np.arange(2_000) + 2)
    assert summary(labels, np.log(rate / (1 - rate))).ne == pytest.approx(1.0, rel=1e-9)


def test_vectors_of_different_lengths_are_refused() -> None:
    with pytest.raises(ValueError, match="wanted two vectors of one length"):
        Progressive().update([1.0], [0.0, 1.0])
