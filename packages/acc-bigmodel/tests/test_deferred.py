"""What is made while a model is built empty has no memory, or all of its values."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from acc_bigmodel import deferred, empty, init_empty_weights, init_on_device

FAR = 500_000  # FAR x FAR numbers are a terabyte


class RealBytes(TorchDispatchMode):
    """Adds up what torch allocates off the meta device in this thread."""

    nbytes = 0

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        result = func(*args, **(kwargs or {}))
        for leaf in tree_leaves(result):
            if isinstance(leaf, torch.Tensor) and not leaf.is_meta:
                self.nbytes += leaf.nbytes
        return result


HUGE: dict[str, Callable[[], nn.Module]] = {
    "linear": lambda: nn.Linear(FAR, FAR),
    "on a device": lambda: nn.Linear(FAR, FAR, device="cpu", dtype=torch.bfloat16),
    "embedding": lambda: nn.Embedding(FAR, FAR, padding_idx=0),
    "convolution": lambda: nn.Conv1d(FAR, FAR, 3),
    "recurrent": lambda: nn.LSTM(FAR, FAR),
    "attention": lambda: nn.MultiheadAttention(FAR, 10),
    "norm": lambda: nn.LayerNorm((FAR, FAR)),
    "zeros": lambda: holding(torch.zeros(FAR, FAR)),
    "ones": lambda: holding(torch.ones((FAR, FAR), dtype=torch.float16)),
    "full": lambda: holding(torch.full((FAR, FAR), 0.5)),
    "random": lambda: holding(torch.randn(FAR, FAR, generator=torch.Generator())),
    "scaled": lambda: holding(0.02 * torch.randn(FAR, FAR) - 1),
    "filled": lambda: holding(torch.empty(size=(FAR, FAR)).normal_(0, 0.02).mul_(3)),
    "filled as a parameter": lambda: holding(nn.init.xavier_uniform_(nn.Parameter(torch.empty(FAR, FAR)))),
    "initialised": lambda: holding(nn.init.kaiming_normal_(torch.empty(FAR, FAR))),
    "identity": lambda: holding(torch.eye(FAR)),
    "drawn": lambda: holding(torch.normal(0.0, 0.02, (FAR, FAR))),
    "cast": lambda: holding(torch.rand(FAR, FAR).half().to(torch.bfloat16)),
    "rearranged": lambda: holding(torch.linspace(0, 1, FAR * FAR).view(FAR, FAR).T[None].clone().data),
    "initialised when registered": lambda: truncated(holding(torch.empty(FAR, FAR))),
}


def holding(tensor: torch.Tensor) -> nn.Module:
    module = nn.Module()
    module.weight = tensor if isinstance(tensor, nn.Parameter) else nn.Parameter(tensor)
    return module


def truncated(module: nn.Module) -> nn.Module:
    nn.init.trunc_normal_(module.weight, std=0.02)
    return module


@pytest.mark.parametrize("include_buffers", [False, True])
@pytest.mark.parametrize("kind", HUGE)
def test_a_layer_of_a_terabyte_can_be_built(kind: str, include_buffers: bool) -> None:
    with init_empty_weights(include_buffers=include_buffers), RealBytes() as real:
        module = HUGE[kind]()
    assert all(parameter.is_meta for parameter in module.parameters())
    assert real.nbytes < 1000
    assert "reset_parameters" not in vars(module)


def pairs() -> tuple[torch.Tensor, torch.Tensor]:
    noise = torch.randn(5)
    return noise * 2, noise


def positions() -> torch.Tensor:
    table = torch.zeros(6, 4)
    angles = torch.arange(6).unsqueeze(1) * torch.exp(torch.arange(0, 4, 2) * -0.5)
    table[:, 0::2], table[:, 1::2] = torch.sin(angles), torch.cos(angles)
    return table.unsqueeze(0)


def written_through_a_view() -> torch.Tensor:
    table = torch.ones(3, 3)
    row = table[1]
    row.zero_()
    table.t()[0].fill_(7)
    return table


def size_that_changes() -> torch.Tensor:
    size = [2, 3]
    tensor = torch.zeros(size)
    size.append(4)
    return tensor


def long_chain() -> torch.Tensor:
    total = torch.zeros(2)
    for _ in range(3000):
        total = total + 1
    return total


def filled_after_use() -> tuple[torch.Tensor, torch.Tensor]:
    one = torch.ones(3)
    two = one + 1
    one.zero_()
    return one, two


def filled_through_views() -> tuple[torch.Tensor, ...]:
    one = torch.zeros(2, 3)
    one.view(6)[:4].fill_(2)
    two = one.t()
    three = one + 1
    two.zero_()
    four = torch.ones(4).view(2, 2).fill_(5)
    return one, two, three, four.T


BUILT: dict[str, Callable[[], Any]] = {
    "zeros": lambda: torch.zeros(3),
    "integers": lambda: torch.zeros(2, 2, dtype=torch.long).add_(3),
    "full": lambda: (
        torch.full((2,), 1.5),
        torch.full((2,), 3),
        torch.full((2,), True),
        torch.full((), -1e9),
    ),
    "a number": lambda: torch.full([2], fill_value=4.0),
    "random": lambda: (torch.randn(3), torch.rand(2, 2)),
    "generator": lambda: torch.rand(3, generator=torch.Generator().manual_seed(5)),
    "filled": lambda: torch.empty(4).uniform_(-1, 1).mul_(2).clamp_(-1, 1),
    "initialised": lambda: nn.init.normal_(torch.empty(3, 3), std=0.1),
    "by keyword": lambda: nn.init.constant_(tensor=torch.empty(3), val=2.5),
    "filled with a tensor": lambda: torch.empty(3).fill_(torch.tensor(2.0)),
    "mask": lambda: torch.tril(torch.ones(4, 4, dtype=torch.bool)).view(1, 1, 4, 4),
    "causal": lambda: torch.full((3, 3), float("-inf")).triu_(1),
    "positions": positions,
    "view": written_through_a_view,
    "derived": pairs,
    "arithmetic": lambda: -(2 * (torch.ones(3) / 4 + 1)) - 3,
    "long chain": long_chain,
    "size that changes": size_that_changes,
    "of two": lambda: torch.ones(3) + torch.full((3,), 2.0),
    "filled after use": filled_after_use,
    "filled through views": filled_through_views,
    "identity": lambda: (torch.eye(3), torch.eye(2, 3, dtype=torch.int64)),
    "spread": lambda: (torch.linspace(0, 1, 5), torch.normal(2.0, 0.0, (2, 2))),
    "looked into": lambda: torch.ones(3) if bool(torch.zeros(1).eq(0)) else torch.zeros(3),
    "device": lambda: torch.arange(3, device=torch.zeros(2).device),
    "like": lambda: torch.zeros_like(torch.ones(2, 2)),
    "list": lambda: torch.stack([torch.ones(2), torch.zeros(2)]),
    "numpy-like": lambda: torch.tensor(torch.ones(3).tolist()),
    "gradient": lambda: torch.ones(3, requires_grad=True),
    "copy": lambda: copy.deepcopy(torch.ones(3)),
    "cast": lambda: torch.ones(3).half().to(torch.float64),
    "other memory": lambda: torch.zeros(2, 3).t().contiguous(),
    "complex": lambda: torch.full((2,), 1j) * torch.ones(2),
    "out": lambda: torch.zeros(3, out=torch.empty(3)),
    "parameter": lambda: nn.Parameter(torch.ones(3)).sum(),
    "rearranged parameter": lambda: nn.Parameter(torch.ones(2, 3)).data.t() * 2,
}


@pytest.fixture(params=["small", "large"])
def deferring(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """As tensors are treated, small as they are, and as if they were large."""
    if request.param == "large":
        monkeypatch.setattr(deferred, "_SMALL_BYTES", 1)


@pytest.mark.usefixtures("deferring")
@pytest.mark.parametrize("where", ["buffer", "attribute", "list"])
@pytest.mark.parametrize("kind", BUILT)
def test_what_is_no_parameter_is_as_it_is_outside(kind: str, where: str) -> None:
    module = nn.Module()
    torch.manual_seed(3)
    with init_empty_weights():
        built = BUILT[kind]()
        for number, tensor in enumerate(built if isinstance(built, tuple) else [built]):
            if where == "buffer":
                module.register_buffer(f"b{number}", tensor)
            elif where == "attribute":
                setattr(module, f"b{number}", tensor)
            else:
                module.b = [*getattr(module, "b", []), tensor]
        del built, tensor
    torch.manual_seed(3)
    expected = BUILT[kind]()
    expected = expected if isinstance(expected, tuple) else (expected,)
    found = module.b if where == "list" else [getattr(module, f"b{i}") for i in range(len(expected))]
    for one, other in zip(found, expected, strict=True):
        assert type(one) is torch.Tensor
        assert (one.dtype, one.requires_grad, one.stride()) == (
            other.dtype,
            other.requires_grad,
            other.stride(),
        )
        if kind != "random":  # drawn in the order of use
            assert torch.equal(one, other)


def test_everything_is_empty_with_buffers() -> None:
    with init_empty_weights(include_buffers=True):
        for kind in BUILT.keys() - {"looked into", "numpy-like"}:
            built = BUILT[kind]()
            for tensor in built if isinstance(built, tuple) else [built]:
                assert tensor.is_meta, kind
    with init_empty_weights(include_buffers=True):
        module = nn.Module()
        module.register_buffer("explicit", torch.zeros(FAR, FAR, device="cpu"))
    assert module.explicit.is_meta


def test_the_dtype_is_that_of_the_moment() -> None:
    with init_empty_weights():
        torch.set_default_dtype(torch.float64)
        try:
            tensor = torch.ones(3)
        finally:
            torch.set_default_dtype(torch.float32)
    assert tensor.dtype == torch.float64
    assert tensor.tolist() == [1.0] * 3


def test_attributes_and_identity_are_kept() -> None:
    with init_empty_weights():
        tensor = torch.zeros(3)
        tensor.mark = "mine"
        kept = tensor
        tensor[0] = 1
    assert kept is tensor
    assert (tensor.mark, tensor.tolist()) == ("mine", [1.0, 0.0, 0.0])


def test_a_parameter_of_a_tensor_that_is_a_buffer_too() -> None:
    module = nn.Module()
    with init_empty_weights():
        tensor = torch.ones(3)
        module.weight = nn.Parameter(tensor)
        module.register_buffer("start", tensor)
        big = torch.empty(FAR, FAR)
        module.big = nn.Parameter(big)
    assert (module.weight.is_meta, module.start.tolist()) == (True, [1.0] * 3)
    assert big.is_meta  # its memory is the parameter's


def test_parameters_can_be_computed_with_before_and_after_they_are_registered() -> None:
    module = nn.Module()
    with init_empty_weights():
        weight = nn.Parameter(torch.ones(3))
        assert weight.sum().item() == 3
        module.weight = weight
        other = nn.Parameter(torch.ones(3) * 2)
        module.norm = nn.Parameter(other.detach().norm(keepdim=True))
        module.other = other
        assert (module.other * 2).is_meta
        with torch.no_grad():
            module.other.copy_(torch.ones(3))
            module.other[0] = 0
    assert all(parameter.is_meta and type(parameter) is nn.Parameter for parameter in module.parameters())


def test_a_real_context_inside_makes_real_tensors_and_sees_values() -> None:
    with init_empty_weights():
        before = torch.ones(2)
        with init_on_device("cpu"):
            module = holding(torch.ones(2))
            module.before = nn.Parameter(before)
            module.register_buffer("sum", before + module.weight)
        after = nn.Linear(2, 2)
    assert (module.sum.tolist(), module.before.tolist()) == ([2.0, 2.0], [1.0, 1.0])
    assert after.weight.is_meta


def test_an_exception_passes_without_values_for_what_is_large() -> None:
    held = []
    with pytest.raises(ZeroDivisionError), init_empty_weights():
        held += [torch.ones(2), torch.ones(FAR, FAR)]
        1 / 0
    assert held[0].tolist() == [1.0, 1.0]
    assert held[1].is_meta


def test_reset_parameters_is_skipped_for_the_first_time_only_and_only_where_it_fills() -> None:
    class Own(nn.Linear):
        def reset_parameters(self) -> None:
            self.was_called = True
            super().reset_parameters()

    with init_empty_weights():
        own, embedding = Own(2, 2), nn.Embedding(2, 2, _weight=torch.empty(2, 2))
        norm = nn.BatchNorm1d(2)
        linear = nn.Linear(2, 2)
        assert "reset_parameters" not in vars(linear)
        linear.reset_parameters()
    assert own.was_called
    assert norm.running_var.tolist() == [1.0, 1.0]
    assert not [module for module in (own, embedding, linear) if "reset_parameters" in vars(module)]


def test_a_patched_reset_is_called(monkeypatch: pytest.MonkeyPatch) -> None:
    called = []
    monkeypatch.setattr(nn.Linear, "reset_parameters", lambda self: called.append(self))
    with init_empty_weights():
        linear = nn.Linear(2, 2)
    assert called == [linear]


def test_nothing_is_kept_of_parameters_that_are_registered() -> None:
    with init_empty_weights():
        deferral = empty._targets.stack[-1].deferral
        assert deferral is not None
        lingering = torch.ones(3)
        for _ in range(50):
            module = nn.Linear(2, 2)
            module.scale = nn.Parameter(torch.zeros(2) + 1)
            module.register_buffer("mask", torch.tril(torch.ones(2, 2)))
        deferral.claim(module.weight)
        deferral.give_values(module.scale)
        assert len(deferral._waiting) < 60
    assert lingering.tolist() == [1.0] * 3
