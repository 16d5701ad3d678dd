"""Checkpoints there and back again: what accelerate writes is loaded here, what is written here is loaded there, and the run goes on as it was.

    python tools/round_trips.py PYTHON_WITH_ACCELERATE [--only NAME] [--processes 1 2]

PYTHON is the interpreter of an environment that has accelerate, this one has the acc packages. Processes of one library go through the cases: each
trains an epoch, saves, trains on and writes the losses down. Then processes of the other library build the same objects with other weights,
load, and train on. `equal` means that all their losses are the same numbers. Not in CI: it needs the other environment.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

OURS, THEIRS = "acc", "accelerate"
SAMPLES, BATCH, WIDTH = 24, 2, 4


@dataclass(frozen=True, kw_only=True)
class Case:
    """One kind of run. `batches`: how many of its epoch are done when it saves; None: all. `epochs`: the script says which epoch begins."""

    safe: bool = True
    models: int = 1
    registered: bool = False
    naming: bool = False
    plain: bool = False
    precision: str = "no"
    loader: dict[str, Any] = field(default_factory=dict)
    shuffle: bool = True
    dropout: bool = True
    stream: bool = False
    epochs: bool = False
    batches: int | None = None
    accumulate: int = 1
    compiled: str = ""  # by the script: "all" of each model, or its first "layer"; there where accelerate writes, plain where it reads
    note: str = ""


SEEDED = {"use_seedable_sampler": True, "data_seed": 5}
CASES = {
    "safetensors": Case(note="model, AdamW, scheduler, RNG (dropout)"),
    "torch files": Case(safe=False),
    "several models": Case(models=2),
    "registered object": Case(registered=True),
    "by hand": Case(plain=True, note="save_accelerator_state"),
    "bf16": Case(precision="bf16"),
    "automatic naming": Case(naming=True),
    "compiled": Case(compiled="all"),
    "compiled layer": Case(compiled="layer"),
    "accumulation": Case(accumulate=2),
    "seeded sampler": Case(loader=SEEDED, epochs=True),
    "stream": Case(stream=True, shuffle=False, loader={"dispatch_batches": False}),
    # without dropout: what a pass over a loader draws from torch's generator, and on which process, is each library's own
    "dispatched": Case(loader={"dispatch_batches": True}, shuffle=False, dropout=False),
    "skipped batches": Case(shuffle=False, dropout=False, batches=4),
    "stateful loader": Case(
        shuffle=False, dropout=False, batches=4, loader={"use_stateful_dataloader": True}
    ),
}


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("python", nargs="?", help="the interpreter of the environment that has accelerate")
    parser.add_argument("--only", choices=CASES, help="one case")
    parser.add_argument("--processes", type=int, nargs="+", default=[1, 2])
    parser.add_argument("--work", nargs=4, help=argparse.SUPPRESS)  # library, phase, folder, cases
    arguments = parser.parse_args()
    if arguments.work:
        library, phase, folder, names = arguments.work
        work(library, phase, Path(folder), names.split(","))
        return
    if not arguments.python:
        parser.error("name the interpreter of an environment that has accelerate")
    pythons = {OURS: sys.executable, THEIRS: arguments.python}
    names = [arguments.only] if arguments.only else list(CASES)
    print(f"{'case':20} {'processes':>9}  {'accelerate -> acc':34}  acc -> accelerate")
    bad = 0
    for processes in arguments.processes:
        there, back = (trips(pythons, names, processes, *pair) for pair in ((THEIRS, OURS), (OURS, THEIRS)))
        for name in names:
            print(f"{name:20} {processes:>9}  {there[name]:34}  {back[name]}", flush=True)
        bad += sum(result != "equal" for result in (*there.values(), *back.values()))
    print(f"{bad} of {2 * len(names) * len(arguments.processes)} round trips differ")
    sys.exit(bad > 0)


def trips(
    pythons: dict[str, str], names: list[str], processes: int, writer: str, reader: str
) -> dict[str, str]:
    """For each case `equal`, or in one line what was not."""
    with tempfile.TemporaryDirectory() as folder:
        said = []
        for library, phase in ((writer, "write"), (reader, "read")):
            options = ["-m", "torch.distributed.run", "--standalone", "--nproc_per_node", str(processes)]
            command = [pythons[library], *(options if processes > 1 else [])]
            command += [__file__, "--work", library, phase, folder, ",".join(names)]
            environ = {**os.environ, "OMP_NUM_THREADS": "1", "ACCELERATE_USE_CPU": "true"}
            ended = subprocess.run(
                command, capture_output=True, text=True, env=environ, timeout=600, check=False
            )
            out = Path(folder, f"{phase}.json")
            found = json.loads(out.read_text()) if out.exists() else {}
            missing = f"{library} fails to {phase}: {ended.stderr[-300:]}"
            said.append({name: found.get(name, missing) for name in names})
        return {name: _compared(said[0][name], said[1][name]) for name in names}


def _compared(wanted: list[float] | str, found: list[float] | str) -> str:
    if isinstance(wanted, str) or isinstance(found, str):
        return wanted if isinstance(wanted, str) else str(found)
    if wanted == found:
        return "equal"
    if len(wanted) != len(found):
        return f"{len(found)} losses, not {len(wanted)}"
    worst = max(abs(a - b) / max(abs(a), 1e-12) for a, b in zip(wanted, found, strict=True))
    first = next(i for i, (a, b) in enumerate(zip(wanted, found, strict=True)) if a != b)
    return f"differs by {worst:.1e}, from loss {first} on"


def work(library: str, phase: str, folder: Path, names: list[str]) -> None:
    """In a process of one library: every case, one after the other; rank 0 writes down the losses, or the error, of each."""
    results: dict[str, list[float] | str] = {}
    for name in names:
        print(f"{library} {phase}: {name}", file=sys.stderr, flush=True)
        try:
            results[name] = _run(library, CASES[name], phase, folder / name.replace(" ", "_"))
        except Exception as error:  # noqa: BLE001  one case that fails is a line of the table
            results[name] = f"{library} fails to {phase}: {type(error).__name__}: {error}"
    if int(os.environ.get("RANK", "0")) == 0:
        (folder / f"{phase}.json").write_text(json.dumps(results))


def _run(library: str, case: Case, phase: str, folder: Path) -> list[float]:
    """Train an epoch and save, or load; then the losses of what follows, of all ranks."""
    import torch  # noqa: PLC0415  the process that only starts others needs none

    reading = phase == "read"
    if (
        int(os.environ.get("WORLD_SIZE", "1")) > 1 and case.shuffle
    ):  # else each library has an order of its own
        case = replace(case, epochs=True, loader={**SEEDED, **case.loader})
    accelerator, things, loader, counter = _build(library, case, folder, reading)
    place = None if case.naming else str(folder / "saved")
    plain = _Plain(library, accelerator, things, scale=2.0 if reading else 64.0)

    def save() -> None:
        counter.count = 7
        if case.plain:
            plain.save(folder)
        else:
            accelerator.save_state(place, safe_serialization=case.safe)

    if reading:
        if case.plain:
            plain.load(folder)
        else:
            accelerator.load_state(place)
        if case.epochs:
            loader.set_epoch(1)
        again = case.batches is not None and not case.loader.get("use_stateful_dataloader")
        losses = _train(
            accelerator, things, accelerator.skip_first_batches(loader, case.batches) if again else loader
        )
    elif case.batches is None:
        _train(accelerator, things, loader)
        save()
        if case.epochs:
            loader.set_epoch(1)
        losses = _train(accelerator, things, loader)
    else:  # in the middle of an epoch, which goes on
        losses = _train(accelerator, things, loader, after=case.batches, do=save)[
            case.batches * case.models :
        ]
    if case.epochs:
        loader.set_epoch(2)
    losses += _train(accelerator, things, loader)
    losses += [float(counter.count)] if case.registered else []
    losses += [plain.scaler.get_scale()] if case.plain else []
    everywhere: list[float] = accelerator.gather(torch.tensor(losses, dtype=torch.float64)).tolist()
    accelerator.wait_for_everyone()
    return everywhere


class _Plain:
    """`save_accelerator_state` and `load_accelerator_state`, with a gradient scaler (on the CPU accelerate's own Accelerator has none)."""

    def __init__(self, library: str, accelerator: Any, things: list[Any], scale: float) -> None:
        import torch  # noqa: PLC0415

        if library == OURS:
            import acc_trainer as functions  # noqa: PLC0415
        else:
            from accelerate import checkpointing as functions  # noqa: PLC0415
        self.functions: Any = functions
        self.accelerator = accelerator
        self.models = [accelerator.unwrap_model(model) for model, _, _ in things]
        self.rest = [one for _, one, _ in things], [one for _, _, one in things], []
        self.scaler = torch.amp.GradScaler("cpu", init_scale=scale)

    def save(self, folder: Path) -> None:
        folder.mkdir(exist_ok=True)
        rank = self.accelerator.process_index
        states = [model.state_dict() for model in self.models]
        self.functions.save_accelerator_state(str(folder), states, *self.rest, rank, 5, self.scaler)
        self.accelerator.wait_for_everyone()

    def load(self, folder: Path) -> None:
        rank = self.accelerator.process_index
        found = self.functions.load_accelerator_state(str(folder), self.models, *self.rest, rank, self.scaler)
        if found != {"step": 5}:
            raise ValueError(f"the step was 5, found {found}")


class _Counter:
    """A registered object."""

    def __init__(self) -> None:
        self.count = 0

    def state_dict(self) -> dict[str, int]:
        return {"count": self.count}

    def load_state_dict(self, state: dict[str, int]) -> None:
        self.count = state["count"]


def _compiled(model: Any, what: str) -> Any:
    import torch  # noqa: PLC0415

    if what == "all":
        return torch.compile(model, backend="eager")
    model[0] = torch.compile(model[0], backend="eager")
    return model


def _build(library: str, case: Case, folder: Path, reading: bool) -> tuple[Any, list[Any], Any, _Counter]:
    import torch  # noqa: PLC0415

    if library == OURS:
        from acc_trainer import (  # noqa: PLC0415
            Accelerator,
            AcceleratorState,
            DataLoaderConfiguration,
            GradientState,
            ProjectConfiguration,
        )
    else:
        from accelerate import Accelerator  # noqa: PLC0415
        from accelerate.state import AcceleratorState, GradientState  # noqa: PLC0415
        from accelerate.utils import DataLoaderConfiguration, ProjectConfiguration  # noqa: PLC0415

    AcceleratorState._reset_state()  # the case before had another precision
    GradientState._reset_state()
    accelerator = Accelerator(
        cpu=True,
        mixed_precision=case.precision,
        gradient_accumulation_steps=case.accumulate,
        project_config=ProjectConfiguration(
            project_dir=str(folder), automatic_checkpoint_naming=case.naming, total_limit=2
        ),
        dataloader_config=DataLoaderConfiguration(**case.loader),
    )
    torch.manual_seed(101 if reading else 1)
    things = []
    for _ in range(case.models):
        layers = [torch.nn.Linear(WIDTH, 8), torch.nn.Dropout(0.5 if case.dropout else 0.0)]
        model: Any = torch.nn.Sequential(*layers, torch.nn.Linear(8, 1))
        optimizer = torch.optim.AdamW(model.parameters(), lr=0.05)
        schedule = torch.optim.lr_scheduler.StepLR(optimizer, 3, gamma=0.9)
        # our files have the names of a model that is not compiled, which is what accelerate can load
        if case.compiled and (library == OURS or not reading):
            model = _compiled(model, case.compiled)
        things.append(accelerator.prepare(model, optimizer, schedule))
    values = torch.linspace(-1, 1, SAMPLES * WIDTH).view(SAMPLES, WIDTH)
    loader: Any = torch.utils.data.DataLoader(
        _stream_of(values) if case.stream else values, BATCH, shuffle=case.shuffle
    )
    loader = accelerator.prepare(loader)
    counter = _Counter()
    if case.registered:
        accelerator.register_for_checkpointing(counter)
    return accelerator, things, loader, counter


def _stream_of(values: Any) -> Any:
    import torch  # noqa: PLC0415

    class Stream(torch.utils.data.IterableDataset):  # type: ignore[type-arg]
        def __iter__(self) -> Iterator[Any]:
            return iter(values)

    return Stream()


def _train(
    accelerator: Any, things: list[Any], loader: Any, after: int = 0, do: Callable[[], None] | None = None
) -> list[float]:
    """The losses of a pass over the loader; `do` is done after so many batches."""
    losses = []
    for number, batch in enumerate(loader, start=1):
        for model, optimizer, schedule in things:
            with accelerator.accumulate(model):
                loss = (model(batch).float() - batch.sum(1, keepdim=True)).square().mean()
                accelerator.backward(loss)
                optimizer.step()
                schedule.step()
                optimizer.zero_grad()
            losses.append(loss.item())
        if do is not None and number == after:
            do()
    return losses


if __name__ == "__main__":
    main()
