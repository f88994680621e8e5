"""The scorer on a real store: what the engine predicts, the service answers."""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from tests.unit.test_engine_event import EVERY_KIND, part, tables
from tests.unit.textbook import World, random_log
from trainer.entities import Entities, EntityChanges
from trainer.events import Features
from trainer.live import LEARNED, UNKNOWN, Layout, Reader, Writer
from trainer.probe import shard_of
from trainer.publish import Publisher, layout_for
from trainer.scorer import Scorer

NOTHING = np.empty(0, np.int64)


class Served(World):
    """A world that has learned a log and published it."""

    def __init__(self, directory: Path, **model: Any) -> None:
        super().__init__(tables(EVERY_KIND), EVERY_KIND, pairs=[["user", "item"]], pair_bits=8, **model)
        self.log, labels = random_log(self.schema, 300, num_ids=20, seed=1)
        self.slots = self.place(self.log)
        self.engine.learn(self.slots, self.log, labels)
        self.writer = Writer.create(directory, layout_for(self.schema, self.settings.model, 1))
        entities = Entities(self.schema)
        self.publisher = Publisher(self.writer, self.tables, entities, self.state, self.settings.model)
        self.publisher.publish_all(step=1, watermark_us=1)
        self.writer.activate()
        self.reader = Reader(directory, schema_hash=self.schema.layout_hash)
        self.reader.attach(0)
        self.scorer = Scorer(self.schema, self.settings.model, self.reader)


@pytest.fixture
def served(tmp_path: Path) -> Iterator[Served]:
    world = Served(tmp_path, fm=True, cross_layers=2)
    yield world
    world.writer.close()


def test_scores_are_what_the_engine_predicts(served: Served) -> None:
    scored = served.scorer.score(served.log)
    predicted = served.engine.predict(served.slots, served.log)
    assert np.abs(scored.logits_B - predicted).max() < 1e-5
    assert scored.probabilities_B == pytest.approx(1 / (1 + np.exp(-predicted.astype(np.float64))), abs=1e-6)


def test_a_row_scores_the_same_bits_alone_and_in_company(served: Served) -> None:
    together = served.scorer.score(served.log)
    for size in (1, 2, 15, 16, 17, 33):
        for start in range(0, 70, 3):  # so that a row comes to lie in every place of a vector
            some = served.scorer.score(part(served.log, start, start + size))
            assert np.array_equal(some.logits_B, together.logits_B[start : start + size])
            assert np.array_equal(some.probabilities_B, together.probabilities_B[start : start + size])


def test_what_is_learned_shows_after_the_next_publish(served: Served) -> None:
    before = served.scorer.score(served.log)
    batch = part(served.log, 0, 10)
    assignment = served.tables.assign(batch, None, 2)
    served.engine.learn(assignment.slots_BC, batch, np.ones(10, np.float32))
    assert np.array_equal(served.scorer.score(served.log).logits_B, before.logits_B)
    served.publisher.publish(
        assignment, EntityChanges(NOTHING, NOTHING), served.engine.touched_pairs, step=2, watermark_us=2
    )
    after = served.scorer.score(served.log)
    assert np.abs(after.logits_B - served.engine.predict(served.slots, served.log)).max() < 1e-5


def test_an_unknown_id_reads_zeros_and_says_so(served: Served) -> None:
    row = part(served.log, 0, 1)
    stranger = Features(row.ids_BC.copy(), row.lengths_BF, row.floats_BM, row.present_BA)
    stranger.ids_BC[0, 0] = 12345
    slots = served.slots[:1].copy()
    slots[0, 0] = -1
    scored = served.scorer.score(stranger)
    assert scored.logits_B[0] == pytest.approx(served.engine.predict(slots, stranger)[0], abs=1e-5)
    used = np.flatnonzero(row.ids_BC[0] != -1)
    assert scored.status_BC[0, 0] == UNKNOWN
    assert (scored.status_BC[0, used[1:]] == LEARNED).all()
    assert (np.delete(scored.status_BC[0], used) == UNKNOWN).all()


def test_no_candidates_are_no_scores(served: Served) -> None:
    assert len(served.scorer.score(part(served.log, 0, 0)).probabilities_B) == 0


def test_two_shards_answer_like_one(served: Served, tmp_path: Path) -> None:
    one = served.reader.layout
    layout = Layout(one.sections, one.dense_size, one.pair_slots, num_shards=2, schema_hash=one.schema_hash)
    writers = [Writer.create(tmp_path / "two", layout, shard=k) for k in range(2)]
    dense, _ = served.reader.dense()
    writers[0].put_dense(dense)
    for table, section in zip(served.schema.tables, one.sections, strict=False):
        local = served.tables.occupied(table.index)
        keys = served.tables.keys[served.tables.slot_base_T[table.index] + local]
        words, _ = served.reader.gather(section.name, keys)
        shards = np.array([int(shard_of(key, 2)) for key in keys.tolist()])
        for k, writer in enumerate(writers):
            zeros = np.zeros(int((shards == k).sum()), np.uint32)
            writer.put(section.name, local[shards == k], keys[shards == k], words[shards == k], zeros, zeros)
    view = served.reader.shards[0]
    weights = view.f32[view.pairs_off : view.pairs_off + one.pair_slots]
    for k, writer in enumerate(writers):
        writer.put_pairs(np.arange(k, one.pair_slots, 2), np.ascontiguousarray(weights[k::2]))
        writer.activate()
        writer.close()
    reader = Reader(tmp_path / "two")
    reader.attach(0)
    scorer = Scorer(served.schema, served.settings.model, reader)
    assert np.array_equal(scorer.score(served.log).logits_B, served.scorer.score(served.log).logits_B)
