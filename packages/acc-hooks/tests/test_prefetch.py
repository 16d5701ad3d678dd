from __future__ import annotations

import random

import pytest
import torch
from hooks_slow_store import PATIENCE_S, Net, Silent, Store, expected, offloaded, prefetcher_of
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn

from acc_hooks import attach_align_device_hook, attach_align_device_hook_on_blocks, prefetch
from acc_ops.testing import count_calls

# --- what is read when -------------------------------------------------------------------------------------------


def test_the_next_two_layers_are_read_while_one_computes_already_in_the_first_forward(x):
    net, store = offloaded()

    def meanwhile(number):
        for following in range(number + 1, min(number + 3, 5)):
            store.wait_for_layer(following)
        assert set(store.read_by(True)) <= set(range(number + 3))

    net.meanwhile(meanwhile)
    torch.testing.assert_close(net(x), expected(net, store, x))
    assert sorted(name for name, _ in store.reads) == sorted(store)  # each of them once
    assert store.read_by(False) == [0]
    assert all(parameter.is_meta for parameter in net.parameters())


def test_one_layer_ahead_is_one_layer(x):
    net, store = offloaded(prefetch=1)

    def meanwhile(number):
        if number < 4:
            store.wait_for_layer(number + 1)
        assert set(store.read_by(True)) <= set(range(number + 2))

    net.meanwhile(meanwhile)
    net(x)


def test_without_prefetch_nothing_is_read_by_another_thread(x):
    net, store = offloaded(prefetch=0)
    torch.testing.assert_close(net(x), expected(net, store, x))
    assert store.read_by(True) == []
    assert not hasattr(net, "_hf_hook")


@pytest.mark.parametrize("wrong", [-1, True, 1.5, "2", None])
def test_a_wrong_number_is_refused(wrong):
    with pytest.raises(ValueError, match="prefetch"):
        attach_align_device_hook(Net(2), execution_device="cpu", offload=True, prefetch=wrong)


def test_another_order_is_learnt_in_one_forward(x):
    net, store = offloaded()
    net.order = [3, 0, 4, 2, 1]
    net(x)
    net(x)  # begins with distrust
    store.reads.clear()
    net.meanwhile(lambda number: number == 1 or store.wait_for_layer(net.order[net.order.index(number) + 1]))
    torch.testing.assert_close(net(x), expected(net, store, x))
    assert len(store.reads) == 10
    assert store.read_by(False) == [3]


def test_wrong_guesses_are_few_and_soon_given_up(x):
    net, store = offloaded(16)
    net(x)
    for seed in range(6):
        net.order = random.Random(seed).sample(range(16), 16)
        store.reads.clear()
        torch.testing.assert_close(net(x), expected(net, store, x))
        assert len(store.reads) - 2 * 16 <= 8  # needless ones
    assert store.overlaps == 0


@settings(max_examples=25)
@given(
    st.lists(st.lists(st.integers(0, 4), min_size=1, max_size=9), min_size=1, max_size=4), st.integers(1, 3)
)
def test_any_order_computes_right_with_no_more_ahead_than_was_said_and_nothing_left_over(orders, ahead):
    net, store = offloaded(prefetch=ahead)
    jobs, seen = prefetcher_of(net)._jobs, [0]
    store.at_each_read = lambda: seen.append(len(jobs))
    x = torch.ones(1, 4)
    for order in orders:
        net.order = order
        torch.testing.assert_close(net(x), expected(net, store, x))
        assert jobs == {}
    assert max(seen) <= ahead
    assert store.overlaps == 0


def test_a_model_of_blocks_and_a_root_with_weights_of_its_own_are_fetched_ahead_too(x):
    class Rooted(Net):
        def __init__(self, layers):
            super().__init__(layers)
            self.scale = nn.Parameter(torch.ones(4))

        def forward(self, x):
            return super().forward(x * self.scale)

    for attach in (attach_align_device_hook, attach_align_device_hook_on_blocks):
        net = Rooted(3).requires_grad_(False)
        store = Store(net.state_dict())
        by_block = attach is attach_align_device_hook_on_blocks
        attach(net, {"": "cpu"} if by_block else "cpu", {"": True} if by_block else True, weights_map=store)
        net.meanwhile(lambda number, store=store: number == 2 or store.wait_for_layer(number + 1))
        net(x)
        assert len(store.reads) == 7


def test_ties_are_read_once_for_each_use_and_stay_ties(tied):
    ids = torch.tensor([[1, 2]])
    tied.requires_grad_(False)
    expected = tied(ids)
    store = Store(tied.state_dict())
    attach_align_device_hook(tied, execution_device="cpu", offload=True, weights_map=store)
    for _ in range(3):
        store.reads.clear()
        torch.testing.assert_close(tied(ids), expected)
        assert sorted(name for name, _ in store.reads) == sorted(store)
    assert tied.embed.weight is tied.head.weight


# --- what costs nothing ------------------------------------------------------------------------------------------


@pytest.fixture
def no_threads(monkeypatch):
    def refuse(self):
        raise AssertionError("a thread was started")

    monkeypatch.setattr(prefetch.threading.Thread, "start", refuse)


@pytest.mark.usefixtures("no_threads")
def test_a_map_in_memory_needs_no_thread(x):
    net, _ = offloaded(kind=dict)
    for _ in range(2):
        net(x)


@pytest.mark.usefixtures("no_threads")
def test_a_map_that_has_everything_at_hand_needs_no_thread(x):
    net, store = offloaded()
    store.is_at_hand = lambda name: True
    net(x)
    assert len(store.reads) == 10


def test_looking_ahead_costs_a_bounded_number_of_calls_for_a_map_in_memory(x):
    def calls(**options):
        net, _ = offloaded(20, kind=dict, **options)
        net(x)
        return count_calls(lambda: net(x))

    assert calls() < 1.35 * calls(prefetch=0)


class Clock:
    def __init__(self):
        self.now = 0.0

    def __call__(self):
        return self.now


@pytest.mark.parametrize(("seconds", "is_ahead"), [(1e-5, False), (1e-2, True)])
def test_what_a_map_that_says_nothing_takes_is_measured(x, seconds, is_ahead):
    clock = Clock()
    net, store = offloaded(kind=Silent)
    prefetcher_of(net)._clock = clock
    store.at_each_read = lambda: setattr(clock, "now", clock.now + seconds)
    net(x)
    store.reads.clear()
    net.meanwhile(lambda number: number == 4 or not is_ahead or store.wait_for_layer(number + 1))
    net(x)
    assert bool(store.read_by(True)) is is_ahead


# --- what goes wrong elsewhere -----------------------------------------------------------------------------------


def test_an_error_that_our_thread_alone_meets_once_ends_nothing(x, caplog):
    net, store = offloaded()

    def meanwhile(number):
        if number in (0, 2):
            assert prefetcher_of(net)._jobs[number + 1]._ended.wait(PATIENCE_S)
        store.fails = set()

    net.meanwhile(meanwhile)
    for _ in range(3):  # more often than in a row
        store.reads.clear()
        store.fails = {"layers.1.weight"}
        torch.testing.assert_close(net(x), expected(net, store, x))
        assert 1 in store.read_by(False)
        assert 3 in store.read_by(True)
    assert caplog.records == []


def test_a_map_that_cannot_say_whether_a_later_layer_is_at_hand_does_not_break_this_one(x, caplog):
    class Unsure(Store):
        def is_at_hand(self, name):
            if name.startswith("layers.1"):
                raise OSError("disk gone")
            return False

    net, store = offloaded(kind=Unsure)
    for _ in range(2):
        torch.testing.assert_close(net(x), expected(net, store, x))
    (record,) = caplog.records
    assert "is_at_hand('layers.1.weight') of a Unsure raised OSError: disk gone" in record.getMessage()
