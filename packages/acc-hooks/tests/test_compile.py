"""What torch.compile and torch.export make of hooked modules. No file of the package answers for this alone."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from acc_hooks import (
    AlignDevicesHook,
    LayerwiseCastingHook,
    ModelHook,
    SequentialHook,
    add_hook_to_module,
    attach_align_device_hook,
    attach_align_device_hook_on_blocks,
    remove_hook_from_submodules,
)
from acc_ops.optional import is_torch_version


class PreAndPost(ModelHook):
    def pre_forward(self, module, x):
        return (x + 1,), {}

    def post_forward(self, module, output):
        return output * 2


HOOKS = {
    "noop": ModelHook,
    "align": lambda: AlignDevicesHook("cpu"),
    "align_io": lambda: AlignDevicesHook("cpu", io_same_device=True),
    "sequential": lambda: SequentialHook(ModelHook(), ModelHook()),
    "two aligns": lambda: SequentialHook(
        AlignDevicesHook("cpu"), AlignDevicesHook("cpu", io_same_device=True)
    ),
    "user": PreAndPost,
    "casting": lambda: LayerwiseCastingHook(torch.bfloat16, torch.float32, False),
}


@pytest.fixture(autouse=True)
def _fresh_compiler():
    torch._dynamo.reset()
    yield
    torch._dynamo.reset()


def stack() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(*[nn.Linear(4, 4) for _ in range(4)]).requires_grad_(False)


def counting_compile(model: nn.Module) -> tuple[nn.Module, list[int]]:
    runs: list[int] = []

    def backend(graph, inputs):
        runs.append(0)
        this = len(runs) - 1

        def run(*args):
            runs[this] += 1
            return graph(*args)

        return run

    return torch.compile(model, backend=backend, fullgraph=True), runs


# what these hooks do per call is beyond the tracer of torch 2.6; there the compiler breaks the graph, or refuses with fullgraph
beyond_torch_26 = pytest.mark.skipif(is_torch_version("<", "2.7"), reason="needs the tracer of a newer torch")
KINDS = [pytest.param(k, marks=beyond_torch_26) if k in ("two aligns", "casting") else k for k in HOOKS]


@pytest.mark.parametrize("kind", KINDS)
def test_a_hook_with_nothing_to_fetch_compiles_to_one_graph(kind):
    model = stack()
    for layer in model:
        add_hook_to_module(layer, HOOKS[kind]())
    x = torch.ones(2, 4)
    expected = model(x)
    compiled, runs = counting_compile(model)
    for _ in range(2):
        torch.testing.assert_close(compiled(x), expected)
    assert runs == [2]


@beyond_torch_26
def test_a_model_dispatched_to_one_device_compiles_to_one_graph():
    model = stack()
    attach_align_device_hook_on_blocks(model, {"": "cpu"}, {"": False})
    x = torch.ones(2, 4)
    expected = model(x)
    compiled, runs = counting_compile(model)
    torch.testing.assert_close(compiled(x), expected)
    assert runs == [1]


def test_removing_a_hook_recompiles():
    model = stack()
    for layer in model:
        add_hook_to_module(layer, PreAndPost())
    x = torch.ones(2, 4)
    compiled, _ = counting_compile(model)
    compiled(x)
    remove_hook_from_submodules(model)
    torch.testing.assert_close(compiled(x), model(x))


def test_many_hooked_classes_compiled_one_by_one_all_get_their_graph():
    graphs = 0

    def backend(graph, inputs):
        nonlocal graphs
        graphs += 1
        return graph.forward

    for index in range(12):
        kind = type(
            f"Layer{index}", (nn.Linear,), {"forward": lambda self, x: nn.functional.linear(x, self.weight)}
        )
        layer = add_hook_to_module(kind(4, 4), AlignDevicesHook("cpu"))
        torch.compile(layer, backend=backend, fullgraph=True)(torch.ones(1, 4))
    assert graphs == 12


def test_an_offloaded_layer_breaks_the_graph_and_computes_the_same():
    model = stack()
    x = torch.ones(2, 4)
    expected = model(x)
    attach_align_device_hook_on_blocks(
        model,
        {"0": "cpu", "1": "cpu", "2": "cpu", "3": "cpu"},
        {"0": False, "1": True, "2": False, "3": False},
    )
    compiled = torch.compile(model, backend="eager")
    for _ in range(2):
        torch.testing.assert_close(compiled(x), expected)
    assert model[1].weight.is_meta


def test_a_hooked_model_can_be_exported():
    model = stack()
    for layer in model:
        add_hook_to_module(layer, AlignDevicesHook("cpu", io_same_device=True))
    x = torch.ones(2, 4)
    exported = torch.export.export(model, (x,))
    torch.testing.assert_close(exported.module()(x), model(x))


@pytest.mark.skipif(not is_torch_version(">=", "2.7"), reason="older versions do not tell that they export")
@pytest.mark.parametrize("strict", [True, False])
def test_exporting_an_offloaded_model_is_refused_with_the_way_out(strict):
    model, x = stack(), torch.randn(2, 4)
    expected = model(x)
    attach_align_device_hook(model, execution_device="cpu", offload=True)
    with pytest.raises(Exception, match=r"remove_hook_from_module.*before torch\.export"):
        torch.export.export(model, (x,), strict=strict)
    torch.testing.assert_close(model(x), expected)
    remove_hook_from_submodules(model)
    torch.testing.assert_close(torch.export.export(model, (x,)).module()(x), expected)


def test_an_offloaded_layer_with_a_forward_hook_computes_the_same_compiled():
    model = stack()
    x = torch.ones(2, 4)
    seen = []
    model[1].register_forward_hook(lambda module, *_: seen.append(module.weight.is_meta))
    expected = model(x)
    add_hook_to_module(model[1], AlignDevicesHook("cpu", offload=True))
    compiled = torch.compile(model, backend="eager")
    seen.clear()
    for _ in range(2):
        torch.testing.assert_close(compiled(x), expected)
    assert seen == [False, False]
    assert model[1].weight.is_meta


def test_a_parent_that_computes_with_an_offloaded_weight_breaks_the_graph_there_and_computes_the_same():
    class Parent(nn.Module):
        def __init__(self):
            super().__init__()
            torch.manual_seed(0)
            self.child, self.after = nn.Linear(4, 4), nn.Linear(4, 4)
            self.requires_grad_(False)

        def forward(self, x):
            hidden = nn.functional.linear(torch.relu(x + 1), self.child.weight, self.child.bias)
            return self.after(torch.relu(hidden) * 2)

    def backend(graph, inputs):
        graphs.append(graph)
        return graph.forward

    graphs: list[object] = []
    model, x = Parent(), torch.ones(2, 4)
    expected = model(x)
    attach_align_device_hook_on_blocks(
        model, {"child": "cpu", "after": "cpu"}, {"child": True, "after": False}
    )
    compiled = torch.compile(model, backend=backend)
    for _ in range(2):
        torch.testing.assert_close(compiled(x), expected)
    assert len(graphs) == 2  # before and after the use
    assert model.child.weight.is_meta
