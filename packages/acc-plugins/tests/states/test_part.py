"""A part is written under its name, from its own memory or from another's, and says why it could not be."""

from __future__ import annotations

import errno
import os
from dataclasses import replace

import pytest
import torch

from acc_plugins.states.part import TorchFilePart, WeightsPart


def test_a_part_with_another_state_writes_the_same_files(tmp_path):
    parts = [
        WeightsPart(name="model", state={"w": torch.ones(2)}),
        WeightsPart(name="model_1", state={"w": torch.ones(2)}, safe=False),
        TorchFilePart(name="optimizer", state={"step": 1}),
        TorchFilePart(name="scaler", suffix=".pt", state={"scale": 2.0}),
    ]
    names = [part.write(tmp_path) for part in parts]
    assert names == [["model.safetensors"], ["pytorch_model_1.bin"], ["optimizer.bin"], ["scaler.pt"]]
    again = replace(parts[2], state={"step": 2})
    assert again.write(tmp_path) == ["optimizer.bin"]
    assert torch.load(tmp_path / "optimizer.bin")["step"] == 2
    assert sorted(os.listdir(tmp_path)) == sorted(name for files in names for name in files)


@pytest.mark.skipif(not os.path.exists("/dev/full"), reason="needs a device that is always full")
@pytest.mark.parametrize("size", [10, 10_000_000])
def test_a_full_disk_is_the_systems_error_and_not_torchs(tmp_path, size):
    os.symlink("/dev/full", tmp_path / "optimizer.bin")
    with pytest.raises(OSError) as error:
        TorchFilePart(name="optimizer", state={"m": torch.ones(size)}).write(tmp_path)
    assert error.value.errno == errno.ENOSPC
