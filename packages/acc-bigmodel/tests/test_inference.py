"""Pipelines without processes: how a model is cut, what goes in and comes out, and a world of one rank."""

from __future__ import annotations

import itertools
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import nn

from acc_bigmodel import (
    build_pipeline,
    cpu_offload,
    find_pippy_batch_size,
    generate_device_map,
    infer_auto_device_map,
    pippy_forward,
    prepare_pippy,
)
from acc_bigmodel.inference import prepare
from acc_bigmodel.inference.stages import even_starts
from acc_bigmodel.inference.tracing import PipelineError, Traced, lay_out, refuse_opaque
from acc_ops.testing import run_threads


class Residual(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.offset = nn.Parameter(torch.ones(4))
        self.layers = nn.ModuleList([nn.Linear(4, 4) for _ in range(4)])
        self.head = nn.Linear(4, 2)

    def forward(self, x: torch.Tensor, factor: Any = None) -> Any:
        hidden = x + self.offset
        for layer in self.layers:
            hidden = hidden + layer(hidden)
        hidden = hidden if factor is None else hidden * factor
        return {"out": self.head(hidden), "hidden": (hidden, x), "name": "residual"}


def test_the_map_has_every_tensor_in_order_and_equal_layers_are_spread_evenly() -> None:
    model = nn.Sequential(*[nn.Linear(4, 4) for _ in range(8)])
    assert list(generate_device_map(model, 4).values()) == [0, 0, 1, 1, 2, 2, 3, 3]
    device_map = generate_device_map(Residual(), 2)
    assert list(device_map) == ["offset", "layers.0", "layers.1", "layers.2", "layers.3", "head"]
    assert list(device_map.values()) == [0, 0, 0, 1, 1, 1]


def test_no_stage_begins_at_a_tensor_beside_modules() -> None:
    model = nn.Module()
    model.first, model.second = nn.Linear(2, 2), nn.Linear(2, 2)
    model.second.register_parameter("extra", nn.Parameter(torch.ones(100)))
    inner = nn.Module()
    inner.big = nn.Parameter(torch.ones(1000))
    inner.child = nn.Linear(2, 2)
    model.inner = inner
    device_map = generate_device_map(model, 2)
    assert device_map["inner.big"] == device_map["second"]  # it goes with the layer before it
    assert device_map["first"] == 0


def test_one_process_or_budgets_leave_the_map_to_the_planner() -> None:
    model = Residual()
    assert generate_device_map(model, max_memory={"cpu": 10**6}) == infer_auto_device_map(
        model, {"cpu": 10**6}, clean_result=False
    )
    budgets = {0: 200, 1: 10**6}
    assert set(generate_device_map(model, 2, max_memory=budgets).values()) == {0, 1}


def test_modules_that_must_stay_whole_do_and_too_few_layers_are_refused() -> None:
    class Pair(nn.Sequential): ...

    model = nn.Sequential(*[Pair(nn.Linear(2, 2), nn.Linear(2, 2)) for _ in range(2)])
    assert list(generate_device_map(model, 2, ["Pair"])) == ["0", "1"]
    model._no_split_modules = ["Pair"]
    assert list(generate_device_map(model, 2)) == ["0", "1"]
    with pytest.raises(ValueError, match="has 2 layers at which a stage can begin, too few for 3 processes"):
        generate_device_map(model, 3)
    with pytest.raises(ValueError, match="num_processes must be at least 1, got 0"):
        generate_device_map(model, 0)


@given(st.lists(st.integers(0, 9), min_size=1, max_size=8), st.integers(1, 8))
def test_the_largest_run_is_as_small_as_can_be_and_none_is_empty(sizes: list[int], runs: int) -> None:
    runs = min(runs, len(sizes))
    starts = even_starts([0, *itertools.accumulate(sizes)], runs)

    def largest(cuts: Any) -> int:
        return max(sum(sizes[a:b]) for a, b in itertools.pairwise([*cuts, len(sizes)]))

    assert len(starts) == runs
    assert starts[0] == 0
    assert all(a < b for a, b in itertools.pairwise([*starts, len(sizes)]))
    every = itertools.combinations(range(1, len(sizes)), runs - 1)
    assert largest(starts) == min(largest((0, *cuts)) for cuts in every)


def test_the_batch_size_is_that_of_the_first_tensor() -> None:
    assert find_pippy_batch_size((3, [torch.ones(4, 2)]), {"a": torch.ones(2)}) == 4
    assert find_pippy_batch_size((torch.tensor(1.0),), {"a": torch.ones(2)}) == 2
    assert find_pippy_batch_size((), None) is None


def test_rows_are_cut_and_filled_up_and_the_rest_is_repeated() -> None:
    x, bias, number = torch.arange(10.0).reshape(5, 2), torch.ones(3), torch.tensor(7)
    layout, rows = lay_out((x,), {"bias": bias, "number": number, "flag": True}, 2, training=False)
    assert (rows, layout.rows, layout.is_row) == (5, 3, (True, False, False))
    cut, same, scalar = layout.inputs((x,), {"bias": bias, "number": number, "flag": True}, 2)
    assert cut.shape == (2, 3, 2)
    assert torch.equal(cut.reshape(6, 2)[:5], x)
    assert not cut[1, 2].any()
    assert torch.equal(same, bias.expand(2, 3))
    assert scalar.tolist() == [7, 7]


def test_layouts_have_one_graph_unless_something_but_the_rows_differs() -> None:
    def key(*args: Any, training: bool = False, **kwargs: Any) -> Any:
        return lay_out(args, kwargs, 2, training)[0].key()

    x = torch.ones(4, 3)
    assert key(x) == key(torch.zeros(9, 3))
    others = [
        key(x),
        key(torch.ones(4, 2)),
        key(x.double()),
        key(x, training=True),
        key(x, True),
        key(x, 1),
        key(x, 2),
        key(x, flag=True),
        key([x]),
        key(x, torch.ones(3)),
    ]
    assert len(set(others)) == len(others)


def test_what_may_hide_tensors_is_refused_with_its_place() -> None:
    with pytest.raises(TypeError, match=r"input\['cache'\]\[1\] is a object.*use_cache=False"):
        refuse_opaque({"cache": [None, object()]}, "input")


@pytest.mark.parametrize("split_points", [["layers.2"], ["layers.1", "head"]])
def test_the_stages_one_after_the_other_are_the_model(split_points: list[str]) -> None:
    model = Residual().eval()
    x, factor = torch.rand(5, 4), torch.rand(4)
    layout, rows = lay_out((x,), {"factor": factor}, 2, training=False)
    count = len(split_points) + 1
    stages = [Traced(model, model.forward, split_points, layout, number) for number in range(count)]
    inputs = layout.inputs((x,), {"factor": factor}, 2)
    parts = []
    with torch.no_grad():
        for chunk in range(2):
            made: list[Any] = []
            for stage in stages:
                given = [
                    inputs[position][chunk : chunk + 1] if source < 0 else made[source][position]
                    for source, position in stage.takes
                ]
                result = stage.module(*given)
                made.append([result] if isinstance(result, torch.Tensor) else result)
            parts.append([made[-1][position] for position in stages[-1].positions])
        leaves = [torch.cat(leaf) for leaf in zip(*parts, strict=True)]
        found = stages[-1].outputs(leaves, rows)
        expected = model(x, factor=factor)
    assert list(found) == list(expected)
    assert found["name"] == "residual"
    torch.testing.assert_close(found["out"], expected["out"])
    torch.testing.assert_close(found["hidden"], expected["hidden"])
    assert next(name for name, _ in stages[0].module.named_parameters()) == "model.offset"
    own = {id(parameter) for parameter in model.parameters()}
    assert all(id(parameter) in own for stage in stages for parameter in stage.module.parameters())
    assert all(not module._forward_pre_hooks for module in model.modules())  # the marks are gone


def test_outputs_without_rows_must_be_the_same_in_every_micro_batch() -> None:
    class Mean(nn.Linear):
        def forward(self, x: torch.Tensor, given: Any) -> Any:
            return {"mean": super().forward(x).mean(), "given": given * 2}

    model = Mean(2, 2)
    layout, rows = lay_out((torch.ones(4, 2), torch.tensor(3.0)), {}, 2, training=True)
    traced = Traced(model, model.forward, [], layout, 0)
    assert not traced.has_only_rows
    found = traced.outputs([torch.ones(2), torch.full((2,), 6.0)], rows)
    assert (found["mean"].item(), found["given"].item()) == (1.0, 6.0)
    with pytest.raises(PipelineError, match=r"output\['mean'\] has no row for each of the batch and differs"):
        traced.outputs([torch.tensor([1.0, 2.0]), torch.full((2,), 6.0)], rows)


def test_one_rank_runs_the_whole_model_and_the_forward_comes_back() -> None:
    model = Residual().eval()
    x = torch.rand(3, 4)
    expected = model(x)
    original = model.forward
    assert prepare_pippy(model, example_args=(x,)) is model
    found = model(x)
    torch.testing.assert_close(found["out"], expected["out"], rtol=0, atol=0)
    assert not found["out"].requires_grad
    assert model.hf_split_points == []
    assert model.pippy_stage.split_points == []
    assert model._original_forward == original
    for wrong in ((), (torch.tensor(1.0),), (torch.ones(0, 4),)):
        with pytest.raises(ValueError, match="no batch size is to be found"):
            model(*wrong)
    assert prepare_pippy(model, num_chunks=3)._original_forward == original  # anew, not around itself
    model.forward = model._original_forward
    assert model(x)["out"].requires_grad
    pipeline = build_pipeline(model, "auto", (x,), None, 2)
    torch.testing.assert_close(pippy_forward(pipeline.step, 2, True, x)["out"], expected["out"])


def test_a_schedule_that_cannot_pad_gets_padded_inputs_and_its_output_is_cut() -> None:
    seen = []

    def step(x: torch.Tensor, *, flag: bool, scale: torch.Tensor) -> Any:
        seen.append((x.shape, flag))
        return [x * scale, scale]

    out, scale = pippy_forward(step, 4, False, torch.ones(5, 2), flag=True, scale=torch.tensor(2.0))
    assert seen == [((8, 2), True)]
    assert (out.shape, scale.item()) == ((5, 2), 2.0)
    with pytest.raises(ValueError, match="no batch size"):
        pippy_forward(step, 4, False, 3, flag=True, scale=None)


def test_what_cannot_be_a_pipeline_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(ValueError, match="num_chunks must be at least 1, got 0"):
        prepare_pippy(Residual(), num_chunks=0)
    with pytest.raises(ValueError, match="offloaded cannot be a pipeline: remove_hook_from_module"):
        prepare_pippy(cpu_offload(Residual(), torch.device("meta")))
    with pytest.raises(ValueError, match=r"needs processes in a torch\.distributed group"):
        run_threads(2, lambda: prepare_pippy(Residual()))
    monkeypatch.setattr(prepare, "is_pippy_available", lambda: False)
    with pytest.raises(ImportError, match=r"torch 2\.4 or later"):
        prepare_pippy(Residual())
