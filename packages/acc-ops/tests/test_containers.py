"""Every kind of container is taken apart and rebuilt as itself, and never written to."""

from __future__ import annotations

import types
import warnings
from collections import OrderedDict, UserDict, defaultdict, deque, namedtuple
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

import pytest
import torch
import torch.utils._pytree as pytree
from torch import nn

from acc_ops.containers import container_of
from acc_ops.precision import convert_to_fp32

Pair = namedtuple("Pair", "left right")


@dataclass
class Batch:
    ids: Any
    extra: Any = None
    length: int = field(init=False, default=0)

    def __post_init__(self) -> None:
        self.length += 1


@dataclass(frozen=True)
class Frozen:
    ids: Any


class Output(OrderedDict):  # like transformers' ModelOutput: keys are attributes, too
    def __setitem__(self, key: str, value: Any) -> None:
        super().__setitem__(key, value)
        super().__setattr__(key, value)


class Encoding(UserDict):  # like transformers' BatchEncoding
    def __init__(self, data: dict[str, Any] | None = None, encodings: str = "") -> None:
        super().__init__(data)
        self._encodings = encodings


class Wrapped(Mapping[str, Any]):
    """A Mapping of a user; a plain copy of it would share what it wraps."""

    def __init__(self, data: dict[str, Any]) -> None:
        self.inner = dict(data)

    def __getitem__(self, key: str) -> Any:
        return self.inner[key]

    def __iter__(self) -> Iterator[str]:
        return iter(self.inner)

    def __len__(self) -> int:
        return len(self.inner)


class Registered:
    def __init__(self, cache: list[Any]) -> None:
        self.cache = cache


pytree.register_pytree_node(Registered, lambda r: (r.cache, None), lambda values, _: Registered(list(values)))

MAKERS: list[Callable[[], Any]] = [
    lambda: [1, 2],
    lambda: (1, 2),
    lambda: Pair(1, 2),
    lambda: {"a": 1, "b": 2},
    lambda: OrderedDict(b=1, a=2),
    lambda: defaultdict(list, a=1, b=2),
    lambda: Output(a=1, b=2),
    lambda: Encoding({"a": 1, "b": 2}, "kept"),
    lambda: Wrapped({"a": 1, "b": 2}),
    lambda: types.MappingProxyType({"a": 1, "b": 2}),
    lambda: torch.Size([1, 2]),
    lambda: Registered([1, 2]),
    lambda: deque([1, 2]),
]


@pytest.mark.parametrize("make", MAKERS)
def test_a_container_is_rebuilt_as_its_own_type_and_left_alone(make: Callable[[], Any]) -> None:
    data, untouched = make(), make()
    container = container_of(data)
    assert container is not None
    assert container.values(data) == [1, 2]
    new = container.rebuild(data, [3, 4])
    assert type(new) is type(data)
    assert container.values(new) == [3, 4]
    assert container.key(new) == container.key(data)
    assert container.values(data) == container.values(untouched)
    assert len(container.names(data)) == 2


def test_what_hangs_on_a_container_stays() -> None:
    output = Output(a=1, b=2)
    new = container_of(output).rebuild(output, [3, 2])
    assert (new.a, new["a"], list(new)) == (3, 3, ["a", "b"])
    assert output.a == 1
    encoding = Encoding({"a": 1}, "kept")
    assert container_of(encoding).rebuild(encoding, [2])._encodings == "kept"
    factory = defaultdict(list, a=1)
    assert container_of(factory).rebuild(factory, [2]).default_factory is list


def test_a_dataclass_is_copied_without_running_its_initialiser() -> None:
    batch = Batch(1, 2)
    container = container_of(batch)
    assert container is not None
    assert container.names(batch) == [".ids", ".extra", ".length"]
    new = container.rebuild(batch, [5, 6, 1])
    assert (new.ids, new.extra, new.length, batch.ids) == (5, 6, 1, 1)
    frozen = Frozen(1)
    assert container_of(frozen).rebuild(frozen, [2]) == Frozen(2)
    assert frozen == Frozen(1)


def test_struct_sequences_of_torch_keep_their_type() -> None:
    best = torch.tensor([[1.0, 3.0], [2.0, 0.0]]).max(dim=1)
    container = container_of(best)
    assert container is not None
    new = container.rebuild(best, [t + 1 for t in container.values(best)])
    assert type(new) is type(best)
    assert new.values.tolist() == [4.0, 3.0]


def test_frozen_slots_are_copied_as_well() -> None:
    @dataclass(frozen=True)
    class Slotted:
        __slots__ = ("ids",)
        ids: Any

    @dataclass(frozen=True)
    class Below(Slotted):  # has a __dict__ beside the slots
        mask: Any = 0

    for before in (Slotted(1), Below(1, 2)):
        container = container_of(before)
        assert container is not None
        after = container.rebuild(before, [value + 1 for value in container.values(before)])
        assert type(after) is type(before)
        assert container.values(after) == [value + 1 for value in container.values(before)]
        assert before.ids == 1


def test_what_an_author_registered_counts_for_dataclasses_lists_and_tuples() -> None:
    @dataclass
    class Sample:
        ids: Any
        source: str  # no data, says its author

    class Point(tuple):
        def __new__(cls, x: Any, y: Any) -> Point:
            return super().__new__(cls, (x, y))

    pytree.register_pytree_node(
        Sample, lambda s: ([s.ids], s.source), lambda values, source: Sample(*values, source)
    )
    with pytest.raises(TypeError, match=r"a Point cannot be rebuilt .*register the class with torch"):
        container_of(Point(1, 2)).rebuild(Point(1, 2), [3, 4])
    pytree.register_pytree_node(Point, lambda p: (list(p), None), lambda values, _: Point(*values))
    sample = container_of(Sample(1, "web"))
    assert sample is not None
    assert sample.values(Sample(1, "web")) == [1]
    assert sample.rebuild(Sample(1, "web"), [2]) == Sample(2, "web")
    assert container_of(Point(1, 2)).rebuild(Point(1, 2), [3, 4]) == (3, 4)


def test_a_mapping_that_cannot_be_written_to_is_made_anew_or_named() -> None:
    class ReadOnly(dict):
        def __setitem__(self, key: Any, value: Any) -> None:
            raise TypeError("read-only")

    class Unmakable(Wrapped):
        def __init__(self, **data: Any) -> None:
            super().__init__(data)

    new = container_of(ReadOnly(a=1)).rebuild(ReadOnly(a=1), [2])
    assert (type(new), new["a"]) == (ReadOnly, 2)
    with pytest.raises(
        TypeError, match=r"a Unmakable cannot be rebuilt with other values: .*give a mapping a __copy__"
    ):
        container_of(Unmakable(a=1)).rebuild(Unmakable(a=1), [2])


def test_names_say_how_to_reach_a_value() -> None:
    assert container_of({"a": 1, 2: 3}).names({"a": 1, 2: 3}) == ["['a']", "[2]"]
    assert container_of(Pair(1, 2)).names(Pair(1, 2)) == [".left", ".right"]


@pytest.mark.parametrize(
    "leaf", [1, "text", None, b"", torch.ones(1), nn.Linear(1, 1), Batch, object(), {1, 2}]
)
def test_everything_else_is_a_leaf(leaf: Any) -> None:
    assert container_of(leaf) is None


def test_a_type_may_be_registered_after_it_was_seen_as_a_leaf() -> None:
    class Late:
        value = 1

    assert container_of(Late()) is None
    pytree.register_pytree_node(Late, lambda late: ([late.value], None), lambda values, _: Late())
    assert container_of(Late()) is not None


def test_a_compiled_function_is_compiled_once_without_a_warning_whatever_types_come_by() -> None:
    compilations = []

    def backend(graph: Any, _: Any) -> Any:
        compilations.append(graph)
        return graph

    compiled = torch.compile(convert_to_fp32, backend=backend)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        for i in range(3):
            container_of(type(f"Other{i}", (), {})())
            assert (
                compiled({"x": (torch.ones(1, dtype=torch.float16), 1, "text")})["x"][0].dtype
                == torch.float32
            )
            assert compiled(Pair(torch.ones(1), None)).left.dtype == torch.float32
    assert len(compilations) <= 2
