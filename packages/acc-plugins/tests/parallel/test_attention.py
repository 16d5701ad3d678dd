"""Attention over parts of a sequence gives what attention over all of it gives."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.nn.functional as F
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from torch import Tensor

from acc_ops.testing import run_threads
from acc_plugins.parallel.attention import Attention, Heads, Keys
from acc_plugins.parallel.masks import SequenceError

_MASKS = ["none", "causal", "square", "rows here", "keys", "keys here", "bias of heads", "one row of all"]


def _inputs(ranks: int, places: int, heads: int, kv_heads: int) -> tuple[Tensor, Tensor, Tensor]:
    generator = torch.Generator().manual_seed(places)
    time = ranks * places

    def draw(number: int) -> Tensor:
        return torch.randn(2, number, time, 4, generator=generator, dtype=torch.float64)

    return draw(heads), draw(kv_heads), draw(kv_heads)


def _mask(kind: str, heads: int, time: int) -> Tensor | None:
    generator = torch.Generator().manual_seed(time)
    if kind in ("none", "causal"):
        return None
    if kind == "bias of heads":
        return torch.randn(1, heads, time, time, generator=generator, dtype=torch.float64)
    if kind == "one row of all":
        return torch.randn(2, 1, 1, 1, generator=generator, dtype=torch.float64)
    seen = torch.rand(2, 1, 1 if "keys" in kind else time, time, generator=generator) < 0.7
    seen[..., 0] = True
    return seen


@settings(max_examples=80, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(
    ranks=st.integers(2, 4),
    places=st.integers(2, 3),
    groups=st.sampled_from([1, 2, 4]),
    kind=st.sampled_from(_MASKS),
    by_heads=st.booleans(),
)
def test_the_parts_together_are_the_whole(
    line_here: Any, ranks: int, places: int, groups: int, kind: str, by_heads: bool
) -> None:
    heads = 4 * ranks
    query, key, value = _inputs(ranks, places, heads, heads // groups)
    mask = _mask(kind, heads, ranks * places)
    gqa: dict[str, Any] = {"enable_gqa": True} if groups > 1 else {}
    expected = F.scaled_dot_product_attention(
        query, key, value, attn_mask=mask, is_causal=kind == "causal", scale=0.3, **gqa
    )

    def part() -> Tensor:
        line = line_here()
        attention = (Heads if by_heads else Keys)(line)
        attention.lengths = {places}
        given_mask = mask
        if mask is not None and kind in ("rows here", "keys here"):
            given_mask = line.mine(mask, -2 if kind == "rows here" else -1)
        q, k, v = (line.mine(t, -2) for t in (query, key, value))
        return attention(q, k, v, given_mask, is_causal=kind == "causal", scale=0.3, **gqa)

    torch.testing.assert_close(torch.cat(run_threads(ranks, part), -2), expected, rtol=1e-9, atol=1e-12)


def _alone(line_here: Any, call: Any) -> None:
    def part() -> None:
        attention = Keys(line_here())
        attention.lengths = {3}
        call(attention)

    run_threads(2, part)


def _tensors(queries: int, keys: int) -> tuple[Tensor, Tensor, Tensor]:
    return torch.ones(1, 2, queries, 4), torch.ones(1, 2, keys, 4), torch.rand(1, 2, keys, 4)


def test_keys_that_every_rank_has_whole_are_not_joined(line_here: Any) -> None:
    def call(attention: Attention) -> None:
        q, k, v = _tensors(3, 5)
        torch.testing.assert_close(attention(q, k, v), F.scaled_dot_product_attention(q, k, v))

    _alone(line_here, call)


@pytest.mark.parametrize(
    ("queries", "keys", "options", "message"),
    [
        (5, 3, {}, "5 queries and 3 keys.*split both along the sequence"),
        (3, 5, {"is_causal": True}, "and is causal"),
        (
            3,
            3,
            {"attn_mask": torch.ones(3, 3).bool()},
            r"shape \(3, 3\) and covers 3 keys.*there are 6, of which 3",
        ),
        (3, 3, {"attn_mask": torch.ones(1, 6).bool(), "is_causal": True}, "either attn_mask or is_causal"),
    ],
)
def test_what_cannot_be_told_from_the_parts_is_refused(
    line_here: Any, queries: int, keys: int, options: Any, message: str
) -> None:
    def call(attention: Attention) -> None:
        with pytest.raises(SequenceError, match=message):
            attention(*_tensors(queries, keys), **options)

    _alone(line_here, call)


def test_heads_that_the_ranks_do_not_divide_are_refused(line_here: Any) -> None:
    def part() -> None:
        attention = Heads(line_here())
        attention.lengths = {2}
        with pytest.raises(SequenceError, match="2 attention heads cannot be divided over 3 ranks"):
            attention(*_tensors(2, 2))

    run_threads(3, part)


def test_training_by_heads_on_batches_that_nobody_cut_is_refused(line_here: Any) -> None:
    def part() -> None:
        attention = Heads(line_here())
        with pytest.raises(SequenceError, match=r"no batch was cut.*deepspeed_ulysses_dl_adapter"):
            attention(*_tensors(4, 4))
        with torch.no_grad():
            assert attention(*_tensors(4, 4)).shape == (1, 2, 4, 4)

    run_threads(2, part)
