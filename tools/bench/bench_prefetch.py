"""Fetching ahead: layers that compute while the next ones are read, from a slow store, in wrong orders, and from a mapped file."""

from __future__ import annotations

import random
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping, Sequence

import torch
from measure import interleave, report, timed
from torch import nn

from acc_bigmodel import init_empty_weights, load_checkpoint_and_dispatch, save_weights
from acc_hooks import attach_align_device_hook

ROUNDS = 7
LAYERS = 16
READING_S = 0.02
COMPUTING_S = 0.02
FILE_WIDTH = 1344  # 8 blocks of 58 MB
FILE_BLOCKS = 8


class SlowStore(Mapping[str, torch.Tensor]):
    """Needs `READING_S` for a layer, like a disk or a network: the thread that reads sleeps."""

    def __init__(self, values: Mapping[str, torch.Tensor]) -> None:
        self.values_by_name = values

    def __getitem__(self, name: str) -> torch.Tensor:
        if name.endswith("weight"):
            time.sleep(READING_S)
        return self.values_by_name[name]

    def __iter__(self) -> Iterator[str]:
        return iter(self.values_by_name)

    def __len__(self) -> int:
        return len(self.values_by_name)


class Layer(nn.Linear):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        time.sleep(COMPUTING_S)  # an accelerator that computes
        return super().forward(x)


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(Layer(4, 4) for _ in range(LAYERS))
        self.order: Sequence[int] = range(LAYERS)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for number in self.order:
            x = self.layers[number](x)
        return x


def main() -> None:
    torch.set_num_threads(1)
    with torch.no_grad():
        sleeping()
        mapped()


def sleeping() -> None:
    serial, known, wrong = (slow_net(prefetch) for prefetch in (0, 2, 2))
    shuffle = random.Random(0)

    def other_order() -> float:
        wrong.order = shuffle.sample(range(LAYERS), LAYERS)
        return run(wrong)()

    contenders = {
        "one after the other": run(serial),
        "first forward": lambda: run(slow_net(2))(),
        "known order": run(known),
        "another order each time": other_order,
    }
    series = interleave(contenders, ROUNDS)
    goals = {"first forward": 1.0, "known order": 0.6, "another order each time": 1.05}
    report(
        f"{LAYERS} layers, {READING_S * 1e3:g} ms to read and to compute",
        series,
        "one after the other",
        goals,
    )


def slow_net(prefetch: int) -> Net:
    net = Net()
    store = SlowStore({name: value.clone() for name, value in net.state_dict().items()})
    attach_align_device_hook(net, execution_device="cpu", offload=True, weights_map=store, prefetch=prefetch)
    return net


def run(net: Net) -> Callable[[], float]:
    x = torch.ones(1, 4)
    return lambda: timed(lambda: net(x))


def mapped() -> None:
    """A safetensors file in the page cache costs nothing to read, so fetching ahead must cost nothing."""
    with tempfile.TemporaryDirectory() as folder:
        save_weights(blocks().state_dict(), folder, "model")
        calls = {}
        for name, prefetch in (("without", 0), ("with fetching ahead", 2)):
            with init_empty_weights():
                model = blocks()
            model = load_checkpoint_and_dispatch(model, folder, device_map={"": "disk"}, prefetch=prefetch)
            calls[name] = run_on_file(model)
        series = interleave(calls, 3 * ROUNDS)
        megabytes = FILE_BLOCKS * 8 * FILE_WIDTH**2 * 4 // 10**6
        report(
            f"{megabytes} MB of mapped safetensors: CPU time",
            series,
            "without",
            {"with fetching ahead": 1.05},
        )


def blocks() -> nn.Module:
    pairs = [
        nn.Sequential(nn.Linear(FILE_WIDTH, 4 * FILE_WIDTH), nn.Linear(4 * FILE_WIDTH, FILE_WIDTH))
        for _ in range(FILE_BLOCKS)
    ]
    return nn.Sequential(*pairs)


def run_on_file(model: nn.Module) -> Callable[[], float]:
    x = torch.ones(1, FILE_WIDTH)
    return lambda: timed(lambda: model(x), time.process_time)


if __name__ == "__main__":
    main()
