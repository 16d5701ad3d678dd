from __future__ import annotations

import copy
import gc
import weakref

import torch

from acc_hooks.resident import Residents

CPU = torch.device("cpu")


def test_a_copy_is_made_once_and_freed_by_its_last_user():
    residents = Residents([["a", "b"]])
    tie = residents.tie_of("b")
    assert tie == residents.tie_of("a") == "a"
    assert residents.tie_of("c") is None
    made = []

    def make():
        made.append(1)
        return torch.ones(1)

    first = residents.acquire(tie, CPU, make)
    assert residents.acquire(tie, CPU, make) is first
    reference = weakref.ref(first)
    del first
    residents.release(tie, CPU)
    assert reference() is not None
    residents.release(tie, CPU)
    assert reference() is None
    assert made == [1]


def test_a_tensor_that_stays_serves_as_the_copy_while_it_lives():
    residents = Residents([["a", "b"]])
    stays = residents.settle("a", CPU, lambda: torch.ones(1))
    assert residents.settle("a", CPU, lambda: torch.zeros(1)) is stays
    assert residents.acquire("a", CPU, lambda: torch.zeros(1)) is stays
    residents.release("a", CPU)
    del stays
    gc.collect()
    assert not residents.acquire("a", CPU, lambda: torch.zeros(1)).any()


def test_a_copy_of_the_whole_knows_the_ties_and_no_copies():
    residents = Residents([["a", "b"]])
    held = residents.acquire("a", CPU, lambda: torch.ones(1))
    other = copy.deepcopy(residents)
    assert other.tie_of("b") == "a"
    assert other.acquire("a", CPU, lambda: torch.zeros(1)) is not held
