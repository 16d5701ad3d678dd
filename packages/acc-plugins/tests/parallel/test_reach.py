"""Attention inside a user's model is reached while the model runs, and nowhere else."""

from __future__ import annotations

import copy
import threading
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from acc_plugins.parallel.attention import Attention
from acc_plugins.parallel.exchange import Line
from acc_plugins.parallel.inputs import fill_in
from acc_plugins.parallel.masks import SequenceError
from acc_plugins.parallel.reach import Reach


class Noted(Attention):
    """Counts its calls and attends to what is here."""

    calls = 0

    def attend(self, asked):
        self.calls += 1
        return asked.answer()


class Inner(nn.Module):
    def __init__(self, kind: str) -> None:
        super().__init__()
        self.kind = kind
        self.layer = nn.Linear(4, 4)

    def forward(self, x: Tensor) -> Tensor:
        x = self.layer(x)
        if self.kind == "softmax":
            return (x @ x.transpose(-1, -2)).softmax(-1) @ x
        if self.kind == "raise":
            raise KeyError
        return F.scaled_dot_product_attention(x, x, x)


class Outer(nn.Module):
    def __init__(self, kind: str = "") -> None:
        super().__init__()
        self.inner, self.again = Inner(kind), Inner(kind)

    def forward(self, x: Tensor) -> Tensor:
        return self.again(checkpoint(self.inner, x, use_reentrant=False))


def _reached(kind: str = "", *, open: bool = True) -> tuple[Outer, Reach, Noted]:
    model, attention = Outer(kind), Noted(Line(None, 0, 2))
    attention.lengths = {3}
    reach = Reach(attention, open=open)
    reach.attach(model)
    return model, reach, attention


def test_only_the_model_s_own_attention_is_split() -> None:
    model, _, attention = _reached()
    x = torch.rand(2, 3, 4)
    model(x)
    assert attention.calls == 2
    F.scaled_dot_product_attention(x, x, x)
    nn.Sequential(Outer())(x)
    assert attention.calls == 2


def test_what_runs_again_within_backward_does_what_it_did_though_the_doors_are_closed() -> None:
    model, reach, attention = _reached(open=False)
    x = torch.rand(2, 3, 4)
    reach.open = True
    loss = model(x).sum()
    reach.open = False
    loss.backward()
    assert attention.calls == 3
    model(x).sum().backward()
    assert attention.calls == 3


def test_another_thread_without_the_model_is_not_touched() -> None:
    model, _, attention = _reached()
    x, seen = torch.rand(2, 3, 4), []

    def other() -> None:
        seen.append(F.scaled_dot_product_attention(x, x, x))
        seen.append(model(x))

    def meanwhile(module: nn.Module, args: Any) -> None:
        before = attention.calls
        thread = threading.Thread(target=lambda: seen.append(F.scaled_dot_product_attention(x, x, x)))
        thread.start()
        thread.join()
        assert attention.calls == before

    handle = model.again.register_forward_pre_hook(meanwhile)
    model(x)
    handle.remove()
    assert attention.calls == 2
    thread = threading.Thread(target=other)
    thread.start()
    thread.join()
    assert attention.calls == 4


def test_after_an_error_nothing_is_left_on() -> None:
    model, _, attention = _reached("raise")
    x = torch.rand(2, 3, 4)
    with pytest.raises(KeyError):
        model(x)
    F.scaled_dot_product_attention(x, x, x)
    assert attention.calls == 0
    healthy, _, attention = _reached()
    healthy(x)
    assert attention.calls == 2


def test_attention_by_hand_is_refused_where_it_is_seen() -> None:
    model, reach, _ = _reached("softmax")
    with pytest.raises(SequenceError, match=r"softmax over scores of shape \(2, 3, 3\).*sdpa"):
        model(torch.rand(2, 3, 4))
    assert model(torch.rand(2, 5, 4)).shape == (2, 5, 4)
    reach.open = False
    assert model(torch.rand(2, 3, 4)).shape == (2, 3, 4)


def test_torch_s_multihead_attention_is_refused_where_it_is_called() -> None:
    model = nn.ModuleList([nn.MultiheadAttention(4, 2)])
    wrapper = nn.Sequential(nn.Identity())
    wrapper.forward = lambda x: model[0](x, x, x)[0]
    Reach(Noted(Line(None, 0, 2)), open=True).attach(wrapper)
    with pytest.raises(SequenceError, match=r"nn\.MultiheadAttention"):
        wrapper(torch.rand(3, 2, 4))


def test_a_copy_of_the_model_is_reached_too() -> None:
    model, _, attention = _reached()
    copy.deepcopy(model)(torch.rand(2, 3, 4))
    assert attention.calls == 2


class Tokens(nn.Module):
    def forward(
        self,
        input_ids: Tensor,
        attention_mask: Any = None,
        position_ids: Any = None,
        labels: Any = None,
        **rest: Any,
    ) -> None:
        """As transformers' models have it."""


def test_places_of_this_rank_are_filled_in_where_none_are_given() -> None:
    attention = Noted(Line(None, 1, 2))
    attention.lengths = {3}
    ids = torch.ones(2, 3)
    assert fill_in(Tokens(), (ids,), {}, attention)["position_ids"].tolist() == [[3, 4, 5]]
    own = torch.zeros(1, 3)
    assert fill_in(Tokens(), (), {"input_ids": ids, "position_ids": own}, attention)["position_ids"] is own
    assert fill_in(Tokens(), (torch.ones(2, 4),), {}, attention) == {}
    assert fill_in(Tokens(), (ids, None, own), {}, attention) == {}
