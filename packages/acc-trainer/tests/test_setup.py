"""What the constructor checks: the same errors on one rank and on several."""

from __future__ import annotations

import pytest

from acc_ops.enums import RNGType
from acc_ops.testing import run_threads
from acc_plugins.options.kwargs import AutocastKwargs
from acc_trainer import Accelerator


@pytest.mark.parametrize("ranks", [1, 3])
def test_rng_types_are_checked_when_the_accelerator_is_built(ranks):
    def work():
        with pytest.raises(TypeError, match=r"a list of generators.*got 'torch'"):
            Accelerator(rng_types="torch")
        with pytest.raises(TypeError, match="got 5"):
            Accelerator(rng_types=5)
        with pytest.raises(ValueError, match=r"rng_types knows torch.*got 'foo'"):
            Accelerator(rng_types=["torch", "foo"])
        with pytest.raises(ValueError, match="'hpu', but this machine has no such device"):
            Accelerator(rng_types=[RNGType.HPU])
        return Accelerator(rng_types=["torch", RNGType.GENERATOR]).rng_types

    assert run_threads(ranks, work) == [["torch", RNGType.GENERATOR]] * ranks


def test_a_handler_outside_a_list_is_refused_with_the_list_to_write():
    with pytest.raises(TypeError, match=r"takes a list.*kwargs_handlers=\[AutocastKwargs"):
        Accelerator(kwargs_handlers=AutocastKwargs())
