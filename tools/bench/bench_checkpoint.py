"""What a checkpoint costs the training: the time a save blocks it, and the rate of its steps while a save is written; and what loading costs.

The limit is safetensors' own `save_file` and `load_file` of the same values in the same run. All files are written beside each other, and deleted.
A bare copy of as many bytes, by as many threads, into memory that has its pages, says what the machine cannot do faster.
"""

from __future__ import annotations

import ctypes
import os
import shutil
import tempfile
import threading
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import torch
from measure import Series, interleave, report, timed
from safetensors.torch import load_file, save_file
from torch import nn

from acc_trainer import Accelerator

ROUNDS = 5
MANY = 20_000 // 4
Clock = Callable[[], float]


def main() -> None:
    for threads, goal in ((2, 0.25), (1, 0.4)):
        blocked("36 large tensors, 1 GB", layers(12, 2635), threads, goal)
    blocked(f"{4 * MANY} small tensors, 330 MB", layers(MANY, 64), 2, 0.25)
    torch.set_num_threads(1)
    stepping(layers(12, 1666))
    loading(layers(12, 1666))


def layers(count: int, width: int) -> nn.Module:
    return nn.ModuleList([nn.Linear(width, width, bias=False) for _ in range(count)])


def prepared(model: nn.Module) -> tuple[Accelerator, dict[str, torch.Tensor], torch.optim.Optimizer]:
    """An Accelerator with `model` and AdamW after one step, and all its tensors by name."""
    accelerator = Accelerator(cpu=True)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    for parameter in model.parameters():
        parameter.grad = torch.ones_like(parameter)
    optimizer.step()
    optimizer.zero_grad()
    accelerator.prepare(model, optimizer)
    values = dict(model.state_dict())
    for number, state in optimizer.state_dict()["state"].items():
        values.update({f"{number}.{name}": value for name, value in state.items()})
    return accelerator, values, optimizer


def blocked(title: str, model: nn.Module, threads: int, goal: float) -> None:
    """The time that `save_state(blocking=False)` does not let the training go on, against `save_file`."""
    torch.set_num_threads(threads)
    accelerator, values, _ = prepared(model)
    with tempfile.TemporaryDirectory(dir=os.environ.get("BENCH_DIR")) as folder:
        file = Path(folder, "all.safetensors")

        def plain(clock: Clock) -> float:
            file.unlink(missing_ok=True)
            return timed(lambda: save_file(values, file), clock)

        def ours(clock: Clock) -> float:
            seconds = timed(lambda: accelerator.save_state(f"{folder}/c", blocking=False), clock)
            accelerator.wait_for_save()
            return seconds

        bare = bare_copy(sum(value.nbytes for value in values.values()), threads)
        first = ours(time.perf_counter)
        name = "save_state, blocking=False"
        for clock, what in (
            (time.perf_counter, "time"),
            (time.thread_time, "CPU time of the training's thread"),
        ):
            calls = {"save_file": plain, name: ours, "a bare copy of the bytes": partial(timed, bare)}
            series = interleave({called: partial(call, clock) for called, call in calls.items()}, ROUNDS)
            report(
                f"{title}, {threads} copying threads: {what} until save_state returns",
                series,
                "save_file",
                {name: goal},
            )
        print(f"  the first save blocked for {first * 1e3:.0f} ms")
    accelerator.end_training()


def bare_copy(nbytes: int, threads: int) -> Callable[[], None]:
    source, target = torch.ones(nbytes, dtype=torch.uint8), torch.ones(nbytes, dtype=torch.uint8)
    share = -(-nbytes // threads)

    def copy(at: int) -> None:
        ctypes.memmove(target.data_ptr() + at, source.data_ptr() + at, min(share, nbytes - at))

    def copy_all() -> None:
        helpers = [threading.Thread(target=copy, args=(at,)) for at in range(share, nbytes, share)]
        for helper in helpers:
            helper.start()
        copy(0)
        for helper in helpers:
            helper.join()

    return copy_all


def stepping(model: nn.Module) -> None:
    """The rate of plain steps beside the writing thread, against the rate without one."""
    accelerator, _, _ = prepared(model)
    work = nn.Sequential(nn.Linear(256, 256), nn.ReLU(), nn.Linear(256, 256))
    inputs = torch.randn(64, 256)

    def step() -> None:
        work(inputs).square().mean().backward()

    def rate(going_on: Callable[[], bool]) -> float:
        begun, steps = time.perf_counter(), 0
        while going_on():
            step()
            steps += 1
        return steps / (time.perf_counter() - begun)

    def alone() -> float:
        until = time.perf_counter() + 1.0
        return rate(lambda: time.perf_counter() < until)

    with tempfile.TemporaryDirectory(dir=os.environ.get("BENCH_DIR")) as folder:

        def beside() -> float:
            accelerator.save_state(f"{folder}/c", blocking=False)
            writing: Any = accelerator._background
            got = rate(lambda: bool(writing.is_writing))
            accelerator.wait_for_save()
            return got

        series = interleave({"no save": alone, "while a save is written": beside}, 5)
    slower = series["while a save is written"].over(series["no save"])
    print(f"\nstep rate, 1 torch thread: {slower:.2f} of the normal rate while 400 MB are written and synced")
    accelerator.end_training()


def loading(model: nn.Module) -> None:
    """`load_state` against `load_file` and a copy into the same tensors."""
    accelerator, values, _ = prepared(model)
    folder = tempfile.mkdtemp(dir=os.environ.get("BENCH_DIR"))
    try:
        accelerator.save_state(f"{folder}/c")
        save_file(values, f"{folder}/all.safetensors")

        def plain() -> float:
            return timed(lambda: copy_in(load_file(f"{folder}/all.safetensors")), time.process_time)

        def copy_in(loaded: dict[str, torch.Tensor]) -> None:
            for name, value in values.items():
                value.copy_(loaded[name])

        series: dict[str, Series] = interleave(
            {
                "load_file": plain,
                "load_state": lambda: timed(lambda: accelerator.load_state(f"{folder}/c"), time.process_time),
                "load_state, checksums=True": lambda: timed(
                    lambda: accelerator.load_state(f"{folder}/c", checksums=True), time.process_time
                ),
            },
            ROUNDS,
        )
        report("loading 400 MB: CPU time", series, "load_file", {"load_state": 1.5})
    finally:
        shutil.rmtree(folder)
    accelerator.end_training()


if __name__ == "__main__":
    main()
