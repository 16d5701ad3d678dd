"""Training through a pipeline on real gloo processes: the same losses and gradients as one process, in float64."""

from __future__ import annotations

from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy

from acc_ops.testing import run_processes
from acc_ops.world import current_world
from acc_plugins.pipeline import Pipelined, PipelineError
from acc_trainer import Accelerator

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
    refused(lambda: made.step(words, keep=keep, target=target if current_world().rank else None))
    refused(lambda: made.step(words[: 4 if current_world().rank else 2], keep=keep, target=target))
    optimizer = torch.optim.SGD(made.parameters(), lr=0.1)
    for thing in (made, made.model, optimizer):
        refused(lambda thing=thing: Accelerator(cpu=True).prepare(thing), TypeError)
    with mock.patch.object(type(made.world.comm), "all_gather_object") as objects:
        assert float(made.step(words, keep=keep, target=target)) > 0  # the ranks are still together
    objects.assert_not_called()  # one number says that all have a batch
    return said


def _saved_with_a_checkpoint(folder: str) -> None:
    """A pipeline and its optimizer in a checkpoint of the Accelerator's, and back."""
    words, keep, _ = _batch(0)
    accelerator = Accelerator(cpu=True)
    pipes = []
    for seed in range(2):
        torch.manual_seed(seed)
        pipe = Pipelined(Words().double(), ((words,), {"keep": keep, "scale": 2.0}), _loss, microbatches=2)
        optimizer = torch.optim.AdamW(pipe.parameters(), lr=1e-2)
        pipes.append((pipe, optimizer))
    (first, its), (second, other) = pipes
    _step(first, its, 0)
    accelerator.register_for_checkpointing(first.with_optimizer(its))
    accelerator.save_state(folder)
    accelerator._custom_objects.clear()
    accelerator.register_for_checkpointing(second.with_optimizer(other))
    accelerator.load_state(folder)
    assert _step(second, other, 1) == _step(first, its, 1)
    assert _step(second, other, 2) == _step(first, its, 2)
    accelerator.end_training()


class Normed(nn.Sequential):
    """Running statistics in every stage, and dropout."""

    def __init__(self) -> None:
        layers = [nn.Linear(4, 4), nn.BatchNorm1d(4), nn.Linear(4, 4), nn.BatchNorm1d(4), nn.Dropout(0.5)]
        super().__init__(*layers, nn.Linear(4, 1))


def _statistics_of_every_stage_are_saved_and_modes_are_kept() -> None:
    def made(seed: int, **options: Any) -> Pipelined:
        torch.manual_seed(seed)
        return Pipelined(Normed().double(), x, lambda out, _: out.square().mean(), microbatches=2, **options)

    generator = torch.Generator().manual_seed(0)
    x = torch.randn(6, 4, generator=generator, dtype=torch.float64)
    pipe = made(0, split=["2"])
    torch.manual_seed(0)
    reference = Normed().double()
    for _ in range(2):
        pipe.step(x)
        for part in x.chunk(2):
            reference(part)
    told = [pipe.with_optimizer(torch.optim.SGD(pipe.parameters(), lr=0.1)).state_dict()]
    torch.distributed.broadcast_object_list(told)
    expected = {name: value for name, value in reference.state_dict().items() if "running" in name}
    for name, value in expected.items():
        torch.testing.assert_close(told[0]["model"][name], value)
    assert [told[0]["model"][f"{at}.num_batches_tracked"].item() for at in (1, 3)] == [4, 4]
    other = made(1, split=["4"])  # the second statistics are the first rank's here
    other.with_optimizer(torch.optim.SGD(other.parameters(), lr=0.1)).load_state_dict(told[0])
    for name, value in other.whole_state_dict().items():
        torch.testing.assert_close(value, told[0]["model"][name])
    pipe.model[4].eval()
    with pytest.raises(PipelineError, match=r"4 was in train\(\) when the stages were cut.*in eval\(\) now"):
        pipe.step(x)
    pipe.model.train()
    with pytest.raises(PipelineError, match=r"\(\(4,\), 'float32'\).*the example had .*'float64'"):
        pipe.step(x.float())
    pipe.step(x)


def _refusals_and_a_checkpoint(folder: str) -> list[str]:
    said = _refusals()
    _statistics_of_every_stage_are_saved_and_modes_are_kept()
    _saved_with_a_checkpoint(folder)
    return said


def test_what_does_not_fit_is_said_on_every_rank_and_what_is_registered_is_saved(tmp_path: Path) -> None:
    first, second = run_processes(2, _refusals_and_a_checkpoint, str(tmp_path / "c"))
    assert first == second
    assert len(first) == 14
