"""Batches that are cut along the sequence as a loader hands them out."""

from __future__ import annotations

import copy
from collections import UserDict
from typing import Any

import pytest
import torch

from acc_ops.testing import run_threads
from acc_plugins.parallel.attention import Heads
from acc_plugins.parallel.exchange import Line
from acc_plugins.parallel.masks import SequenceError
from acc_plugins.parallel.reach import Reach
from acc_plugins.parallel.sequence import SplitLoader, split_batch

SECOND = Line(None, 1, 2)


def test_labels_are_shifted_before_the_cut_and_places_are_told() -> None:
    batch = {
        "input_ids": torch.tensor([[1, 2, 3, 4], [5, 6, 7, 8]]),
        "labels": torch.tensor([[1, 2, 3, 4], [5, 6, -100, 8]]),
        "score": torch.ones(2),
        "names": ["a", "b"],
    }
    first, second = split_batch(batch, Line(None, 0, 2)), split_batch(batch, SECOND)
    assert list(first) == ["input_ids", "score", "names", "shift_labels", "position_ids"]
    assert first["input_ids"].tolist() == [[1, 2], [5, 6]]
    assert first["shift_labels"].tolist() == [[2, 3], [6, -100]]
    assert second["shift_labels"].tolist() == [[4, -100], [8, -100]]
    assert second["position_ids"].tolist() == [[2, 3], [2, 3]]
    assert second["score"] is batch["score"]
    assert second["names"] == ["a", "b"]
    assert batch["labels"].shape == (2, 4)


def test_what_the_batch_has_is_kept() -> None:
    batch = UserDict(
        input_ids=torch.arange(4)[None],
        position_ids=torch.tensor([[5, 6, 7, 8]]),
        shift_labels=torch.tensor([[9, 9, 9, 9]]),
        labels=torch.tensor([[1, 2, 3, 4]]),
        pixels=torch.ones(1, 3, 4),
    )
    cut = split_batch(batch, SECOND)
    assert isinstance(cut, UserDict)
    assert cut["position_ids"].tolist() == [[7, 8]]
    assert cut["shift_labels"].tolist() == [[9, 9]]
    assert "labels" not in cut
    assert cut["pixels"].shape == (1, 3, 4)


@pytest.mark.parametrize(
    ("batch", "error", "message"),
    [
        (
            {"input_ids": torch.ones(2, 5)},
            SequenceError,
            "5 places cannot be cut for 2 ranks.*pad_to_multiple_of",
        ),
        ((torch.ones(2, 4),), TypeError, "got tuple"),
        ({"x": torch.ones(2)}, SequenceError, "no tensor of a batch with x has a sequence"),
    ],
)
def test_what_cannot_be_cut_is_refused(batch: Any, error: Any, message: str) -> None:
    with pytest.raises(error, match=message):
        split_batch(batch, SECOND)


def test_a_loader_that_cuts_is_else_the_loader_inside_and_tells_attention(line_here: Any) -> None:
    class Loader(list):
        batch_size = 7

    def work() -> list[Any]:
        loader = Loader({"input_ids": torch.arange(size)[None]} for size in (4, 8))
        made, reach = SplitLoader(loader, line_here()), Reach(Heads(line_here()), open=True)
        made.tell(reach)
        assert (len(made), made.batch_size) == (2, 7)
        assert copy.copy(made).loader is loader
        seen = [(batch["input_ids"].tolist(), set(reach.attention.lengths)) for batch in made]
        assert reach.attention.lengths == {2, 4}
        return seen

    assert run_threads(2, work) == [
        [([[0, 1]], {2}), ([[0, 1, 2, 3]], {2, 4})],
        [([[2, 3]], {2}), ([[4, 5, 6, 7]], {2, 4})],
    ]
