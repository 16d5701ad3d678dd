"""Random numbers are seeded, and continue where they were."""

from __future__ import annotations

import os
import pickle
import random
import sys
import threading
import time
import types
from collections.abc import Iterator
from typing import Any

import pytest
import torch

import acc_ops.random
from acc_ops import devices
from acc_ops.random import capture_rng, restore_rng, set_seed, torch_state
from acc_ops.testing import run_threads


@pytest.fixture(autouse=True)
def _flags_and_state_as_before() -> Iterator[None]:
    benchmark, deterministic = torch.backends.cudnn.benchmark, torch.are_deterministic_algorithms_enabled()
    state = torch.get_rng_state()
    yield
    torch.set_rng_state(state)
    torch.backends.cudnn.benchmark = benchmark
    torch.use_deterministic_algorithms(deterministic)


def draw() -> tuple[Any, ...]:
    drawn = [random.random(), torch.rand(1).item()]
    try:
        import numpy as np
    except ImportError:
        return tuple(drawn)
    return (*drawn, np.random.rand(), np.random.randn())  # the second leaves a number in reserve


def test_a_seed_gives_the_same_numbers_again() -> None:
    set_seed(3)
    first = draw()
    set_seed(4)
    assert draw() != first
    set_seed(3)
    assert draw() == first


def test_large_seeds_suit_every_generator() -> None:
    set_seed(2**62)
    first = draw()
    set_seed(2**62)
    assert draw() == first


class Whole:
    """A whole number of another library, as NumPy's are."""

    def __index__(self) -> int:
        return 3


def test_whole_numbers_of_other_libraries_are_seeds() -> None:
    set_seed(3)
    first = draw()
    set_seed(Whole())
    assert draw() == first


@pytest.mark.parametrize("seed", [-1, 2**63, 1.5, True, None])
def test_a_seed_that_is_none_is_named(seed: Any) -> None:
    with pytest.raises(ValueError, match=f"got {seed}"):
        set_seed(seed)


def test_ranks_draw_alike_unless_the_seed_is_device_specific(monkeypatch: pytest.MonkeyPatch) -> None:
    seeds: list[int] = []
    monkeypatch.setattr(torch, "manual_seed", seeds.append)  # threads share one generator
    run_threads(3, lambda: set_seed(5))
    assert seeds == [5, 5, 5]
    seeds.clear()
    run_threads(3, lambda: set_seed(5, device_specific=True))
    assert sorted(seeds) == [5, 6, 7]


def test_determinism_flags_change_only_when_asked_for() -> None:
    torch.backends.cudnn.benchmark = True
    set_seed(1)
    assert torch.backends.cudnn.benchmark
    assert not torch.are_deterministic_algorithms_enabled()
    set_seed(1, deterministic=True)
    assert not torch.backends.cudnn.benchmark
    assert torch.are_deterministic_algorithms_enabled()
    set_seed(1)  # and are not taken back behind the user's back
    assert torch.are_deterministic_algorithms_enabled()


def test_a_captured_state_survives_pickling_and_continues() -> None:
    set_seed(7)
    draw()
    state = pickle.loads(pickle.dumps(capture_rng()))
    expected = draw()
    draw()
    assert restore_rng(state) == []
    assert draw() == expected


def test_a_captured_state_is_plain_enough_for_a_safe_load(tmp_path: Any) -> None:
    torch.save(capture_rng(), tmp_path / "rng.pt")
    state = torch.load(tmp_path / "rng.pt", weights_only=True)
    expected = draw()
    assert restore_rng(state) == []
    assert draw() == expected


def test_what_is_missing_on_either_side_is_named() -> None:
    state = capture_rng()
    state.pop("python")
    state["abacus"] = [1]
    with pytest.warns(UserWarning, match="abacus, python"):
        assert restore_rng(state) == ["abacus", "python"]


def test_numpy_is_left_out_where_it_is_not_loaded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delitem(sys.modules, "numpy", raising=False)
    state = capture_rng()
    assert "numpy" not in state
    set_seed(1)
    with pytest.warns(UserWarning, match="numpy"):
        assert restore_rng({**state, "numpy": {}}) == ["numpy"]


class FakeGenerators(types.ModuleType):
    """An accelerator of two devices with a counter each as its random state."""

    def __init__(self) -> None:
        super().__init__("torch.privateuseone")
        self.states = [torch.tensor([1], dtype=torch.uint8), torch.tensor([2], dtype=torch.uint8)]

    def device_count(self) -> int:
        return 2

    def get_rng_state_all(self) -> list[torch.Tensor]:
        return [state.clone() for state in self.states]

    def get_rng_state(self) -> torch.Tensor:
        return self.states[0].clone()

    def set_rng_state(self, state: torch.Tensor, index: int = 0) -> None:
        self.states[index] = state

    def manual_seed_all(self, seed: int) -> None:
        self.states = [torch.tensor([seed], dtype=torch.uint8)] * 2


@pytest.fixture
def fake_accelerator(monkeypatch: pytest.MonkeyPatch) -> FakeGenerators:
    module = FakeGenerators()
    row = devices.DeviceRow(
        kind="privateuseone", module="privateuseone", backend="x", distributed_type="MULTI_X", rng="x"
    )
    monkeypatch.setattr(torch, "privateuseone", module, raising=False)
    monkeypatch.setattr(devices, "DEVICE_TABLE", (row, *devices.DEVICE_TABLE))
    return module


def test_every_device_of_an_accelerator_is_seeded_kept_and_restored(
    fake_accelerator: FakeGenerators, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(torch, "manual_seed", lambda seed: None)
    set_seed(9)
    assert [int(s) for s in fake_accelerator.states] == [9, 9]
    fake_accelerator.states = [torch.tensor([1], dtype=torch.uint8), torch.tensor([2], dtype=torch.uint8)]
    state = capture_rng()
    fake_accelerator.manual_seed_all(0)
    assert restore_rng(state) == []
    assert [int(s) for s in fake_accelerator.states] == [1, 2]
    state["privateuseone"] = state["privateuseone"][:1]
    with pytest.warns(UserWarning, match="privateuseone:1"):
        assert restore_rng(state) == ["privateuseone:1"]
    del state["privateuseone"]
    with pytest.warns(UserWarning, match="privateuseone"):
        assert restore_rng(state) == ["privateuseone"]


@pytest.mark.parametrize("part", ["python", "torch"])
def test_a_part_that_holds_no_state_is_named(part: str) -> None:
    with pytest.raises(ValueError, match=f"'{part}'.* is no state .*capture_rng"):
        restore_rng({**capture_rng(), part: 3})


def test_every_generator_is_as_it_was_where_one_part_is_refused() -> None:
    set_seed(5)
    other = capture_rng()
    set_seed(9)
    expected = draw()
    set_seed(9)
    with pytest.raises(ValueError, match=r"state\['torch'\] is no state"):
        restore_rng({**other, "torch": 3})
    assert draw() == expected


def test_every_device_is_as_it_was_where_one_state_is_refused(fake_accelerator: FakeGenerators) -> None:
    with pytest.raises(ValueError, match=r"state\['privateuseone'\] is no state"):
        restore_rng({**capture_rng(), "privateuseone": [torch.tensor([7], dtype=torch.uint8), 3]})
    assert [int(state) for state in fake_accelerator.states] == [1, 2]


@pytest.mark.parametrize("state", [None, 3, [1]])
def test_what_is_no_mapping_of_states_is_named(state: Any) -> None:
    with pytest.raises(TypeError, match=r"the mapping that capture_rng\(\) returned, got"):
        restore_rng(state)


def test_the_module_hides_nothing_of_pythons_random() -> None:
    assert sys.modules["random"] is random


def test_one_thread_at_a_time_asks_for_the_state_of_torch(monkeypatch: pytest.MonkeyPatch) -> None:
    """torch can wait for ever when a second thread asks while the first makes the answer."""
    inside, most = [], []

    def asked() -> torch.Tensor:
        inside.append(1)
        time.sleep(0.005)
        most.append(len(inside))
        inside.pop()
        return torch.zeros(1)

    monkeypatch.setattr(torch, "get_rng_state", asked)
    run_threads(4, lambda: torch_state())
    assert most == [1] * 4


class Noted:
    """A lock that tells when somebody asks for it."""

    def __init__(self, lock: Any, asked: threading.Event) -> None:
        self.lock = lock
        self.asked = asked

    def acquire(self, blocking: bool = True, timeout: float = -1) -> bool:
        self.asked.set()
        return self.lock.acquire(blocking, timeout)

    def release(self) -> None:
        self.lock.release()


def locks_held_in_a_fork(locks: list[Any]) -> int:
    """How many of the locks a child could not have."""
    child = os.fork()
    if child == 0:
        os._exit(sum(not lock.acquire(False) for lock in locks))
    return os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])


@pytest.mark.skipif(not hasattr(os, "fork"), reason="no fork")
@pytest.mark.filterwarnings("ignore::DeprecationWarning")
@pytest.mark.parametrize("which", ["ours", "torch's"])
def test_a_fork_waits_for_a_thread_that_is_seeding(which: str, monkeypatch: pytest.MonkeyPatch) -> None:
    asked, held = threading.Event(), threading.Event()
    module, name = (acc_ops.random, "_asking") if which == "ours" else (torch.cuda, "_initialization_lock")
    lock = Noted(getattr(module, name), asked)
    monkeypatch.setattr(module, name, lock)

    def seed() -> None:
        lock.lock.acquire()
        held.set()
        asked.wait()
        lock.release()

    thread = threading.Thread(target=seed)
    thread.start()
    held.wait()
    in_child = locks_held_in_a_fork([lock.lock])
    asked.set()  # where the fork did not ask
    thread.join()
    assert in_child == 0
    assert lock.acquire(False)  # and the parent can go on
    lock.release()
