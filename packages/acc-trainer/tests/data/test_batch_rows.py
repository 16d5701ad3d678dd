"""What the rows of a batch are: counted, cut and joined by one rule."""

from __future__ import annotations

from collections import defaultdict, namedtuple

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch.utils.data import DataLoader, default_collate

from acc_trainer.data.batch_rows import RowRule
from acc_trainer.data.batches import CollateWithTail

OWN, COLLATED = RowRule(), RowRule(collated=True)
Pair = namedtuple("Pair", ["a", "b"])


def test_rows_are_cut_everywhere_they_are():
    data = {
        "a": torch.arange(4),
        "b": (torch.zeros(4, 2), ["w", "x", "y", "z"]),
        "c": torch.tensor(1.0),
        "d": [1, 2],
    }
    part = OWN.cut(data, slice(1, 3), 4)
    assert part["a"].tolist() == [1, 2]
    assert part["b"][0].shape == (2, 2)
    assert part["b"][1] == ["x", "y"]
    assert part["c"].item() == 1.0
    assert part["d"] == [1, 2]


def test_a_loader_tells_whether_torch_made_its_batches():
    assert RowRule.of(DataLoader(range(2))) == COLLATED
    assert RowRule.of(DataLoader(range(2), collate_fn=CollateWithTail(default_collate))) == COLLATED
    assert RowRule.of(DataLoader(range(2), collate_fn=list)) == OWN
    assert RowRule.of(object()) == OWN


@pytest.mark.parametrize("rows", [1, 2, 3])
@pytest.mark.parametrize(
    "sample",
    [
        lambda i: (f"s{i}", f"t{i}"),
        lambda i: {"pair": (f"s{i}", f"t{i}"), "text": f"x{i}"},
        lambda i: (f"s{i}", {"label": i, "deep": [f"t{i}", i]}),
        lambda i: Pair(f"s{i}", i),
        lambda i: f"s{i}",
    ],
)
def test_what_torch_collates_is_counted_cut_and_joined_like_its_samples(sample, rows):
    def batch(*places):
        return default_collate([sample(i) for i in places])

    one, other = batch(*range(rows)), batch(7)
    assert COLLATED.count(one) == rows
    joined = COLLATED.join([one, other], [rows, 1])
    assert str(joined) == str(batch(*range(rows), 7))
    assert str(COLLATED.cut(joined, slice(0, rows), rows + 1)) == str(one)
    assert str(COLLATED.cut(joined, slice(rows, None), rows + 1)) == str(other)


@pytest.mark.parametrize("rows", [1, 2, 3])
@pytest.mark.parametrize(
    "collate",
    [
        list,
        lambda items: [{"id": i, "words": ["w"] * i} for i in items],
        lambda items: [["w"] * i for i in items],
        lambda items: [(i, str(i)) for i in items],
        lambda items: {"text": [str(i) for i in items]},
        lambda items: {"x": torch.tensor(items), "words": [["w"] * i for i in items]},
        lambda items: {"x": torch.tensor(items), "shapes": [torch.ones(i + 4) for i in items]},
        lambda items: ([str(i) for i in items], [f"r{i}" for i in items]),
    ],
)
def test_lists_of_the_users_own_are_one_entry_a_row(collate, rows):
    one, other = collate(list(range(rows))), collate([7])
    assert OWN.count(one) == rows
    joined = OWN.join([one, other], [rows, 1])
    assert str(joined) == str(collate([*range(rows), 7]))
    assert str(OWN.cut(joined, slice(0, rows), rows + 1)) == str(one)
    assert str(OWN.cut(joined, slice(rows, None), rows + 1)) == str(other)


def test_a_list_of_tensors_that_all_have_the_rows_is_columns():
    columns = [torch.tensor([4, 0]), torch.tensor([5, 1])]
    assert [one.tolist() for one in OWN.cut({"l": columns}, slice(0, 1), 2)["l"]] == [[4], [5]]
    joined = OWN.join([columns, columns], [2, 2])
    assert [one.tolist() for one in joined] == [[4, 0, 4, 0], [5, 1, 5, 1]]
    assert OWN.cut((torch.zeros(2, 3), "name"), slice(0, 1), 2)[1] == "name"


def test_a_batch_that_is_a_list_of_tensors_holds_columns_however_long_they_are():
    ids, weights = torch.zeros(2, 7), torch.ones(3)
    part = OWN.cut([ids, weights], slice(0, 1), 2)
    assert [tuple(one.shape) for one in part] == [(1, 7), (3,)]
    assert [tuple(one.shape) for one in OWN.join([[ids, weights]] * 2, [2, 2])] == [(4, 7), (3,)]


def test_a_tuple_of_lists_of_unequal_length_is_cut_list_by_list():
    assert OWN.cut((["a", "b"], ["one", "two", "three"]), slice(0, 1), 2) == (["a"], ["one", "two", "three"])


def test_lists_of_lists_that_are_not_the_rows_are_left_whole():
    beams = [["a", "b"], ["c"], ["d"], ["e", "f"]]  # two for each of two rows
    assert OWN.cut({"x": torch.zeros(2), "beams": beams}, slice(0, 1), 2)["beams"] is beams


def test_arrays_have_rows_too():
    numpy = pytest.importorskip("numpy")
    batch = {"x": numpy.arange(4), "n": numpy.float64(0.5)}
    assert OWN.count(batch) == 4
    joined = OWN.join([batch, batch], [4, 4])
    assert OWN.cut(joined, slice(3, 6), 8)["x"].tolist() == [3, 0, 1]
    assert joined["n"] == 0.5
    with pytest.raises(TypeError, match=r"batch\['x'\] cannot be joined: .*shapes: \(1, 2\), \(1, 3\)"):
        OWN.join([{"x": numpy.ones((1, 2))}, {"x": numpy.ones((1, 3))}], [1, 1])


def test_a_batch_keeps_its_kind_of_dict():
    batch = defaultdict(list, x=torch.ones(2))
    part = OWN.cut(OWN.join([batch, batch], [2, 2]), slice(0, 3), 4)
    assert type(part) is defaultdict
    assert part.default_factory is list
    assert len(part["x"]) == 3
    assert len(batch["x"]) == 2


def test_what_belongs_to_the_whole_batch_stays_where_it_is_the_same_everywhere():
    def batch(name, scale):
        return {
            "x": torch.ones(2),
            "name": name,
            "weights": torch.full((3,), scale),
            "scale": torch.tensor(scale),
        }

    joined = OWN.join([batch("a", 1.0)] * 2, [2, 2])
    assert joined["weights"].tolist() == [1.0, 1.0, 1.0]
    assert OWN.cut(joined, slice(0, 1), 4)["weights"].tolist() == [1.0, 1.0, 1.0]
    assert joined["scale"].item() == 1.0
    with pytest.raises(
        TypeError, match=r"batch\['name'\] .*differs \('a', 'b', \.\.\.\); put it into a list"
    ):
        OWN.join([batch("a", 1.0), batch("b", 1.0)], [2, 2])
    with pytest.raises(TypeError, match=r"batch\['weights'\] cannot be joined"):
        OWN.join([batch("a", 1.0), batch("a", 2.0)], [2, 2])


def test_batches_that_do_not_fit_are_refused_with_the_place():
    with pytest.raises(TypeError, match=r"batch\['x'\]\[1\] cannot be joined: its types are Tensor, list"):
        OWN.join([{"x": (torch.ones(1), torch.ones(1))}, {"x": (torch.ones(1), [1])}], [1, 1])
    with pytest.raises(TypeError, match=r"batch cannot be joined: its keys or lengths differ"):
        OWN.join([{"x": torch.ones(1)}, {"y": torch.ones(1)}], [1, 1])
    with pytest.raises(
        TypeError, match=r"batch\['x'\] cannot be joined: shapes have to agree .* \(1, 2\), \(1, 3\)"
    ):
        OWN.join([{"x": torch.ones(1, 2)}, {"x": torch.ones(1, 3)}], [1, 1])


@pytest.mark.parametrize("batch", [5, "text", {}, {"a": 1}, torch.tensor(1.0), Pair(1, 2)])
def test_a_batch_without_rows_is_refused(batch):
    with pytest.raises(ValueError, match=f"rows to share out are needed, got {type(batch).__name__}"):
        OWN.count(batch)


@given(
    sizes=st.lists(st.integers(0, 4), min_size=1, max_size=4),
    collated=st.booleans(),
    data=st.data(),
)
def test_cutting_undoes_joining(sizes, collated, data):
    rule, numbers = RowRule(collated=collated), iter(range(100))

    def batch(size):
        rows = [next(numbers) for _ in range(size)]
        words = tuple(map(str, rows))
        return {"x": torch.tensor(rows), "words": words, "pair": (torch.tensor(rows)[:, None], list(words))}

    batches = [batch(size) for size in sizes]
    joined, total = rule.join(batches, sizes), sum(sizes)
    assert rule.count(joined) == total
    start = data.draw(st.integers(0, total))
    parts = [rule.cut(joined, slice(0, start), total), rule.cut(joined, slice(start, total), total)]
    assert [rule.count(part) for part in parts] == [start, total - start]
    assert str(rule.join(parts, [start, total - start])) == str(joined)
