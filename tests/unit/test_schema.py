from typing import Any

import pytest

from tests.unit.worlds import EVERY_KIND, every_kind
from trainer.budget import table_bytes
from trainer.errors import SettingsError
from trainer.schema import Schema
from trainer.settings import Settings


def compiled(**overrides: Any) -> Schema:
    return every_kind(**overrides)[1]


def test_columns_and_offsets_follow_the_order_of_declaration() -> None:
    schema = compiled()
    assert schema.feature_column_F.tolist() == [0, 1, 2, 5, 6]
    assert schema.column_table_C.tolist() == [0, 1, 1, 1, 1, 2, 1, 1, 1, 1]
    assert schema.feature_x_F.tolist() == [0, 8, 12, 16, 21]
    assert schema.float_x_M.tolist() == [20, 25, 26, 27]
    assert schema.x_width == 28


def test_inputs_are_what_the_wire_may_name() -> None:
    assert {(i.name, i.kind, i.size) for i in compiled().inputs} == {
        ("user_id", "id", 1),
        ("item_id", "id", 1),
        ("previous", "ids", 3),
        ("price", "number", 1),
        ("tags", "ids", 4),
        ("content", "vector", 3),
    }


def test_an_entity_record_has_room_for_each_of_its_features() -> None:
    (item,) = compiled().entities
    assert item.feature_E.tolist() == [4, 5, 6]
    assert item.word_E.tolist() == [1, 2, 11]
    assert item.words == 14


def test_two_features_may_read_one_input() -> None:
    features = {**EVERY_KIND["features"], "price_bucket": {"kind": "categorical", "table": "item", "source": "price"}}
    features["price_bucket"]["transform"] = "log2"
    assert len(compiled(features=features).inputs) == 6


def test_a_budget_in_bytes_becomes_rows_that_fit() -> None:
    tables = {**EVERY_KIND["tables"], "user": {"width": 8, "budget_bytes": "1MB"}}
    schema = compiled(tables=tables)
    table = schema.tables[0]
    assert table.num_bytes <= 1_000_000 < table_bytes(table.spec, table.capacity + 1, schema.costs)


def test_the_layout_hash_sees_what_moves_things_and_nothing_else() -> None:
    assert compiled().layout_hash == compiled(model__bias_lr=0.5).layout_hash
    assert compiled().layout_hash != compiled(model__cross_rank=4).layout_hash


@pytest.mark.parametrize(
    ("overrides", "field"),
    [
        ({"features__user_id__table": "nothing"}, "features.user_id.table"),
        ({"features__price__entity": "user"}, "features.price.entity"),
        ({"entities__item__key": "price"}, "entities.item.key"),
        ({"features__item_id__entity": "item"}, "features.item_id.entity"),
        ({"model__pairs": [["user_id", "tags"]]}, "model.pairs"),
        ({"tables__spare": {"width": 4}}, "tables.spare"),
        ({"features__user_id__source": "$time"}, "features.user_id.transform"),
        ({"features__tags__source": "previous"}, "features.tags.source"),
        ({"tables__user": {"width": 8, "budget_bytes": 100}}, "tables.user.budget_bytes"),
    ],
)
def test_what_does_not_fit_together_is_named(overrides: dict[str, Any], field: str) -> None:
    with pytest.raises(SettingsError) as caught:
        compiled(**overrides)
    assert str(caught.value).startswith(field + ":")


def test_overrides_do_not_leak_into_the_shared_world() -> None:
    assert compiled(tables__user__width=16).x_width == 36
    assert Settings.load(None, EVERY_KIND, {}).tables["user"].width == 8


def test_other_capacities_change_nothing_else() -> None:
    schema = compiled()
    other = schema.with_capacities({"item": 77})
    assert [table.capacity for table in other.tables] == [1000, 77, 100_000]
    assert other.layout_hash == schema.layout_hash
    assert other.feature_table_F.tolist() == schema.feature_table_F.tolist()
    assert other.tables[1].num_bytes < schema.tables[1].num_bytes
    assert other.tables[0] == schema.tables[0]
    assert other.with_capacities({"item": 1000}).tables == schema.tables


@pytest.mark.parametrize(("name", "capacity"), [("nothing", 100), ("item", 63), ("item", 2**31)])
def test_a_capacity_that_no_table_can_have_is_named(name: str, capacity: int) -> None:
    with pytest.raises(SettingsError, match=f"tables.{name}"):
        compiled().with_capacities({name: capacity})
