"""Strategies for the specs of `ops_data.py`, and what may not differ in one."""

from __future__ import annotations

import functools
from typing import Any

import torch
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from ops_data import DTYPES, KINDS, MAX_RANKS, Color, Leaf, Node, Other, Spec

STABLE = settings(
    max_examples=60,
    suppress_health_check=[HealthCheck.too_slow, HealthCheck.data_too_large],
)
REDUCIBLE = tuple(name for name in DTYPES if name != "uint64" and not name.startswith("complex"))
NOT_PICKLABLE = ("proxy", "slotted")  # kinds that Python cannot pickle
READ_ONLY_VIEWS = ("expanded", "inference")
VIEWS = ("plain", "transposed", "strided", "offset", "conj", "neg", "grad", "result", "parameter")

ranks = st.integers(1, MAX_RANKS)
several_ranks = st.integers(2, MAX_RANKS)
_sizes = st.integers(0, 3)
_any_keys = st.one_of(
    st.text(max_size=2),
    st.integers(2, 5),
    st.none(),
    st.just(Color.RED),
    st.tuples(st.integers(0, 1), st.just("k")),
)
_name_keys = st.sampled_from(["logits", "loss", "hidden", "cache"])
others = st.one_of(
    st.none(), st.booleans(), st.integers(), st.text(max_size=3), st.binary(max_size=2), st.just(Color.RED)
)


def shapes(differ: str) -> st.SearchStrategy[tuple[tuple[int, ...], ...]]:
    """Every rank's shape of one leaf, which differ in "nothing", in their "rows" or in all "sizes"."""
    one = st.lists(_sizes, max_size=3).map(tuple)
    if differ == "nothing":
        return one.map(lambda shape: (shape,) * MAX_RANKS)
    if differ == "rows":
        rows = st.lists(_sizes, min_size=MAX_RANKS, max_size=MAX_RANKS)
        return st.tuples(one, rows).map(
            lambda drawn: tuple((n, *drawn[0][1:]) if drawn[0] else () for n in drawn[1])
        )
    dims = st.integers(0, 3)
    return dims.flatmap(lambda n: st.tuples(*[st.tuples(*[_sizes] * n)] * MAX_RANKS))


@st.composite
def specs(
    draw: st.DrawFn,
    differ: str = "nothing",
    views: tuple[str, ...] = (*VIEWS, *READ_ONLY_VIEWS),
    with_others: bool = False,
    without: tuple[str, ...] = (),
    dtypes: tuple[str, ...] = DTYPES,
) -> Spec:
    """Nested data; one in eight is too large to travel inside a header. `without` names kinds to leave out."""
    # Few dtypes for many leaves: leaves of one dtype travel together.
    pool = draw(st.lists(st.sampled_from(dtypes), min_size=1, max_size=3))
    spec = _with_dtypes(draw(_nested(differ, views, with_others, without)), pool)
    if draw(st.integers(0, 7)) != 7:
        return spec
    count = 17_000 // getattr(torch, pool[0]).itemsize
    return Node("tuple", (spec, Leaf(pool[0], ((count,),) * MAX_RANKS)))


@functools.lru_cache
def _nested(
    differ: str, views: tuple[str, ...], with_others: bool, without: tuple[str, ...]
) -> st.SearchStrategy[Spec]:
    leaf: st.SearchStrategy[Any] = st.builds(
        Leaf, st.integers(0, 2), shapes(differ), st.sampled_from(views), st.integers(0, 20)
    )
    if with_others:
        leaf = leaf | st.builds(Other, others)
    return st.recursive(leaf, lambda inner: _nodes(inner, without), max_leaves=10)


def _nodes(inner: st.SearchStrategy[Spec], without: tuple[str, ...]) -> st.SearchStrategy[Spec]:
    found = []
    for name, kind in KINDS.items():
        if name in without:
            continue
        if kind.keys:
            keys = _any_keys if kind.keys == "any" else _name_keys
            items = st.lists(st.tuples(keys, inner), max_size=3, unique_by=lambda item: item[0])
            found.append(
                items.map(lambda i, name=name: Node(name, tuple(v for _, v in i), tuple(k for k, _ in i)))
            )
        else:
            low, high = (0, 6) if kind.size is None else (kind.size, kind.size)
            children = st.lists(inner, min_size=low, max_size=high)
            found.append(children.map(lambda c, name=name: Node(name, tuple(c))))
    return st.one_of(found)


def _with_dtypes(spec: Spec, pool: list[str]) -> Spec:
    if isinstance(spec, Leaf):
        return spec._replace(dtype=pool[int(spec.dtype) % len(pool)])
    if isinstance(spec, Node):
        return spec._replace(children=tuple(_with_dtypes(child, pool) for child in spec.children))
    return spec


def mutations(spec: Spec, differ: str) -> list[Spec]:
    """Every spec that differs from `spec` in one place, in a way that ranks must not; `differ` as in `shapes`."""
    if isinstance(spec, Leaf):
        return _leaf_mutations(spec, differ)
    if isinstance(spec, Other):
        return []
    found = [
        spec._replace(children=(*spec.children[:i], changed, *spec.children[i + 1 :]))
        for i, child in enumerate(spec.children)
        for changed in mutations(child, differ)
    ]
    return found + _node_mutations(spec)


SCALAR = Leaf("float32", ((),) * MAX_RANKS)
_RELATED = {
    "list": "tuple",
    "tuple": "list",
    "pair": "tuple",
    "max": "pair",
    "batch": "frozen",
    "frozen": "slotted",
}


def _leaf_mutations(leaf: Leaf, differ: str) -> list[Spec]:
    dims = len(leaf.shapes[0])
    found: list[Spec] = [
        leaf._replace(dtype="int16" if leaf.dtype == "bfloat16" else "bfloat16"),
        leaf._replace(shapes=tuple((*shape, 1) for shape in leaf.shapes)),
        Other("text"),
        Other(None),
        Node("list", (leaf,)),
    ]
    first = {"nothing": 0, "rows": 1, "sizes": dims}[differ]
    for dim in range(first, dims):
        larger = tuple((*s[:dim], s[dim] + 1, *s[dim + 1 :]) for s in leaf.shapes)
        found.append(leaf._replace(shapes=larger))
    return found


def _node_mutations(node: Node) -> list[Spec]:
    kind = KINDS[node.kind]
    found: list[Spec] = [SCALAR] if node != SCALAR else []
    if kind.keys:
        other = "ordered" if node.kind == "dict" else "dict"
        found.append(node._replace(kind=other))
        new = "other"
        found.append(Node(node.kind, (*node.children, SCALAR), (*node.keys, new)))
        if node.keys:
            found.append(Node(node.kind, node.children[1:], node.keys[1:]))
            found.append(node._replace(keys=(new, *node.keys[1:])))
        if len(node.keys) > 1:
            found.append(Node(node.kind, node.children[::-1], node.keys[::-1]))
        return found
    if node.kind in _RELATED:
        found.append(node._replace(kind=_RELATED[node.kind]))
    if kind.size is None:
        found.append(node._replace(children=(*node.children, SCALAR)))
        if node.children:
            found.append(node._replace(children=node.children[:-1]))
    return found
