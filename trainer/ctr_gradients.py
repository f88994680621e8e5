"""The CTR net of `model.py` forward and backward, by hand: the same numbers as autograd's, without its graph.

    logits = ctr.forward(x, wide)        dx = ctr.backward(g)        # and the parameters' gradients, in one vector

g is the gradient of the loss by each logit. Every intermediate has its place, kept from step to step: no graph is
built, nothing is allocated, and each gradient is written where the optimizer reads it. The order of the work is that
of `forward.py`'s kernels; here a layer is one matrix product over the batch.

Legend: N rows, n network input, H units of a hidden layer, L cross layers, R their rank, D row width, P dense weights.
"""

from typing import NamedTuple

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from trainer.dense import DenseLayout
from trainer.schema import Schema
from trainer.settings import ModelSettings

Float32s = npt.NDArray[np.float32]

SIZES = 64  # batch sizes whose views are kept: making them takes as long as a step of 16 rows


class _Layer(NamedTuple):
    """A hidden layer and its gradients."""

    weight_HI: Tensor
    weight_IH: Tensor  # the same, transposed: a view, which costs as much to make as a small product
    bias_H: Tensor
    d_weight_HI: Tensor
    d_bias_H: Tensor


class _Cross(NamedTuple):
    """A cross layer and its gradients."""

    v_Rn: Tensor
    v_nR: Tensor
    u_Rn: Tensor
    u_nR: Tensor
    bias_n: Tensor
    d_v_Rn: Tensor
    d_u_Rn: Tensor
    d_bias_n: Tensor


class _Transposed(NamedTuple):
    """Views of `_Room`, columns first."""

    h: list[Tensor]
    dh: list[Tensor]
    x: list[Tensor]
    v: list[Tensor]
    dv: Tensor
    dy: Tensor


class _Room(NamedTuple):
    """Activations and their gradients for N rows, views of one allocation."""

    ones_N: Tensor
    h: list[Tensor]  # h_1 .. of each hidden layer
    dh: list[Tensor]
    x: list[Tensor]  # x_1 .. x_L
    y: list[Tensor]  # what x_0 is multiplied with in each cross layer; in the first, plus 1
    v: list[Tensor]
    dv: Tensor
    dxl: Tensor
    dy: Tensor
    dx: Tensor
    transposed: _Transposed


class CtrGradients:
    """The net over `params_P`; `backward` overwrites `gradients_P`. One thread at a time."""

    def __init__(self, schema: Schema, model: ModelSettings, params_P: Float32s, gradients_P: Float32s) -> None:
        layout = DenseLayout(schema, model)
        names, n = layout.starts, schema.x_width
        at = {name: torch.from_numpy(view) for name, view in layout.view(params_P).items()}
        to = {name: torch.from_numpy(view) for name, view in layout.view(gradients_P).items()}
        hidden = [(f"mlp.{i}.weight", f"mlp.{i}.bias") for i in range(len(model.hidden))]
        self._layers = [_Layer(at[w], at[w].T, at[b], to[w], to[b]) for w, b in hidden]
        self._crosses = []
        for layer in range(model.cross_layers):
            v, u, bias = (f"cross.{layer}.{part}" for part in ("v", "u", "bias"))
            self._crosses.append(_Cross(at[v], at[v].T, at[u], at[u].T, at[bias], to[v], to[u], to[bias]))
        self._heads = {name: (at[name], to[name]) for name in ("mlp.head", "cross.head") if name in names}
        self._fm_FD: Tensor | None = None  # where each float of the rows lies in x
        if model.fm and len(schema.feature_x_F):
            self._fm_FD = torch.from_numpy(schema.feature_x_F)[:, None] + torch.arange(int(schema.feature_width_F[0]))
        self._widths = (n, [*model.hidden], model.cross_layers, model.cross_rank)
        self._rooms: dict[int, _Room] = {}
        self._ones, self._memory = torch.empty(0), torch.empty(0)
        self._x_Nn = torch.empty(0, n)

    def forward(self, x_Nn: Tensor, wide_N: Tensor) -> Tensor:
        """Logits [N]; x must stay as it is until `backward`. Cost: 2 P floating-point operations a row and a half."""
        room = self._reserve(len(x_Nn))
        self._x_Nn = x_Nn
        logits_N = wide_N
        if self._layers:
            h = x_Nn
            for layer, out in zip(self._layers, room.h, strict=True):
                h = torch.addmm(layer.bias_H, h, layer.weight_IH, out=out).relu_()
            logits_N = torch.addmv(logits_N, h, self._heads["mlp.head"][0])
        if self._crosses:
            xl = x_Nn
            for i, (cross, v, y, after) in enumerate(zip(self._crosses, room.v, room.y, room.x, strict=True)):
                torch.mm(xl, cross.v_nR, out=v)
                if (
                    i == 0
                ):  # x_1 = x_0 * y + x_0 = x_0 * (y + 1), and `y` is that sum: one pass less here, two in backward
                    torch.addmm(cross.bias_n + 1, v, cross.u_Rn, out=y)
                    xl = torch.mul(x_Nn, y, out=after)
                else:
                    torch.addmm(cross.bias_n, v, cross.u_Rn, out=y)
                    xl = torch.addcmul(xl, x_Nn, y, out=after)
            logits_N = torch.addmv(logits_N, xl, self._heads["cross.head"][0])
        if self._fm_FD is not None:
            rows_NFD = x_Nn[:, self._fm_FD]
            logits_N = logits_N + 0.5 * (rows_NFD.sum(1).square() - rows_NFD.square().sum(1)).sum(1)
        return logits_N

    def backward(self, g_N: Tensor) -> Tensor:
        """Gradient by x of the last `forward`, [N, n], valid until the next one; and `gradients_P`."""
        room = self._reserve(len(g_N))
        if self._layers:
            self._mlp_backward(g_N, room)
        else:
            room.dx.zero_()
        if self._crosses:
            self._cross_backward(g_N, room)
        if self._fm_FD is not None:
            rows_NFD = self._x_Nn[:, self._fm_FD]
            d_rows_NFD = g_N[:, None, None] * (rows_NFD.sum(1, keepdim=True) - rows_NFD)
            room.dx.index_add_(1, self._fm_FD.reshape(-1), d_rows_NFD.flatten(1))
        return room.dx

    def _mlp_backward(self, g_N: Tensor, room: _Room) -> None:
        head_H, d_head_H = self._heads["mlp.head"]
        torch.mv(room.transposed.h[-1], g_N, out=d_head_H)
        torch.outer(g_N, head_H, out=room.dh[-1])
        for i in range(len(self._layers) - 1, -1, -1):
            layer, h, dh, dh_HN = self._layers[i], room.h[i], room.dh[i], room.transposed.dh[i]
            torch.ops.aten.threshold_backward.grad_input(dh, h, 0, grad_input=dh)  # the ReLU's
            torch.mm(dh_HN, room.h[i - 1] if i else self._x_Nn, out=layer.d_weight_HI)
            torch.mv(dh_HN, room.ones_N, out=layer.d_bias_H)
            torch.mm(dh, layer.weight_HI, out=room.dh[i - 1] if i else room.dx)

    def _cross_backward(self, g_N: Tensor, room: _Room) -> None:
        head_n, d_head_n = self._heads["cross.head"]
        x_Nn, dx, dxl, dy, dv = self._x_Nn, room.dx, room.dxl, room.dy, room.dv
        torch.mv(room.transposed.x[-1], g_N, out=d_head_n)
        torch.outer(g_N, head_n, out=dxl)
        for i in range(len(self._crosses) - 1, -1, -1):
            cross = self._crosses[i]
            torch.mul(dxl, x_Nn, out=dy)
            dx.addcmul_(dxl, room.y[i])
            torch.mv(room.transposed.dy, room.ones_N, out=cross.d_bias_n)
            torch.mm(room.transposed.v[i], dy, out=cross.d_u_Rn)
            torch.mm(dy, cross.u_nR, out=dv)
            torch.mm(room.transposed.dv, room.x[i - 1] if i else x_Nn, out=cross.d_v_Rn)
            (dxl if i else dx).addmm_(dv, cross.v_Rn)

    def _reserve(self, num_rows: int) -> _Room:
        """Room for so many rows; the memory only grows, and is kept because fresh pages cost more than the work."""
        if num_rows not in self._rooms:
            n, hidden, L, R = self._widths
            widths = [*hidden, *hidden, *[n] * L, *[n] * L, *[R] * L, R, n, n, n]
            if num_rows > len(self._ones):
                self._ones, self._memory = torch.ones(num_rows), torch.empty(num_rows * sum(widths))
                self._rooms.clear()
            elif len(self._rooms) == SIZES:
                self._rooms.clear()
            self._rooms[num_rows] = self._cut(num_rows, widths)
        return self._rooms[num_rows]

    def _cut(self, num_rows: int, widths: list[int]) -> _Room:
        """Views of the memory."""
        _, hidden, L, _ = self._widths
        cut = torch.split(self._memory[: num_rows * sum(widths)], [num_rows * width for width in widths])
        parts = iter([piece.view(num_rows, width) for piece, width in zip(cut, widths, strict=True)])

        def take(count: int) -> list[Tensor]:
            return [next(parts) for _ in range(count)]

        h, dh, x, y, v = (take(count) for count in (len(hidden), len(hidden), L, L, L))
        dv, dxl, dy, dx = take(4)
        h_T, dh_T, x_T, v_T = ([part.T for part in parts] for parts in (h, dh, x, v))
        transposed = _Transposed(h_T, dh_T, x_T, v_T, dv.T, dy.T)
        return _Room(self._ones[:num_rows], h, dh, x, y, v, dv, dxl, dy, dx, transposed)
