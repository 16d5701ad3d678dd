from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from acc_plugins.pipeline.errors import PipelineError
from acc_plugins.pipeline.graph import Cut, Leaves, cut, split_inputs, trace


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Linear(4, 4)
        self.register_buffer("bias", torch.ones(4))

    def forward(self, x: Tensor, mask: Tensor) -> Tensor:
        return x + self.inner(x) * mask + self.bias


class Skipping(nn.Module):
    """The last layer needs what the first has made, and a mask that follows from the batch alone."""

    def __init__(self, blocks: int = 3) -> None:
        super().__init__()
        self.table = nn.Embedding(7, 4)
        self.blocks = nn.ModuleList(Block() for _ in range(blocks))
        self.head = nn.Linear(4, 7, bias=False)
        self.head.weight = self.table.weight

    def forward(self, words: Tensor, scale: float = 1.0) -> tuple[Tensor, dict[str, Any]]:
        mask = (words > 1)[..., None].float()
        x = first = self.table(words) * scale
        for block in self.blocks:
            x = block(x, mask)
        return self.head(x + first), {"mask": mask, "scale": scale}


def _cuts(
    model: nn.Module, starts: Sequence[str], *args: Any, **kwargs: Any
) -> tuple[list[Cut], Leaves, list[Tensor]]:
    spec, constants, tensors = split_inputs(args, kwargs)
    leaves = Leaves(model, spec, constants)
    named: dict[str, Any] = {
        **dict(model.named_buffers()),
        **dict(model.named_parameters(remove_duplicate=False)),
    }
    return cut(trace(leaves, tensors), starts, named), leaves, tensors


def _run(cuts: Sequence[Cut], leaves: Leaves, tensors: Sequence[Tensor]) -> Any:
    value: tuple[Any, ...] = ()
    for one in cuts:
        assert [tuple(t.shape) for t in one.takes] == [tuple(t.shape) for t in value]
        value = one.module(*value, *(tensors[number] for number in one.batch))
    return leaves.outputs.of(value)


_WORDS = torch.tensor([[0, 1, 2], [3, 4, 5]])


@pytest.mark.parametrize(
    "starts", [["blocks.1"], ["blocks.0", "head"], ["blocks.0", "blocks.1", "blocks.2", "head"]]
)
def test_the_stages_one_after_the_other_are_the_model(starts: list[str]) -> None:
    model = Skipping()
    cuts, leaves, tensors = _cuts(model, starts, _WORDS, scale=3.0)
    output, rest = _run(cuts, leaves, tensors)
    want, want_rest = model(_WORDS, scale=3.0)
    assert torch.equal(output, want)
    assert torch.equal(rest["mask"], want_rest["mask"])
    assert rest["scale"] == 3.0


def test_every_stage_has_the_models_own_weights_and_those_alone() -> None:
    model = Skipping()
    cuts, _, _ = _cuts(model, ["blocks.1"], _WORDS)
    names = [set(one.parameters) for one in cuts]
    assert names[0] & {"table.weight", "head.weight"}
    assert "blocks.0.inner.weight" in names[0]
    assert "blocks.1.inner.weight" in names[1]
    assert not {"blocks.1.inner.weight", "blocks.2.inner.weight"} & names[0]
    known = {id(p) for p in model.parameters()}
    assert all(id(p) in known for one in cuts for p in one.module.parameters())


def test_what_follows_from_the_batch_is_computed_again_and_not_sent() -> None:
    cuts, _, _ = _cuts(Skipping(), ["blocks.1"], _WORDS)
    assert len(cuts[0].gives) == 2  # the first value, and the present one, but not the mask
    assert cuts[1].batch == (0,)


def test_gradients_through_the_stages_are_the_models() -> None:
    model = Skipping().double()
    model(_WORDS)[0].square().sum().backward()
    want = {name: p.grad for name, p in model.named_parameters()}
    model.zero_grad()
    _run(*_cuts(model, ["blocks.0", "blocks.2"], _WORDS))[0].square().sum().backward()
    for name, p in model.named_parameters():
        torch.testing.assert_close(p.grad, want[name])


class Choosing(nn.Module):
    """Chooses by its weights, before the second layer, which of two layers to use after it."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second, self.experts = (
            nn.Linear(4, 4),
            nn.Linear(4, 4),
            nn.Parameter(torch.ones(2, 4)),
        )

    def forward(self, x: Tensor) -> Tensor:
        x = self.first(x)
        chosen = x.sum(-1).gt(0).long()
        return self.second(x) * self.experts[chosen]


def test_a_choice_that_would_cross_a_cut_is_refused_by_name() -> None:
    with pytest.raises(PipelineError, match=r"int64|bool"):
        _cuts(Choosing(), ["second"], torch.zeros(2, 4))


def test_a_module_that_is_not_called_in_that_order_is_refused_by_name() -> None:
    with pytest.raises(PipelineError, match=r"no stage can begin at blocks\.0"):
        _cuts(Skipping(), ["blocks.1", "blocks.0"], _WORDS)


class Looping(nn.Linear):
    def forward(self, x: Tensor) -> Tensor:
        while x.sum() > 0:
            x = super().forward(x) - 1
        return x


def test_a_path_that_depends_on_values_is_said() -> None:
    with pytest.raises(PipelineError, match="cannot be written down as one graph"):
        _cuts(Looping(4, 4), ["x"], torch.ones(2, 4))
