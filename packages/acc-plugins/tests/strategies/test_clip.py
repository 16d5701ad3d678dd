"""Clipping gives torch's numbers, faster in the plain case."""

from __future__ import annotations

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from acc_plugins.strategies.clip import clip_norm, unique_parameters


def parameters(
    shapes: list[tuple[int, ...]], dtypes: list[torch.dtype], seed: int, gaps: bool
) -> list[torch.Tensor]:
    generator = torch.Generator().manual_seed(seed)
    made = []
    for i, shape in enumerate(shapes):
        p = torch.zeros(shape, dtype=dtypes[i % len(dtypes)], requires_grad=True)
        if not (gaps and i % 3 == 2):
            p.grad = torch.randn(shape, generator=generator).to(p.dtype) * 3
        made.append(p)
    return made


@settings(max_examples=60)
@given(
    shapes=st.lists(st.lists(st.integers(1, 4), max_size=3).map(tuple), max_size=6),
    dtypes=st.sampled_from(
        [[torch.float32], [torch.float64], [torch.float32, torch.float64], [torch.bfloat16]]
    ),
    norm_type=st.sampled_from([1.0, 2.0, 3.0, math.inf]),
    max_norm=st.sampled_from([0.1, 1.0, 100.0, math.inf]),
    seed=st.integers(0, 99),
    gaps=st.booleans(),
)
def test_clip_equals_torchs_bit_for_bit(shapes, dtypes, norm_type, max_norm, seed, gaps) -> None:
    ours, theirs = (parameters(shapes, dtypes, seed, gaps) for _ in range(2))
    norm = clip_norm((p for p in ours), max_norm, norm_type)
    expected = torch.nn.utils.clip_grad_norm_(theirs, max_norm, norm_type)
    assert torch.equal(norm, expected)
    for a, b in zip(ours, theirs, strict=True):
        assert (a.grad is None) == (b.grad is None)
        assert a.grad is None or torch.equal(a.grad, b.grad)


def test_a_parameter_given_twice_counts_once() -> None:
    p = torch.zeros(2, requires_grad=True)
    p.grad = torch.tensor([3.0, 4.0])
    assert clip_norm([p, p], 1.0).item() == 5
    torch.testing.assert_close(p.grad, torch.tensor([0.6, 0.8]))
    assert unique_parameters(p) == [p]


def test_sparse_and_subclassed_gradients_go_to_torch() -> None:
    class Tagged(torch.Tensor):
        pass

    p = torch.zeros(2, requires_grad=True)
    p.grad = torch.tensor([3.0, 4.0]).as_subclass(Tagged)
    assert float(clip_norm([p], 1.0)) == 5
    torch.testing.assert_close(p.grad.as_subclass(torch.Tensor), torch.tensor([0.6, 0.8]))


def test_the_kind_of_norm_may_be_text_as_for_torch() -> None:
    p = torch.zeros(2, requires_grad=True)
    p.grad = torch.tensor([3.0, 4.0])
    assert clip_norm([p], 9.0, "inf").item() == 4


def test_without_gradients_the_norm_is_zero() -> None:
    assert clip_norm([torch.zeros(2, requires_grad=True)], 1.0).item() == 0
    assert clip_norm([], 1.0).item() == 0


@pytest.mark.parametrize("bad", [math.nan, math.inf])
def test_a_norm_that_is_not_finite_is_reported(bad: float) -> None:
    p = torch.zeros(2, requires_grad=True)
    p.grad = torch.tensor([bad, 1.0])
    assert not math.isfinite(clip_norm([p], 1.0).item())
