"""The file of random states goes on under our names and under those of the specification."""

from __future__ import annotations

import random

import pytest
import torch

from acc_ops.random import restore_rng
from acc_trainer.checkpoint.generators import states_from, states_to_save


def _draws():
    return random.random(), random.gauss(0, 1), torch.rand(2).tolist()


def test_both_kinds_of_names_give_the_same_numbers():
    random.gauss(0, 1)  # leaves one over
    saved = states_to_save(7)
    assert saved["step"] == 7
    wanted = _draws()
    theirs = {name: saved[name] for name in ("step", "random_state", "torch_manual_seed")}
    for state in (saved, theirs):
        _draws()
        restore_rng({**states_from(saved), **states_from(state)})
        assert _draws() == wanted


def test_numpys_five_values_are_read_and_written():
    numpy = pytest.importorskip("numpy")
    numpy.random.normal()  # leaves one over
    saved = states_to_save(0)
    theirs = {"numpy_random_seed": numpy.random.get_state(), "random_state": random.getstate()}
    assert saved["numpy_random_seed"][0] == "MT19937"
    wanted = (numpy.random.normal(), numpy.random.rand())
    numpy.random.set_state(saved["numpy_random_seed"])  # as another library does
    assert (numpy.random.normal(), numpy.random.rand()) == wanted
    restore_rng({**states_from(saved), "numpy": states_from(theirs)["numpy"]})
    assert (numpy.random.normal(), numpy.random.rand()) == wanted


def test_a_state_is_in_the_file_once_and_needs_no_numpy_to_be_read(tmp_path):
    pytest.importorskip("numpy")
    saved = states_to_save(0)
    assert saved["python"] is saved["random_state"]
    torch.save(saved, tmp_path / "both")
    torch.save({"python": saved["python"], "torch": saved["torch"]}, tmp_path / "ours")
    assert (tmp_path / "both").stat().st_size < (tmp_path / "ours").stat().st_size + 9000  # NumPy's
    assert torch.load(tmp_path / "both", weights_only=True).keys() == saved.keys()


def test_what_is_not_known_keeps_its_name_so_that_a_warning_can_tell_it():
    assert states_from({"step": 1, "xpu": [1], "numpy_random_seed": "odd"}) == {"xpu": [1], "numpy": "odd"}
