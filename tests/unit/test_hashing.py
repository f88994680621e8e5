from array import array

import numpy as np
import pytest
import xxhash
from hypothesis import given, settings
from hypothesis import strategies as st

from trainer.hashing import MISSING_ID, hash_integers, hash_together, hash_values, integers_of

RESERVED = {-1, -2}


def reference(value: str | int) -> int:
    return int(np.uint64(xxhash.xxh64_intdigest(str(value).encode())).astype(np.int64))


@settings(deadline=None)  # the first call loads or compiles
@given(st.lists(st.text(alphabet=st.characters(exclude_categories=["Cs"]), max_size=100), max_size=20))
def test_strings_hash_as_xxh64_of_their_utf8_text(values: list[str]) -> None:
    assert hash_values(values).tolist() == [reference(v) for v in values]


@settings(deadline=None)  # the first call loads or compiles
@given(st.lists(st.integers(), max_size=20))
def test_integers_of_any_size_hash_as_their_decimal_text(values: list[int]) -> None:
    assert hash_values(values).tolist() == [reference(v) for v in values]


def test_mixed_lists_hash_item_by_item() -> None:
    assert hash_values([7, "7", "x"]).tolist() == [reference("7"), reference("7"), reference("x")]


def test_texts_that_hold_nul_hash_like_others() -> None:
    values = ["a\0b", "", "\0", "c", "\0\0"]
    assert hash_values(values).tolist() == [reference(v) for v in values]


@settings(deadline=None)  # the first call loads or compiles
@given(st.lists(st.lists(st.integers(-(2**63), 2**63 - 1), max_size=5), max_size=5))
def test_columns_hashed_together_have_the_ids_that_each_has_alone(columns: list[list[int]]) -> None:
    together = hash_together([array("q", column) for column in columns])
    assert [ids.tolist() for ids in together] == [[reference(v) for v in column] for column in columns]


def test_only_columns_of_64_bit_integers_are_integers() -> None:
    assert integers_of((1, -5)) == array("q", [1, -5])
    assert [integers_of(values) for values in ([1, None], ["1"], [1.0], [2**63])] == [None] * 4


def test_extreme_integers_hash_like_their_text() -> None:
    values = np.array([0, -1, 2**63 - 1, -(2**63)], np.int64)
    assert hash_integers(values).tolist() == [reference(int(v)) for v in values]


def test_the_missing_id_is_that_of_the_empty_string() -> None:
    assert hash_values([""])[0] == MISSING_ID == reference("")


def test_a_float_is_no_id() -> None:
    with pytest.raises(TypeError, match="got float"):
        hash_values(["a", 1.5])  # type: ignore[list-item]
