"""The net, as kernels: forward (shared by the trainer's engine and the service's scorer) and backward.

    logit = offset + wide + MLP(x) + cross(x) + FM(x)
    MLP:   h_i = relu(W_i h_i-1 + b_i), h_0 = x; head . h_last
    cross: x_l+1 = x_0 * (U_l^T (V_l x_l) + b_l) + x_l; head . x_L        (low-rank DCN-V2)
    FM:    1/2 (|sum of rows|^2 - sum of |row|^2), over the pooled rows of the id features

n: network input, L: cross layers, R: their rank, D: row width. The parameters lie in one vector (`dense.py`); what a
forward pass leaves for the backward one lies in another, `act`, of which x is the first n floats:

    act:  x (n) | x_1 .. x_L (n each) | y_0 .. y_L-1 (n each) | v (R each) | h_1 .. | sum of rows (D)
    back: dx (n) | dx_l (n) | dy (n) | dh_1 ..
"""
# ruff: noqa: PLR0917 -- kernels take arrays and numbers one by one: numba unpacks no objects.

from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from trainer.dense import DenseLayout
from trainer.errors import UnsupportedByEventEngine
from trainer.kernel import kernel_hot, kernel_inner
from trainer.optim import dense_step, dense_step_through
from trainer.schema import Schema
from trainer.settings import ModelSettings

Float32s = npt.NDArray[np.float32]
Int64s = npt.NDArray[np.int64]

ZERO, ONE, HALF = np.float32(0), np.float32(1), np.float32(0.5)
LARGEST_LOGIT = np.float32(80)  # exp of it is still a float32; beyond, probabilities are 0 or 1 anyway


class Net(NamedTuple):
    """Shapes and places, as the kernels read them. Layer 0 of `size`, `act` and `back` is x itself."""

    size: Int64s  # units of x and of each hidden layer
    act: Int64s  # where their activations start in `act`
    back: Int64s  # where their gradients start in `back`
    weight: Int64s  # where each hidden layer's weights and biases start in the parameters
    bias: Int64s
    head: int
    cross: Int64s  # (L, 3): where v, u and bias of each cross layer start in the parameters
    cross_head: int
    rank: int
    fm_x: Int64s  # where the rows that the FM term multiplies start in x; none: no FM
    fm_width: int
    fm_act: int
    act_size: int
    back_size: int


def build_net(schema: Schema, model: ModelSettings) -> Net:
    """Places of everything for a configuration; refuses by name what the kernels do not do."""
    if model.family != "ctr":
        message = f"model.family {model.family!r} runs on the torchrec engine only: set engine: torchrec"
        raise UnsupportedByEventEngine(message)
    starts = DenseLayout(schema, model).starts
    n, L, R = schema.x_width, model.cross_layers, model.cross_rank
    size = np.array([n, *model.hidden], np.int64)
    hidden_act = n * (1 + 2 * L) + R * L + np.concatenate([[0], np.cumsum(size[1:])])
    hidden_back = 3 * n + np.concatenate([[0], np.cumsum(size[1:])])
    cross = [starts[f"cross.{i}.{part}"] for i in range(L) for part in ("v", "u", "bias")]
    fm_width = int(schema.feature_width_F[0]) if model.fm and len(schema.feature_width_F) else 0
    return Net(
        size=size,
        act=np.concatenate([[0], hidden_act[:-1]]).astype(np.int64),
        back=np.concatenate([[0], hidden_back[:-1]]).astype(np.int64),
        weight=np.array([starts[f"mlp.{i}.weight"] for i in range(len(model.hidden))], np.int64),
        bias=np.array([starts[f"mlp.{i}.bias"] for i in range(len(model.hidden))], np.int64),
        head=starts.get("mlp.head", 0),
        cross=np.array(cross, np.int64).reshape(L, 3),
        cross_head=starts.get("cross.head", 0),
        rank=R,
        fm_x=schema.feature_x_F if fm_width else np.empty(0, np.int64),
        fm_width=fm_width,
        fm_act=int(hidden_act[-1]),
        act_size=int(hidden_act[-1]) + fm_width,
        back_size=int(hidden_back[-1]),
    )


@kernel_hot
def sigmoid(logit: np.float32) -> np.float32:
    """Probability of a logit, in float32."""
    bounded = min(max(logit, -LARGEST_LOGIT), LARGEST_LOGIT)
    return np.float32(ONE / (ONE + np.exp(-bounded)))


@kernel_hot
def dot(a: Float32s, b: Float32s) -> np.float32:
    """Inner product of two vectors."""
    total = ZERO
    for k in range(a.shape[0]):
        total += a[k] * b[k]
    return total


@kernel_inner
def net_logit(net: Net, params: Float32s, act: Float32s) -> np.float32:
    """MLP, cross and FM on the x that lies in `act`; fills the rest of `act`."""
    logit = ZERO
    if net.weight.shape[0] > 0:
        logit += _mlp_forward(net, params, act)
    if net.cross.shape[0] > 0:
        logit += _cross_forward(net, params, act)
    if net.fm_x.shape[0] > 0:
        logit += _fm_forward(net, act)
    return logit


@kernel_inner
def _mlp_forward(net: Net, params: Float32s, act: Float32s) -> np.float32:
    num_layers = net.weight.shape[0]
    for i in range(num_layers):
        inputs = act[net.act[i] : net.act[i] + net.size[i]]
        outputs = act[net.act[i + 1] : net.act[i + 1] + net.size[i + 1]]
        bias = params[net.bias[i] : net.bias[i] + net.size[i + 1]]
        at, n = net.weight[i], inputs.shape[0]
        for j in range(outputs.shape[0]):
            outputs[j] = max(dot(params[at : at + n], inputs) + bias[j], ZERO)
            at += n
    last = act[net.act[num_layers] : net.act[num_layers] + net.size[num_layers]]
    return dot(params[net.head : net.head + last.shape[0]], last)


@kernel_inner
def _cross_forward(net: Net, params: Float32s, act: Float32s) -> np.float32:
    n, L, R = net.size[0], net.cross.shape[0], net.rank
    x = act[:n]
    for layer in range(L):
        xl = act[layer * n : layer * n + n]
        after = act[layer * n + n : layer * n + 2 * n]
        y = act[(L + 1 + layer) * n : (L + 2 + layer) * n]
        v = act[(2 * L + 1) * n + layer * R : (2 * L + 1) * n + layer * R + R]
        v_at, u_at, bias_at = net.cross[layer, 0], net.cross[layer, 1], net.cross[layer, 2]
        bias = params[bias_at : bias_at + n]
        for k in range(n):
            y[k] = bias[k]
        for r in range(R):
            scale = dot(params[v_at + r * n : v_at + r * n + n], xl)
            v[r] = scale
            u = params[u_at + r * n : u_at + r * n + n]
            for k in range(n):
                y[k] += scale * u[k]
        for k in range(n):
            after[k] = x[k] * y[k] + xl[k]
    return dot(params[net.cross_head : net.cross_head + n], act[L * n : L * n + n])


@kernel_inner
def _fm_forward(net: Net, act: Float32s) -> np.float32:
    total = act[net.fm_act : net.fm_act + net.fm_width]
    total[:] = ZERO
    squares = ZERO
    for f in range(net.fm_x.shape[0]):
        row = act[net.fm_x[f] : net.fm_x[f] + net.fm_width]
        for k in range(net.fm_width):
            total[k] += row[k]
            squares += row[k] * row[k]
    return HALF * (dot(total, total) - squares)


@kernel_inner
def net_backward(
    net: Net,
    params: Float32s,
    state: Float32s,
    act: Float32s,
    back: Float32s,
    g: np.float32,
    rule: int,
    lr: np.float32,
    eps: np.float32,
) -> None:
    """From the logit's gradient g: update the parameters by `rule`, leave dx in back[:n].

    With rule ACCUMULATE the parameters stay and `state` collects their gradients.
    """
    back[: net.size[0]] = ZERO
    if net.weight.shape[0] > 0:
        _mlp_backward(net, params, state, act, back, g, rule, lr, eps)
    if net.cross.shape[0] > 0:
        _cross_backward(net, params, state, act, back, g, rule, lr, eps)
    if net.fm_x.shape[0] > 0:
        _fm_backward(net, act, back, g)


@kernel_inner
def _mlp_backward(
    net: Net,
    params: Float32s,
    state: Float32s,
    act: Float32s,
    back: Float32s,
    g: np.float32,
    rule: int,
    lr: np.float32,
    eps: np.float32,
) -> None:
    last = net.weight.shape[0]
    width = net.size[last]
    h = act[net.act[last] : net.act[last] + width]
    dh = back[net.back[last] : net.back[last] + width]
    head = params[net.head : net.head + width]
    for j in range(width):
        dh[j] = g * head[j]
    dense_step(rule, head, state[net.head : net.head + width], g, h, lr, eps)
    for i in range(last - 1, -1, -1):
        n, width = net.size[i], net.size[i + 1]
        inputs = act[net.act[i] : net.act[i] + n]
        h = act[net.act[i + 1] : net.act[i + 1] + width]
        dh = back[net.back[i + 1] : net.back[i + 1] + width]
        below = back[net.back[i] : net.back[i] + n]
        if i > 0:
            below[:] = ZERO
        for j in range(width):
            # A unit that the ReLU silenced passes nothing down and has no gradient: its row is left alone.
            if h[j] <= ZERO:
                dh[j] = ZERO
            elif dh[j] != ZERO:
                at = net.weight[i] + j * n
                dense_step_through(rule, params[at : at + n], state[at : at + n], dh[j], inputs, below, lr, eps)
        at = net.bias[i]
        dense_step(rule, params[at : at + width], state[at : at + width], ONE, dh, lr, eps)


@kernel_inner
def _cross_backward(
    net: Net,
    params: Float32s,
    state: Float32s,
    act: Float32s,
    back: Float32s,
    g: np.float32,
    rule: int,
    lr: np.float32,
    eps: np.float32,
) -> None:
    n, L, R = net.size[0], net.cross.shape[0], net.rank
    x, dx, dxl, dy = act[:n], back[:n], back[n : 2 * n], back[2 * n : 3 * n]
    head = params[net.cross_head : net.cross_head + n]
    for k in range(n):
        dxl[k] = g * head[k]
    dense_step(rule, head, state[net.cross_head : net.cross_head + n], g, act[L * n : L * n + n], lr, eps)
    for layer in range(L - 1, -1, -1):
        xl = act[layer * n : layer * n + n]
        y = act[(L + 1 + layer) * n : (L + 2 + layer) * n]
        v_act = (2 * L + 1) * n + layer * R
        for k in range(n):
            dy[k] = dxl[k] * x[k]
            dx[k] += dxl[k] * y[k]
        at = net.cross[layer, 2]
        dense_step(rule, params[at : at + n], state[at : at + n], ONE, dy, lr, eps)
        for r in range(R):
            at = net.cross[layer, 1] + r * n
            u = params[at : at + n]
            dv = dot(u, dy)
            dense_step(rule, u, state[at : at + n], act[v_act + r], dy, lr, eps)
            at = net.cross[layer, 0] + r * n
            dense_step_through(rule, params[at : at + n], state[at : at + n], dv, xl, dxl, lr, eps)
    for k in range(n):
        dx[k] += dxl[k]


@kernel_inner
def _fm_backward(net: Net, act: Float32s, back: Float32s, g: np.float32) -> None:
    total = act[net.fm_act : net.fm_act + net.fm_width]
    for f in range(net.fm_x.shape[0]):
        at = net.fm_x[f]
        for k in range(net.fm_width):
            back[at + k] += g * (total[k] - act[at + k])
