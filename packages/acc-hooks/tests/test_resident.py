from __future__ import annotations

import copy
import gc
import weakref

import torch

from acc_hooks import (
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
