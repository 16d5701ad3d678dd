"""Values as text and back."""

from __future__ import annotations

import enum
import math
from pathlib import Path
from typing import Any, Literal

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from acc_ops.enums import DynamoBackend, LoggerType
from acc_ops.option_text import kind_name, plain_of, split_optional, text_of, truth_of, value_from


class Level(enum.Enum):
    LOW = 1
    HIGH = 2


json_leaves = st.none() | st.booleans() | st.integers() | st.text() | st.floats(allow_nan=False)
json_objects = st.dictionaries(
    st.text(),
    st.recursive(
        json_leaves, lambda inner: st.lists(inner) | st.dictionaries(st.text(), inner), max_leaves=8
    ),
    max_size=4,
)
paths = st.text(st.characters(blacklist_characters="\0", blacklist_categories=("Cs",)), min_size=1).map(Path)

KINDS: list[tuple[Any, Any]] = [
    (bool, st.booleans()),
    (int, st.integers()),
    (float, st.floats(allow_nan=False)),
    (str, st.text()),
    (Level, st.sampled_from(Level)),
    (DynamoBackend, st.sampled_from(DynamoBackend)),
    (LoggerType | None, st.none() | st.sampled_from(LoggerType)),
    (int | None, st.none() | st.integers()),
    (str | None, st.none() | st.text().filter(lambda text: text.strip().lower() != "none")),
    (list[str], st.lists(st.text())),
    (list[int], st.lists(st.integers())),
    (list[bool], st.lists(st.booleans())),
    (list[Level], st.lists(st.sampled_from(Level))),
    (tuple[str, ...], st.lists(st.text()).map(tuple)),
    (dict[str, Any], json_objects),
    (Path, paths),
    (Literal["a", "b", 3], st.sampled_from(["a", "b", 3])),
    (int | bool, st.integers(min_value=2) | st.booleans()),
]


@pytest.mark.parametrize(("kind", "values"), KINDS, ids=[str(kind) for kind, _ in KINDS])
def test_every_type_survives_the_way_through_text(kind, values):
    @settings(max_examples=40)
    @given(values)
    def there_and_back(value):
        back = value_from(text_of(value), kind)
        assert back == value
        assert type(back) is type(value)

    there_and_back()


@pytest.mark.parametrize(("kind", "values"), KINDS, ids=[str(kind) for kind, _ in KINDS])
def test_every_type_survives_the_way_through_plain_data(kind, values):
    @settings(max_examples=40)
    @given(values)
    def there_and_back(value):
        assert value_from(plain_of(value), kind) == value

    there_and_back()


def test_not_a_number_survives():
    assert math.isnan(value_from(text_of(math.nan), float))


@pytest.mark.parametrize("word", ["y", "YES", "t", "True", "on", "1", " true "])
def test_words_of_truth(word):
    assert truth_of(word) is True


@pytest.mark.parametrize("word", ["n", "No", "f", "FALSE", "off", "0"])
def test_words_of_falsehood(word):
    assert truth_of(word) is False


def test_other_words_are_refused_with_the_word():
    with pytest.raises(ValueError, match="'maybe'"):
        truth_of("maybe")


@pytest.mark.parametrize(
    ("raw", "kind", "expected"),
    [
        ("inductor", DynamoBackend, DynamoBackend.INDUCTOR),
        (False, DynamoBackend, DynamoBackend.NO),  # a YAML file with a bare `no`
        ("high", Level, Level.HIGH),
        ("2", Level, Level.HIGH),
        ("a, b ,c", list[str], ["a", "b", "c"]),
        ("", list[str], []),
        ('["a,b"]', list[str], ["a,b"]),
        ("0,1", list[int], [0, 1]),
        (3, list[int], [3]),
        (3, str, "3"),
        (Path("x"), str, "x"),
        (2, float, 2.0),
        ("None", int | None, None),
        (1, bool, True),
        ('{"a": 1}', dict[str, int], {"a": 1}),
    ],
)
def test_what_is_read_leniently(raw, kind, expected):
    value = value_from(raw, kind)
    assert value == expected
    assert type(value) is type(expected)


@pytest.mark.parametrize(
    ("raw", "kind"),
    [
        (True, int),
        (2.5, int),
        ("2.5", int),
        ("one", int),
        ("x", float),
        (True, float),
        (True, str),
        (None, int),
        (2, bool),
        ("[1", list[int]),
        ({"a": 1}, list[str]),
        (True, list[str]),
        ("[1]", dict[str, int]),
        ("{", dict[str, int]),
        (3, Path),
        ("c", Literal["a", "b"]),
        ("middle", Level),
        ("x", int | bool),
    ],
)
def test_what_is_refused_shows_the_value(raw, kind):
    with pytest.raises(ValueError, match="expected"):
        value_from(raw, kind)


def test_a_union_with_none_is_told_apart_from_other_unions():
    assert split_optional(int | None) == (int, True)
    assert split_optional(int | str) == (int | str, False)
    assert split_optional(int | str | None) == (int | str, True)


def test_types_have_readable_names():
    assert kind_name(int) == "int"
    assert kind_name(list[str]) == "list[str]"
    assert kind_name(Level | None) == "one of 1, 2 or none"
    assert kind_name(Literal["a", "b"]) == "one of a, b"
    assert kind_name(int | Literal["auto"] | None) == "int or auto or none"
