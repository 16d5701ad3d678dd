"""Inference through a pipeline of real processes: the same outputs as the plain model, and no rank that waits for ever."""

from __future__ import annotations

import os
import signal
from typing import Any

import pytest
import torch
from torch import nn

from acc_bigmodel import PipelineError, prepare_pippy
from acc_ops.testing import RankFailed, run_processes
from acc_ops.world import current_world


class Words(nn.Module):
    """Tied ends, residual layers, inputs that every layer needs, and outputs from several stages."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.embed = nn.Embedding(10, 8)
        self.layers = nn.ModuleList([nn.Linear(8, 8) for _ in range(4)])
        self.head = nn.Linear(8, 10, bias=False)
        self.head.weight = self.embed.weight
        self.register_buffer("scale", torch.tensor(2.0))

    def forward(self, tokens: torch.Tensor, mask: Any = None, bias: Any = None, tell: bool = True) -> Any:
        hidden = first = self.embed(tokens)  # (batch, token, 8)
        for layer in self.layers:
            hidden = hidden + torch.relu(layer(hidden))
            hidden = hidden if mask is None else hidden * mask
            hidden = hidden if bias is None else hidden + bias
        return {
            "logits": self.head(hidden * self.scale),
            "inner": (first, tokens),
            "told": 3 if tell else None,
        }


def tokens(batch: int) -> torch.Tensor:
    return torch.arange(batch * 3).reshape(batch, 3) % 10


def check(model: nn.Module, *args: Any, **kwargs: Any) -> None:
    """Every rank has the plain model's output."""
    found, expected = model(*args, **kwargs), Words().eval()(*args, **kwargs)
    assert list(found) == list(expected)
    assert found["told"] == expected["told"]
    torch.testing.assert_close(found["logits"], expected["logits"])
    torch.testing.assert_close(found["inner"], expected["inner"])
    assert not found["logits"].requires_grad


def batches_of_all_sizes(split_points: Any) -> list[str]:
    model = prepare_pippy(Words().eval(), split_points, example_args=(tokens(4),), gather_output=True)
    check(model, tokens(4))
    check(model, tokens(3))  # an uneven last micro-batch
    assert len(model.pippy_stage._graphs) == 1
    check(model, tokens(1))  # fewer rows than micro-batches
    check(model, tokens(4))
    graphs = len(model.pippy_stage._graphs)
    assert graphs <= 2
    check(model, tokens(9))
    check(model, tokens(7), mask=torch.rand(7, 1, 1, generator=torch.Generator().manual_seed(1)))
    bias = torch.rand(3, 8, generator=torch.Generator().manual_seed(1))
    check(model, tokens=tokens(5), bias=bias, tell=False)
    assert len(model.pippy_stage._graphs) == graphs + 3
    model.load_state_dict({name: tensor * 0 for name, tensor in model.state_dict().items()})
    assert not model(tokens(4))["logits"].any()  # a stage has the model's own weights
    model.forward = model._original_forward
    assert model._original_call == model.__call__
    model.load_state_dict(Words().state_dict())
    assert model(tokens(2))["logits"].requires_grad  # a plain model again
    return model.hf_split_points


def refusals() -> None:
    rank = current_world().rank
    for options, kind, message in (
        ({"split_points": ["layers.9"]}, ValueError, r"'layers.9', which is no module.*did you mean"),
        ({"split_points": ["layers.1", "layers.1"]}, ValueError, "2 processes need 1 different split_points"),
        ({"split_points": "middle"}, ValueError, "'auto' or a list"),
        ({"num_chunks": 0}, ValueError, "num_chunks must be at least 1, got 0"),
        ({"num_chunks": 2 + rank}, PipelineError, "same model alike"),
    ):
        with pytest.raises(kind, match=message):
            prepare_pippy(Words().eval(), **options)
    model = prepare_pippy(Words().eval(), num_chunks=2)  # traced in the first forward
    for args, kind, message in (
        ((), ValueError, "no batch size is to be found"),
        ((3,), ValueError, r"no batch size is to be found.*got \(int\)"),
        ((tokens(2), object()), TypeError, "is a object, which a pipeline can neither cut nor send"),
    ):
        with pytest.raises(kind, match=message):
            model(*args) if rank == 0 else model()
    found = model(tokens(2)) if rank == 0 else model()  # the group can be used afterwards
    assert (found is None) == (rank == 0)
    with pytest.raises(PipelineError, match=r"torch.export could not turn Branches into one graph"):
        prepare_pippy(Branches(), ["second"], example_args=(torch.ones(4, 2),))
    with pytest.raises(PipelineError, match=r"\['second'\] gives 1 stages, not 2"):
        prepare_pippy(Unused(), ["second"], example_args=(torch.ones(4, 2),))
    with pytest.raises(PipelineError, match=r"output\['loss'\] has no row for each of the batch and differs"):
        prepare_pippy(Loss(), ["second"])(torch.arange(8.0).reshape(4, 2))


class Branches(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(2, 2), nn.Linear(2, 2)

    def forward(self, x: torch.Tensor) -> Any:
        return self.second(self.first(x)) if x.sum() > 0 else x


class Unused(Branches):
    def forward(self, x: torch.Tensor) -> Any:
        return self.first(x)


class Loss(Branches):
    def forward(self, x: torch.Tensor) -> Any:
        out = self.second(self.first(x))
        return {"out": out, "loss": out.mean()}


def one_rank_fails(number: int) -> None:
    rank = current_world().rank
    model = prepare_pippy(Words().eval(), example_args=(tokens(4),), gather_output=True)
    stage = next(iter(model.pippy_stage._graphs.values())).stage
    working = stage.module
    if rank == number:
        stage.module = Failing()
    kind = OverflowError if rank == number else PipelineError
    with pytest.raises(kind, match="too much" if rank == number else f"rank {number} failed.*too much"):
        model(tokens(4))
    stage.module = working
    check(model, tokens(4))


class Failing(nn.Module):
    def forward(self, *inputs: Any) -> Any:
        raise OverflowError("too much")


def one_rank_dies() -> None:
    model = prepare_pippy(Words().eval(), example_args=(tokens(4),))
    if current_world().rank == 1:
        stage = next(iter(model.pippy_stage._graphs.values())).stage
        stage.module = Dying()
    model(tokens(4))


class Dying(nn.Module):
    def forward(self, *inputs: Any) -> Any:
        os.kill(os.getpid(), signal.SIGKILL)


def real_models() -> list[str]:
    from architectures import ARCHITECTURES

    done = []
    for name in ("gpt2", "t5"):
        architecture = ARCHITECTURES[name]
        torch.manual_seed(1)
        model: Any = architecture.build().eval()
        inputs = {**architecture.inputs(), "use_cache": False}
        expected = model(**inputs)
        found = prepare_pippy(model, example_kwargs=inputs, gather_output=True)(**inputs)
        assert type(found) is type(expected)
        assert list(found) == list(expected)
        for key in expected:
            torch.testing.assert_close(found[key], expected[key], rtol=1e-5, atol=1e-5)
        done += model.hf_split_points
    with pytest.raises(TypeError, match=r"is a DynamicCache.*use_cache=False"):
        inputs["use_cache"] = True
        prepare_pippy(ARCHITECTURES["gpt2"].build().eval())(input_ids=tokens(2))
    return done


def everything_on_two() -> list[Any]:
    return [batches_of_all_sizes("auto"), refusals(), real_models()]


def everything_on_three() -> None:
    points = ["layers.1", "layers.3"]
    assert batches_of_all_sizes(points) == points
    for number in range(3):
        one_rank_fails(number)
    one_rank_dies()


# in one pair and one trio of processes: starting them, and torch's compiler in each, is what costs


def test_two_processes_run_models_together_and_hear_why_they_cannot() -> None:
    pytest.importorskip("transformers")
    expected = [["layers.2"], None, ["transformer.h.1", "decoder.block.0"]]
    assert run_processes(2, everything_on_two, timeout_s=280) == [expected] * 2


def test_three_processes_share_errors_and_nobody_waits_for_one_that_was_killed() -> None:
    with pytest.raises(RankFailed, match=r"rank 1 ended without a result, with exit code -9"):
        run_processes(3, everything_on_three, timeout_s=280)
