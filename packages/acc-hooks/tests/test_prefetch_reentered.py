"""The model is used while its map is read: by a signal handler, or by the map itself."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from hooks_slow_store import PATIENCE_S, Net, WritableStore, prefetcher_of

from acc_hooks import attach_align_device_hook
from acc_hooks.fetching import Job, Wanted


class Reentered(WritableStore):
    """Calls `meanwhile(name)` while it is read."""

    def __init__(self, state) -> None:
        super().__init__(state)
        self.meanwhile: Callable[[str], object] = lambda name: None

    def __getitem__(self, name):
        self.meanwhile(name)
        return self.state[name].clone()


def offloaded(prefetch: int) -> tuple[Net, Reentered, Net]:
    torch.manual_seed(0)
    net = Net(4).requires_grad_(False)
    plain = Net(4)
    plain.load_state_dict(net.state_dict())
    store = Reentered(net.state_dict())
    attach_align_device_hook(net, execution_device="cpu", offload=True, weights_map=store, prefetch=prefetch)
    return net, store, plain


@pytest.mark.parametrize("prefetch", [0, 2])
@pytest.mark.parametrize("use", ["state_dict", "load_state_dict", "call"])
def test_a_signal_handler_may_use_the_model_while_its_map_is_read(use, prefetch, x):
    net, store, plain = offloaded(prefetch)
    torch.testing.assert_close(net(x), plain(x))
    found = []

    def handler(name):
        store.meanwhile = lambda name: None  # a handler comes once
        if use == "call":
            found.append(net.layers[3](x))
        elif use == "state_dict":
            found.append(net.state_dict())
        else:
            net.layers[3].load_state_dict(plain.layers[3].state_dict())

    with prefetcher_of(net).reading():  # by the thread of the forward, whoever reads ahead otherwise
        store.meanwhile = handler
        net.layers[1].weight.sum()
    torch.testing.assert_close(net(x), plain(x))
    if use == "state_dict":
        assert not any(value.is_meta for value in found[0].values())


@pytest.mark.parametrize("prefetch", [0, 2])
def test_a_map_may_make_a_weight_of_others_of_the_same_model(prefetch, x):
    net, store, plain = offloaded(prefetch)
    with torch.no_grad():
        plain.layers[2].weight.add_(plain.layers[0].weight)
    reads_again = []

    def merged(name):
        if name == "layers.2.weight" and not reads_again:
            reads_again.append(name)
            try:
                store.state[name] = store.state[name] + net.layers[0].weight
            except BaseException:  # in the thread that reads ahead; the layer reads it once more
                reads_again.clear()
                raise

    store.meanwhile = merged
    if prefetch:  # our thread fails, and the layer reads in its own
        wanted = Wanted(
            weights_map=store, device=torch.device("cpu"), nbytes={"layers.2.weight": 64}, staged=frozenset()
        )
        job = Job(wanted, prefetcher_of(net).reading(), lambda: 0.0, None)
        job.run()
        assert "of its own model" in str(job.error)
        assert job._ended.wait(PATIENCE_S)
        reads_again.clear()
    torch.testing.assert_close(net(x), plain(x))
