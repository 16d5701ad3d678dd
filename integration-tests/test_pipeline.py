"""Training through a pipeline on real gloo processes: the same losses and gradients as one process, in float64."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy

from acc_ops.testing import run_processes
from acc_ops.world import current_world
from acc_plugins.pipeline import Pipelined, PipelineError

_WIDTH, _WORDS, _TIMES, _STEPS = 8, 13, 5, 10


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm, self.inner = nn.LayerNorm(_WIDTH), nn.Linear(_WIDTH, _WIDTH)

    def forward(self, x: Tensor, mask: Tensor) -> Tensor:
        return x + torch.relu(self.inner(self.norm(x))) * mask


class Words(nn.Module):
    """Tied at both ends; a mask, made of the batch, that every block needs; a value of the first block that the last layer needs."""

    def __init__(self) -> None:
        super().__init__()
        self.table = nn.Embedding(_WORDS, _WIDTH)
        self.blocks = nn.ModuleList(Block() for _ in range(4))
        self.head = nn.Linear(_WIDTH, _WORDS, bias=False)
        self.head.weight = self.table.weight

    def forward(self, words: Tensor, keep: Tensor | None = None, scale: float = 1.0) -> dict[str, Any]:
        mask = torch.ones_like(words) if keep is None else keep
        mask = mask[..., None].to(self.table.weight.dtype)
        x = first = self.table(words) * scale
        for block in self.blocks:
            x = block(x, mask)
        return {"logits": self.head(x + first), "none": None}


def _loss(output: Any, target: Tensor) -> Tensor:
    return cross_entropy(output["logits"].flatten(0, 1), target.flatten())


def _model() -> Words:
    torch.manual_seed(0)
    return Words().double()


def _batch(step: int, replica: int = 0, rows: int = 4) -> tuple[Tensor, Tensor, Tensor]:
    generator = torch.Generator().manual_seed(100 * step + replica)
    words = torch.randint(_WORDS, (rows, _TIMES), generator=generator)
    keep = torch.randint(2, (rows, _TIMES), generator=generator)
    return words, keep, torch.randint(_WORDS, (rows, _TIMES), generator=generator)


def _alone(replicas: int) -> tuple[list[float], dict[str, Tensor], list[float], dict[str, Tensor]]:
    """Losses, the first gradients, norms and the last weights of one process that sees the batches of all replicas."""
    model = _model()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    losses, norms, gradients = [], [], {}
    for step in range(_STEPS):
        parts = [_batch(step, replica) for replica in range(replicas)]
        words, keep, target = (torch.cat(part) for part in zip(*parts, strict=True))
        loss = _loss(model(words, keep=keep, scale=2.0), target)
        loss.backward()
        if step == 0:
            named = model.named_parameters(remove_duplicate=False)
            gradients = {name: p.grad.clone() for name, p in named if p.grad is not None}
        norms.append(float(nn.utils.clip_grad_norm_(model.parameters(), 0.5)))
        losses.append(float(loss.detach()))
        optimizer.step()
        optimizer.zero_grad()
    return losses, gradients, norms, model.state_dict()


def _resumed(options: dict[str, Any], other: dict[str, Any]) -> dict[str, Any]:
    """Five steps in one pipeline, saved, and the rest in another that starts from other weights."""
    words, keep, _ = _batch(0)
    example = ((words,), {"keep": keep, "scale": 2.0})
    first = Pipelined(_model(), example, _loss, **options)
    optimizer = torch.optim.AdamW(first.parameters(), lr=1e-2)
    losses = [_step(first, optimizer, step) for step in range(5)]
    told = [first.with_optimizer(optimizer).state_dict()]
    torch.distributed.broadcast_object_list(told)  # a file, otherwise
    torch.manual_seed(7)
    second = Pipelined(Words().double(), example, _loss, **other)
    optimizer = torch.optim.AdamW(second.parameters(), lr=1.0)
    second.with_optimizer(optimizer).load_state_dict(told[0])
    return {"losses": losses + [_step(second, optimizer, step) for step in range(5, _STEPS)]}


def _step(pipe: Pipelined, optimizer: torch.optim.Optimizer, step: int) -> float:
    words, keep, target = _batch(step)
    loss = float(pipe.step(words, keep=keep, scale=2.0, target=target))
    pipe.clip_norm(0.5)
    optimizer.step()
    optimizer.zero_grad()
    return loss


def _trained(options: dict[str, Any]) -> dict[str, Any]:
    world, replicas = current_world(), options.get("replicas", 1)
    replica = world.rank // (world.size // replicas)
    words, keep, _ = _batch(0)
    pipe = Pipelined(_model(), ((words,), {"keep": keep, "scale": 2.0}), _loss, **options)
    optimizer = torch.optim.AdamW(pipe.parameters(), lr=1e-2)
    losses, norms, gradients = [], [], {}
    for step in range(_STEPS):
        words, keep, target = _batch(step, replica)
        losses.append(float(pipe.step(words, keep=keep, scale=2.0, target=target)))
        if step == 0:
            gradients = {name: p.grad.clone() for name, p in pipe.named_parameters() if p.grad is not None}
        norms.append(float(pipe.clip_norm(0.5)))
        optimizer.step()
        optimizer.zero_grad()
    whole = pipe.whole_state_dict()
    held = sum(p.numel() for p in pipe.model.parameters() if not p.is_meta)
    return {"losses": losses, "norms": norms, "gradients": gradients, "state": whole, "held": held}


def _each(cases: list[dict[str, Any]]) -> list[dict[str, Any]]:
    return [_trained(options) for options in cases]


def _each_and_resumed(cases: list[dict[str, Any]]) -> list[dict[str, Any]]:
    return [*_each(cases), _resumed(cases[1], cases[2])]


def _check(size: int, cases: list[dict[str, Any]], run: Any = _each) -> list[Any]:
    """Trains in every pipeline, and compares with one process; what `run` did besides, for each rank."""
    ranks = run_processes(size, run, cases)
    for number, options in enumerate(cases):
        replicas = options.get("replicas", 1)
        losses, gradients, norms, weights = _alone(replicas)
        got = [rank[number] for rank in ranks]
        of_all = torch.tensor([one["losses"] for one in got], dtype=torch.float64)
        torch.testing.assert_close(
            of_all.mean(0), torch.tensor(losses, dtype=torch.float64), msg=str(options)
        )
        for one in got:
            torch.testing.assert_close(one["norms"], norms, msg=str(options))
            for name, gradient in one["gradients"].items():
                torch.testing.assert_close(gradient, gradients[name], msg=f"{options} {name}")
        found = {name for one in got for name in one["gradients"]}
        assert found | {"head.weight", "table.weight"} == set(
            gradients
        )  # one of the two names of the shared weight
        for name, value in got[0]["state"].items():
            torch.testing.assert_close(value, weights[name], msg=f"{options} {name}")
        assert all(one["held"] < sum(p.numel() for p in _model().parameters()) for one in got)
    return [rank[len(cases) :] for rank in ranks]


def test_two_stages_train_as_one_process_and_go_on_as_other_stages() -> None:
    cases = [
        {"microbatches": 2, "schedule": "gpipe"},
        {"microbatches": 4, "schedule": "1f1b", "split": ["blocks.1"]},
        {"microbatches": 2, "schedule": "interleaved1f1b", "stages_per_rank": 2},
    ]
    for (resumed,) in _check(2, cases, _each_and_resumed):
        torch.testing.assert_close(resumed["losses"], _alone(1)[0])


def test_four_processes_train_as_one() -> None:
    _check(4, [{"microbatches": 4}, {"microbatches": 2, "replicas": 2}])


def _refusals() -> list[str]:
    words, keep, target = _batch(0)
    said = []

    def refused(make: Any, kind: type[Exception] = PipelineError) -> None:
        with pytest.raises(kind) as caught:
            make()
        said.append(str(caught.value))

    def pipe(**options: Any) -> Pipelined:
        return Pipelined(_model(), ((words,), {"keep": keep}), _loss, **{"microbatches": 2, **options})

    refused(lambda: pipe(microbatches=3))
    refused(lambda: pipe(microbatches=0), ValueError)
    refused(lambda: pipe(schedule="2f2b"), ValueError)
    refused(lambda: pipe(schedule="interleaved1f1b"), ValueError)
    refused(lambda: pipe(replicas=2), ValueError)
    refused(lambda: pipe(split=["blocks.9"]), ValueError)
    mine = {"split": ["blocks.1" if current_world().rank else "blocks.2"]}
    refused(lambda: pipe(**mine))
    made = pipe()
    refused(lambda: made.step(words, target=target))
    refused(lambda: made.step(words[:2], keep=keep[:2], target=target[:2]))
    assert float(made.step(words, keep=keep, target=target)) > 0  # the ranks are still together
    return said


def test_what_does_not_fit_is_said_on_every_rank() -> None:
    first, second = run_processes(2, _refusals)
    assert len(first) == len(second) == 9
