"""Regional compilation."""

from __future__ import annotations

from types import MethodType

import pytest
import torch
from torch import nn

from acc_ops.regions import (
    compile_regions,
    compile_regions_deepspeed,
    compile_regions_fsdp2,
    has_compiled_regions,
    has_repeated_blocks,
    is_compiled_module,
    is_repeated_blocks,
)


class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.linear = nn.Linear(4, 4)

    def forward(self, x):
        return torch.relu(self.linear(x))


class Model(nn.Module):
    def __init__(self):
        super().__init__()
        self.embed = nn.Linear(4, 4)
        self.blocks = nn.ModuleList(Block() for _ in range(3))
        self.heads = nn.ModuleDict({"a": nn.Linear(4, 2), "b": nn.Linear(4, 2)})
        self.nothing = None

    def forward(self, x):
        x = self.embed(x)
        for block in self.blocks:
            x = block(x)
        return self.heads["a"](x) + self.heads["b"](x)


def test_repeated_blocks_are_a_list_of_one_class():
    assert is_repeated_blocks(nn.ModuleList([Block(), Block()]))
    assert not is_repeated_blocks(nn.ModuleList([Block(), nn.Linear(1, 1)]))
    assert not is_repeated_blocks(nn.ModuleList())
    assert not is_repeated_blocks(nn.Sequential(Block()))
    assert has_repeated_blocks(nn.Sequential(Model()))
    assert not has_repeated_blocks(Block())


def test_a_plain_module_is_not_compiled():
    assert not is_compiled_module(Model())
    assert is_compiled_module(torch.compile(Block(), backend="eager"))
    assert not has_compiled_regions(Model())


def test_blocks_are_compiled_one_by_one_and_compute_the_same():
    model = Model()
    compiled = compile_regions(model, backend="eager")
    assert compiled is not model
    assert type(compiled) is Model
    assert all(is_compiled_module(block) for block in compiled.blocks)
    assert is_compiled_module(compiled.embed)
    assert is_compiled_module(compiled.heads["a"])
    assert has_compiled_regions(compiled)
    x = torch.randn(2, 4)
    torch.testing.assert_close(compiled(x), model(x))


def test_the_given_model_is_left_alone_and_shares_its_parameters():
    model = Model()
    compiled = compile_regions(model, backend="eager")
    assert not has_compiled_regions(model)
    assert vars(compiled)["_orig_mod"] is model
    assert {id(p) for p in compiled.parameters()} == {id(p) for p in model.parameters()}
    with torch.no_grad():
        model.embed.weight.zero_()
    assert not compiled.embed.weight.any()


def test_the_copy_is_no_child_of_itself():
    compiled = compile_regions(Model(), backend="eager")
    assert "_orig_mod" not in dict(compiled.named_children())
    assert len(list(compiled.parameters())) == len(list(Model().parameters()))


def test_bound_methods_follow_the_copy():
    model = Model()
    model.forward = MethodType(lambda self, x: (self, Model.forward(self, x)), model)
    compiled = compile_regions(model, backend="eager")
    assert compiled(torch.randn(1, 4))[0] is compiled
    assert model(torch.randn(1, 4))[0] is model


def test_a_block_used_twice_stays_one():
    model = Model()
    model.second = model.embed
    compiled = compile_regions(model, backend="eager")
    assert compiled.second is compiled.embed


def test_a_block_in_two_lists_stays_one():
    model = Model()
    model.again = nn.ModuleList([model.blocks[1]])
    compiled = compile_regions(model, backend="eager")
    assert compiled.again[0] is compiled.blocks[1]


def test_deeply_shared_modules_are_walked_once_each():
    model = nn.Sequential(nn.Linear(1, 1))
    for _ in range(60):
        model = nn.Sequential(model, model)
    assert is_compiled_module(compile_regions(model, backend="eager"))


def test_without_repeated_blocks_the_whole_is_compiled():
    assert is_compiled_module(compile_regions(Block(), backend="eager"))


def test_training_reaches_the_blocks():
    compiled = compile_regions(Model(), backend="eager")
    compiled.eval()
    assert not any(
        module.training
        for module in vars(compiled)["_orig_mod"].blocks.modules()
        if isinstance(module, Block)
    )


@pytest.mark.parametrize("compile_in_place", [compile_regions_fsdp2, compile_regions_deepspeed])
def test_in_place_the_same_regions_are_compiled(compile_in_place):
    model = Model()
    result = compile_in_place(model, backend="eager")
    assert result is (model if compile_in_place is compile_regions_fsdp2 else None)
    compiled = {name for name, module in model.named_modules() if module._compiled_call_impl is not None}
    assert compiled == {"embed", "blocks.0", "blocks.1", "blocks.2", "heads.a", "heads.b"}
    model(torch.randn(2, 4)).sum().backward()
