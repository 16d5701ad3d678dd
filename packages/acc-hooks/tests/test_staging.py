from __future__ import annotations

import threading

import pytest
import torch
from hooks_slow_store import PATIENCE_S, Net, prefetcher_of

from acc_hooks import attach_align_device_hook, attached_hook, remove_hook_from_module, staging
from acc_hooks.staging import side_stream
from acc_ops.fake_accelerator import fake_accelerator


@pytest.fixture
def fake(needs_fake_accelerator):
    with fake_accelerator(total_bytes=2**20) as fake:
        yield fake


@pytest.fixture
def kept(monkeypatch):
    """The streams for which copies were kept; the fake has no pinned memory and no record_stream."""
    kept: list[tuple[object, int]] = []
    monkeypatch.setattr(staging, "pinned", lambda tensor: tensor)
    monkeypatch.setattr(
        staging, "keep_for", lambda stream, tensors: kept.append((stream, len(list(tensors))))
    )
    return kept


@pytest.mark.parametrize("device", ["cpu", "meta"])
def test_what_is_no_accelerator_has_no_side_stream(device):
    assert side_stream(torch.device(device)) is None


def test_a_kind_without_streams_has_no_side_stream(fake, monkeypatch):
    assert side_stream(fake.device) is not None
    monkeypatch.setattr(staging, "_NEEDED", ("Stream", "no_such_function"))
    assert side_stream(fake.device) is None


def test_copies_are_on_the_device_and_what_computes_waits_for_them(fake, kept):
    side = side_stream(fake.device)
    staged = side.send({"a": torch.ones(3), "b": torch.zeros(2)})
    assert all(tensor.device == fake.device for tensor in staged.tensors.values())
    assert [copy.non_blocking for copy in fake.log] == [True, True]
    assert kept == []
    side.receive(staged)
    stream = torch.get_device_module(fake.kind).current_stream(fake.device)
    assert [number for _, number in kept] == [2]
    assert kept[0][0] is stream
    assert stream is not side._stream
    del staged


def test_without_twice_the_room_nothing_is_copied(fake, kept):
    side = side_stream(fake.device)
    value = torch.ones(100)
    fake.set_total_bytes(2 * value.nbytes - 1)
    assert side.send({"a": value}) is None
    fake.set_total_bytes(2 * value.nbytes)
    assert side.send({"a": value}) is not None


def test_a_device_that_is_full_all_the_same_is_no_error(fake, kept, monkeypatch):
    side = side_stream(fake.device)
    monkeypatch.setattr(side, "_free_bytes", lambda: 2**40)
    fake.set_total_bytes(10)
    assert side.send({"a": torch.ones(100)}) is None


def test_nothing_to_copy_is_nothing_staged(fake):
    assert side_stream(fake.device).send({}) is None


def test_a_tensor_that_cannot_be_pinned_is_copied_as_it_is():
    if torch.cuda.is_available():
        pytest.skip("this machine can pin memory")
    tensor = torch.ones(2)
    assert staging.pinned(tensor) is tensor


# --- with the hooks ----------------------------------------------------------------------------------------------


def offloaded_to(fake, **options):
    torch.manual_seed(0)
    net = Net(4).requires_grad_(False)
    weights = {name: value.clone() for name, value in net.state_dict().items()}
    attach_align_device_hook(net, execution_device=fake.device, offload=True, weights_map=weights, **options)
    return net, weights


def wait_for_the_next_layers(net):
    def meanwhile(number):
        for job in list(prefetcher_of(net)._jobs.values()):
            assert job._ended.wait(PATIENCE_S)

    net.meanwhile(meanwhile)


def test_the_next_layers_are_copied_by_our_thread_while_one_computes(fake, kept, monkeypatch):
    copied_by = []
    monkeypatch.setattr(
        staging, "pinned", lambda tensor: copied_by.append(threading.current_thread().name) or tensor
    )
    net, weights = offloaded_to(fake)
    plain = Net(4)
    plain.load_state_dict(weights)
    wait_for_the_next_layers(net)
    x = torch.ones(2, 4)
    for _ in range(2):
        fake.reset()
        torch.testing.assert_close(net(x).cpu(), plain(x))
        assert fake.bytes_to_device == x.nbytes + sum(value.nbytes for value in weights.values())
    assert copied_by == ["acc-prefetch"] * 2 * 2 * 3
    assert fake.allocated_bytes() == 0
    layer = weights["layers.0.weight"].nbytes + weights["layers.0.bias"].nbytes
    assert fake.peak_bytes() <= 3 * layer + 16 * x.nbytes  # this layer and two ahead


def test_a_weight_that_is_changed_after_it_was_copied_is_copied_again(fake, kept):
    net, weights = offloaded_to(fake)
    wait_for_the_next_layers(net)
    waiting = net.layers[0].meanwhile

    def meanwhile(number):
        waiting(number)
        if number == 0:
            weights["layers.1.weight"].copy_(torch.eye(4))  # in place
            weights["layers.2.weight"] = torch.eye(4)

    net.meanwhile(meanwhile)
    x = torch.ones(2, 4)
    got = net(x).cpu()
    plain = Net(4)
    plain.load_state_dict(weights)
    torch.testing.assert_close(got, plain(x))


def test_a_full_device_is_no_error_and_only_slower(fake, kept):
    net, weights = offloaded_to(fake)
    wait_for_the_next_layers(net)
    x = torch.ones(2, 4)
    layer = weights["layers.0.weight"].nbytes + weights["layers.0.bias"].nbytes
    fake.set_total_bytes(2 * layer + x.nbytes)
    plain = Net(4)
    plain.load_state_dict(weights)
    torch.testing.assert_close(net(x).cpu(), plain(x))
    assert kept == []


def test_weights_that_are_on_the_device_already_are_not_fetched(fake, kept):
    net, weights = offloaded_to(fake)
    for name in list(weights):
        weights[name] = weights[name].to(fake.device)
    net(torch.ones(2, 4))
    assert prefetcher_of(net)._thread is None
    remove_hook_from_module(net, recurse=True)
    assert attached_hook(net) is None
    net.to("cpu")
    weights.clear()
