"""The net's forward pass for LANES rows at once (`lanes.py`), for scoring; what it computes is said in `forward.py`.

The activations lie as in `forward.py`, each a vector of LANES: `act_AL`. After them come two vectors more, the logits
and what is added to them.
"""
# ruff: noqa: PLR0917 -- kernels take arrays and numbers one by one: numba unpacks no objects.

import numpy as np
import numpy.typing as npt

from trainer.forward import HALF, ZERO, Net
from trainer.kernel import kernel_inner
from trainer.lanes import LANES, UNITS, VECTOR_BYTES, dot_one, dot_units
from trainer.live_atomics import address_of

Float32s = npt.NDArray[np.float32]


def lane_activations(net: Net) -> Float32s:
    """Room for `act_AL`, at the start of a cache line: a vector that straddles two takes twice as long."""
    size = (net.act_size + 2) * LANES
    room = np.zeros(size + LANES, np.float32)
    skipped = -room.ctypes.data % VECTOR_BYTES // room.itemsize
    return room[skipped : skipped + size].reshape(-1, LANES)


@kernel_inner
def add_net_logits(net: Net, params: Float32s, act_AL: Float32s) -> None:
    """Add MLP, cross and FM of the x in the first rows of `act_AL` to the logits; fills the rest of it."""
    if net.weight.shape[0] > 0:
        _mlp(net, params, act_AL)
    if net.cross.shape[0] > 0:
        _cross(net, params, act_AL)
    if net.fm_x.shape[0] > 0:
        _fm(net, act_AL)


@kernel_inner
def _weigh(
    params: Float32s,
    at: int,
    unit: int,
    step: int,
    num_units: int,
    num: int,
    act_AL: Float32s,
    x: int,
    out: int,
) -> None:
    """act[out + j] = sum over k of params[at + j * unit + k * step] * act[x + k]."""
    weights, act = address_of(params) + 4 * at, address_of(act_AL)
    source, target = act + VECTOR_BYTES * x, act + VECTOR_BYTES * out
    j = 0
    while j + UNITS <= num_units:
        dot_units(weights + 4 * unit * j, 4 * unit, 4 * step, num, source, target + VECTOR_BYTES * j)
        j += UNITS
    while j < num_units:
        dot_one(weights + 4 * unit * j, 4 * unit, 4 * step, num, source, target + VECTOR_BYTES * j)
        j += 1


@kernel_inner
def _add_head(net: Net, params: Float32s, at: int, num: int, act_AL: Float32s, x: int) -> None:
    logit, term = net.act_size, net.act_size + 1
    _weigh(params, at, num, 1, 1, num, act_AL, x, term)
    for lane in range(LANES):
        act_AL[logit, lane] += act_AL[term, lane]


@kernel_inner
def _mlp(net: Net, params: Float32s, act_AL: Float32s) -> None:
    num_layers = net.weight.shape[0]
    for i in range(num_layers):
        n, width, out = int(net.size[i]), int(net.size[i + 1]), int(net.act[i + 1])
        _weigh(params, int(net.weight[i]), n, 1, width, n, act_AL, int(net.act[i]), out)
        for j in range(width):
            bias = params[net.bias[i] + j]
            for lane in range(LANES):
                act_AL[out + j, lane] = max(act_AL[out + j, lane] + bias, ZERO)
    _add_head(net, params, net.head, int(net.size[num_layers]), act_AL, int(net.act[num_layers]))


@kernel_inner
def _cross(net: Net, params: Float32s, act_AL: Float32s) -> None:
    n, L, R = int(net.size[0]), net.cross.shape[0], net.rank
    for layer in range(L):
        xl, after, y = layer * n, (layer + 1) * n, (L + 1 + layer) * n
        v = (2 * L + 1) * n + layer * R
        _weigh(params, int(net.cross[layer, 0]), n, 1, R, n, act_AL, xl, v)
        _weigh(params, int(net.cross[layer, 1]), 1, n, n, R, act_AL, v, y)
        for k in range(n):
            bias = params[net.cross[layer, 2] + k]
            for lane in range(LANES):
                act_AL[after + k, lane] = act_AL[k, lane] * (act_AL[y + k, lane] + bias) + act_AL[xl + k, lane]
    _add_head(net, params, net.cross_head, n, act_AL, L * n)


@kernel_inner
def _fm(net: Net, act_AL: Float32s) -> None:
    logit, squares, total = net.act_size, net.act_size + 1, net.fm_act
    for lane in range(LANES):
        act_AL[squares, lane] = ZERO
    for k in range(net.fm_width):
        for lane in range(LANES):
            act_AL[total + k, lane] = ZERO
        for f in range(net.fm_x.shape[0]):
            row = net.fm_x[f] + k
            for lane in range(LANES):
                act_AL[total + k, lane] += act_AL[row, lane]
                act_AL[squares, lane] += act_AL[row, lane] * act_AL[row, lane]
    for lane in range(LANES):
        doubled = -act_AL[squares, lane]
        for k in range(net.fm_width):
            doubled += act_AL[total + k, lane] * act_AL[total + k, lane]
        act_AL[logit, lane] += HALF * doubled
