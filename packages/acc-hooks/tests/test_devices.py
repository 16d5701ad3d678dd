"""Hooks over several memories: the fake accelerator's devices and the CPU."""

from __future__ import annotations

import threading

import pytest
import torch
from torch import nn

from acc_hooks import (
    AlignDevicesHook,
    CpuOffload,
    UserCpuOffloadHook,
    add_hook_to_module,
    align_module_device,
    attach_align_device_hook,
    attach_align_device_hook_on_blocks,
    remove_hook_from_module,
    remove_hook_from_submodules,
    set_module_tensor_to_device,
)
from acc_ops.fake_accelerator import fake_accelerator

CPU = torch.device("cpu")


@pytest.fixture
def fake(needs_fake_accelerator):
    with fake_accelerator(count=2) as fake:
        yield fake


class Masked(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(4, 4)
        self.scale = nn.Parameter(torch.full((4,), 2.0))

    def forward(self, x: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
        return self.linear(x) * mask * self.scale


class Layers(nn.Module):
    def __init__(self, count: int) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.layers = nn.ModuleList([Masked() for _ in range(count)])

    def forward(self, x: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
        for layer in self.layers:
            x = layer(x, mask=mask)
        return x


def dispatch(model: Layers, devices: list[torch.device]) -> None:
    places = {f"layers.{i}": devices[i * len(devices) // len(model.layers)] for i in range(len(model.layers))}
    attach_align_device_hook_on_blocks(model, {"": devices[0], **places}, False)


def test_a_model_over_two_devices_computes_the_same_and_its_output_comes_back(fake, x):
    model = Layers(4).requires_grad_(False)
    mask = torch.tensor([1.0, 0, 1, 1])
    expected = model(x, mask)
    dispatch(model, fake.devices)
    assert [layer.linear.weight.device for layer in model.layers] == [fake.devices[i] for i in (0, 0, 1, 1)]
    for _ in range(2):
        output = model(x, mask)
        assert output.device == CPU
        torch.testing.assert_close(output, expected)
    on_second = model(x.to(fake.devices[1]), mask)
    assert on_second.device == fake.devices[1]


def test_a_mask_given_to_every_layer_moves_once_for_each_device_and_forward(fake, x):
    model = Layers(8).requires_grad_(False)
    dispatch(model, fake.devices)
    mask = torch.ones(4)
    for _ in range(2):
        fake.reset()
        model(x, mask)
        assert sum(copy.nbytes == mask.nbytes for copy in fake.log) == 2
        assert len(fake.log) == 5  # x and the mask to the first, to the second, and the output back


def test_threads_bring_their_output_to_the_device_of_their_own_input(fake, x):
    layer = nn.Linear(4, 4).requires_grad_(False)
    expected = layer(x)
    add_hook_to_module(layer, AlignDevicesHook(fake.device, io_same_device=True))
    wrong: list[object] = []

    def run(device: torch.device) -> None:
        mine = x.to(device)
        for _ in range(20):
            output = layer(mine)
            if output.device != device or not torch.allclose(output.cpu(), expected):
                wrong.append(output)

    threads = [threading.Thread(target=run, args=(device,)) for device in (CPU, *fake.devices)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not wrong


def test_two_threads_run_two_models_on_two_devices(fake, x):
    models = [Layers(3).requires_grad_(False) for _ in range(2)]
    mask = torch.ones(4)
    expected = models[0](x, mask)
    for model, device in zip(models, fake.devices, strict=True):
        attach_align_device_hook(model, execution_device=device, offload=True, prefetch=0)
    wrong: list[object] = []

    def run(model: nn.Module) -> None:
        for _ in range(10):
            output = model(x, mask)
            if not torch.allclose(output.cpu(), expected):
                wrong.append(output)

    threads = [threading.Thread(target=run, args=(model,)) for model in models]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not wrong
    for model in models:
        remove_hook_from_submodules(model)
        torch.testing.assert_close(model(x, mask), expected)


def test_what_is_offloaded_is_on_the_device_for_its_forward_only(fake, x):
    model = Layers(4).requires_grad_(False)
    expected = model(x, torch.ones(4))
    attach_align_device_hook(model, execution_device=fake.device, offload=True, prefetch=0)
    fake.reset()
    torch.testing.assert_close(model(x, torch.ones(4)).cpu(), expected)
    one_layer = 4 * (16 + 4 + 4)
    assert fake.peak_bytes() < 2 * one_layer + 8 * 32  # one layer and what it computes
    assert fake.allocated_bytes() == 0


def test_ties_across_devices_are_one_tensor_for_each(fake, tied):
    ids = torch.tensor([[1, 2]])
    tied.requires_grad_(False)
    expected = tied(ids)
    attach_align_device_hook_on_blocks(
        tied, {"embed": fake.devices[0], "middle": fake.devices[0], "head": fake.devices[1]}, False
    )
    assert tied.embed.weight.device == fake.devices[0]
    assert tied.head.weight.device == fake.devices[1]
    torch.testing.assert_close(tied(ids).cpu(), expected)


def test_ties_on_one_device_stay_one_tensor(fake, tied):
    attach_align_device_hook_on_blocks(tied, dict.fromkeys(("embed", "middle", "head"), fake.device), False)
    assert tied.embed.weight is tied.head.weight
    assert tied.embed.weight.device == fake.device


def test_offloaded_ties_are_one_copy_on_the_device(fake, tied):
    ids = torch.tensor([[1, 2]])
    tied.requires_grad_(False)
    expected = tied(ids)
    attach_align_device_hook(tied, execution_device=fake.device, offload=True, prefetch=0)
    torch.testing.assert_close(tied(ids).cpu(), expected)
    remove_hook_from_module(tied, recurse=True)
    assert tied.embed.weight is tied.head.weight
    assert tied.embed.weight.device == CPU


def test_models_in_a_chain_take_turns_on_the_device(fake, x):
    first, second = nn.Linear(4, 4), nn.Linear(4, 4)
    expected = second(first(x))
    hook = CpuOffload(fake.device)
    add_hook_to_module(first, hook)
    user = UserCpuOffloadHook(first, hook)
    last = CpuOffload(fake.device, prev_module_hook=user)
    add_hook_to_module(second, last)
    for _ in range(2):
        y = first(x)
        assert (first.weight.device, second.weight.device) == (fake.device, CPU)
        torch.testing.assert_close(second(y).cpu(), expected)
        assert (first.weight.device, second.weight.device) == (CPU, fake.device)
        UserCpuOffloadHook(second, last).offload()
    user.remove()
    assert type(first) is nn.Linear


@pytest.mark.parametrize("name", ["weight", "bias"])
def test_a_tensor_is_put_on_a_device_with_its_flags(fake, name):
    layer = nn.Linear(4, 4).requires_grad_(False)
    old = getattr(layer, name)
    old.tag = "kept"
    expected = old.detach().clone()
    set_module_tensor_to_device(layer, name, 1)
    new = getattr(layer, name)
    assert (type(new), new.device, new.requires_grad, new.tag) == (
        nn.Parameter,
        fake.devices[1],
        False,
        "kept",
    )
    assert torch.equal(new.cpu(), expected)
    set_module_tensor_to_device(layer, name, "cpu", value=expected * 2)
    assert torch.equal(getattr(layer, name), expected * 2)


def test_a_module_visits_another_device_and_comes_back_with_what_was_written(fake):
    layer = nn.Linear(4, 4)
    weight = layer.weight
    with align_module_device(layer, fake.device):
        assert layer.weight.device == fake.device
        with torch.no_grad():
            layer.weight.fill_(3)
    assert layer.weight is weight
    assert torch.equal(weight, torch.full((4, 4), 3.0))


def test_a_new_kind_of_device_needs_a_row_and_no_other_edit(fake, monkeypatch):
    monkeypatch.setattr(torch.Tensor, fake.kind, lambda self: self.to(fake.device), raising=False)
    layer = nn.Linear(4, 4).requires_grad_(False)
    expected = layer.weight.clone()
    add_hook_to_module(layer, AlignDevicesHook(fake.device, offload=True))
    moved = getattr(layer.weight, fake.kind)()
    assert type(moved) in (torch.Tensor, nn.Parameter)  # the value, no placeholder
    assert torch.equal(moved.cpu(), expected)
    setattr(layer, fake.kind, lambda: None)  # as dispatching does
    layer.xla = True  # the user's
    with pytest.raises(ValueError, match="no such device"):
        set_module_tensor_to_device(nn.Linear(4, 4), "weight", f"{fake.kind}:7")
    remove_hook_from_module(layer)
    assert fake.kind not in vars(layer)
    assert layer.xla


def test_a_tensor_that_stays_is_put_where_its_offloaded_module_runs(net, x, fake):
    model = net()
    expected, bias = model(x), model[0].bias
    attach_align_device_hook_on_blocks(
        model, {"": fake.device}, {"": True}, dict(model.state_dict()), staying={"0.bias"}
    )
    assert model[0].weight.is_meta
    assert model[0].bias.device == fake.device
    assert torch.allclose(model(x), expected)
    remove_hook_from_module(model, recurse=True)
    assert model[0].bias.device == bias.device
    assert torch.equal(model[0].bias, bias)
