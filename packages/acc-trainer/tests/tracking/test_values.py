"""Settings and values in plain forms."""

from __future__ import annotations

import enum
import json
import pathlib
from collections import OrderedDict
from dataclasses import dataclass

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from acc_trainer.tracking.values import finite, flat, is_number, number_of, plain, spread, table_rows


class Colour(enum.Enum):
    RED = "red"


class Level(enum.IntEnum):
    LOW = 1


@dataclass
class Options:
    lr: float
    where: pathlib.Path


def test_odd_settings_become_plain():
    given_settings = {
        "colour": Colour.RED,
        "level": Level.LOW,
        Colour.RED: "a key",
        3: "another",
        "options": Options(0.1, pathlib.Path("a", "b")),
        "none": None,
        "set": {2, 1},
        "ordered": OrderedDict(a=(1, 2)),
        "dtype": torch.float16,
        "device": torch.device("cpu"),
        "one": torch.tensor(2.0),
        "few": torch.tensor([1, 2]),
        "many": torch.zeros(1000),
        "meta": torch.empty(2, device="meta"),
        "empty": torch.empty(0),
        "range": range(3),
        "bytes": b"ab",
    }
    made = plain(given_settings)
    assert made["colour"] == "red"
    assert (made["level"], type(made["level"])) == (1, int)
    assert made["red"] == "a key"
    assert made["3"] == "another"
    assert made["options"] == {"lr": 0.1, "where": str(pathlib.Path("a", "b"))}
    assert made["none"] is None
    assert made["set"] == [1, 2]
    assert made["ordered"] == {"a": [1, 2]}
    assert (made["dtype"], made["device"]) == ("torch.float16", "cpu")
    assert (made["one"], made["few"]) == (2.0, [1, 2])
    assert all(isinstance(made[name], str) for name in ("many", "meta", "empty", "range", "bytes"))
    json.dumps(made)


def test_a_structure_that_contains_itself_ends():
    loop: dict[str, object] = {}
    loop["itself"] = loop
    assert "itself" in json.dumps(plain(loop))


anything = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text() | st.sampled_from(list(Colour)),
    lambda inner: (
        st.lists(inner) | st.dictionaries(st.text() | st.integers(), inner) | st.tuples(inner, inner)
    ),
    max_leaves=12,
)


@given(anything)
def test_whatever_is_given_becomes_strict_json(value):
    made = json.dumps(finite(value), allow_nan=False)
    assert finite(json.loads(made)) == finite(value)


@given(st.dictionaries(st.text(), anything))
def test_flat_settings_have_one_level(values):
    assert all(value is None or isinstance(value, (bool, int, float, str)) for value in flat(values).values())


def test_flat_settings_name_the_way():
    made = flat({"a": {"b": {"c": 1}, "list": [1, {"d": 2}], "none": {}}})
    assert made == {"a.b.c": 1, "a.list": "[1, {'d': 2}]", "a.none": "{}"}


@pytest.mark.parametrize(
    ("value", "text"), [(float("nan"), "NaN"), (float("inf"), "Infinity"), (-float("inf"), "-Infinity")]
)
def test_numbers_that_json_has_not_got_are_texts_that_float_reads(value, text):
    assert finite({"a": [value]}) == {"a": [text]}
    assert str(float(text)) == str(value)


def test_tensors_of_one_element_are_numbers():
    assert number_of(torch.tensor([[2.5]], requires_grad=True)) == 2.5
    assert number_of("2.5") == "2.5"
    longer = torch.zeros(2)
    assert number_of(longer) is longer
    assert is_number(True)
    assert not is_number(longer)


def test_groups_are_spread_over_their_names():
    assert spread({"loss": {"a": torch.tensor(1), "b": {"c": 2}}, 5: 3}) == {
        "loss/a": 1,
        "loss/b/c": 2,
        "5": 3,
    }


def test_a_table_is_rows_or_a_dataframe():
    class Frame:
        columns = ("x", 1)

        class values:
            @staticmethod
            def tolist():
                return [[1, 2]]

    assert table_rows(["x"], [(1,)], None) == (["x"], [[1]])
    assert table_rows(None, None, Frame()) == (["x", "1"], [[1, 2]])
    with pytest.raises(ValueError, match="log_table needs the rows"):
        table_rows(["x"], None, None)
