"""What was fetched ahead is never stale, never left over and never in the way."""

from __future__ import annotations

import copy
import gc
import logging
import os
import pickle
import signal
import threading
import weakref

import pytest
import torch
from hooks_slow_store import PATIENCE_S, Net, Store, WritableStore, expected, offloaded, prefetcher_of
from torch import nn

from acc_hooks import (
    AlignDevicesHook,
    OffloadedWeightError,
    PrefixedDataset,
    add_hook_to_module,
    align_module_device,
    attach_align_device_hook,
    attached_hook,
    prefetch,
    remove_hook_from_module,
)
from acc_hooks.fetching import Wanted
from acc_hooks.prefetch import Prefetcher
from acc_ops.testing import run_threads
from acc_ops.world import current_world

CPU = torch.device("cpu")


def waits(net: Net, store: Store) -> None:
    """Each layer waits until the two behind it are there."""
    last = len(net.layers) - 1
    net.meanwhile(
        lambda number: [store.wait_for_layer(min(number + i, last)) for i in (1, 2) if number < last]
    )


# --- never stale -------------------------------------------------------------------------------------------------


def test_a_map_may_be_written_to_between_forwards(x):
    net, store = offloaded(kind=WritableStore)
    waits(net, store)
    for factor in (1.0, 2.0, 3.0):
        for name in store:
            store[name] = store.state[name] * factor
        torch.testing.assert_close(net(x), expected(net, store, x))


def test_what_a_failed_forward_had_fetched_is_not_used_by_the_next_one(x):
    net, store = offloaded(kind=WritableStore)

    def meanwhile(number):
        store.wait_for_layer(number + 1)
        raise KeyboardInterrupt

    net.meanwhile(meanwhile)
    with pytest.raises(KeyboardInterrupt):
        net(x)
    assert prefetcher_of(net)._jobs == {}
    assert all(parameter.is_meta for parameter in net.parameters())
    store["layers.1.weight"] = torch.eye(4)
    net.meanwhile(lambda number: None)
    torch.testing.assert_close(net.layers[1](x), x + store.state["layers.1.bias"])
    torch.testing.assert_close(net(x), expected(net, store, x))


@pytest.mark.parametrize("kind", [dict, WritableStore])
@pytest.mark.parametrize("how", ["align", "assign", "load"])
def test_a_weight_that_is_changed_while_it_is_fetched_ahead_is_used_as_changed(x, kind, how):
    net, store = offloaded(kind=kind)
    layer, state = net.layers[1], store if kind is dict else store.state

    def meanwhile(number):
        if number != 0:
            return
        if kind is not dict:
            store.wait_for_layer(1)
        if how == "load":
            layer.load_state_dict({"weight": torch.eye(4), "bias": torch.ones(4)})
            return
        with align_module_device(layer), torch.no_grad():
            if how == "align":
                layer.weight.copy_(torch.eye(4))
            else:
                layer.weight = nn.Parameter(torch.eye(4), requires_grad=False)

    net.meanwhile(meanwhile)
    got = net(x)
    assert torch.equal(state["layers.1.weight"], torch.eye(4))
    twin = Net(5)
    twin.load_state_dict(dict(state))
    torch.testing.assert_close(got, twin(x))


class Changing(dict):
    """A map that finds each entry at hand once it was read, and can be written to by anybody."""

    def __init__(self, state):
        super().__init__({name: value.detach().clone() for name, value in state.items()})
        self.seen: set[str] = set()

    def __getitem__(self, name):
        self.seen.add(name)
        return super().__getitem__(name)

    def is_at_hand(self, name):
        return name in self.seen


@pytest.mark.parametrize("in_place", [False, True])
def test_an_entry_that_somebody_else_changes_in_the_middle_of_a_forward_is_seen_where_that_can_be_asked(
    x, in_place
):
    net, store = offloaded(kind=Changing)

    def meanwhile(number):
        if number == 0:
            job = prefetcher_of(net)._jobs[1]
            assert job._ended.wait(PATIENCE_S)
            if in_place:
                dict.__getitem__(store, "layers.1.weight").copy_(torch.eye(4))
            else:
                dict.__setitem__(store, "layers.1.weight", torch.eye(4))

    net.meanwhile(meanwhile)
    got = net(x)
    twin = Net(5)
    twin.load_state_dict(dict(store))
    torch.testing.assert_close(got, twin(x))


def test_another_map_put_in_place_in_the_middle_of_a_forward_is_used(x):
    net, store = offloaded()
    other = {"weight": torch.eye(4), "bias": torch.zeros(4)}
    seen = {}

    def meanwhile(number):
        if number == 0:
            store.wait_for_layer(1)
            net.layers[1]._hf_hook.weights_map = other
        seen[number] = net.layers[number].weight.detach().clone()

    net.meanwhile(meanwhile)
    net(x)
    assert torch.equal(seen[1], torch.eye(4))


def test_hooks_can_be_removed_in_the_middle_of_a_forward(x):
    net, store = offloaded()

    def meanwhile(number):
        if number == 0:
            store.wait_for_layer(2)
            remove_hook_from_module(net.layers[1])

    net.meanwhile(meanwhile)
    torch.testing.assert_close(net(x), expected(net, store, x))


# --- failures ----------------------------------------------------------------------------------------------------


def test_an_error_of_the_map_is_raised_by_the_layer_that_needs_the_weight_and_passes(x):
    net, store = offloaded()
    ran = []
    net.meanwhile(ran.append)
    store.fails.add("layers.3.weight")
    for _ in range(2):
        ran.clear()
        with pytest.raises(OSError, match=r"layers\.3\.weight"):
            net(x)
        assert ran == [0, 1, 2]
        assert all(parameter.is_meta for parameter in net.parameters())
    store.fails.clear()
    torch.testing.assert_close(net(x), expected(net, store, x))


def test_a_map_that_loses_an_entry_is_a_clear_error_of_its_layer(x):
    net, store = offloaded()
    net(x)
    del store.state["layers.2.bias"]
    with pytest.raises(OffloadedWeightError, match=r"layers\.2\.bias is offloaded"):
        net(x)


def test_a_map_for_one_thread_only_is_read_by_that_thread(x, caplog):
    net, store = offloaded()
    attempts = []

    def only_here():
        if threading.current_thread() is not threading.main_thread():
            attempts.append(1)
            raise RuntimeError("made in another thread")

    store.at_each_read = only_here

    def meanwhile(number):
        if number < 2:  # our thread must have tried by then
            assert prefetcher_of(net)._jobs[number + 1]._ended.wait(PATIENCE_S)

    net.meanwhile(meanwhile)
    with caplog.at_level(logging.WARNING):
        torch.testing.assert_close(net(x), expected(net, store, x))
    assert "Store" in caplog.text
    assert "made in another thread" in caplog.text
    net.meanwhile(lambda number: None)
    tried = len(attempts)
    torch.testing.assert_close(net(x), expected(net, store, x))
    assert len(attempts) == tried
    assert len(caplog.records) == 1


def test_where_no_thread_can_be_started_layers_read_for_themselves(x, monkeypatch):
    def refuse(self):
        raise RuntimeError("can't start new thread")

    net, store = offloaded()
    monkeypatch.setattr(prefetch.threading.Thread, "start", refuse)
    torch.testing.assert_close(net(x), expected(net, store, x))
    assert store.read_by(True) == []


# --- lifetime ----------------------------------------------------------------------------------------------------


def test_deleting_the_model_frees_everything_and_ends_the_thread(x):
    gc.collect()
    gc.disable()
    try:
        net, store = offloaded()
        values = []

        def meanwhile(number):
            store.wait_for_layer(2)
            values.extend(
                weakref.ref(value)
                for job in prefetcher_of(model()).__dict__["_jobs"].values()
                for value, _ in job._values.values()
            )

        model = weakref.ref(net)
        net.meanwhile(meanwhile)
        net(x)
        thread = prefetcher_of(net)._thread
        hook = weakref.ref(net.layers[0]._hf_hook)
        assert values
        assert all(value() is None for value in values)
        del net
        assert hook() is None
        thread.join(PATIENCE_S)
        assert not thread.is_alive()
    finally:
        gc.enable()


def test_an_idle_thread_ends_and_another_one_begins(x, monkeypatch):
    monkeypatch.setattr(prefetch, "_IDLE_S", 0.01)
    net, store = offloaded()
    waits(net, store)
    net(x)
    thread = prefetcher_of(net)._thread
    if thread is not None:
        thread.join(PATIENCE_S)
        assert not thread.is_alive()
    store.reads.clear()
    torch.testing.assert_close(net(x), expected(net, store, x))
    assert store.read_by(False) == [0]


@pytest.mark.parametrize("copier", [copy.deepcopy, lambda model: pickle.loads(pickle.dumps(model))])
def test_a_copy_fetches_ahead_for_itself(x, copier):
    net, _ = offloaded(kind=dict)
    other = copier(net)
    numbers = [attached_hook(layer)._offloaded._number for layer in other.layers]
    assert numbers == [0, 1, 2, 3, 4]
    ours = prefetcher_of(other)
    assert ours is not prefetcher_of(net)
    assert all(attached_hook(layer)._prefetcher is ours for layer in other.layers)
    store = Store(net.state_dict())
    for i, layer in enumerate(other.layers):
        layer._hf_hook.weights_map = PrefixedDataset(store, f"layers.{i}.")
    waits(other, store)
    torch.testing.assert_close(other(x), net(x))
    assert store.read_by(False) == [0]


@pytest.mark.skipif(not hasattr(os, "fork"), reason="there is no fork here")
@pytest.mark.filterwarnings("ignore::DeprecationWarning")
def test_a_forked_child_reads_for_itself_though_the_parent_was_reading(x):
    net, store = offloaded()
    expected_output = expected(net, store, x)
    net(x)
    in_thread, go_on = threading.Event(), threading.Event()

    def meanwhile(number):
        if number != 0:
            return
        assert in_thread.wait(PATIENCE_S)
        child = os.fork()
        if child == 0:
            signal.alarm(int(PATIENCE_S))
            store.at_each_read = lambda: None
            store._busy = threading.Lock()
            net.meanwhile(lambda number: None)
            os._exit(0 if torch.allclose(net(x), expected_output) else 1)
        go_on.set()
        assert os.waitpid(child, 0)[1] == 0

    def gate():
        if threading.current_thread() is not threading.main_thread():
            in_thread.set()
            assert go_on.wait(PATIENCE_S)

    store.at_each_read = gate
    net.meanwhile(meanwhile)
    torch.testing.assert_close(net(x), expected_output)


# --- several at once ---------------------------------------------------------------------------------------------


def test_threads_that_run_one_model_get_their_results_and_one_of_them_is_served():
    net, store = offloaded()
    inputs = [torch.full((2, 4), float(i)) for i in range(3)]
    wanted = [expected(net, store, value) for value in inputs]

    def run():
        rank = current_world().rank
        with torch.no_grad():
            for _ in range(30):
                torch.testing.assert_close(net(inputs[rank]), wanted[rank])

    run_threads(3, run)
    assert prefetcher_of(net)._forward is None
    assert prefetcher_of(net)._jobs == {}
    assert all(parameter.is_meta for parameter in net.parameters())


def test_two_models_that_take_turns_with_one_map_never_read_it_at_once(x):
    torch.manual_seed(0)
    store = Store(Net(5).state_dict())
    nets = [Net(5).requires_grad_(False) for _ in range(2)]
    for net in nets:
        attach_align_device_hook(net, execution_device="cpu", offload=True, weights_map=store)
    for order in ([0, 1, 2, 3, 4], [4, 2, 0], [1, 3]):
        for net in nets:
            net.order = order
            torch.testing.assert_close(net(x), expected(net, store, x))
    assert store.overlaps == 0


# --- bounds ------------------------------------------------------------------------------------------------------


class Asks:
    """A layer that wants so many bytes."""

    def __init__(self, store, nbytes):
        self.wanted = Wanted(weights_map=store, device=CPU, nbytes={"w": nbytes}, staged=frozenset())

    def _wants_next(self):
        return self.wanted


def test_no_more_bytes_are_fetched_ahead_than_was_said():
    store = Store({"w": torch.ones(1)})
    prefetcher = Prefetcher(4, bytes_ahead=100)
    layers = [Asks(store, nbytes) for nbytes in (1, 60, 60, 40, 1)]
    for layer in layers:
        prefetcher.join(layer)

    class Outer(nn.Module):
        def forward(self, x):
            prefetcher.take(0, store, CPU)
            prefetcher.look_ahead(0)
            seen.extend(prefetcher._jobs)
            return x

    seen: list[int] = []
    add_hook_to_module(Outer(), AlignDevicesHook())(torch.ones(1))
    assert seen == [1, 3]
