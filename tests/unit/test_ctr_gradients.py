"""The hand-written gradients of the CTR net, held to autograd's through the reference net."""

from typing import Any

import numpy as np
import pytest
import torch

from trainer import model as nets
from trainer.ctr_gradients import CtrGradients
from trainer.dense import DenseLayout
from trainer.schema import Schema
from trainer.settings import Settings

NETS: dict[str, dict[str, Any]] = {
    "MLP": {"hidden": [16, 8], "cross_layers": 0},
    "one layer": {"hidden": [5], "cross_layers": 0},
    "DCN": {"hidden": [], "cross_layers": 3, "cross_rank": 4},
    "FM": {"hidden": [], "cross_layers": 0, "fm": True},
    "all": {"hidden": [16, 8, 4], "cross_layers": 2, "cross_rank": 3, "fm": True},
}


def schema_and_settings(**model: Any) -> tuple[Schema, Settings]:
    features = {"price": {"kind": "numeric"}, "user": {"kind": "categorical"}, "item": {"kind": "categorical"}}
    tables = {name: {"width": 4, "capacity": 64} for name in ("user", "item")}
    settings = Settings.model_validate({"tables": tables, "features": features, "model": model})
    return Schema.from_settings(settings), settings


@pytest.mark.parametrize("net", NETS)
def test_they_are_autograds_whatever_the_size_of_the_batches(net: str) -> None:
    schema, settings = schema_and_settings(**NETS[net])
    random = np.random.default_rng(0)
    layout = DenseLayout(schema, settings.model)
    params_P = random.standard_normal(layout.size).astype(np.float32) / 3  # biases too, which start as zeros
    gradients_P = np.full_like(params_P, np.nan)  # each one is written
    by_hand = CtrGradients(schema, settings.model, params_P, gradients_P)
    reference = nets.build(schema, settings.model, params_P)
    for num_rows in (7, 1, 30, 7):
        x_Nn = torch.from_numpy(random.standard_normal((num_rows, schema.x_width)).astype(np.float32))
        wide_N, g_N = torch.from_numpy(random.standard_normal((2, num_rows)).astype(np.float32))
        logits_N = by_hand.forward(x_Nn, wide_N)
        dx_Nn = by_hand.backward(g_N)
        leaf_Nn = x_Nn.clone().requires_grad_()
        reference.zero_grad()
        wanted_N = reference(leaf_Nn, wide_N)
        wanted_N.backward(g_N)
        wanted = {id(p): p.grad for p in reference.parameters()}
        places = {p.data_ptr(): p for p in reference.parameters()}
        torch.testing.assert_close(logits_N, wanted_N.detach(), rtol=1e-5, atol=1e-5)
        torch.testing.assert_close(dx_Nn, leaf_Nn.grad, rtol=1e-5, atol=1e-5)
        for view, gradient in zip(layout.view(params_P).values(), layout.view(gradients_P).values(), strict=True):
            expected = wanted[id(places[view.ctypes.data])]
            torch.testing.assert_close(torch.from_numpy(gradient), expected, rtol=1e-5, atol=1e-5)
