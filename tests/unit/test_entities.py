"""Entity records: what an example sees depends on its place in the log, and on nothing else."""

import json
import math
from typing import Any

import numpy as np
import pytest

from tests.unit.worlds import every_kind
from trainer.entities import Entities, RecordLayout
from trainer.event_json import EventParser
from trainer.events import EventBatch, derive_batch
from trainer.hashing import MISSING_ID, hash_values
from trainer.probe import EMPTY
from trainer.schema import Schema

_, SCHEMA = every_kind()
PRICE, TAGS, CONTENT = 0, slice(6, 10), slice(1, 4)  # float column, id columns, float columns


def batch_of(*events: dict[str, Any], schema: Schema = SCHEMA, accepted_us: int = 5_000_000) -> EventBatch:
    raw, rejected = EventParser(schema).parse(json.dumps(events).encode(), accepted_us=accepted_us)
    assert rejected == []
    return derive_batch(schema, raw)


def fact(id_: object = "a", **features: object) -> dict[str, Any]:
    return {"entity": "item", "id": id_, "features": features}


def example(**features: object) -> dict[str, Any]:
    return {"label": 1, "features": features}


def prices(batch: EventBatch) -> list[float]:
    return [round(math.expm1(value), 3) for value in batch.features.floats_BM[:, PRICE].tolist()]


def test_an_example_sees_the_feature_events_before_it_and_no_later_ones() -> None:
    batch = batch_of(example(item_id="a"), fact(price=10), example(item_id="a"), fact(price=20), example(item_id="a"))
    Entities(SCHEMA).apply(batch)
    assert prices(batch) == [0, 10, 10, 20, 20]


def test_batches_may_be_cut_anywhere() -> None:
    events = [e for k in range(20) for e in (fact(k % 3, price=k), example(item_id=k % 5))]
    whole, one_by_one = batch_of(*events), [batch_of(event) for event in events]
    Entities(SCHEMA).apply(whole)
    entities = Entities(SCHEMA)
    for batch in one_by_one:
        entities.apply(batch)
    np.testing.assert_array_equal(
        whole.features.floats_BM, np.concatenate([batch.features.floats_BM for batch in one_by_one])
    )


def test_every_kind_of_feature_comes_back_as_it_was_given() -> None:
    given = batch_of(example(item_id="a", price=-3.5, tags=["x", 9, "y"], content=[1.5, -2, 3e-5])).features
    batch = batch_of(fact(price=-3.5, tags=["x", 9, "y"], content=[1.5, -2, 3e-5]), example(item_id="a"))
    Entities(SCHEMA).apply(batch)
    filled = batch.features
    assert filled.ids_BC[1].tolist() == given.ids_BC[0].tolist()
    assert filled.floats_BM[1].tolist() == given.floats_BM[0].tolist()
    assert filled.lengths_BF[1].tolist() == given.lengths_BF[0].tolist()
    assert filled.present_BA[1].tolist() == given.present_BA[0].tolist()


def test_a_feature_event_changes_only_what_it_gives() -> None:
    batch = batch_of(
        fact(price=10, tags=["x"]), fact(content=[1, 2, 3]), fact(tags=[]), fact("b", price=99), example(item_id="a")
    )
    Entities(SCHEMA).apply(batch)
    features = batch.features
    assert prices(batch)[-1] == 10
    assert features.ids_BC[-1, TAGS].tolist() == [EMPTY] * 4
    assert features.lengths_BF[-1].tolist()[-1] == 0
    assert features.floats_BM[-1, CONTENT].tolist() == [1, 2, 3]
    assert features.present_BA[-1].tolist() == [0, 1, 0, 1, 1, 1, 1]  # the hour is that of acceptance


def test_a_shorter_list_leaves_nothing_of_the_longer_one() -> None:
    batch = batch_of(fact(tags=["x", "y", "z"]), fact(tags=["w"]), example(item_id="a"))
    Entities(SCHEMA).apply(batch)
    assert batch.features.ids_BC[-1, TAGS].tolist() == [*hash_values(["w"]).tolist(), *[EMPTY] * 3]


def test_values_in_the_example_win() -> None:
    batch = batch_of(fact(price=10, tags=["x"]), example(item_id="a", price=3, tags=[]), example(item_id="a"))
    Entities(SCHEMA).apply(batch)
    assert prices(batch) == [10, 3, 10]
    assert batch.features.ids_BC[1, TAGS].tolist() == [EMPTY] * 4


def test_nothing_is_filled_without_a_key_or_for_an_unknown_one() -> None:
    batch = batch_of(fact("", price=10), example(), example(item_id="b"), fact(price=1))
    assert batch.features.ids_BC[1, 1] == MISSING_ID == batch.entity_id_B[0]
    entities = Entities(SCHEMA)
    entities.apply(batch)
    assert prices(batch) == [10, 0, 0, 1]
    assert entities.find(0, hash_values(["b"])).tolist() == [-1], "an example creates no record"


def test_what_was_written_is_reported_once_an_id() -> None:
    entities = Entities(SCHEMA)
    changes = entities.apply(batch_of(fact("a"), fact("b"), fact("a"), example(item_id="c"), example(item_id="a")))
    slots = entities.find(0, hash_values(["a", "b"]))
    assert sorted(changes.slots_K.tolist()) == sorted(slots.tolist())
    assert changes.entities_K.tolist() == [0, 0]
    assert entities.counts[slots].tolist() == [3, 1], "an example that names an id keeps it from being forgotten"
    assert entities.seen_s[slots].tolist() == [5, 5]


def test_the_id_forgotten_is_the_least_recently_used_and_its_slot_starts_empty() -> None:
    _, schema = every_kind(entities__item__capacity=64)
    entities = Entities(schema)
    ids = list(range(2000))
    entities.apply(batch_of(fact("kept", tags=["x"]), schema=schema))
    for id_ in ids:
        entities.apply(batch_of(fact(id_, price=id_), example(item_id="kept"), schema=schema))
    assert (entities.find(0, hash_values(["kept", ids[-1]])) >= 0).all()
    assert entities.find(0, hash_values(ids[:500])).max() == -1
    newcomer = batch_of(fact("new"), example(item_id="new"), schema=schema)
    entities.apply(newcomer)
    assert prices(newcomer) == [0, 0]
    assert newcomer.features.present_BA[1].sum() == 2  # item_id and the hour


def test_serving_fills_a_request_as_training_filled_the_example() -> None:
    entities = Entities(SCHEMA)
    entities.apply(batch_of(fact(price=10, tags=["x", "y"], content=[1, 2, 3]), fact("b", price=20)))
    candidates = [example(item_id="a"), example(item_id="b", tags=["z"]), example(item_id="c"), example()]
    trained, served = batch_of(*candidates), batch_of(*candidates).features
    entities.apply(trained)
    layout = RecordLayout(SCHEMA)
    keys_B = layout.keys_of(served, 0)
    assert keys_B[3] == EMPTY
    slots_B = entities.find(0, keys_B)
    layout.fill(served, 0, entities.records(0)[slots_B], (slots_B >= 0).astype(np.uint8))
    for name in ("ids_BC", "lengths_BF", "floats_BM", "present_BA"):
        np.testing.assert_array_equal(getattr(served, name), getattr(trained.features, name))


def test_one_entity_may_name_another() -> None:
    tables = {"item": {"width": 4}, "author": {"width": 4}, "country": {"width": 4}}
    features = {
        "item": {"kind": "categorical"},
        "author": {"kind": "categorical", "entity": "item"},
        "country": {"kind": "categorical", "entity": "author"},
    }
    _, schema = every_kind(
        tables=tables, features=features, entities={"item": {"key": "item"}, "author": {"key": "author"}}
    )
    batch = batch_of(
        {"entity": "author", "id": "ann", "features": {"country": "no"}},
        {"entity": "item", "id": 1, "features": {"author": "ann"}},
        example(item=1),
        schema=schema,
    )
    changes = Entities(schema).apply(batch)
    assert sorted(changes.entities_K.tolist()) == [0, 1]
    assert batch.features.ids_BC[-1].tolist() == hash_values([1, "ann", "no"]).tolist()


def test_a_schema_without_entities_costs_nothing() -> None:
    _, schema = every_kind(tables={"item": {}}, features={"item": {"kind": "categorical"}}, entities={})
    entities = Entities(schema)
    assert entities.num_bytes == 0
    assert len(entities.apply(batch_of(example(item=1), schema=schema)).slots_K) == 0


@pytest.mark.parametrize("num_features", [1, 32, 33, 70])
def test_the_mask_holds_any_number_of_features(num_features: int) -> None:
    features: dict[str, Any] = {f"n{k}": {"kind": "numeric", "entity": "item"} for k in range(num_features)}
    _, schema = every_kind(
        tables={"item": {}}, features={"item": {"kind": "categorical"}, **features}, entities={"item": {"key": "item"}}
    )
    given = {f"n{k}": k + 1 for k in range(0, num_features, 3)}
    batch = batch_of(fact("a", **given), example(item="a"), schema=schema)
    Entities(schema).apply(batch)
    assert batch.features.floats_BM[1].tolist() == [given.get(f"n{k}", 0) for k in range(num_features)]
