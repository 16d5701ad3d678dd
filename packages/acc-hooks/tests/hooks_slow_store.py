"""A slow store, and a net whose layers say when they compute: for the tests of fetching ahead."""

from __future__ import annotations

import threading
from collections.abc import Callable, Mapping

import torch
from torch import nn

from acc_hooks import attach_align_device_hook
from acc_hooks.prefetch import Prefetcher

PATIENCE_S = 20.0


class Silent(Mapping):
    """A map that writes down who read what, and notes where two threads read at once."""

    def __init__(self, state):
        self.state = {name: value.detach().clone() for name, value in state.items()}
        self.reads: list[tuple[str, bool]] = []  # name, whether another thread than the main one
        self.overlaps = 0
        self.fails: set[str] = set()
        self.at_each_read: Callable[[], None] = lambda: None
        self._busy = threading.Lock()
        self._news = threading.Condition()

    def __getitem__(self, name):
        if not self._busy.acquire(blocking=False):
            self.overlaps += 1
            self._busy.acquire()
        try:
            self.at_each_read()
            if name in self.fails:
                raise OSError(f"{name} cannot be read")
            value = self.state[name].clone()
        finally:
            self._busy.release()
        with self._news:
            self.reads.append((name, threading.current_thread() is not threading.main_thread()))
            self._news.notify_all()
        return value

    def __iter__(self):
        return iter(self.state)

    def __len__(self):
        return len(self.state)

    def wait_for_layer(self, number):
        """Until our thread has read it."""
        wanted = {(f"layers.{number}.{leaf}", True) for leaf in ("weight", "bias")}
        with self._news:
            assert self._news.wait_for(lambda: wanted <= set(self.reads), PATIENCE_S)

    def read_by(self, ahead):
        """The layers of which our thread read something, or the layers themselves."""
        return list(dict.fromkeys(int(name.split(".")[1]) for name, by in self.reads if by is ahead))


class Store(Silent):
    """It says that nothing is at hand, so that all is worth to be fetched ahead."""

    def is_at_hand(self, name):
        return name not in self.state


class WritableStore(Store):
    def __setitem__(self, name, value):
        self.state[name] = value.detach().clone()


class Layer(nn.Linear):
    """Calls `meanwhile(number)` while it computes, if there is such an attribute."""

    def __init__(self, number: int) -> None:
        super().__init__(4, 4)
        self.number = number

    def forward(self, x):
        getattr(self, "meanwhile", lambda number: None)(self.number)
        return super().forward(x)


class Net(nn.Module):
    def __init__(self, layers: int) -> None:
        super().__init__()
        self.layers = nn.ModuleList(Layer(i) for i in range(layers))
        self.order = list(range(layers))

    def forward(self, x):
        for i in self.order:
            x = self.layers[i](x)
        return x

    def meanwhile(self, call: Callable[[int], object]) -> None:
        for layer in self.layers:
            layer.meanwhile = call


def offloaded(layers: int = 5, kind: Callable[..., Mapping] = Store, **options) -> tuple[Net, Store]:
    torch.manual_seed(0)
    net = Net(layers).requires_grad_(False)
    store = kind(net.state_dict())
    attach_align_device_hook(net, execution_device="cpu", offload=True, weights_map=store, **options)
    return net, store


def expected(net: Net, store: Store, x: torch.Tensor) -> torch.Tensor:
    twin = Net(len(net.layers))
    twin.load_state_dict(store.state)
    twin.order = net.order
    return twin(x)


def prefetcher_of(net: Net) -> Prefetcher:
    return net.layers[0]._hf_hook._prefetcher
