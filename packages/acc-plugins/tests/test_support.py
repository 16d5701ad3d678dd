"""The table of what works with what."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import pytest
import torch

from acc_ops import devices
from acc_ops.devices import DEVICE_TABLE
from acc_ops.fake_accelerator import fake_accelerator
from acc_ops.world import World
from acc_plugins.precisions.precision import Precision
from acc_plugins.strategies.ddp import DDPStrategy
from acc_plugins.strategies.fsdp1 import FSDP1Strategy
from acc_plugins.strategies.fsdp2 import FSDP2Strategy
from acc_plugins.strategies.mesh import MeshStrategy
from acc_plugins.strategies.registry import choose_precision
from acc_plugins.strategies.replicated import ReplicatedStrategy
from acc_plugins.strategies.strategy import Strategy
from acc_plugins.support import (
    PRECISIONS,
    STRATEGIES,
    UnsupportedError,
    check_support,
    record_run,
    support,
    support_table,
)
from acc_plugins.testing import StrategyContract

KINDS = [row.kind for row in DEVICE_TABLE]
RAN = Path(sys.modules[Strategy.__module__].__file__ or "").parents[1] / "ran.json"


def test_the_table_knows_every_strategy_class() -> None:
    kinds = (Strategy, DDPStrategy, FSDP1Strategy, FSDP2Strategy, MeshStrategy, ReplicatedStrategy)
    assert set(STRATEGIES) == {kind.name for kind in kinds}


@pytest.mark.parametrize("strategy", STRATEGIES)
@pytest.mark.parametrize("precision", PRECISIONS)
@pytest.mark.parametrize("kind", KINDS)
def test_check_agrees_with_the_table(strategy: str, precision: str, kind: str) -> None:
    cell = support(strategy, precision, kind)
    if cell.works:
        check_support(strategy, precision, kind)
        assert bool(cell.run) == (kind == "cpu")
    else:
        with pytest.raises(UnsupportedError, match="does not work on") as caught:
            check_support(strategy, precision, kind)
        assert cell.reason in str(caught.value)


def test_float32_on_one_device_works_everywhere() -> None:
    assert all(support("single", "no", kind).works for kind in KINDS)


def test_everything_works_on_the_cpu_and_was_run_there() -> None:
    cells = [support(strategy, precision, "cpu") for strategy in STRATEGIES for precision in PRECISIONS]
    assert all(cell.works and cell.run.startswith("torch ") for cell in cells)


def test_the_contract_notes_what_passed_and_keeps_what_it_finds(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    class Contract(StrategyContract):
        precisions = ("no", "bf16")

        def make_strategy(self, world: World, precision: Precision) -> Strategy:
            return Strategy(world, precision)

    file = tmp_path / "ran.json"
    record_run(file, "ddp", "no", "tin", "1.0")
    Contract().test_every_precision_trains_near_float32_and_skips_overflows_on_all_ranks()
    assert json.loads(file.read_text()) == {"ddp no tin": "torch 1.0"}
    monkeypatch.setenv("ACC_RECORD_RUNS", str(file))
    Contract().test_every_precision_trains_near_float32_and_skips_overflows_on_all_ranks()
    version = f"torch {torch.__version__.partition('+')[0]}"
    noted = {"ddp no tin": "torch 1.0", "single no cpu": version, "single bf16 cpu": version}
    assert json.loads(file.read_text()) == noted


def test_what_is_said_to_have_run_is_in_the_table() -> None:
    for pair in json.loads(RAN.read_text()):
        assert support(*pair.split(" ")).run, pair


@pytest.mark.parametrize(
    ("arguments", "word"),
    [
        (("fsdp9", "no", "cpu"), "strategy"),
        (("ddp", "fp3", "cpu"), "precision"),
        (("ddp", "no", "tin"), "device kind"),
    ],
)
def test_unknown_words_are_refused_with_the_known_ones(arguments: tuple[str, str, str], word: str) -> None:
    with pytest.raises(UnsupportedError, match=f"unknown {word}.*choose one of"):
        support(*arguments)


def test_every_device_kind_stands_in_every_row_once_under_the_right_heading() -> None:
    header, _, *rows = [line for line in support_table().splitlines() if line.startswith("|")]
    assert "not run on real hardware" in header
    assert len(rows) == len(STRATEGIES) * len(PRECISIONS)
    for row in rows:
        strategy, precision, *columns = [cell.strip() for cell in row.strip("|").split("|")]
        kinds = [[part.split(" ")[0] for part in column.split(", ") if part] for column in columns]
        assert sorted(kind for column in kinds for kind in column) == sorted(KINDS)
        for kind, cell in ((kind, support(strategy, precision, kind)) for kind in KINDS):
            assert kind in kinds[0 if cell.run else 1 if cell.works else 2]


def test_every_reason_is_a_note_below_the_table() -> None:
    notes = [line.split(". ", 1)[1] for line in support_table().splitlines() if line[:1].isdigit()]
    cells = [support(s, p, kind) for s in STRATEGIES for p in PRECISIONS for kind in KINDS]
    assert set(notes) == {cell.reason for cell in cells if not cell.works}
    assert len(notes) == len(set(notes))


@pytest.mark.parametrize("has_scaler", [True, False])
def test_fp16_on_mps_follows_its_scaler(has_scaler: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """torch has one there since 2.8; either way the same machine can be asked."""
    table = [row._replace(grad_scaler=has_scaler) if row.kind == "mps" else row for row in DEVICE_TABLE]
    monkeypatch.setattr(devices, "DEVICE_TABLE", tuple(table))
    if has_scaler:
        precision = choose_precision("fp16", "mps")
        assert precision.scaler is not None
        assert precision.scaler.is_enabled()
        assert isinstance(precision.context(), torch.autocast)
    else:
        with pytest.raises(UnsupportedError, match=r"no gradient scaler for mps: use mixed_precision='bf16'"):
            choose_precision("fp16", "mps")
    assert support("single", "bf16", "mps").works


def test_a_new_kind_of_device_needs_a_row_and_no_other_edit() -> None:
    with fake_accelerator(no_ddp="it has no cables", grad_scaler=False) as fake:
        assert support("single", "bf16", fake.kind).works
        assert support("ddp", "no", fake.kind).reason == "it has no cables"
        assert "no gradient scaler" in support("single", "fp16", fake.kind).reason
        assert f"{fake.kind} (1)" in support_table()
