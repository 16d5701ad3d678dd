"""Which strategy works with which precision on which kind of device: one table, for the error and for the docs.

[Note: what was run] `ran.json` beside this file holds, for every strategy, precision and device whose contract passed
(`StrategyContract.check_precision`), the version of torch it last passed with. The contract itself writes it, through `record_run`, where
ACC_RECORD_RUNS names that file; nobody else does.
"""

from __future__ import annotations

import functools
import json
from dataclasses import dataclass
from pathlib import Path

from acc_ops import devices
from acc_ops.devices import DeviceRow


class UnsupportedError(ValueError):
    """A combination of strategy, precision and device that cannot work."""


@dataclass(frozen=True, kw_only=True)
class Support:
    """One cell: whether it `works`, the version of torch it was `run` with on such a device, and the `reason` when it does not work."""

    works: bool
    run: str = ""
    reason: str = ""

    def __str__(self) -> str:
        if not self.works:
            return f"no: {self.reason}"
        return f"works ({self.run})" if self.run else "expected to work, not run on real hardware"


STRATEGIES = {
    "single": "one device",
    "ddp": "one model per process, torch's DistributedDataParallel",
    "fsdp1": "one model in shards over the processes, torch's FullyShardedDataParallel",
    "fsdp2": "one model in shards over the processes or a mesh, torch's fully_shard",
    "mesh": "layers or sequences split over the axes of a mesh",
    "replicated": "one model per rank, gradients averaged through the world's Comm (ranks as threads, tests)",
}
PRECISIONS = ("no", "bf16", "fp16", "fp8")
_GROUPED = ("ddp", "fsdp1", "fsdp2", "mesh")  # speak through torch's process groups
_RAN = Path(__file__).with_name("ran.json")
# what is known of what was not run on real hardware
_KNOWN = {
    "fp8": "on the CPU through torchao; TransformerEngine, which needs a GPU, only with a stand-in for the library; layers that tensor parallelism "
    "splits are refused",
    "xla": "its collectives, generators and moves ran with one rank on torch_xla 2.6's CPU device; several ranks only with a stand-in for "
    "torch_xla; torch_xla 2.9, the newest, does not import beside torch 2.13",
}


def support(strategy: str, precision: str, device_type: str) -> Support:
    """The cell of the table. Raises UnsupportedError for a strategy, precision or device kind that the table does not know."""
    rows = {row.kind: row for row in devices.DEVICE_TABLE}
    for what, value, known in (
        ("strategy", strategy, STRATEGIES),
        ("precision", precision, PRECISIONS),
        ("device kind", device_type, rows),
    ):
        if value not in known:
            raise UnsupportedError(f"unknown {what} {value!r}: choose one of {', '.join(known)}")
    reason = _refusal(strategy, precision, rows[device_type])
    run = "" if reason else _ran().get(f"{strategy} {precision} {device_type}", "")
    return Support(works=not reason, run=run, reason=reason)


@functools.lru_cache(maxsize=1)
def _ran() -> dict[str, str]:
    found: dict[str, str] = json.loads(_RAN.read_text(encoding="utf-8"))
    return found


def record_run(file: str | Path, strategy: str, precision: str, device_type: str, version: str) -> None:
    """Note in `file` that the contract of this pair passed on such a device, with that version of torch."""
    path = Path(file)
    known = json.loads(path.read_text(encoding="utf-8")) if path.exists() else {}
    known[f"{strategy} {precision} {device_type}"] = f"torch {version}"
    path.write_text(json.dumps(known, indent=1, sort_keys=True) + "\n", encoding="utf-8")


def _refusal(strategy: str, precision: str, row: DeviceRow) -> str:
    """Why the combination cannot work, or nothing."""
    if strategy in _GROUPED and row.no_ddp:
        return row.no_ddp
    if precision == "bf16" and not row.autocast_bf16:
        return f"there is no bfloat16 autocast for {row.kind}: use mixed_precision='no'"
    if precision == "fp16" and not (row.autocast_fp16 and row.grad_scaler):
        missing = "float16 autocast" if not row.autocast_fp16 else "gradient scaler"
        return f"there is no {missing} for {row.kind}: use mixed_precision='bf16'"
    if precision == "fp8" and not row.fp8:
        return "neither torchao nor TransformerEngine trains in 8-bit floating point there: use mixed_precision='bf16'"
    return ""


def check_support(strategy: str, precision: str, device_type: str) -> None:
    """Raise UnsupportedError, with the reason and a way out, for a combination that cannot work."""
    cell = support(strategy, precision, device_type)
    if not cell.works:
        raise UnsupportedError(
            f"strategy {strategy!r} with precision {precision!r} does not work on {device_type}: {cell.reason}"
        )


def support_table() -> str:
    """The table as Markdown: a row per strategy and precision, the device kinds in three columns, the reasons and what is known below."""
    reasons: dict[str, int] = {}  # reason -> the number of its note
    lines = [
        "| strategy | precision | tested on | expected to work, not run on real hardware | does not work |",
        "| --- | --- | --- | --- | --- |",
    ]
    for strategy in STRATEGIES:
        for precision in PRECISIONS:
            cells = {kind: support(strategy, precision, kind) for kind in devices.known_kinds()}
            tested = ", ".join(f"{kind} ({cell.run})" for kind, cell in cells.items() if cell.run)
            untested = ", ".join(kind for kind, cell in cells.items() if cell.works and not cell.run)
            refused = ", ".join(
                f"{kind} ({reasons.setdefault(cell.reason, len(reasons) + 1)})"
                for kind, cell in cells.items()
                if not cell.works
            )
            lines.append(f"| {strategy} | {precision} | {tested} | {untested} | {refused} |")
    meanings = [f"- **{strategy}**: {meaning}" for strategy, meaning in STRATEGIES.items()]
    notes = [f"{number}. {reason}" for reason, number in reasons.items()]
    known = [f"- **{kind}**: {fact}" for kind, fact in _KNOWN.items()]
    return "\n".join(
        [
            *lines,
            "",
            *meanings,
            "",
            "Why it does not work:",
            "",
            *notes,
            "",
            "What was run short of real hardware:",
            "",
            *known,
            "",
        ]
    )
