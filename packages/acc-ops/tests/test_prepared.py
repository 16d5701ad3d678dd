"""What makes data unfit on one rank is the same error on all of them, and so is every difference that matters."""

from __future__ import annotations

import datetime
import threading
from collections import OrderedDict
from collections.abc import Callable
from dataclasses import dataclass
from enum import Enum
from typing import Any

import pytest
import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode

from acc_ops import packing
from acc_ops.collectives import (
    MismatchError,
    barrier,
    broadcast,
    broadcast_object_list,
    copy_tensor_to_devices,
    gather,
    gather_object,
    pad_across_processes,
    reduce,
    scatter,
)
from acc_ops.prepared import MayDiffer, Prepared, prepare
from acc_ops.testing import count_calls, run_threads
from acc_ops.world import current_world


class StandIn(Tensor):
    """A tensor class that answers for data elsewhere, as DTensor and acc-hooks' placeholders do: its own address is null."""

    @staticmethod
    def __new__(cls, *shape: int) -> StandIn:
        return Tensor._make_wrapper_subclass(cls, shape, dtype=torch.float32)

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return func(*[torch.ones(a.shape) if isinstance(a, cls) else a for a in args], **(kwargs or {}))


class Unreadable(dict):
    """Data that raises what nobody expects as soon as it is looked at."""

    def __iter__(self) -> Any:
        raise OSError("gone")


FAILING: list[Callable[[], Any]] = [
    lambda: gather(Unreadable(x=1)),
    lambda: reduce(Unreadable(x=1)),
    lambda: broadcast(Unreadable(x=1)),
    lambda: broadcast(torch.ones(1), 7),
    lambda: reduce(torch.ones(1), "average"),
    lambda: reduce(torch.ones(1, dtype=torch.uint64), "sum"),
    lambda: pad_across_processes(Unreadable(x=1)),
    lambda: pad_across_processes(torch.ones(1), pad_index=torch.ones(2)),
    lambda: pad_across_processes(torch.ones(1), dim="x"),
    lambda: gather({object(): torch.ones(1)}),
    lambda: gather([torch.ones(1), StandIn(3)]),
    lambda: gather_object([lambda: 1]),
    lambda: broadcast_object_list([lambda: 1], 1),
    lambda: broadcast_object_list([1], 7),
    lambda: scatter([[threading.Lock()], [1]], 1),
    lambda: scatter([Unreadable(x=1), 1], 1),
    lambda: scatter([1, 2], 7),
]


@pytest.mark.parametrize("call", FAILING)
def test_what_fails_on_one_rank_is_an_error_on_every_rank_and_the_ranks_go_on(
    call: Callable[[], Any],
) -> None:
    def one_of_two() -> tuple[str, int]:
        with pytest.raises(MismatchError) as caught:
            call() if current_world().rank == 1 else barrier()
        return str(caught.value), int(gather(torch.ones(1)).sum())

    results = run_threads(2, one_of_two, timeout_s=10)
    assert results[0] == results[1]
    assert "rank 0 barrier, rank 1 cannot take part: " in results[0][0]
    assert results[0][1] == 2


def fake_tensor(*shape: int) -> Tensor:
    with FakeTensorMode():
        return torch.empty(shape)


@pytest.mark.parametrize("size", [1, 2])
@pytest.mark.parametrize("make", [StandIn, fake_tensor])
def test_tensors_without_memory_of_their_own_are_refused_on_any_number_of_ranks(
    make: Callable[..., Tensor], size: int
) -> None:
    for shape in ((3,), (9_000,)):
        tensor = make(*shape)
        for call in (
            lambda t=tensor: gather(t),
            lambda t=tensor: gather({"x": [torch.ones(2), t]}),
            lambda t=tensor: reduce(t),
            lambda t=tensor: reduce(t, "none"),
            lambda t=tensor: broadcast(t),
            lambda t=tensor: pad_across_processes(t),
            lambda t=tensor: scatter([t] * size if current_world().rank == 0 else None),
            lambda t=tensor: copy_tensor_to_devices(t if current_world().is_last else None),
        ):

            def told(call: Callable[[], Any] = call) -> None:
                with pytest.raises(TypeError, match=r"has no memory of its own.*full_tensor\(\)"):
                    call()

            run_threads(size, told, timeout_s=10)


def test_an_error_in_putting_the_bytes_together_reaches_every_rank(monkeypatch: pytest.MonkeyPatch) -> None:
    pack = packing.pack

    def without_memory(leaves: list[Tensor], *rest: Any) -> Tensor:
        if current_world().rank == 1:
            raise torch.OutOfMemoryError("no memory")
        return pack(leaves, *rest)

    monkeypatch.setattr("acc_ops.prepared.pack", without_memory)
    monkeypatch.setattr("acc_ops.collectives.pack", without_memory)
    data = torch.ones(3)
    for call in (lambda: gather(data), lambda: broadcast(data, 1), lambda: reduce(data)):

        def told(call: Callable[[], Any] = call) -> None:
            with pytest.raises(MismatchError, match="rank 1 cannot take part: OutOfMemoryError: no memory"):
                call()

        run_threads(2, told, timeout_s=10)


class Task(Enum):
    NER = "ner"
    QA = "qa"


@pytest.mark.parametrize(
    ("one", "other"),
    [
        (Task.NER, Task.QA),
        ((Task.NER,), (Task.QA,)),
        (frozenset({0}), frozenset({1})),
        (datetime.date(2020, 1, 1), datetime.date(2020, 1, 2)),
        (torch.device("cpu"), torch.device("cuda:1")),
        (range(1), range(2)),
    ],
)
def test_keys_in_another_order_are_a_mismatch_whatever_their_type(one: Any, other: Any) -> None:
    def call() -> str:
        keys = (one, other) if current_world().rank == 0 else (other, one)
        with pytest.raises(MismatchError) as caught:
            reduce({key: torch.tensor(1.0 if key == one else 100.0) for key in keys})
        return str(caught.value)

    first, second = run_threads(2, call)
    assert (
        first == second == f"batch: rank 0 dict with {one!r}, {other!r}, rank 1 dict with {other!r}, {one!r}"
    )
    same = {one: torch.ones(1), other: torch.zeros(1)}
    assert run_threads(2, lambda: [leaf.item() for leaf in reduce(same).values()]) == [[1.0, 0.0]] * 2


@pytest.mark.parametrize("size", [1, 2])
def test_a_padding_that_a_dtype_cannot_hold_is_refused_whether_padding_is_needed_or_not(size: int) -> None:
    lowest = torch.finfo(torch.float32).min

    def call() -> None:
        with pytest.raises(ValueError, match=r"does not fit into torch\.float16"):
            pad_across_processes(torch.ones(1 + current_world().rank, dtype=torch.half), pad_index=lowest)

    run_threads(size, call, timeout_s=10)
    for good in (float("-inf"), float("nan"), torch.tensor(-100.0), 1e-9):
        run_threads(
            size, lambda good=good: pad_across_processes(torch.ones(1 + current_world().rank), 0, good)
        )


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (lambda rank: {"dim": rank}, "dim: rank 0 has 0, rank 1 has 1"),
        (lambda rank: {"pad_index": -rank}, "pad_index: rank 0 has 0, rank 1 has -1"),
        (lambda rank: {"pad_first": rank == 1}, "pad_first: rank 0 has False, rank 1 has True"),
    ],
)
def test_ranks_that_pad_differently_are_told_how(arguments: Callable[[int], Any], said: str) -> None:
    def call() -> str:
        with pytest.raises(MismatchError) as caught:
            pad_across_processes(torch.ones(2, 2), **arguments(current_world().rank))
        return str(caught.value)

    assert run_threads(2, call) == [said, said]


def test_the_same_padding_may_be_written_as_an_int_a_float_or_a_tensor() -> None:
    ways: list[Any] = [0, 0.0, torch.tensor(0.0), False]
    shapes = run_threads(
        4,
        lambda: (
            pad_across_processes(torch.ones(1 + current_world().rank), 0, ways[current_world().rank]).shape
        ),
    )
    assert shapes == [(4,)] * 4


def test_a_nested_tensor_is_called_one() -> None:
    jagged = torch.nested.nested_tensor([torch.ones(1), torch.ones(2)])
    with pytest.raises(TypeError, match="got one that is nested"):
        gather(jagged)


@dataclass(frozen=True)
class Point:
    x: object


class Text(str, Enum):
    A = "a"


class Alike(type):
    """Classes that are equal when they have as many letters in their name."""

    def __eq__(cls, other: object) -> bool:
        return isinstance(other, Alike) and len(cls.__name__) == len(other.__name__)

    def __hash__(cls) -> int:
        return len(cls.__name__)


class One(OrderedDict, metaclass=Alike):
    pass


class Two(OrderedDict, metaclass=Alike):
    pass


LEAF = torch.ones(2)


@pytest.mark.parametrize(
    ("one", "other"),
    [
        ({1: LEAF}, {1.0: LEAF}),
        ({1: LEAF}, {True: LEAF}),
        ({0.0: LEAF}, {-0.0: LEAF}),
        ({"a": LEAF}, {Text.A: LEAF}),
        ({(1,): LEAF}, {(1.0,): LEAF}),
        ({Point(1): LEAF}, {Point(True): LEAF}),
        (OrderedDict({1: LEAF}), OrderedDict({1.0: LEAF})),
        (One(a=LEAF), Two(a=LEAF)),
        ([LEAF], (LEAF,)),
        ({"a": LEAF}, {"b": LEAF}),
        ([LEAF, [LEAF]], [[LEAF], LEAF]),
    ],
)
def test_what_is_equal_but_not_the_same_stays_a_mismatch_after_either_was_seen(one: Any, other: Any) -> None:
    for data in (one, other):
        run_threads(2, lambda data=data: gather(data))

    def call() -> str:
        with pytest.raises(MismatchError) as caught:
            gather(one if current_world().rank == 0 else other)
        return str(caught.value)

    first, second = run_threads(2, call)
    assert first == second


def test_data_that_changes_between_two_calls_is_seen_as_it_is() -> None:
    def call() -> list[Any]:
        data: dict[str, Any] = {"a": torch.ones(1)}
        seen = [gather(data)]
        data["a"] = torch.ones(2, dtype=torch.int64)
        seen.append(gather(data))
        data["b"] = [torch.zeros(1)]
        seen.append(gather(data))
        data["a"].resize_(4).fill_(5)
        seen.append(gather(data))
        del data["b"]
        seen.append(gather(data))
        data["a"] = "text"
        with pytest.raises(TypeError, match="is a str"):
            gather(data)
        return seen

    two, five = torch.ones(4, dtype=torch.int64), torch.full((8,), 5)
    expected: list[Any] = [
        {"a": torch.ones(2)},
        {"a": two},
        {"a": two, "b": [torch.zeros(2)]},
        {"a": five, "b": [torch.zeros(2)]},
        {"a": five},
    ]
    for seen in run_threads(2, call):
        assert str(seen) == str(expected)


class Tagged(Tensor):
    """A user's tensor class."""


def test_a_tensor_class_of_the_users_travels_like_the_tensor_it_is() -> None:
    plain = torch.arange(6.0).reshape(2, 3)
    tagged = plain.as_subclass(Tagged)

    def call(leaf: Tensor) -> list[Any]:
        data = {"x": leaf, "y": [leaf[:1], leaf]}
        return [
            [torch.Tensor.tolist(part) for part in (made["x"], *made["y"])]
            for made in (gather(data), reduce(data, "sum"), broadcast(data))
        ]

    for leaf in (plain, tagged, plain):
        assert run_threads(2, lambda leaf=leaf: call(leaf)) == [call_by_hand(plain)] * 2


def call_by_hand(plain: Tensor) -> list[Any]:
    leaves = [plain, plain[:1], plain]
    return [
        [torch.cat([leaf, leaf]).tolist() for leaf in leaves],
        [(leaf + leaf).tolist() for leaf in leaves],
        [leaf.tolist() for leaf in leaves],
    ]


@pytest.mark.parametrize(
    ("make", "said"),
    [
        (lambda: torch.ones(2, device="meta"), "on the meta device"),
        (lambda: torch.ones(2).to_sparse(), r"torch\.sparse_coo"),
        (lambda: torch.quantize_per_tensor(torch.ones(2), 1.0, 0, torch.quint8), "quantized"),
    ],
)
@pytest.mark.filterwarnings("ignore:.*quantize_per_tensor")  # which torch is about to drop
def test_tensors_without_plain_data_are_refused_every_time(make: Callable[[], Tensor], said: str) -> None:
    if said == "quantized" and not hasattr(torch, "quantize_per_tensor"):
        pytest.skip("this torch has no quantized tensors")
    for _ in range(2):
        with pytest.raises(TypeError, match=f"got one that is {said}"):
            gather([torch.ones(2), make()])


def prepared(data: Any) -> Prepared:
    return prepare("gather", data, current_world(), may_differ=MayDiffer.ROWS)


def test_the_like_of_what_was_seen_is_looked_up() -> None:
    first = {f"a{i}": torch.ones(i + 1, 7) for i in range(50)}
    like = {name: leaf + 1 for name, leaf in first.items()}
    found_out = count_calls(lambda: prepared(first))
    assert count_calls(lambda: prepared(like)) < found_out / 5
    assert prepared(like).plan is prepared(first).plan
    assert prepared({1.0: torch.ones(1)}).plan is not prepared({1.0: torch.ones(1)}).plan


def test_no_more_than_some_plans_are_kept() -> None:
    plan = prepared(torch.ones(3, 5)).plan
    for size in range(300):
        prepared(torch.ones(size, 5))
    assert prepared(torch.ones(3, 5)).plan is not plan
