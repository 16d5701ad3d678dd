"""Objects, and batches that only one rank has, reach every rank."""

from __future__ import annotations

from collections import OrderedDict, defaultdict
from typing import Any

import pytest
import torch

from acc_ops.collectives import (
    MismatchError,
    broadcast_object_list,
    copy_tensor_to_devices,
    gather,
    gather_object,
    gather_tensor_shape,
    scatter,
)
from acc_ops.testing import run_threads
from acc_ops.world import current_world


@pytest.mark.parametrize("verify", [True, False])
@pytest.mark.parametrize("size", [1, 2, 3])
def test_lists_are_chained_and_other_objects_become_items(size: int, verify: bool) -> None:
    def call() -> list[Any]:
        rank = current_world().rank
        return [
            gather_object([rank, "x" * rank]),
            gather_object((rank,)),
            gather_object({"r": rank}),
            gather_object(None),
        ]

    for got in run_threads(size, call, verify=verify):
        assert got[0] == [item for r in range(size) for item in (r, "x" * r)]
        assert got[1:] == [list(range(size)), [{"r": r} for r in range(size)], [None] * size]


def test_on_one_rank_a_list_is_returned_as_it_is() -> None:
    objects = [1, 2]
    assert gather_object(objects) is objects
    assert broadcast_object_list(objects) is objects


def test_lists_beside_other_objects_are_refused_everywhere() -> None:
    def call() -> str:
        with pytest.raises(MismatchError) as caught:
            gather_object([1] if current_world().rank else {"a": 1})
        return str(caught.value)

    assert (
        run_threads(2, call)
        == ["gather_object: every rank gives a list or none does: rank 0 dict, rank 1 list"] * 2
    )


def test_an_object_that_cannot_be_pickled_on_one_rank_fails_on_all() -> None:
    def call() -> tuple[str, int]:
        rank = current_world().rank
        with pytest.raises(MismatchError) as caught:
            gather_object([lambda: None] if rank == 1 else [1])
        return str(caught.value)[:58], len(gather_object([rank]))

    assert run_threads(2, call) == [("operation: rank 0 gather_object, rank 1 cannot take part: ", 2)] * 2


@pytest.mark.parametrize("verify", [True, False])
@pytest.mark.parametrize("text", ["short", "long" * 20_000])
def test_objects_of_the_root_replace_everybodys(text: str, verify: bool) -> None:
    def call() -> bool:
        mine = [current_world().rank, text if current_world().rank == 1 else None]
        assert broadcast_object_list(mine, 1) is mine
        return mine == [1, text]

    assert run_threads(2, call, verify=verify) == [True, True]


def test_lists_of_different_length_are_refused() -> None:
    def call() -> str:
        with pytest.raises(MismatchError) as caught:
            broadcast_object_list([1] * (current_world().rank + 1))
        return str(caught.value)

    assert run_threads(2, call) == ["object_list: rank 0 has 1 items, rank 1 has 2 items"] * 2
    for size in (1, 2):
        with pytest.raises(TypeError, match="overwrites a list, got"):
            run_threads(size, lambda: broadcast_object_list((1,)))


@pytest.mark.parametrize("verify", [True, False])
@pytest.mark.parametrize("rows", [2, 30_000])
@pytest.mark.parametrize("root", [0, 2])
def test_a_batch_only_the_root_has_reaches_each_rank(rows: int, root: int, verify: bool) -> None:
    parts = [
        defaultdict(
            list,
            ids=torch.full((rows + r, 2), r, dtype=torch.int16),
            flags=OrderedDict(on=torch.tensor(r % 2 == 0), names=[f"{r}"] * r),
            empty=torch.empty(0, 3),
        )
        for r in range(3)
    ]

    def call() -> Any:
        return scatter(parts if current_world().rank == root else None, root)

    for rank, part in enumerate(run_threads(3, call, verify=verify)):
        assert type(part) is defaultdict
        assert part.default_factory is list
        assert torch.equal(part["ids"], parts[rank]["ids"])
        assert part["flags"]["on"].item() is (rank % 2 == 0)
        assert part["flags"]["names"] == [f"{rank}"] * rank
        assert part["empty"].shape == (0, 3)
        assert part["ids"].dtype == torch.int16


def test_a_wrong_number_of_parts_fails_on_every_rank_and_they_go_on() -> None:
    def call() -> tuple[str, int]:
        with pytest.raises(ValueError, match="one part") as caught:
            scatter([torch.ones(1)] if current_world().rank == 0 else None)
        return str(caught.value), len(gather(torch.ones(1)))

    one, two = run_threads(2, call)
    assert "one part for each of the 2 ranks, got 1" in one[0]
    assert one == two
    with pytest.raises(ValueError, match="one part for each of the 1 ranks, got 2"):
        scatter([1, 2])


@pytest.mark.parametrize("verify", [True, False])
@pytest.mark.parametrize("size", [1, 2])
def test_wrong_parts_are_the_same_error_on_any_number_of_ranks(size: int, verify: bool) -> None:
    def call() -> int:
        for parts, kind, said in (
            (None, ValueError, "rank 0 has to give one part for each"),
            ([torch.eye(2).to_sparse()] * size, TypeError, "scatter takes dense tensors.*sparse_coo"),
            ([torch.empty(2, device="meta")] * size, TypeError, "scatter takes dense tensors.*meta"),
        ):
            with pytest.raises(kind, match=said):
                scatter(parts if current_world().rank == 0 else None)
        return len(gather(torch.ones(1)))

    assert run_threads(size, call, verify=verify) == [size] * size


@pytest.mark.parametrize("size", [1, 2, 3])
def test_the_tensor_of_one_rank_reaches_all(size: int) -> None:
    def call() -> tuple[list[float], tuple[torch.Size, int]]:
        own = torch.tensor([1.5, 2.5]) if current_world().is_last else None
        return copy_tensor_to_devices(own).tolist(), gather_tensor_shape(own)

    assert run_threads(size, call) == [([1.5, 2.5], (torch.Size([2]), 1))] * size


def test_several_holders_are_summed_and_must_agree() -> None:
    assert [t.item() for t in run_threads(2, lambda: copy_tensor_to_devices(torch.tensor(2)))] == [4, 4]
    with pytest.raises(MismatchError, match=r"tensor: rank 0 \(1,\) torch.float32, rank 1 \(2,\)"):
        run_threads(2, lambda: copy_tensor_to_devices(torch.ones(current_world().rank + 1)))
    for size in (1, 2):
        with pytest.raises(ValueError, match="no rank has a tensor"):
            run_threads(size, copy_tensor_to_devices)
        with pytest.raises(TypeError, match="rank 0 gives a int: 3"):
            run_threads(size, lambda: copy_tensor_to_devices(3))


def test_a_tensor_that_cannot_be_copied_is_named_on_every_rank() -> None:
    def call() -> None:
        sparse = torch.ones(2).to_sparse()
        with pytest.raises(TypeError, match="rank 1 gives a Tensor: "):
            copy_tensor_to_devices(sparse if current_world().rank == 1 else None)

    run_threads(2, call, timeout_s=10)
