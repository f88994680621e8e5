"""Update rules, as inlined kernels: of rows, of dense weights, and FTRL-proximal of the wide ones.

    rows    adagrad (row-wise; accumulators may decay down to a floor, `decay_accumulators`), sgd, adam (row-wise)
    dense   adagrad and sgd within the backward pass; adam, adamw and clipping in one pass over summed gradients

A weight with no gradient in an event needs no work under Adagrad and SGD, which is what lets the event engine skip dead
ReLU units and untouched rows. Adam of a row counts no steps: both its moments start from the row's first gradient, in
place of a correction for their start at zero, so that a row needs no counter and one that is reset starts anew.

Sources: Adagrad as torch.optim.Adagrad without decay (`a += g^2; w -= lr * g / (sqrt(a) + eps)`); row-wise
Adagrad as fbgemm's EXACT_ROWWISE_ADAGRAD (one accumulator a row, of the mean of g^2); row-wise Adam after fbgemm's
PARTIAL_ROWWISE_ADAM; Adam and AdamW as torch.optim's; FTRL-proximal from McMahan et al., "Ad Click Prediction: a View
from the Trenches" (KDD 2013), algorithm 1.

Numbers are float32; sums are reordered (fastmath), so results agree with the textbook to about 1e-6.
"""
# ruff: noqa: PLR0917 -- kernels take arrays and numbers one by one: numba unpacks no objects.

import numpy as np
import numpy.typing as npt

from trainer.kernel import kernel_hot

Float32s = npt.NDArray[np.float32]
Float64s = npt.NDArray[np.float64]

SGD, ADAGRAD, ACCUMULATE = 0, 1, 2  # ACCUMULATE only sums gradients: `state` is then the gradient vector
ADAM, ADAMW, CLIPPED_ADAGRAD = 3, 4, 5
ZERO, ONE = np.float32(0), np.float32(1)


@kernel_hot
def dense_step(
    rule: int, weights: Float32s, state: Float32s, scale: np.float32, x: Float32s, lr: np.float32, eps: np.float32
) -> None:
    """Apply the gradient scale * x to a vector of weights."""
    if rule == ADAGRAD:
        for k in range(weights.shape[0]):
            g = scale * x[k]
            a = state[k] + g * g
            state[k] = a
            weights[k] -= lr * g / (np.sqrt(a) + eps)
    elif rule == ACCUMULATE:
        for k in range(weights.shape[0]):
            state[k] += scale * x[k]
    else:
        step = lr * scale
        for k in range(weights.shape[0]):
            weights[k] -= step * x[k]


@kernel_hot
def dense_step_through(
    rule: int,
    weights: Float32s,
    state: Float32s,
    scale: np.float32,
    x: Float32s,
    dx: Float32s,
    lr: np.float32,
    eps: np.float32,
) -> None:
    """The same, and first dx += scale * (old weights): backward and update in one pass over the memory."""
    if rule == ADAGRAD:
        for k in range(weights.shape[0]):
            w = weights[k]
            dx[k] += scale * w
            g = scale * x[k]
            a = state[k] + g * g
            state[k] = a
            weights[k] = w - lr * g / (np.sqrt(a) + eps)
    elif rule == ACCUMULATE:
        for k in range(weights.shape[0]):
            dx[k] += scale * weights[k]
            state[k] += scale * x[k]
    else:
        step = lr * scale
        for k in range(weights.shape[0]):
            w = weights[k]
            dx[k] += scale * w
            weights[k] = w - step * x[k]


@kernel_hot
def squares_of(gradient: Float32s) -> np.float32:
    """Squared length of a gradient."""
    squares = ZERO
    for k in range(gradient.shape[0]):
        squares += gradient[k] * gradient[k]
    return squares


@kernel_hot
def row_step(
    row: Float32s, accumulators: Float32s, slot: int, gradient: Float32s, lr: np.float32, eps: np.float32
) -> np.float32:
    """Row-wise Adagrad of one embedding row, whose accumulator is at `slot`; the gradient's squared length."""
    squares = ZERO
    for k in range(row.shape[0]):
        squares += gradient[k] * gradient[k]
    a = accumulators[slot] + squares / np.float32(row.shape[0])
    accumulators[slot] = a
    step = lr / (np.sqrt(a) + eps)
    for k in range(row.shape[0]):
        row[k] -= step * gradient[k]
    return squares


@kernel_hot
def row_step_scaled(
    row: Float32s,
    accumulators: Float32s,
    slot: int,
    gradient: Float32s,
    squares: np.float32,
    scale: np.float32,
    lr: np.float32,
    eps: np.float32,
) -> None:
    """The same for `scale` times the gradient, whose squared length is known."""
    a = accumulators[slot] + scale * scale * squares / np.float32(row.shape[0])
    accumulators[slot] = a
    step = lr * scale / (np.sqrt(a) + eps)
    for k in range(row.shape[0]):
        row[k] -= step * gradient[k]


@kernel_hot
def row_step_adam(
    row: Float32s,
    moments: Float32s,
    accumulators: Float32s,
    slot: int,
    gradient: Float32s,
    squares: np.float32,
    scale: np.float32,
    lr: np.float32,
    eps: np.float32,
    beta1: np.float32,
    beta2: np.float32,
) -> None:
    """Row-wise Adam: a first moment for each float, the second one of the whole row at `slot` (0: no gradient yet)."""
    v = accumulators[slot]
    mean_square = scale * scale * squares / np.float32(row.shape[0])
    keep = beta1
    if v == ZERO:
        v, keep = mean_square, ZERO
    else:
        v = beta2 * v + (ONE - beta2) * mean_square
    accumulators[slot] = v
    step = lr / (np.sqrt(v) + eps)
    for k in range(row.shape[0]):
        m = keep * moments[k] + (ONE - keep) * scale * gradient[k]
        moments[k] = m
        row[k] -= step * m


@kernel_hot
def row_step_by_rule(
    rule: int,
    row: Float32s,
    moments: Float32s,
    accumulators: Float32s,
    slot: int,
    gradient: Float32s,
    lr: np.float32,
    eps: np.float32,
    beta1: np.float32,
    beta2: np.float32,
    clip_squares: np.float32,
) -> np.float32:
    """Update a row by any rule; the gradient's squared length, before it is scaled down to `clip_squares`.

    `moments` is read and written by Adam alone.
    """
    squares, scale = squares_of(gradient), ONE
    if squares > clip_squares:
        scale = np.sqrt(clip_squares / squares)
    if rule == SGD:
        dense_step(SGD, row, row, scale, gradient, lr, eps)
    elif rule == ADAM:
        row_step_adam(row, moments, accumulators, slot, gradient, squares, scale, lr, eps, beta1, beta2)
    else:
        row_step_scaled(row, accumulators, slot, gradient, squares, scale, lr, eps)
    return squares


@kernel_hot
def decay_accumulators(accumulators: Float32s, first: int, last: int, decay: np.float32, floor: np.float32) -> None:
    """Let a table forget old gradients: accumulators first .. last - 1 become max(floor, decay * a)."""
    for slot in range(first, last):
        accumulators[slot] = max(floor, decay * accumulators[slot])


@kernel_hot
def dense_update(
    rule: int,
    weights: Float32s,
    accumulators: Float32s,
    moments: Float32s,
    powers: Float64s,
    gradients: Float32s,
    lr: np.float32,
    eps: np.float32,
    beta1: np.float32,
    beta2: np.float32,
    weight_decay: np.float32,
    clip_squares: np.float32,
) -> None:
    """Apply summed gradients to all dense weights and set them to zero.

    clip_squares: the largest squared length that they may have together (0: any). powers: beta1^t and beta2^t, which
    Adam's correction needs; both are 1 before the first update.
    """
    scale = ONE
    if clip_squares > ZERO:
        squares = squares_of(gradients)
        if squares > clip_squares:
            scale = np.sqrt(clip_squares / squares)
    if rule in (ADAM, ADAMW):
        powers[0] *= beta1
        powers[1] *= beta2
        rate = lr / np.float32(1.0 - powers[0])
        correction = np.float32(1.0 / np.sqrt(1.0 - powers[1]))
        shrink = ONE - lr * weight_decay if rule == ADAMW else ONE
        for k in range(weights.shape[0]):
            g = scale * gradients[k]
            m = beta1 * moments[k] + (ONE - beta1) * g
            v = beta2 * accumulators[k] + (ONE - beta2) * g * g
            moments[k], accumulators[k] = m, v
            weights[k] = shrink * weights[k] - rate * m / (np.sqrt(v) * correction + eps)
            gradients[k] = ZERO
    else:
        dense_step(rule, weights, accumulators, scale, gradients, lr, eps)
        for k in range(weights.shape[0]):
            gradients[k] = ZERO


@kernel_hot
def ftrl_weight(
    z: np.float32, n: np.float32, alpha: np.float32, beta: np.float32, l1: np.float32, l2: np.float32
) -> np.float32:
    """The weight that an FTRL state (z, n) stands for."""
    if abs(z) <= l1:
        return ZERO
    shrunk = z - l1 if z > ZERO else z + l1
    return np.float32(-shrunk / ((beta + np.sqrt(n)) / alpha + l2))


@kernel_hot
def ftrl_step(z: Float32s, n: Float32s, slot: int, weight: np.float32, gradient: np.float32, alpha: np.float32) -> None:
    """Move the state at `slot` by one gradient; `weight` is what the state stood for in the prediction."""
    before = n[slot]
    after = before + gradient * gradient
    n[slot] = after
    z[slot] += gradient - (np.sqrt(after) - np.sqrt(before)) / alpha * weight
