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


class Other(nn.Module):
    def __init__(self):
        super().__init__()
        self.up, self.down = nn.Linear(4, 8), nn.Linear(8, 4)

    def forward(self, x):
        return x + self.down(torch.relu(self.up(x)))


class Stack(nn.Module):
    """Calls what stands in `blocks`, however it is nested, and then its heads."""

    def __init__(self, blocks, heads=()):
        super().__init__()
        self.first = nn.Linear(4, 4)
        self.blocks, self.heads = blocks, nn.ModuleList(heads)

    def forward(self, x):
        x = _through(self.blocks, self.first(x))
        return torch.cat([x, *(head(x) for head in self.heads)], dim=-1)


class Shortcut(nn.Module):
    """A block of a ResNet: its shortcut is an empty sequence where sizes stay, and one of its parts may be missing."""

    def __init__(self):
        super().__init__()
        self.linear, self.shortcut, self.norm = nn.Linear(4, 4), nn.Sequential(), None

    def forward(self, x):
        return torch.relu(self.linear(x)) + self.shortcut(x)


class Gathering(Block):
    """A block with lists that are empty until something is put into them."""

    def __init__(self):
        super().__init__()
        self.list, self.dictionary, self.weights = nn.ModuleList(), nn.ModuleDict(), nn.ParameterList()


def _through(blocks, x):
    if isinstance(blocks, (nn.ModuleList, nn.ModuleDict)):
        for block in blocks.values() if isinstance(blocks, nn.ModuleDict) else blocks:
            x = _through(block, x)
        return x
    return blocks(x)


def _graphs(compiled_by, model, x):
    """For each graph that one training step compiles, how many operations it has and whether a size is unknown in it."""
    torch._dynamo.reset()
    found = []

    def backend(graph, inputs):
        calls = sum(node.op.startswith("call_") for node in graph.graph.nodes)
        found.append((calls, any(not isinstance(value, torch.Tensor) for value in inputs)))
        return graph.forward

    x = x.requires_grad_()  # as what blocks hand on does
    expected = model(x)
    compiled = compiled_by(model, backend=backend)
    for _ in range(2):
        out = compiled(x)
        out.sum().backward()
    torch.testing.assert_close(out, expected)
    return found


_SHARED = Block()
_FORMS = {
    "a list": (lambda: nn.ModuleList(Block() for _ in range(12)), [2]),
    "lists in a list": (
        lambda: nn.ModuleList(nn.ModuleList(Block() for _ in range(4)) for _ in range(3)),
        [2],
    ),
    "dictionaries in a list": (
        lambda: nn.ModuleList(nn.ModuleDict({"a": Block(), "b": Other()}) for _ in range(6)),
        [2, 4],
    ),
    "a dictionary": (lambda: nn.ModuleDict({str(i): Block() for i in range(12)}), [2]),
    "a sequence": (lambda: nn.Sequential(*(Block() for _ in range(12))), [2]),
    "a sequence with others around": (
        lambda: nn.Sequential(nn.Linear(4, 4), *(Block() for _ in range(10)), Other()),
        [1, 2, 4],
    ),
    "two kinds that alternate": (
        lambda: nn.ModuleList(Other() if i % 2 else Block() for i in range(12)),
        [2, 4],
    ),
    "blocks with an empty shortcut": (lambda: nn.Sequential(*(Shortcut() for _ in range(6))), [3]),
    "blocks with empty lists": (lambda: nn.Sequential(*(Gathering() for _ in range(6))), [2]),
    "one block many times": (lambda: nn.ModuleList([_SHARED] * 12), [2]),
    "one block": (lambda: nn.ModuleList([Block()]), [2]),
    "layers of torch's own": (
        lambda: nn.ModuleList(nn.TransformerEncoderLayer(4, 1, 8, 0.0, batch_first=True) for _ in range(12)),
        [0],  # versions of torch count differently
    ),
}


@pytest.mark.parametrize("form", _FORMS)
def test_as_many_graphs_as_kinds_of_blocks_however_they_are_held(form):
    make, sizes = _FORMS[form]
    found = _graphs(compile_regions, Stack(make()), torch.randn(2, 3, 4))
    kinds = {1, *sizes}  # the first layer is one, and shares the graph of an equal one
    assert len(found) == len(kinds)
    assert form == "layers of torch's own" or {size for size, _ in found} == kinds
    assert not any(unknown for _, unknown in found)


@pytest.mark.parametrize("form", [form for form in _FORMS if form != "layers of torch's own"])
def test_in_place_as_many_graphs_as_kinds_of_blocks(form):
    make, sizes = _FORMS[form]
    found = _graphs(compile_regions_fsdp2, Stack(make()), torch.randn(2, 3, 4))
    assert sorted(size for size, _ in found) == [size for size in sizes if size > 1]


def test_a_few_equal_blocks_in_a_sequence_are_one_graph_with_the_rest():
    model = Stack(nn.Sequential(*(Block() for _ in range(3)), Other()))
    assert len(_graphs(compile_regions, model, torch.randn(2, 4))) == 1


def test_plain_layers_in_a_sequence_are_one_graph():
    layers = [layer for _ in range(6) for layer in (nn.Linear(4, 4), nn.ReLU())]
    assert len(_graphs(compile_regions, nn.Sequential(*layers), torch.randn(2, 4))) == 1


def test_each_of_many_heads_has_a_graph_with_its_own_sizes():
    heads = [nn.Linear(4, i + 1) for i in range(12)]  # more than torch.compile compiles of one function
    found = _graphs(
        compile_regions, Stack(nn.ModuleList(Block() for _ in range(12)), heads), torch.randn(2, 4)
    )
    assert sorted(found) == [(1, False)] * 12 + [
        (2, False)
    ]  # the head of four outputs is the first layer's kind


def test_what_inductor_has_nothing_to_add_to_stays_as_it_is(monkeypatch):
    compiled = []

    def compile_fx(graph, inputs, **_):
        compiled.append(sum(node.op == "call_function" for node in graph.graph.nodes))
        return graph.forward

    monkeypatch.setattr("torch._inductor.compile_fx.compile_fx", compile_fx)
    for mode, expected in ((None, [2]), ("max-autotune-no-cudagraphs", [1, 1, 2])):
        torch._dynamo.reset()
        compiled.clear()
        model = compile_regions(
            Stack(nn.ModuleList(Block() for _ in range(12)), [nn.Linear(4, 1)]), mode=mode
        )
        assert is_compiled_module(model.first)
        model(torch.randn(2, 4))
        assert sorted(compiled) == expected


def test_containers_with_nothing_to_call_stay_containers():
    model = Stack(nn.ModuleList([Block()]))
    model.scales = nn.ParameterList([nn.Parameter(torch.ones(4))])
    compiled = compile_regions(model, backend="eager")
    assert len(list(compiled.heads)) == 0
    assert compiled.scales[0] is model.scales[0]


def test_a_model_that_compilation_is_switched_off_for_runs_all_the_same():
    model = Model()
    x = torch.randn(2, 4)
    torch.testing.assert_close(compile_regions(model, disable=True)(x), model(x))
