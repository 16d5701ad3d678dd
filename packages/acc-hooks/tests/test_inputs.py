from __future__ import annotations

import gc
import threading
import weakref

import pytest
import torch

from acc_hooks import inputs

META = torch.device("meta")


@pytest.fixture
def forward():
    assert inputs.begin_forward()
    yield
    inputs.end_forward()


def test_only_the_outermost_forward_begins(forward):
    assert inputs.begin_forward() is False


def test_outside_of_a_forward_nothing_is_remembered():
    x = torch.ones(1)
    assert inputs.move(x, META) is not inputs.move(x, META)


def test_a_tensor_moves_once_wherever_it_lies(forward):
    x = torch.ones(1)
    first = inputs.move(x, META)
    assert inputs.move((x, [x]), META)[1][0] is first
    assert inputs.move({"a": {"b": x}}, META, skip_keys="c")["a"]["b"] is not None
    assert inputs.move({"a": x, "c": x}, META, skip_keys="c")["a"] is first
    assert inputs.move({"a": x, "c": x}, META, skip_keys=["c"])["c"] is x


def test_a_tensor_that_was_written_to_moves_again(forward):
    x = torch.ones(1)
    first = inputs.move(x, META)
    x.add_(1)
    assert inputs.move(x, META) is not first


def test_a_copy_that_was_written_to_is_not_used_again(forward):
    x = torch.ones(1)
    first = inputs.move(x, META)
    first.add_(1)
    assert inputs.move(x, META) is not first


def test_a_copy_made_without_gradients_is_not_used_with_them(forward):
    x = torch.ones(1, requires_grad=True)
    with torch.no_grad():
        first = inputs.move(x, META)
    second = inputs.move(x, META)
    assert second is not first
    assert second.requires_grad


def test_inference_tensors_move_each_time(forward):
    with torch.inference_mode():
        x = torch.ones(1)
        assert inputs.move(x, META) is not inputs.move(x, META)


def test_a_copy_is_let_go_with_its_original(forward):
    x = torch.ones(1)
    copy = weakref.ref(inputs.move(x, META))
    assert copy() is not None
    del x
    gc.collect()
    assert copy() is None


def test_threads_do_not_see_each_others_copies(forward):
    x = torch.ones(1)
    mine = inputs.move(x, META)
    theirs = []

    def run():
        theirs.append(inputs.begin_forward())
        theirs.append(inputs.move(x, META))
        inputs.end_forward()

    thread = threading.Thread(target=run)
    thread.start()
    thread.join()
    assert theirs[0] is True
    assert theirs[1] is not mine
    assert inputs.move(x, META) is mine


@pytest.mark.parametrize(
    "inside", [lambda t: t, lambda t: [t], lambda t: {"a": (1, [t, None])}, lambda t: ((), {}, t)]
)
def test_are_on_looks_into_plain_containers(inside):
    cpu = torch.device("cpu")
    here, away = inside(torch.ones(1)), inside(torch.ones(1, device=META))
    assert inputs.are_on((here, None, 3, "x"), {"a": here, "b": True}, cpu)
    assert not inputs.are_on((here, away), {}, cpu)
    assert not inputs.are_on((here,), {"a": away}, cpu)


def test_are_on_leaves_what_it_does_not_know_to_others():
    class Mine(dict):
        pass

    assert not inputs.are_on((Mine(),), {}, torch.device("cpu"))
    assert not inputs.are_on((object(),), {}, torch.device("cpu"))


def test_a_write_that_torch_does_not_count_is_seen_once_somebody_counts_it(forward):
    x = torch.ones(1)
    first = inputs.move(x, META)
    x.data.fill_(2)
    assert inputs.move(x, META) is first
    torch.autograd.graph.increment_version(x)
    assert inputs.move(x, META) is not first
