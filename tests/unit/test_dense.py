"""The layout of the dense weights and the learner's state."""

from typing import Any

import numpy as np
import pytest

from trainer.dense import DenseLayout, LearnerState, offset_logit
from trainer.errors import SettingsError
from trainer.schema import Schema
from trainer.settings import Settings

FEATURES: dict[str, Any] = {
    "user": {"kind": "categorical"},
    "item": {"kind": "categorical"},
    "price": {"kind": "numeric"},
}


def configured(width: int = 16, **model: Any) -> tuple[Schema, Settings]:
    tables = {"user": {"width": 16, "capacity": 64}, "item": {"width": width, "capacity": 64}}
    settings = Settings.model_validate({"tables": tables, "features": FEATURES, "model": model})
    return Schema.from_settings(settings), settings


def layout_of(**model: Any) -> DenseLayout:
    schema, settings = configured(**model)
    return DenseLayout(schema, settings.model)


@pytest.mark.parametrize("family", ["ctr", "dlrm"])
def test_every_float_of_the_vector_belongs_to_exactly_one_parameter(family: str) -> None:
    layout = layout_of(family=family, cross_layers=2)
    owners = np.zeros(layout.size, np.float32)
    for view in layout.view(owners).values():
        np.add(view, 1, out=view)
    assert (owners == 1).all()
    assert len(layout.starts) == len(layout.entries)


def test_shapes_follow_from_the_settings() -> None:
    shapes = {entry.name: entry.shape for entry in layout_of(hidden=[8, 4], cross_rank=3).entries}
    assert shapes == {
        "mlp.0.weight": (8, 33), "mlp.0.bias": (8,), "mlp.1.weight": (4, 8), "mlp.1.bias": (4,), "mlp.head": (4,),
        "cross.0.v": (3, 33), "cross.0.u": (3, 33), "cross.0.bias": (33,), "cross.head": (33,),
    }  # fmt: skip


def test_a_net_without_layers_has_no_parameters() -> None:
    assert layout_of(wide=True, hidden=[], cross_layers=0).size == 0


def test_weights_start_by_he_and_biases_at_zero() -> None:
    layout = layout_of(hidden=[400, 4])
    start = layout.view(layout.initial(seed=1))
    assert start["mlp.0.weight"].std() == pytest.approx(np.sqrt(2 / 33), rel=0.05)
    assert np.abs(start["cross.0.v"]).max() <= 1 / np.sqrt(33)
    assert not start["mlp.0.bias"].any()


def test_a_parameter_starts_alike_whatever_else_the_net_has() -> None:
    small, large = layout_of(cross_layers=0), layout_of(cross_layers=2)
    values = [layout.view(layout.initial(seed=5))["mlp.1.weight"] for layout in (small, large)]
    assert np.array_equal(*values)
    other = small.view(small.initial(seed=6))["mlp.1.weight"]
    assert not np.array_equal(values[0], other)


def test_the_offset_is_the_log_odds_of_the_label_plus_the_bias() -> None:
    assert offset_logit(np.array([29.0, 98.0, 0.5, 1.0])) == pytest.approx(np.log(30 / 70) + 0.5)


def test_the_live_vector_ends_in_the_offset() -> None:
    schema, settings = configured()
    state = LearnerState.initial(schema, settings.model)
    state.offset[:3] = 9, 10, 1
    live = state.live_dense()
    assert len(live) == len(state.params) + 1
    assert live[-1] == offset_logit(state.offset)


def test_pairs_have_memory_only_where_there_are_any() -> None:
    schema, settings = configured(pairs="all", pair_bits=10)
    assert len(LearnerState.initial(schema, settings.model).pair_z) == 1024
    schema, settings = configured()
    assert len(LearnerState.initial(schema, settings.model).pair_z) == 0


@pytest.mark.parametrize(("model", "field"), [({"fm": True}, "model.fm"), ({"family": "dlrm"}, "model.family")])
def test_products_of_rows_of_different_widths_are_refused(model: dict[str, Any], field: str) -> None:
    with pytest.raises(SettingsError, match=field):
        layout_of(width=8, **model)
