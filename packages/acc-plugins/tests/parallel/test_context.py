"""Tensors that are cut inside a block, in place, and whole again behind it."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch

from acc_ops.testing import run_threads
from acc_plugins.parallel import context
from acc_plugins.parallel.attention import Keys
from acc_plugins.parallel.context import context_parallel, split_sequences
from acc_plugins.parallel.masks import SequenceError
from acc_plugins.parallel.reach import Reach


def test_every_rank_holds_its_part_inside_and_all_of_it_behind(line_here: Any) -> None:
    def work() -> list[list[Any]]:
        line = line_here()
        ids, places, kept = torch.arange(8).view(2, 4), torch.arange(4), torch.arange(4) * 10
        whole = ids.clone()
        reach = Reach(Keys(line), open=False)
        with split_sequences([reach], line, [ids, places, kept, ids], [1, 0, -1, 1], {kept}):
            inside = [ids.tolist(), places.tolist(), reach.open, reach.attention.lengths]
        assert torch.equal(ids, whole)
        assert (places.tolist(), reach.open) == ([0, 1, 2, 3], False)
        assert kept.tolist() == [20 * line.rank, 20 * line.rank + 10]
        return inside

    assert run_threads(2, work) == [
        [[[0, 1], [4, 5]], [0, 1], True, {2}],
        [[[2, 3], [6, 7]], [2, 3], True, {2}],
    ]


def test_an_error_inside_leaves_everything_whole(line_here: Any) -> None:
    def work() -> None:
        line = line_here()
        ids, reach = torch.arange(4), Reach(Keys(line), open=False)
        with pytest.raises(KeyError), split_sequences([reach], line, [ids], [0]):
            raise KeyError
        assert (ids.tolist(), reach.open) == ([0, 1, 2, 3], False)

    run_threads(2, work)


@pytest.mark.parametrize(
    ("buffers", "dims", "kept", "error", "message"),
    [
        (
            lambda: [torch.ones(2, 3)],
            [1],
            lambda b: [],
            SequenceError,
            r"3 places along dimension 1.*pad_to_multiple_of",
        ),
        (lambda: [torch.ones(2)], [], lambda b: [], ValueError, "one dimension for each of the 1 buffers"),
        (lambda: [torch.ones(2)], [1], lambda b: [], ValueError, r"\[0\]=1 is no dimension"),
        (lambda: [[1, 2]], [0], lambda b: [], TypeError, r"buffers\[0\] must be a tensor, got list"),
        (lambda: torch.ones(2), [0], lambda b: [], TypeError, "buffers must be a list"),
        (lambda: [torch.ones(2)], 0, lambda b: [], TypeError, "buffer_seq_dims must be a list"),
        (lambda: [torch.ones(2, requires_grad=True)], [0], lambda b: [], ValueError, "requires a gradient"),
        (lambda: [torch.ones(2)], [0], lambda b: [torch.ones(2)], ValueError, "not among the buffers"),
    ],
)
def test_what_cannot_be_cut_is_refused_before_anything_is(
    line_here: Any, buffers: Any, dims: Any, kept: Any, error: Any, message: str
) -> None:
    def work() -> None:
        good = torch.arange(4)
        given = buffers()
        both = [good, *given] if isinstance(given, list) and isinstance(dims, list) and dims else given
        numbers = [0, *dims] if both is not given else dims
        text = message.replace(r"\[0\]", r"\[\d\]")
        with pytest.raises(error, match=text), split_sequences([], line_here(), both, numbers, kept(given)):
            pass
        assert good.tolist() == [0, 1, 2, 3]

    run_threads(2, work)


def test_passing_keys_round_is_torch_s_own_engine(monkeypatch: pytest.MonkeyPatch, line_here: Any) -> None:
    told: list[Any] = []

    class Engine:
        def __init__(self, mesh: Any, **options: Any) -> None:
            told.append((mesh, options))

        def __enter__(self) -> None:
            told.append("in")

        def __exit__(self, *error: Any) -> None:
            told.append("out")

    stand_ins = {
        "torch.distributed.tensor.experimental": SimpleNamespace(context_parallel=Engine),
        "torch.distributed.tensor.experimental._attention": SimpleNamespace(set_rotate_method=told.append),
    }
    monkeypatch.setattr(context.importlib, "import_module", stand_ins.__getitem__)
    monkeypatch.setattr(context, "_compare_shapes", lambda *_: None)  # there is no other rank

    class Mesh(SimpleNamespace):
        def __getitem__(self, name: str) -> Any:
            return SimpleNamespace(
                get_group=lambda: None, get_local_rank=lambda: 0, size=lambda: 2, name=name
            )

    buffer = torch.arange(4)
    with context_parallel(Mesh(device_type="cuda"), [], [buffer], [0], {buffer}, rotate="alltoall"):
        told.append("here")
    assert told[0] == "alltoall"
    assert told[1][0].name == "cp"
    assert told[1][1] == {"buffers": [buffer], "buffer_seq_dims": [0], "no_restore_buffers": {buffer}}
    assert told[2:] == ["in", "here", "out"]
    with pytest.raises(ValueError, match="use 'allgather'"):
        context_parallel(Mesh(device_type="cpu"), [], rotate="alltoall")
