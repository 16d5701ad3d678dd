"""Where the generators are, and whether they have moved."""

from __future__ import annotations

import random

import pytest
import torch

from acc_trainer.data.draws import as_then, drawn_so_far, put_back, to_save


def test_generators_go_back_to_where_they_were():
    numpy = pytest.importorskip("numpy")

    def draw():
        return torch.rand(1).item(), random.random(), float(numpy.random.rand()), float(numpy.random.randn())

    draw()
    states = drawn_so_far()
    wanted = draw(), draw()
    for kept in (states, to_save(states)):
        put_back(kept)
        assert (draw(), draw()) == wanted
    now = drawn_so_far()
    with as_then(states):
        assert draw() == wanted[0]
    after = draw()
    put_back(now)
    assert draw() == after


@pytest.mark.parametrize("draw", ["rand", "randn", "nothing", "seed"])
def test_a_numpy_state_is_kept_only_while_nothing_was_drawn(draw):
    numpy = pytest.importorskip("numpy")
    numpy.random.seed(3)
    before = drawn_so_far()
    if draw == "seed":
        numpy.random.seed(4)
    elif draw != "nothing":
        getattr(numpy.random, draw)()
    after = drawn_so_far(before)
    assert (after["numpy"] is before["numpy"]) == (draw == "nothing")
    wanted = numpy.random.randn(3).tolist()
    put_back(after)
    assert numpy.random.randn(3).tolist() == wanted


def test_a_normal_number_that_was_drawn_ahead_is_not_overlooked():
    numpy = pytest.importorskip("numpy")
    numpy.random.seed(3)
    numpy.random.randn()  # draws two, and keeps one
    before = drawn_so_far()
    numpy.random.randn()  # the one that was kept: the twister does not move
    after = drawn_so_far(before)
    assert after["numpy"][3:] != before["numpy"][3:]
    wanted = numpy.random.randn()
    put_back(after)
    assert numpy.random.randn() == wanted


def test_another_bit_generator_is_asked_each_time():
    numpy = pytest.importorskip("numpy")
    if not hasattr(numpy.random, "set_bit_generator"):
        pytest.skip("this NumPy has one generator")
    own = numpy.random.get_bit_generator()
    try:
        numpy.random.set_bit_generator(numpy.random.MT19937(5))
        before = drawn_so_far()
        numpy.random.set_bit_generator(numpy.random.MT19937(6))
        assert drawn_so_far(before)["numpy"] is not before["numpy"]
    finally:
        numpy.random.set_bit_generator(own)
