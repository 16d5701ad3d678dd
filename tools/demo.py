"""The two main jobs on real input: `hatch run demo`.

1. Train a digit classifier on two CPU processes; train it again, kill everything with SIGKILL in the middle of an epoch, resume from the newest
   whole checkpoint, and compare the last weights with those of the run that was never killed, bit for bit.
2. Embed sentences with a pretrained encoder whose memory budget puts half of its layers on disk, and compare with the in-memory model.

What is printed is what was measured. Pictures and results go to --out (default: out/demo).
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import psutil
import torch
from safetensors.torch import load_file
from workspace import ROOT

EXAMPLES = ROOT / "docs" / "examples"
PROCESSES = 2
KILL_AFTER_UPDATE = 50  # between two checkpoints (every 20 updates) and inside an epoch (23 updates)


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--out", type=Path, default=ROOT / "out" / "demo")
    arguments = parser.parse_args()
    out = arguments.out.resolve()
    shutil.rmtree(out, ignore_errors=True)
    out.mkdir(parents=True)
    start = time.monotonic()
    failures = [*training_job(out), *embedding_job(out)]
    print(f"\ndemo took {time.monotonic() - start:.0f} s; everything it wrote is in {out}")
    for failure in failures:
        print(f"FAILED: {failure}", file=sys.stderr)
    sys.exit(1 if failures else 0)


def training_job(out: Path) -> list[str]:
    """Train, train again and kill, resume, compare; what went wrong, if anything."""
    title("1. training on 2 CPU processes over gloo")
    whole, killed = out / "digits", out / "digits-killed"
    run_to_end(train_command(whole))

    title("the same training again, killed with SIGKILL in the middle of an epoch")
    last = kill_in_the_middle(train_command(killed), killed / "log.jsonl")
    checkpoints = sorted(path.name for path in (killed / "checkpoints").iterdir())
    print(
        f"killed after update {last['update']} (epoch {last['epoch']}, batch {last['batch']}); on disk: {', '.join(checkpoints)}"
    )

    title("resumed from the newest whole checkpoint")
    run_to_end([*train_command(killed), "--resume"])

    title("result")
    progress = json.loads((whole / "progress.json").read_text())
    resumed = json.loads((killed / "progress.json").read_text())
    accuracy = progress["accuracies"][-1][1]
    differing = differing_tensors(whole / "final", killed / "final")
    print(
        f"held-out accuracy {accuracy:.4f} on {held_out_size()} images after {len(progress['losses'])} updates"
    )
    print(
        f"weights after the last step, killed-and-resumed against never-killed: {differing if differing else 'bit for bit equal'}"
    )
    draw_training(progress, out / "digits.png", killed_at=last["update"])
    print(f"loss and accuracy: {out / 'digits.png'}")
    problems = []
    if accuracy < 0.95:
        problems.append(f"held-out accuracy {accuracy:.4f} is below 0.95")
    if differing:
        problems.append(f"the resumed run ended with other weights: {differing}")
    if progress != resumed:
        problems.append("the resumed run recorded other losses or accuracies")
    return problems


def embedding_job(out: Path) -> list[str]:
    """Embed with the whole model and within the budget, compare; what went wrong, if anything."""
    title("2. a model larger than its budget")
    script = str(EXAMPLES / "embed_sentences.py")
    run_to_end([sys.executable, script, "--out", str(out / "in-memory")])
    run_to_end([sys.executable, script, "--budget", "half", "--out", str(out / "half-on-disk")])
    title("result")
    reports = {
        name: json.loads((out / name / "report.json").read_text()) for name in ("in-memory", "half-on-disk")
    }
    embeddings = [torch.load(out / name / "embeddings.pt", weights_only=True) for name in reports]
    difference = (embeddings[0] - embeddings[1]).abs().max().item()
    print(f"embeddings of {len(embeddings[0])} sentences differ by at most {difference:.1e}")
    for name, report in reports.items():
        print(f"anonymous memory, {name}: {report['anonymous_mb']:.0f} MB above the start")
    print(f"placement: {out / 'half-on-disk' / 'placement.svg'}")
    return [] if difference <= 1e-5 else [f"the embeddings differ by {difference:.1e}"]


def train_command(folder: Path) -> list[str]:
    acc = Path(sys.executable).with_name("acc")
    launch = [str(acc), "launch", "--cpu", "--num_processes", str(PROCESSES)]
    return [*launch, str(EXAMPLES / "train_digits.py"), "--project_dir", str(folder)]


def run_to_end(command: list[str]) -> None:
    shown = [Path(part).name if part.startswith("/") else part for part in command]
    print("$", *shown, flush=True)
    done = subprocess.run(command)
    if done.returncode:
        raise SystemExit(f"{' '.join(shown)} ended with {done.returncode}")


def kill_in_the_middle(command: list[str], log: Path) -> dict[str, Any]:
    """Start a training, wait for an update in its log, kill launcher and workers at once; the last line it logged."""
    process = subprocess.Popen(command, start_new_session=True)
    try:
        wait_for_update(process, log, KILL_AFTER_UPDATE)
        workers = psutil.Process(process.pid).children(recursive=True)
        for pid in (process.pid, *(worker.pid for worker in workers)):
            os.kill(pid, signal.SIGKILL)
        process.wait()
        psutil.wait_procs(workers, timeout=10)
    finally:
        if process.poll() is None:
            os.killpg(process.pid, signal.SIGKILL)
        process.wait()
    if process.returncode != -signal.SIGKILL:
        raise SystemExit(f"the training ended with {process.returncode} before it could be killed")
    print()
    return logged(log)[-1]


def wait_for_update(process: subprocess.Popen[bytes], log: Path, update: int) -> None:
    deadline = time.monotonic() + 120
    while time.monotonic() < deadline:
        lines = logged(log)
        if lines and lines[-1]["update"] >= update:
            return
        if process.poll() is not None:
            raise SystemExit(f"the training ended with {process.returncode} before update {update}")
        time.sleep(0.002)
    raise SystemExit(f"no update {update} within 120 s")


def logged(log: Path) -> list[dict[str, Any]]:
    """The complete lines of a training log."""
    if not log.exists():
        return []
    text = log.read_text()
    return [json.loads(line) for line in text[: text.rfind("\n") + 1].splitlines()]


def differing_tensors(one: Path, other: Path) -> str:
    """Names of the tensors that are not bit for bit equal in two saved models; empty when all are."""
    a, b = load_file(one / "model.safetensors"), load_file(other / "model.safetensors")
    if a.keys() != b.keys():
        return f"different names: {sorted(a.keys() ^ b.keys())}"
    return ", ".join(
        name
        for name in a
        if not torch.equal(a[name].contiguous().view(torch.uint8), b[name].contiguous().view(torch.uint8))
    )


def held_out_size() -> int:
    sys.path.insert(0, str(EXAMPLES))
    from train_digits import digits  # noqa: PLC0415  the example is a script, not a package

    return len(digits()[1])


def draw_training(progress: dict[str, Any], path: Path, killed_at: int) -> None:
    """Loss per update and held-out accuracy per epoch, as a PNG."""
    import matplotlib  # noqa: PLC0415  slow to import, and only needed here

    matplotlib.use("Agg")
    from matplotlib import pyplot  # noqa: PLC0415

    figure, left = pyplot.subplots(figsize=(8, 4.5))
    left.plot(
        range(1, len(progress["losses"]) + 1), progress["losses"], color="tab:blue", label="training loss"
    )
    left.axvline(killed_at, color="tab:red", linestyle=":", label="the second run was killed here")
    left.set(xlabel="update", ylabel="training loss", title="Handwritten digits, 2 CPU processes")
    right = left.twinx()
    updates, accuracies = zip(*progress["accuracies"], strict=True)
    right.plot(updates, accuracies, color="tab:green", marker="o", label="held-out accuracy")
    right.set(ylabel="held-out accuracy", ylim=(0, 1.02))
    lines = [*left.get_lines(), *right.get_lines()]
    left.legend(lines, [str(line.get_label()) for line in lines], loc="center right")
    figure.tight_layout()
    figure.savefig(path, dpi=120)
    pyplot.close(figure)


def title(text: str) -> None:
    print(f"\n== {text}", flush=True)


if __name__ == "__main__":
    main()
