"""The torch modules: they share the flat vector's memory, and DLRM learns."""

from typing import Any

import numpy as np
import pytest
import torch

from trainer.dense import DenseLayout
from trainer.model import build
from trainer.schema import Schema
from trainer.settings import ModelSettings, Settings

FEATURES: dict[str, Any] = {
    "user": {"kind": "categorical"},
    "price": {"kind": "numeric"},
    "item": {"kind": "categorical"},
    "content": {"kind": "vector", "width": 3},
}


def net(**model: Any) -> tuple[torch.nn.Module, np.ndarray, Schema]:
    tables = {name: {"width": 4, "capacity": 64} for name in ("user", "item")}
    settings = Settings.model_validate({"tables": tables, "features": FEATURES, "model": model})
    schema = Schema.from_settings(settings)
    params = DenseLayout(schema, settings.model).initial(seed=0)
    return build(schema, settings.model, params), params, schema


def inputs(schema: Schema, count: int = 64) -> tuple[torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(0)
    return torch.randn(count, schema.x_width, generator=generator), torch.randn(count, generator=generator)


@pytest.mark.parametrize("family", ["ctr", "dlrm"])
def test_a_step_of_an_optimizer_changes_the_vector_that_the_kernels_read(family: str) -> None:
    module, params, schema = net(family=family, fm=True)
    before = params.copy()
    module(*inputs(schema)).sum().backward()
    torch.optim.SGD(module.parameters(), lr=1.0).step()
    assert np.mean(params != before) > 0.5
    assert sum(p.numel() for p in module.parameters()) == len(params)


def test_what_a_kernel_writes_the_module_reads() -> None:
    module, params, schema = net()
    x_Bn, wide_B = inputs(schema)
    params[:] = 0
    assert torch.equal(module(x_Bn, wide_B), wide_B)


def test_one_cross_layer_is_the_formula_of_dcn_v2() -> None:
    module, params, schema = net(hidden=[], cross_rank=2)
    x_Bn, wide_B = inputs(schema, 1)
    x = x_Bn[0].numpy()
    v, u = params[: 2 * len(x)].reshape(2, -1), params[2 * len(x) : 4 * len(x)].reshape(2, -1)
    b, o = params[4 * len(x) :].reshape(2, -1)
    wanted = wide_B[0].item() + o @ (x * (u.T @ (v @ x) + b) + x)
    assert module(x_Bn, wide_B).item() == pytest.approx(wanted, abs=1e-5)


def test_the_fm_term_is_the_sum_of_the_products_of_all_pairs_of_rows() -> None:
    module, _, schema = net(hidden=[], cross_layers=0, fm=True)
    x_Bn, wide_B = inputs(schema)
    user, item = x_Bn[:, 0:4], x_Bn[:, 5:9]
    assert torch.allclose(module(x_Bn, wide_B), wide_B + (user * item).sum(1), atol=1e-5)


def test_dlrm_learns_the_product_of_two_rows() -> None:
    module, _, schema = net(family="dlrm", hidden=[16])
    x_Bn, wide_B = inputs(schema, 512)
    target = (x_Bn[:, 0:4] * x_Bn[:, 5:9]).sum(1)
    optimizer = torch.optim.Adagrad(module.parameters(), lr=0.05)
    losses = []
    for _ in range(200):
        optimizer.zero_grad()
        loss = torch.nn.functional.mse_loss(module(x_Bn, 0 * wide_B), target)
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    assert losses[-1] < 0.1 * target.var().item()


def test_a_vector_of_another_size_is_refused() -> None:
    _, params, schema = net()
    with pytest.raises(ValueError, match="params: got shape"):
        build(schema, ModelSettings(), params[1:])
