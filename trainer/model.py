"""The nets as torch modules over the same flat vector of dense weights that the kernels use and the store publishes.

    logits_B = forward(x_Bn, wide_B)

x_Bn: pooled rows and floats at the places of the schema; wide_B: what is added as it is, i.e. offset, wide weights and
hashed pairs. `Ctr` is the reference of `forward.py`'s kernels, written for reading; `Dlrm` runs on the torchrec engine
only. Parameters are views of numpy memory (`torch.from_numpy`): an optimizer must change them in place, and nothing may
assign to `.data`, or kernels and publisher would go on with the old memory.

Legend: B rows, n network input, L cross layers, R their rank, F rows (id features), M floats, D row width.
"""

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor, nn

from trainer.dense import DenseLayout
from trainer.schema import Schema
from trainer.settings import ModelSettings


def build(schema: Schema, model: ModelSettings, params: npt.NDArray[np.float32]) -> nn.Module:
    """The configured net over `params` (`LearnerState.params`), which it shares.

    Raises:
        ValueError: `params` is not of the layout's size.
    """
    layout = DenseLayout(schema, model)
    if params.shape != (layout.size,):
        raise ValueError(f"params: got shape {params.shape}, wanted ({layout.size},)")
    weights = {name: nn.Parameter(torch.from_numpy(view)) for name, view in layout.view(params).items()}
    return Dlrm(schema, weights) if model.family == "dlrm" else Ctr(schema, model, weights)


class Mlp(nn.Module):
    """ReLU layers `<prefix>.<i>.weight` (out, in), `<prefix>.<i>.bias` (out,) of the weights."""

    def __init__(self, prefix: str, weights: dict[str, nn.Parameter]) -> None:
        super().__init__()
        num_layers = sum(name.startswith(f"{prefix}.") and name.endswith(".weight") for name in weights)
        self.weight = nn.ParameterList([weights[f"{prefix}.{i}.weight"] for i in range(num_layers)])
        self.bias = nn.ParameterList([weights[f"{prefix}.{i}.bias"] for i in range(num_layers)])

    def forward(self, h: Tensor) -> Tensor:
        """(B, in) -> (B, out)."""
        for weight, bias in zip(self.weight, self.bias, strict=True):
            h = torch.relu(h @ weight.T + bias)
        return h


class Cross(nn.Module):
    """Low-rank DCN-V2 layers: x_l+1 = x_0 * (U_l^T (V_l x_l) + b_l) + x_l."""

    def __init__(self, num_layers: int, weights: dict[str, nn.Parameter]) -> None:
        super().__init__()
        self.v = nn.ParameterList([weights[f"cross.{i}.v"] for i in range(num_layers)])
        self.u = nn.ParameterList([weights[f"cross.{i}.u"] for i in range(num_layers)])
        self.bias = nn.ParameterList([weights[f"cross.{i}.bias"] for i in range(num_layers)])

    def forward(self, x_Bn: Tensor) -> Tensor:
        """(B, n) -> (B, n)."""
        x = x_Bn
        for v_Rn, u_Rn, bias_n in zip(self.v, self.u, self.bias, strict=True):
            x = x_Bn * (x @ v_Rn.T @ u_Rn + bias_n) + x
        return x


class Ctr(nn.Module):
    """Wide + MLP + cross + FM, each where it is configured."""

    def __init__(self, schema: Schema, model: ModelSettings, weights: dict[str, nn.Parameter]) -> None:
        super().__init__()
        self.mlp = Mlp("mlp", weights) if model.hidden else None
        self.mlp_head = weights["mlp.head"] if model.hidden else None
        self.cross = Cross(model.cross_layers, weights) if model.cross_layers else None
        self.cross_head = weights["cross.head"] if model.cross_layers else None
        self.rows = RowsOf(schema) if model.fm else None

    def forward(self, x_Bn: Tensor, wide_B: Tensor) -> Tensor:
        """Logits of B rows."""
        logits_B = wide_B
        if self.mlp is not None:
            logits_B = logits_B + self.mlp(x_Bn) @ self.mlp_head
        if self.cross is not None:
            logits_B = logits_B + self.cross(x_Bn) @ self.cross_head
        if self.rows is not None:
            rows_BFD = self.rows(x_Bn)
            logits_B = logits_B + 0.5 * (rows_BFD.sum(1).square() - rows_BFD.square().sum(1)).sum(1)
        return logits_B


class Dlrm(nn.Module):
    """DLRM: an MLP brings the floats to one more row; the rows' dot products with each other go into the top MLP."""

    def __init__(self, schema: Schema, weights: dict[str, nn.Parameter]) -> None:
        super().__init__()
        self.rows = RowsOf(schema)
        self.bottom = Mlp("bottom", weights) if schema.num_floats else None
        self.top = Mlp("top", weights)
        self.top_head = weights["top.head"]
        num_rows = len(schema.id_features) + (schema.num_floats > 0)
        self.float_x_M: Tensor
        self.pairs: Tensor
        self.register_buffer("float_x_M", torch.from_numpy(schema.float_x_M), persistent=False)
        self.register_buffer("pairs", torch.triu_indices(num_rows, num_rows, offset=1), persistent=False)

    def forward(self, x_Bn: Tensor, wide_B: Tensor) -> Tensor:
        """Logits of B rows."""
        rows_BFD = self.rows(x_Bn)
        top = []
        if self.bottom is not None:
            dense_BD = self.bottom(x_Bn[:, self.float_x_M])
            rows_BFD = torch.cat([rows_BFD, dense_BD[:, None]], 1)
            top.append(dense_BD)
        dots_BFF = rows_BFD @ rows_BFD.transpose(1, 2)
        top.append(dots_BFF[:, self.pairs[0], self.pairs[1]])
        top_BH: Tensor = self.top(torch.cat(top, 1))
        return wide_B + top_BH @ self.top_head


class RowsOf(nn.Module):
    """The pooled rows of the id features out of x; they are of one width (`DenseLayout` sees to that)."""

    def __init__(self, schema: Schema) -> None:
        super().__init__()
        D = int(schema.feature_width_F[0])
        places_FD = torch.from_numpy(schema.feature_x_F)[:, None] + torch.arange(D)
        self.places_FD: Tensor
        self.register_buffer("places_FD", places_FD, persistent=False)

    def forward(self, x_Bn: Tensor) -> Tensor:
        """(B, n) -> (B, F, D)."""
        rows_BFD: Tensor = x_Bn[:, self.places_FD]
        return rows_BFD
