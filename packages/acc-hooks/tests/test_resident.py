from __future__ import annotations

import copy
import gc
import weakref

import pytest
import torch
from torch import nn

from acc_hooks import (
    AlignDevicesHook,
    LayerwiseCastingHook,
    add_hook_to_module,
    align_module_device,
    attach_align_device_hook,
    attach_align_device_hook_on_blocks,
    remove_hook_from_module,
)
from acc_hooks.resident import Residents

CPU = torch.device("cpu")


def test_a_copy_is_made_once_and_freed_by_its_last_user():
    residents = Residents([["a", "b"]])
    tie = residents.tie_of("b")
    assert tie == residents.tie_of("a") == "a"
    assert residents.tie_of("c") is None
    made = []

    def make():
        made.append(1)
        return torch.ones(1)

    first = residents.acquire(tie, CPU, make)
    assert residents.acquire(tie, CPU, make) is first
    reference = weakref.ref(first)
    del first
    residents.release(tie, CPU)
    assert reference() is not None
    residents.release(tie, CPU)
    assert reference() is None
    assert made == [1]


def test_a_tensor_that_stays_serves_as_the_copy_while_it_lives():
    residents = Residents([["a", "b"]])
    stays = residents.settle("a", CPU, lambda: torch.ones(1))
    assert residents.settle("a", CPU, lambda: torch.zeros(1)) is stays
    assert residents.acquire("a", CPU, lambda: torch.zeros(1)) is stays
    residents.release("a", CPU)
    del stays
    gc.collect()
    assert not residents.acquire("a", CPU, lambda: torch.zeros(1)).any()


def test_a_copy_of_the_whole_knows_the_ties_and_no_copies():
    residents = Residents([["a", "b"]])
    held = residents.acquire("a", CPU, lambda: torch.ones(1))
    other = copy.deepcopy(residents)
    assert other.tie_of("b") == "a"
    assert other.acquire("a", CPU, lambda: torch.zeros(1)) is not held


def test_an_edit_of_a_tied_weight_reaches_every_name(tied, writable):
    for name in ("embed", "head"):
        model = copy.deepcopy(tied)
        weights = writable(model.state_dict())
        attach_align_device_hook(model, execution_device="cpu", offload=True, weights_map=weights)
        expected = model.state_dict()["embed.weight"] * 2
        with align_module_device(getattr(model, name)), torch.no_grad():
            getattr(model, name).weight.mul_(2)
        state = model.state_dict()
        assert torch.equal(state["embed.weight"], expected)
        assert torch.equal(state["head.weight"], expected)
        remove_hook_from_module(model, recurse=True)
        assert model.embed.weight is model.head.weight
        assert torch.equal(model.head.weight, expected)


def test_an_edit_of_a_tied_weight_reaches_the_name_that_stays(tied):
    with torch.no_grad():
        expected = tied.embed.weight * 2
    attach_align_device_hook_on_blocks(
        tied,
        execution_device={"embed": "cpu", "middle": "cpu", "head": "meta"},
        offload={"embed": False, "middle": False, "head": True},
        weights_map={"head.weight": tied.head.weight.detach().clone()},
    )
    with align_module_device(tied.head, "cpu"), torch.no_grad():
        tied.head.weight.mul_(2)
    assert torch.equal(tied.embed.weight, expected)
    tied.head.weight.copy_(expected * 2)
    assert torch.equal(tied.embed.weight, expected * 2)


class Shares(nn.Module):
    """Computes with its child's weight too, under a name of its own."""

    def __init__(self) -> None:
        super().__init__()
        self.below = nn.Linear(4, 4, bias=False)
        self.weight = self.below.weight

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.below(x @ self.weight)


def filled_map(module: nn.Module) -> dict[str, torch.Tensor]:
    return {name: value.clone() for name, value in module.state_dict().items()}


@pytest.mark.parametrize("make_map", [None, filled_map])
@pytest.mark.parametrize("place_submodules", [False, True])
@pytest.mark.parametrize("copied", [False, True])
def test_a_hook_made_by_hand_keeps_the_ties_with_what_is_below_its_module(make_map, place_submodules, copied):
    module = Shares().requires_grad_(False)
    weights = None if make_map is None else make_map(module)
    hook = AlignDevicesHook("cpu", offload=True, weights_map=weights, place_submodules=place_submodules)
    add_hook_to_module(module, hook)
    if copied:
        module = copy.deepcopy(module)

    def check(value: float) -> None:
        assert all(torch.equal(now, torch.full((4, 4), value)) for now in module.state_dict().values())
        assert torch.equal(module(torch.ones(1, 4)), torch.full((1, 4), 16 * value**2))

    with align_module_device(module):
        module.weight.fill_(2)
    check(2)
    module.below.weight.fill_(3)
    check(3)
    remove_hook_from_module(module)
    assert module.weight is module.below.weight
    check(3)


def test_a_weights_map_with_another_value_ends_the_tie_of_a_hook_made_by_hand():
    module = Shares().requires_grad_(False)
    below = module.below.weight.clone()
    add_hook_to_module(module, AlignDevicesHook("cpu", offload=True, weights_map={"weight": torch.eye(4)}))
    assert torch.equal(module(torch.eye(4)), below.T)
    with align_module_device(module):
        module.weight.fill_(2)
    assert torch.equal(module.below.weight, below)
    remove_hook_from_module(module)
    assert torch.equal(module.weight, torch.full((4, 4), 2.0))


def test_a_name_that_stays_in_another_dtype_is_cast_for_the_others():
    module = Shares().requires_grad_(False)
    expected = module(torch.eye(4))
    add_hook_to_module(module, LayerwiseCastingHook(torch.float64, torch.float32, False))
    add_hook_to_module(module, AlignDevicesHook("cpu", offload=True), append=True)
    for _ in range(3):
        assert torch.equal(module(torch.eye(4)), expected)
    remove_hook_from_module(module)
    assert module.weight is module.below.weight
    assert module.weight.dtype is torch.float32


def test_what_trains_the_name_that_stays_is_in_the_state_dict_under_every_name():
    module = Shares()
    add_hook_to_module(module, AlignDevicesHook("cpu", offload=True, weights_map=filled_map(module)))
    optimizer = torch.optim.SGD([module.below.weight], lr=0.1)
    module(torch.ones(1, 4)).sum().backward()
    optimizer.step()
    state = module.state_dict()
    assert torch.equal(state["weight"], module.below.weight)
    assert torch.equal(state["below.weight"], module.below.weight)
