"""Update rules, as inlined kernels: Adagrad and SGD (dense), row-wise Adagrad (rows), FTRL-proximal (wide weights).

All of them are safe on streams without end: nothing decays, nothing counts steps, and a weight with no gradient
in an event needs no work, which is what lets the event engine skip dead ReLU units and untouched rows.

Sources: Adagrad as torch.optim.Adagrad without decay (`a += g^2; w -= lr * g / (sqrt(a) + eps)`); row-wise
Adagrad as fbgemm's EXACT_ROWWISE_ADAGRAD (one accumulator a row, of the mean of g^2); FTRL-proximal from
McMahan et al., "Ad Click Prediction: a View from the Trenches" (KDD 2013), algorithm 1.

Numbers are float32; sums are reordered (fastmath), so results agree with the textbook to about 1e-6.
"""
# ruff: noqa: PLR0917 -- kernels take arrays and numbers one by one: numba unpacks no objects.

import numpy as np
import numpy.typing as npt

from trainer.kernel import kernel_hot

Float32s = npt.NDArray[np.float32]

SGD, ADAGRAD, ACCUMULATE = 0, 1, 2  # ACCUMULATE only sums gradients: `state` is then the gradient vector
ZERO = np.float32(0)


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
def row_step(
    row: Float32s, accumulators: Float32s, slot: int, gradient: Float32s, lr: np.float32, eps: np.float32
) -> None:
    """Row-wise Adagrad of one embedding row, whose accumulator is at `slot`."""
    squares = ZERO
    for k in range(row.shape[0]):
        squares += gradient[k] * gradient[k]
    a = accumulators[slot] + squares / np.float32(row.shape[0])
    accumulators[slot] = a
    step = lr / (np.sqrt(a) + eps)
    for k in range(row.shape[0]):
        row[k] -= step * gradient[k]


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
