"""Scores of models that only torch knows: what the engine predicts, the service answers."""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from service.torch_scorer import TorchScorer
from tests.unit.textbook import random_log
from trainer.dense import LearnerState
from trainer.engines import build_engine
from trainer.entities import Entities
from trainer.live import LEARNED, Reader, Writer
from trainer.publish import Publisher, layout_for
from trainer.schema import Schema
from trainer.scorer import Scorer
from trainer.settings import Settings
from trainer.tables import Tables

FEATURES: dict[str, Any] = {
    "user": {"kind": "categorical"},
    "price": {"kind": "numeric"},
    "item": {"kind": "categorical"},
    "seen": {"kind": "list", "table": "item", "max_length": 3, "pooling": "mean"},
}


class Served:
    """A model that has learned a log and published it."""

    def __init__(self, directory: Path, family: str) -> None:
        tables = {name: {"width": 8, "capacity": 64} for name in ("user", "item")}
        model = {"family": family, "pairs": [["user", "item"]], "pair_bits": 8}
        self.settings = Settings.model_validate({"tables": tables, "features": FEATURES, "model": model})
        self.schema = Schema.from_settings(self.settings)
        self.tables = Tables(self.schema, self.settings.model)
        state = LearnerState.initial(self.schema, self.settings.model)
        self.engine = build_engine(self.settings, self.schema, self.tables, state)
        self.writer = Writer.create(directory, layout_for(self.schema, self.settings.model, 1))
        entities = Entities(self.schema)
        self.publisher = Publisher(self.writer, self.tables, entities, state, self.settings.model)
        self.log, self.labels = random_log(self.schema, 100, num_ids=20, seed=1)
        self.learn()
        self.writer.activate()
        self.reader = Reader(directory, schema_hash=self.schema.layout_hash)
        self.reader.attach(0)

    def learn(self) -> None:
        self.slots = self.tables.assign(self.log, None, 1).slots_BC
        self.engine.learn(self.slots, self.log, self.labels)
        self.publisher.publish_all(step=1, watermark_us=1)


@pytest.fixture(params=["ctr", "dlrm"])
def served(tmp_path: Path, request: pytest.FixtureRequest) -> Iterator[Served]:
    world = Served(tmp_path, request.param)
    yield world
    world.writer.close()


def test_scores_are_what_the_engine_predicts_before_and_after_it_learns_more(served: Served) -> None:
    scorer = TorchScorer(served.schema, served.settings.model, served.reader)
    for _ in range(2):
        scored = scorer.score(served.log)
        predicted = served.engine.predict(served.slots, served.log)
        assert np.abs(scored.logits_B - predicted).max() < 1e-5
        assert scored.probabilities_B == pytest.approx(1 / (1 + np.exp(-predicted.astype(np.float64))), abs=1e-6)
        assert (scored.status_BC[:, :2] == LEARNED).all()
        served.learn()


@pytest.mark.parametrize("served", ["ctr"], indirect=True)
def test_it_answers_as_the_kernels_do(served: Served) -> None:
    by_torch = TorchScorer(served.schema, served.settings.model, served.reader).score(served.log)
    by_kernel = Scorer(served.schema, served.settings.model, served.reader).score(served.log)
    assert np.abs(by_torch.logits_B - by_kernel.logits_B).max() < 1e-5
    assert np.array_equal(by_torch.status_BC, by_kernel.status_BC)
