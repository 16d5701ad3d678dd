"""Several processes of a machine run one model from one mapped copy of its weights."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest
import torch
from torch import nn

from acc_bigmodel import (
    disk_offload,
    init_empty_weights,
    load_checkpoint_and_dispatch,
    load_checkpoint_in_model,
    save_weights,
)
from acc_ops import wait_for_everyone
from acc_ops.testing import run_processes
from acc_ops.world import current_world

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="needs /proc/self/smaps_rollup")
WIDTH, LAYERS = 1024, 10
MODEL_BYTES = LAYERS * WIDTH * WIDTH * 4


def _build() -> nn.Module:
    return nn.Sequential(*[nn.Linear(WIDTH, WIDTH, bias=False) for _ in range(LAYERS)])


def _own_bytes() -> int:
    """Memory of this process alone that no file stands behind."""
    lines = Path("/proc/self/smaps_rollup").read_text().splitlines()
    return 1024 * sum(int(line.split()[1]) for line in lines if line.startswith(("Private_Dirty", "Swap:")))


@torch.no_grad()
def _run(how: str, folder: str) -> tuple[float, int]:
    torch.set_num_threads(1)
    warm = nn.Linear(WIDTH, WIDTH)
    x = torch.ones(1, WIDTH)
    warm(x)  # what torch itself takes at the first call
    with init_empty_weights():
        model = _build()
    wait_for_everyone()
    before = _own_bytes()
    if how == "loaded":
        load_checkpoint_in_model(model, f"{folder}/model", {"": "cpu"})
    elif how == "a safetensors file":
        load_checkpoint_and_dispatch(model, f"{folder}/model", {"": "disk"})
    else:
        load_checkpoint_in_model(model, f"{folder}/model", {"": "cpu"})
        disk_offload(model, f"{folder}/shared")  # both into one folder: one writes, the other compares
    result = sum(model(x).sum().item() for _ in range(2))
    wait_for_everyone()
    return result, _own_bytes() - before


@pytest.mark.parametrize("how", ["loaded", "a safetensors file", "one offload folder"])
def test_two_ranks_share_the_weights(how: str, tmp_path: Path) -> None:
    torch.manual_seed(0)
    model = _build()
    save_weights(model.state_dict(), tmp_path / "model", "model")
    (one, own_bytes), (other, its_bytes) = run_processes(2, _run, how, str(tmp_path))
    assert one == other
    assert max(own_bytes, its_bytes) < MODEL_BYTES / 4
    if how == "one offload folder":
        assert len(list((tmp_path / "shared").glob("*.dat"))) == LAYERS
        assert not list((tmp_path / "shared").glob(".*"))


def _convert_and_run(folder: str) -> list[float]:
    """What the weights are after each of some loads into one folder; all loads of this rank are of its own model."""
    rank, seen = current_world().rank, set()
    for _ in range(12):
        with init_empty_weights():
            model = nn.Sequential(*[nn.Linear(64, 64, bias=False) for _ in range(3)])
        load_checkpoint_and_dispatch(
            model, f"{folder}/{rank}", {"": "disk"}, dtype=torch.float64, offload_folder=f"{folder}/off"
        )
        seen |= {float(value) for tensor in model.state_dict().values() for value in tensor.unique()}
    return sorted(seen)


def test_two_ranks_convert_different_models_into_one_folder(tmp_path: Path) -> None:
    for rank in range(2):
        state = {f"{layer}.weight": torch.full((64, 64), float(rank)) for layer in range(3)}
        save_weights(state, tmp_path / str(rank), "model")
    assert run_processes(2, _convert_and_run, str(tmp_path)) == [[0.0], [1.0]]
    assert len(list((tmp_path / "off").glob("*.safetensors"))) == 1
