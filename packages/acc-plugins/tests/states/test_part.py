"""A part is written under its name, from its own memory or from another's, and says why it could not be."""

from __future__ import annotations

import errno
import os
import weakref
from contextlib import nullcontext
from dataclasses import replace

import pytest
import torch

from acc_plugins.states.part import TorchFilePart, WeightsPart, for_each


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


def test_what_fails_for_one_part_is_raised_at_the_end_and_only_what_ranks_do_together_goes_on():
    class Together(TorchFilePart):
        together = True

    done = []

    def work(part):
        done.append(part.name)
        if part.name.startswith("bad"):
            raise TypeError(part.name)

    names = [("a", False), ("bad 1", False), ("left out", False), ("bad 2", True), ("b", True)]
    parts = ((Together if shared else TorchFilePart)(name=name, state={}) for name, shared in names)
    with pytest.raises(TypeError, match="bad 1"):
        for_each(parts, work)
    assert done == ["a", "bad 1", "bad 2", "b"]
    assert list(parts) == []


@pytest.mark.parametrize("fails", [False, True])
def test_a_part_is_gone_before_the_next_one_is_gathered(fails):
    class State:
        pass

    alive, seen = [], []

    def made(name):
        state = State()
        seen.append(weakref.ref(state))
        return [TorchFilePart(name=name, state=state)]

    def parts():
        for name in "abc":
            alive.append(sum(one() is not None for one in seen))
            yield from made(name)

    def work(part):
        if fails and part.name == "a":
            raise OSError(errno.ENOSPC, part.name)

    with pytest.raises(OSError) if fails else nullcontext():
        for_each(parts(), work)
    assert alive == [0, 0, 0]
