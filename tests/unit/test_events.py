import json
import math

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.unit.worlds import every_kind
from trainer.codec import EntryDecoder, encode
from trainer.errors import BadEvent
from trainer.event_json import EventParser
from trainer.event_pb2 import EventBatch as EventBatchMessage
from trainer.event_pb2 import InputColumn as InputColumnMessage
from trainer.events import EventBatch, derive_batch
from trainer.hashing import MISSING_ID, hash_values
from trainer.probe import EMPTY, REMOVED
from trainer.tables import Tables

SETTINGS, SCHEMA = every_kind()
PARSER = EventParser(SCHEMA)
DECODER = EntryDecoder(SCHEMA)
FULL = {
    "features": {
        "user_id": 7,
        "item_id": "a",
        "previous": ["b", 3],
        "price": math.e - 1,
        "tags": [],
        "content": [1, 2, 3],
    },
    "label": 1,
    "event_id": "e1",
    "time_ms": 3_600_000 * 25,
}


def batch_of(*events: object) -> EventBatch:
    raw, rejected = PARSER.parse(json.dumps(events).encode(), accepted_us=5)
    assert rejected == []
    return derive_batch(SCHEMA, raw)


def test_an_event_becomes_ids_lengths_and_transformed_numbers() -> None:
    batch = batch_of(FULL)
    ids = hash_values(["7", "a", "b", "3", "1"]).tolist()
    features = batch.features
    assert features.ids_BC[0].tolist() == [*ids[:4], EMPTY, ids[4], EMPTY, EMPTY, EMPTY, EMPTY]
    assert features.lengths_BF[0].tolist() == [1, 1, 2, 1, 0]
    assert features.floats_BM[0].tolist() == pytest.approx([1, 1, 2, 3])
    assert features.present_BA[0].tolist() == [1] * 7
    assert batch.labels_B.tolist() == [1]
    assert batch.event_key_B.tolist() == hash_values(["e1"]).view(np.uint64).tolist()


def test_what_is_missing_has_a_stated_meaning() -> None:
    features = batch_of({"label": 0}).features
    assert features.ids_BC[0].tolist() == [MISSING_ID, MISSING_ID, EMPTY, EMPTY, EMPTY, MISSING_ID, *[EMPTY] * 4]
    assert features.lengths_BF[0].tolist() == [1, 1, 0, 1, 0]
    assert not features.floats_BM.any()
    assert not features.present_BA.any()


def test_null_means_not_given() -> None:
    a, b = batch_of({"label": 0, "features": {"user_id": None, "tags": None}}, {"label": 0}).features.ids_BC
    assert a.tolist() == b.tolist()


def test_feature_events_name_their_entity() -> None:
    batch = batch_of({"entity": "item", "id": "a", "features": {"price": 3}}, FULL)
    assert batch.entity_B.tolist() == [0, -1]
    assert batch.entity_id_B[0] == hash_values(["a"])[0]
    assert np.isnan(batch.labels_B[0])


def test_columns_rows_and_lines_say_the_same() -> None:
    rows = [{"features": {"user_id": k, "price": k}, "label": k % 2} for k in range(5)]
    table = {"columns": {"user_id": list(range(5)), "price": list(range(5))}, "labels": [0, 1, 0, 1, 0]}
    lines = b"\n".join(json.dumps(row).encode() for row in rows)
    late = json.dumps({"labels": table["labels"], "columns": table["columns"]}, indent=2000).encode()  # past 4 KB
    bodies = [json.dumps(rows).encode(), lines, json.dumps(table).encode(), late]
    batches = [derive_batch(SCHEMA, PARSER.parse(body, accepted_us=5)[0]) for body in bodies]
    for batch in batches[1:]:
        np.testing.assert_array_equal(batch.features.ids_BC, batches[0].features.ids_BC)
        np.testing.assert_array_equal(batch.features.floats_BM, batches[0].features.floats_BM)
        np.testing.assert_array_equal(batch.labels_B, batches[0].labels_B)


@pytest.mark.parametrize(
    ("event", "code", "said"),
    [
        ({"label": 1, "features": {"colour": 1}}, "unknown_feature", "`colour` in features"),
        ({"label": 1, "features": {"user_id": 1.5}}, "invalid", "features.user_id: Expected"),
        ({"label": 1, "features": {"user_id": 2**70}}, "invalid", "features.user_id"),
        ({"label": 1, "features": {"user_id": "x" * 257}}, "invalid", "length <= 256"),
        (
            {"label": 1, "features": {"tags": [1, 2, 3, 4, 5]}},
            "invalid",
            "features.tags: Expected `array` of length <= 4",
        ),
        ({"label": 1, "features": {"content": [1, 2]}}, "invalid", "features.content"),
        ({"label": 1, "features": {"price": 1e300}}, "invalid", "features.price"),
        ({"label": 2}, "bad_label", "wanted 0 or 1"),
        ({"features": {}}, "missing_label", "an example needs `label`"),
        ({"entity": "shop", "id": 1}, "unknown_entity", "entities: item"),
        ({"entity": "item"}, "invalid", "needs `id`"),
        ({"entity": "item", "id": 1, "features": {"user_id": 3}}, "invalid", "its features: price"),
        ({"id": 3, "label": 1}, "invalid", "belongs to a feature event"),
        ({"lable": 1}, "unknown_feature", "`lable`"),
        (7, "invalid", "Expected `object`"),
    ],
)
def test_a_bad_event_is_refused_alone_and_told_why(event: object, code: str, said: str) -> None:
    raw, rejected = PARSER.parse(json.dumps([FULL, event, FULL]).encode(), accepted_us=5)
    assert raw.inputs.count == 2
    assert [(r.index, r.code) for r in rejected] == [(1, code)]
    assert said in rejected[0].detail


@pytest.mark.parametrize("body", [b"", b"{", b"[1,", b"nonsense", b'[{"label": NaN}]', b"[" * 5000, b"\xff\xfe"])
def test_a_body_that_is_not_json_is_refused_whole(body: bytes) -> None:
    with pytest.raises(BadEvent, match="malformed"):
        PARSER.parse(body, accepted_us=5)


def test_too_many_events_are_refused_with_the_limit() -> None:
    with pytest.raises(BadEvent, match="at most 2"):
        PARSER.parse(json.dumps([FULL] * 3).encode(), accepted_us=5, max_events=2)


EVENTS = st.fixed_dictionaries(
    {"label": st.sampled_from([0, 1])},
    optional={
        "time_ms": st.integers(0, 10**12),
        "event_id": st.text(max_size=10),
        "features": st.fixed_dictionaries(
            {},
            optional={
                "user_id": st.integers(-(2**63), 2**63 - 1) | st.text(max_size=40),
                "previous": st.lists(st.integers(0, 9), max_size=3),
                "tags": st.lists(st.text(max_size=5), max_size=4),
                "price": st.floats(-1e18, 1e18),
                "content": st.lists(st.floats(-1e6, 1e6), min_size=3, max_size=3),
            },
        ),
    },
)
FEATURE_EVENTS = st.fixed_dictionaries(
    {"entity": st.just("item"), "id": st.integers(0, 99), "features": st.fixed_dictionaries({"price": st.floats(0, 9)})}
)


@given(st.lists(EVENTS | FEATURE_EVENTS, min_size=1, max_size=8))
def test_the_log_gives_back_what_was_put_in(events: list[object]) -> None:
    raw, rejected = PARSER.parse(json.dumps(events).encode(), accepted_us=5)
    assert rejected == []
    back, rejected = DECODER.decode_entry({b"proto": encode(SCHEMA, raw)}, accepted_us=9)
    assert rejected == []
    direct, logged = derive_batch(SCHEMA, raw), derive_batch(SCHEMA, back)
    for name in ("ids_BC", "lengths_BF", "floats_BM", "present_BA"):
        np.testing.assert_array_equal(getattr(direct.features, name), getattr(logged.features, name))
    for name in ("labels_B", "event_time_ms_B", "accepted_us_B", "event_key_B", "entity_B", "entity_id_B"):
        np.testing.assert_array_equal(getattr(direct, name), getattr(logged, name))


def test_a_producer_need_not_hash() -> None:
    columns = [
        InputColumnMessage(name="user_id", integers=[7, 8]),
        InputColumnMessage(name="tags", strings=["x", "y"], lengths=np.array([2, 0], np.int32).tobytes()),
    ]
    message = EventBatchMessage(count=2, columns=columns, labels=np.array([0, 1], np.float32).tobytes())
    raw, _ = DECODER.decode(message.SerializeToString(), 5)
    by_json = batch_of(
        {"label": 0, "features": {"user_id": 7, "tags": ["x", "y"]}},
        {"label": 1, "features": {"user_id": 8, "tags": []}},
    )
    np.testing.assert_array_equal(derive_batch(SCHEMA, raw).features.ids_BC, by_json.features.ids_BC)


def test_reserved_ids_are_no_ids_and_take_no_slot() -> None:
    column = InputColumnMessage(name="user_id", ids=np.array([EMPTY, REMOVED, 5]).tobytes())
    message = EventBatchMessage(count=3, columns=[column], labels=np.zeros(3, np.float32).tobytes())
    batch = derive_batch(SCHEMA, DECODER.decode(message.SerializeToString(), 5)[0])
    slots_BC = Tables(SCHEMA, SETTINGS.model).assign(batch.features, None, 0).slots_BC
    assert (slots_BC[:, 0] >= 0).tolist() == [False, False, True]


@pytest.mark.parametrize(
    ("entry", "code"),
    [
        ({b"proto": b"\xff\xff"}, "malformed"),
        ({b"proto": b""}, "invalid"),
        ({b"json": b"{"}, "malformed"),
        ({b"payload": b"x"}, "no_payload"),
        ({b"proto": EventBatchMessage(count=2**31).SerializeToString()}, "invalid"),
        ({b"proto": EventBatchMessage(count=2, labels=b"\0\0\0\0").SerializeToString()}, "invalid"),
        (
            {b"proto": EventBatchMessage(count=1, columns=[InputColumnMessage(name="no")]).SerializeToString()},
            "unknown_feature",
        ),
        (
            {
                b"proto": EventBatchMessage(
                    count=1, columns=[InputColumnMessage(name="user_id", integers=[n]) for n in (1, 2)]
                ).SerializeToString()
            },
            "invalid",
        ),
    ],
)
def test_an_entry_that_cannot_be_read_says_why(entry: dict[bytes, bytes], code: str) -> None:
    with pytest.raises(BadEvent) as caught:
        DECODER.decode_entry(entry, accepted_us=5)
    assert caught.value.code == code


@pytest.mark.parametrize("number", [float("nan"), float("inf"), -1e30])
def test_a_number_that_is_not_finite_is_taken_out_of_its_batch(number: float) -> None:
    price = InputColumnMessage(name="price", numbers=np.array([1.0, number, 2.0]).tobytes())
    labels = np.array([0, 1, 1], np.float32).tobytes()
    raw, rejected = DECODER.decode(EventBatchMessage(count=3, columns=[price], labels=labels).SerializeToString(), 5)
    assert [(r.index, r.code) for r in rejected] == [(1, "not_finite")]
    assert raw.inputs.columns["price"].numbers is not None
    assert raw.inputs.columns["price"].numbers.tolist() == [1.0, 2.0]


@given(st.binary(max_size=200))
def test_no_bytes_take_the_decoder_down(payload: bytes) -> None:
    for field in (b"proto", b"json"):
        try:
            raw, _ = DECODER.decode_entry({field: payload}, accepted_us=5)
        except BadEvent:
            continue
        derive_batch(SCHEMA, raw)


def test_batches_join_and_split_in_order() -> None:
    batch = batch_of(FULL, {"label": 0, "features": {"user_id": 1}}, FULL)
    joined = EventBatch.concatenate([batch.rows(0, 1), batch.rows(1, 3)])
    np.testing.assert_array_equal(joined.features.ids_BC, batch.features.ids_BC)
    assert len(joined) == 3


def test_a_time_of_acceptance_that_cannot_be_is_that_of_the_entry() -> None:
    entry_us = 1_700_000_000_000_000
    claimed = np.array([2**62, -5, entry_us - 7, entry_us + 30_000_000], np.int64)
    message = EventBatchMessage(count=4, labels=np.ones(4, np.float32).tobytes(), accepted_times_us=claimed.tobytes())
    raw, _ = DECODER.decode(message.SerializeToString(), entry_us)
    assert raw.accepted_us_B.tolist() == [entry_us, entry_us, entry_us - 7, entry_us + 30_000_000]
