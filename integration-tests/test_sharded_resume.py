"""Sharded runs that are killed and resumed are the same run, bit for bit, also inside an accumulation window. Real gloo processes."""

from __future__ import annotations

import os
import warnings
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
from drawn_together import check_on_every_rank
from hypothesis import strategies as st
from hypothesis.strategies import SearchStrategy
from torch import Tensor, nn
from torch.utils.data import DataLoader, Dataset

from acc_ops.random import set_seed
from acc_ops.testing import run_processes
from acc_plugins import FullyShardedDataParallelPlugin, ParallelismConfig
from acc_plugins.options.accumulation import GradientAccumulationPlugin
from acc_plugins.options.kwargs import DistributedDataParallelKwargs
from acc_plugins.parallel import set_plan
from acc_trainer.accelerator import Accelerator
from acc_trainer.checkpoint import CheckpointError, meeting

pytestmark = pytest.mark.skipif(os.name != "posix", reason="gloo processes")
EPOCHS, SIZE, WINDOW = 2, 26, 3
FULL, SHARDED = "FULL_STATE_DICT", "SHARDED_STATE_DICT"


class Samples(Dataset[Tensor]):
    def __len__(self) -> int:
        return SIZE

    def __getitem__(self, place: int) -> Tensor:
        return torch.cat([torch.tensor([float(place)]), torch.rand(5)])


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(6, 10), nn.Linear(10, 6)
        self.drop = nn.Dropout(0.2)

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = x + self.drop(self.down(torch.tanh(self.up(x))))
        return out


class Net(nn.Module):
    """Sizes that two does not divide, and a layer that no loss reaches."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(5, 6)
        self.blocks = nn.ModuleList([Block(), Block()])
        self.last = nn.Linear(6, 3)
        self.unused = nn.Linear(3, 3)

    def forward(self, x: Tensor) -> Tensor:
        x = self.first(x)
        for block in self.blocks:
            x = block(x)
        out: Tensor = self.last(x)
        return out


def plugin(version: int, kind: str, **more: Any) -> FullyShardedDataParallelPlugin:
    return FullyShardedDataParallelPlugin(
        fsdp_version=version,
        state_dict_type=kind,
        auto_wrap_policy="transformer_based_wrap",
        transformer_cls_names_to_wrap=["Block"],
        **more,
    )


Options = Callable[[], dict[str, Any]]
ON_TWO: dict[str, Options] = {
    "fsdp2, sharded files": lambda: {"fsdp_plugin": plugin(2, SHARDED)},
    "fsdp2, whole files": lambda: {"fsdp_plugin": plugin(2, FULL)},
    "fsdp2 in bf16": lambda: {"fsdp_plugin": plugin(2, SHARDED), "mixed_precision": "bf16"},
    "fsdp2 in fp16": lambda: {"fsdp_plugin": plugin(2, SHARDED), "mixed_precision": "fp16"},
    "fsdp1": lambda: {"fsdp_plugin": plugin(1, SHARDED, use_orig_params=True)},
    "fsdp1, flat": lambda: {"fsdp_plugin": plugin(1, FULL, use_orig_params=False)},
    "tp": lambda: {"parallelism_config": ParallelismConfig(tp_size=2)},
}
ON_FOUR: dict[str, Options] = {
    "fsdp2 x tp": lambda: {
        "fsdp_plugin": plugin(2, SHARDED),
        "parallelism_config": ParallelismConfig(dp_shard_size=2, tp_size=2),
    },
    "replicas x fsdp2": lambda: {
        "fsdp_plugin": plugin(2, SHARDED),
        "parallelism_config": ParallelismConfig(dp_replicate_size=2, dp_shard_size=2),
    },
}


def ddp() -> dict[str, Any]:
    return {"kwargs_handlers": [DistributedDataParallelKwargs(find_unused_parameters=True)]}


class Run:
    """One life of a training process: it is built, loads, trains, saves, and is left."""

    def __init__(self, options: Options, seed: int, window: int = WINDOW, **more: Any) -> None:
        set_seed(seed, device_specific=True)
        given = {"gradient_accumulation_steps": window, **options(), **more}
        self.accelerator = Accelerator(cpu=True, **given)
        net: Any = Net()
        if self.accelerator.parallelism_config is not None:
            set_plan(net, {"blocks.*.up": "colwise", "blocks.*.down": "rowwise"})
        trained = [p for p in net.parameters() if p.requires_grad]
        optimizer = torch.optim.AdamW(trained, lr=0.01)
        schedule = torch.optim.lr_scheduler.StepLR(optimizer, 2, gamma=0.7)
        loader = DataLoader(Samples(), 2, shuffle=True)
        made = self.accelerator.prepare(net, optimizer, loader, schedule)
        self.model, self.optimizer, self.loader, self.schedule = made
        self.seen: list[float] = []

    def train(self, save_at: int = 0, leave_at: int = 0, folder: str = "", blocking: bool = True) -> None:
        accelerator = self.accelerator
        for _ in range(self.loader.iteration, EPOCHS):
            for batch in accelerator.rest_of_epoch(self.loader):
                with accelerator.accumulate(self.model):
                    accelerator.backward(self.model(batch[:, 1:]).square().mean())
                    self.optimizer.step()
                    self.schedule.step()
                    self.optimizer.zero_grad()
                self.seen += batch[: len(batch) - self.loader.position.padding, 0].tolist()
                if accelerator.step == save_at:
                    accelerator.save_state(folder, blocking=blocking)
                if accelerator.step == leave_at:
                    return

    def load(self, folder: str) -> Run:
        self.accelerator.load_state(folder)
        return self

    def end(self) -> Run:
        self.accelerator.wait_for_save()
        self.accelerator.end_training()
        return self

    def result(self) -> list[Any]:
        """What this rank has of weights and optimizer, where the schedule and the generator stand."""
        states = [dict(state) for state in self.optimizer.optimizer.state.values()]
        moments = [{name: local(value).tolist() for name, value in state.items()} for state in states]
        weights = [local(p).tolist() for p in self.model.parameters()]
        return [weights, moments, self.schedule.get_last_lr(), self.accelerator.step, torch.rand(2).tolist()]


def local(tensor: Any) -> Tensor:
    part: Tensor = tensor.to_local() if hasattr(tensor, "to_local") else tensor
    return part.detach()


@dataclass(frozen=True)
class Plan:
    """At which steps a run is saved, left some steps later, and resumed; whether it waits for each save."""

    first: int
    apart: int
    blocking: tuple[bool, bool]
    later: tuple[int, int]


def plans(last: int) -> SearchStrategy[Plan]:
    """Of a run of `last` steps. The simplest one is saved behind an epoch's last step, which closes its window; others anywhere."""
    end = last // EPOCHS
    return st.builds(
        Plan,
        first=st.sampled_from([end, *(step for step in range(1, last) if step != end)]),
        apart=st.integers(1, WINDOW + 1),
        blocking=st.tuples(st.booleans(), st.booleans()),
        later=st.tuples(st.integers(0, 2), st.integers(0, 2)),
    )


def _same_runs(every: dict[str, Options], home: str, number: int) -> None:
    """Each configuration, saved and left at steps that hypothesis chooses, twice in a row."""
    for name, options in every.items():
        whole = Run(options, seed=3)
        whole.train()
        last = whole.accelerator.step
        expected = whole.end().result()
        folder = f"{home}/{name.replace(' ', '_')}"

        def resumed(
            plan: Plan,
            name: str = name,
            options: Options = options,
            last: int = last,
            expected: list[Any] = expected,
            folder: str = folder,
        ) -> None:
            run = Run(options, seed=3)
            for turn, step in enumerate((plan.first, min(plan.first + plan.apart, last - 1))):
                run.train(step, step + plan.later[turn], f"{folder}_{turn}", plan.blocking[turn])
                run.end()
                run = Run(options, seed=90 + turn).load(f"{folder}_{turn}")
                if run.accelerator.step != step:  # and its collectives would not be those of the others
                    raise RuntimeError(f"{name} resumed at step {run.accelerator.step}")
            run.train()
            assert run.end().result() == expected, f"{name}, of {last} steps"

        check_on_every_rank(resumed, plans(last), number=number)


def _other_layouts_lose_the_window_and_say_so(home: str) -> None:
    run = Run(ddp, seed=3)
    run.train(2, 2, f"{home}/window")
    run.end()
    for name in ("fsdp2, sharded files", "fsdp1"):
        with warnings.catch_warnings(record=True) as said:
            warnings.simplefilter("always")
            other = Run(ON_TWO[name], seed=4).load(f"{home}/window")
        text = next(str(one.message) for one in said if "accumulation window" in str(one.message))
        assert "saved with whole gradients for model, now it is fsdp" in text
        assert other.accelerator.grad_sync.index == 0
        other.train()
        other.end()


def _going_back_drops_what_is_held(home: str) -> None:
    for name in ("fsdp2, sharded files", "fsdp1", "fsdp1, flat"):
        run = Run(ON_TWO[name], seed=3)
        run.accelerator.save_state(f"{home}/closed")
        batch = torch.ones(2, 6)

        def micro_batch(run: Run = run, batch: Tensor = batch) -> None:
            with run.accelerator.accumulate(run.model):
                run.accelerator.backward(run.model.eval()(batch[:, 1:]).square().mean())
                run.optimizer.step()
                run.optimizer.zero_grad()

        for _ in range(WINDOW):
            micro_batch()
        expected = run.result()[:2]
        run.load(f"{home}/closed")
        micro_batch()
        run.load(f"{home}/closed")
        for _ in range(WINDOW):
            micro_batch()
        assert run.result()[:2] == expected, name
        run.end()


def _windows_that_end_early_are_those_of_ddp() -> None:
    """What FSDP2 holds back is dropped with a window that was broken off, and counts in the mean of a short one."""
    results = []
    for options in (ddp, ON_TWO["fsdp2, sharded files"], ON_TWO["fsdp1"]):
        accumulation = GradientAccumulationPlugin(num_steps=4, average_short_window=True)
        run = Run(options, seed=3, gradient_accumulation_plugin=accumulation, gradient_accumulation_steps=1)
        run.model.eval()
        run.train(leave_at=6)  # two micro-batches of a window are left behind
        run.train()
        state = run.accelerator.get_state_dict(run.model)
        results.append(
            {name: value.tolist() for name, value in state.items()} if run.accelerator.is_main_process else {}
        )
        run.end()
    expected, *others = results
    for other in others:
        assert other.keys() == expected.keys()
        for name, value in expected.items():
            if name.startswith("unused"):  # FSDP1's flat gradient has zeros there, so its weights decay
                continue
            torch.testing.assert_close(torch.tensor(other[name]), torch.tensor(value), rtol=1e-4, atol=1e-6)


def _steps_behind_broken_windows(home: str) -> None:
    """What is left when a loop ends inside a window: a clip and a step outside are those of plain torch on all samples, in float64."""
    for name, options in {"ddp": ddp, **ON_TWO}.items():
        if "16" not in name:
            for resumes in (False, True):
                _step_behind_a_broken_window(
                    name, options, resumes, f"{home}/broken_{name.replace(' ', '_')}"
                )


def _step_behind_a_broken_window(name: str, options: Options, resumes: bool, folder: str) -> None:
    run = Run(options, seed=3)
    accelerator, model = run.accelerator, run.model.eval()
    start = {key: value.double() for key, value in accelerator.get_state_dict(model).items()}
    rank = 0 if name == "tp" else accelerator.process_index
    shares = torch.randn(WINDOW - 1, 2, 4, 5, generator=torch.Generator().manual_seed(5))
    for share in shares:
        with accelerator.accumulate(model):
            accelerator.backward(model(share[rank]).square().mean())
            run.optimizer.step()
            run.optimizer.zero_grad()
    if resumes:
        accelerator.save_state(folder)
        run.optimizer.optimizer.zero_grad()
        accelerator.load_state(folder)
    accelerator.grad_sync.abandon()  # as a loop that is left does
    norm = accelerator.clip_grad_norm_(model.parameters(), 1e6)
    run.optimizer.step()
    updated = accelerator.get_state_dict(model)
    run.end()
    if start:
        plain = Net().double().eval()
        plain.load_state_dict(start)
        optimizer = torch.optim.AdamW(plain.parameters(), lr=0.01)
        used = shares[:, :1] if name == "tp" else shares  # whose ranks have the same samples
        losses = [plain(share.flatten(0, 1).double()).square().mean() for share in used]
        (torch.stack(losses).sum() / WINDOW).backward()
        expected = torch.nn.utils.clip_grad_norm_(plain.parameters(), 1e6)
        torch.testing.assert_close(norm.double(), expected.double(), rtol=1e-5, atol=1e-7)
        optimizer.step()
        for key, value in plain.state_dict().items():
            if not key.startswith("unused"):  # FSDP1's flat gradient has zeros there, so its weights decay
                torch.testing.assert_close(
                    updated[key].double(), value, rtol=1e-3, atol=1e-5, msg=f"{name}: {key}"
                )


def _one_rank_alone_saves_a_model(home: str) -> None:
    """It may where it has the whole weights; where they are gathered it is an error that names the others, and later calls work."""
    run = Run(ddp, seed=3)
    if run.accelerator.is_main_process:
        run.accelerator.save_model(run.model, f"{home}/alone")
    run.accelerator.wait_for_everyone()
    assert Path(home, "alone", "model.safetensors").is_file()
    run.end()
    run = Run(ON_TWO["fsdp2, sharded files"], seed=3)
    limit, meeting.WAIT_S = meeting.WAIT_S, 0.5
    try:
        if run.accelerator.is_main_process:
            with pytest.raises(
                CheckpointError, match=r"save_model must be called on every rank; rank 1 did not"
            ):
                run.accelerator.save_model(run.model, f"{home}/gathered")
        run.accelerator.wait_for_everyone()
        meeting.WAIT_S = limit
        run.accelerator.save_model(run.model, f"{home}/gathered")
    finally:
        meeting.WAIT_S = limit
    run.accelerator.wait_for_everyone()
    assert Path(home, "gathered", "model.safetensors").is_file()
    run.end()


def _ddp_then_fsdp2(home: str) -> list[float]:
    """The samples of this rank in the first part of an epoch."""
    run = Run(ddp, seed=3, window=1)
    run.train(3, 3, f"{home}/ddp")
    seen = run.end().seen
    run = Run(ON_TWO["fsdp2, sharded files"], seed=4, window=1).load(f"{home}/ddp")
    run.train(5, 5, f"{home}/fsdp2")
    return seen + run.end().seen


def _on_two(home: str) -> list[float]:
    torch.set_num_threads(1)
    _same_runs(ON_TWO, home, 2)
    _other_layouts_lose_the_window_and_say_so(home)
    _going_back_drops_what_is_held(home)
    _windows_that_end_early_are_those_of_ddp()
    _steps_behind_broken_windows(home)
    _one_rank_alone_saves_a_model(home)
    return _ddp_then_fsdp2(home)


def _on_four(home: str) -> tuple[list[float], int]:
    """The samples of this rank from there on, and the updates that its optimizer counts in the end."""
    torch.set_num_threads(1)
    _same_runs(ON_FOUR, home, 2)
    run = Run(ON_TWO["fsdp2, whole files"], seed=5, window=1).load(f"{home}/fsdp2")
    run.train()
    counts = {int(local(state["step"])) for state in run.optimizer.optimizer.state.values()}
    assert counts == {run.end().accelerator.step}
    return run.seen, counts.pop()


def test_a_sharded_run_that_is_left_anywhere_and_resumed_is_the_run_that_never_was(tmp_path: Path) -> None:
    first = run_processes(2, _on_two, str(tmp_path), timeout_s=300)
    rest = run_processes(4, _on_four, str(tmp_path), timeout_s=300)
    seen = [sample for part in first for sample in part]
    seen += [sample for part, _ in rest for sample in part]
    assert sorted(seen) == sorted([*range(SIZE)] * EPOCHS)  # of an epoch that began on DDP, and the next one
    steps_of_four = -(-SIZE // 8)
    assert {count for _, count in rest} == {5 + 1 + steps_of_four}
