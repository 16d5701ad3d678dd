from __future__ import annotations

import copy

import pytest
import torch
from torch import nn

from acc_hooks import (
    AlignDevicesHook,
    ModelHook,
    OffloadedWeightError,
    PrefixedDataset,
    add_hook_to_module,
    attach_align_device_hook,
    attach_align_device_hook_on_blocks,
    attach_execution_device_hook,
    attached_hook,
    iterate_hooks,
    remove_hook_from_module,
)
from acc_ops.testing import count_calls

META = torch.device("meta")  # plays a second device


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(4, 4)
        self.second = nn.Linear(4, 4)

    def forward(self, x):
        return nn.functional.linear(
            self.first(x), self.second.weight, self.second.bias
        )  # reads a child's weights


class Model(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.full((4,), 2.0))
        self.blocks = nn.Sequential(
            nn.Linear(4, 4), nn.Sequential(nn.Linear(4, 4), nn.ReLU()), nn.Linear(4, 4)
        )

    def forward(self, x):
        return self.blocks(x * self.scale)


def hooked(model):
    return {name for name, module in model.named_modules() if attached_hook(module) is not None}


def state(model):
    return {name: value.detach().clone() for name, value in model.state_dict().items()}


# --- attach_align_device_hook ------------------------------------------------------------------------------------


def test_every_module_with_tensors_of_its_own_gets_a_hook(x):
    model = Model()
    expected = model(x)
    attach_align_device_hook(model, execution_device="cpu", offload=True, weights_map=state(model))
    assert hooked(model) == {"", "blocks.0", "blocks.1.0", "blocks.2"}
    assert all(parameter.is_meta for parameter in model.parameters())
    torch.testing.assert_close(model(x), expected)
    assert all(parameter.is_meta for parameter in model.parameters())


def test_the_map_is_narrowed_to_each_module():
    model = Model()
    weights = {f"net.{name}": value for name, value in state(model).items()}
    attach_align_device_hook(
        model, execution_device="cpu", offload=True, weights_map=weights, module_name="net"
    )
    seen = model.blocks[0]._hf_hook.weights_map
    assert isinstance(seen, PrefixedDataset)
    assert (seen.dataset, seen.prefix) == (weights, "net.blocks.0.")
    assert seen["weight"] is weights["net.blocks.0.weight"]


def test_hooks_are_appended_to_those_that_are_there(x):
    model = Model()
    mine = ModelHook()
    add_hook_to_module(model.blocks[0], mine)
    attach_align_device_hook(model, execution_device="cpu", offload=True)
    hooks = list(iterate_hooks(model.blocks[0]._hf_hook))
    assert hooks[0] is mine
    assert isinstance(hooks[1], AlignDevicesHook)


def test_a_preloaded_class_is_one_block(x):
    block = Block()
    expected = block(x)
    model = nn.Sequential(block)
    attach_align_device_hook(model, execution_device="cpu", offload=True, preload_module_classes=["Block"])
    assert hooked(model) == {"0"}
    assert block.second.weight.is_meta
    torch.testing.assert_close(model(x), expected)
    assert not any(value.is_meta for value in model.state_dict().values())
    remove_hook_from_module(model, recurse=True)
    torch.testing.assert_close(model(x), expected)


def test_a_parent_that_reads_a_childs_weights_does_not_compute_with_placeholders(x):
    block = Block()
    expected = block(x)
    attach_align_device_hook(block, execution_device="cpu", offload=True)
    torch.testing.assert_close(block(x), expected)
    assert block.second.weight.is_meta


@pytest.mark.parametrize("need_weights", [False, True])
def test_torchs_attention_is_loaded_whole_with_the_child_whose_weights_it_reads(need_weights):
    layer = nn.MultiheadAttention(4, 2, batch_first=True).requires_grad_(False).eval()
    model = nn.Sequential(layer)
    q = torch.randn(1, 3, 4)
    expected = layer(q, q, q)[0]
    attach_align_device_hook_on_blocks(model, execution_device="cpu", offload=True)
    assert layer.out_proj.weight.is_meta
    torch.testing.assert_close(layer(q, q, q, need_weights=need_weights)[0], expected)


class Fails(nn.Linear):
    """Its hook cannot be attached."""


@pytest.mark.parametrize("how", ["all", "blocks", "execution"])
def test_an_attach_that_fails_half_way_undoes_what_it_did(x, how, monkeypatch):
    model = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4), Fails(4, 4)).requires_grad_(False)
    expected = model(x)
    add_hook_to_module(model[0], first := ModelHook())
    init_hook = AlignDevicesHook.init_hook

    def fails(self, module):
        if isinstance(module, Fails):
            raise MemoryError("no room")
        return init_hook(self, module)

    monkeypatch.setattr(AlignDevicesHook, "init_hook", fails)
    with pytest.raises(MemoryError):
        if how == "all":
            attach_align_device_hook(model, execution_device="cpu", offload=True)
        elif how == "blocks":
            names = {"0": "cpu", "1": "cpu", "2": "cpu"}
            attach_align_device_hook_on_blocks(
                model,
                execution_device=names,
                offload={"0": True, "1": False, "2": True},
                weights_map=model.state_dict(),
            )
        else:
            attach_execution_device_hook(model, "cpu")
    assert attached_hook(model[0]) is first
    assert [attached_hook(module) for module in (model, model[1], model[2])] == [None, None, None]
    assert type(model[1]) is nn.Linear
    assert not any(parameter.is_meta for parameter in model.parameters())
    torch.testing.assert_close(model(x), expected)


def test_a_hook_whose_buffers_cannot_be_moved_leaves_the_weights(monkeypatch):
    layer = nn.BatchNorm1d(4)

    def fails(*_):
        raise MemoryError("no room")

    monkeypatch.setattr(AlignDevicesHook, "_settle", fails)
    with pytest.raises(MemoryError):
        add_hook_to_module(layer, AlignDevicesHook("cpu", offload=True))
    assert not layer.weight.is_meta
    assert type(layer) is nn.BatchNorm1d


def test_ties_are_one_placeholder_one_copy_and_ties_again(tied):
    ids = torch.tensor([1, 2])
    expected = tied(ids)
    attach_align_device_hook(tied, execution_device="cpu", offload=True, weights_map=state(tied))
    assert tied.embed.weight is tied.head.weight
    assert len(list(tied.parameters())) == 3
    torch.testing.assert_close(tied(ids), expected)
    held = []
    hooks = [tied.embed._hf_hook, tied.head._hf_hook]
    for hook, module in zip(hooks, [tied.embed, tied.head], strict=True):
        hook.pre_forward(module)
        held.append(module.weight)
    assert held[0] is held[1]
    for hook, module in zip(hooks, [tied.embed, tied.head], strict=True):
        hook.post_forward(module, None)
    remove_hook_from_module(tied, recurse=True)
    assert tied.embed.weight is tied.head.weight
    torch.testing.assert_close(tied(ids), expected)


def test_ties_survive_a_copy(tied):
    ids = torch.tensor([1, 2])
    expected = tied(ids)
    attach_align_device_hook(tied, execution_device="cpu", offload=True, weights_map=state(tied))
    other = copy.deepcopy(tied)
    assert other.embed.weight is other.head.weight is not tied.embed.weight
    torch.testing.assert_close(other(ids), expected)
    remove_hook_from_module(other, recurse=True)
    assert other.embed.weight is other.head.weight


def test_a_module_under_two_names_gets_one_hook_and_is_whole_again(x):
    class Net(nn.Module):
        def __init__(self):
            super().__init__()
            self.enc = nn.Sequential(nn.Linear(4, 4))
            self.dec = nn.Sequential(self.enc[0], nn.Linear(4, 4))

        def forward(self, x):
            return self.dec(self.enc(x))

    net = Net()
    expected = net(x)
    attach_align_device_hook(net, execution_device="cpu", offload=True, weights_map=state(net))
    assert isinstance(net.enc[0]._hf_hook, AlignDevicesHook)
    torch.testing.assert_close(net(x), expected)
    remove_hook_from_module(net, recurse=True)
    assert not any(parameter.is_meta for parameter in net.parameters())
    torch.testing.assert_close(net(x), expected)


def test_an_error_names_the_tensor_by_its_full_name(x):
    model = Model()
    attach_align_device_hook(model, execution_device="cpu", offload=True)
    with pytest.raises(OffloadedWeightError, match=r"blocks\.2\.(weight|bias) is offloaded"):
        model(x).sum().backward()


# --- attach_align_device_hook_on_blocks --------------------------------------------------------------------------


def test_two_scalars_make_the_model_one_block(x):
    model = Model()
    expected = model(x)
    attach_align_device_hook_on_blocks(model, "cpu")
    assert model._hf_hook.io_same_device
    assert model._hf_hook.place_submodules
    torch.testing.assert_close(model(x), expected)
    model = Model()
    attach_align_device_hook_on_blocks(model, "cpu", offload=True)
    assert all(parameter.is_meta for parameter in model.parameters())
    model(x)


def test_blocks_go_to_their_devices_or_their_map(x):
    model = Model()
    expected = model(x)
    devices = {"blocks.0": "cpu", "blocks.1": "cpu", "blocks.2": "cpu"}
    offload = {"blocks.0": False, "blocks.1": True, "blocks.2": False}
    attach_align_device_hook_on_blocks(model, devices, offload, weights_map=state(model))
    assert model._hf_hook.io_same_device
    assert model.blocks[0].weight.device.type == "cpu"
    assert model.blocks[1][0].weight.is_meta
    torch.testing.assert_close(model(x), expected)
    remove_hook_from_module(model, recurse=True)
    torch.testing.assert_close(model(x), expected)


def test_a_scalar_holds_for_all_blocks_of_the_other_mapping(x):
    model = Model()
    attach_align_device_hook_on_blocks(model, "cpu", {"blocks.0": True, "blocks.1": False})
    assert model.blocks[0].weight.is_meta
    assert not model.blocks[1][0].weight.is_meta
    model = Model()
    attach_align_device_hook_on_blocks(model, {"blocks.0": "meta"}, False)
    assert model.blocks[0].weight.is_meta
    assert model.blocks[0]._hf_hook.execution_device == "meta"


def test_a_block_inside_of_a_block_belongs_to_itself(x):
    model = Model()
    expected = model(x)
    attach_align_device_hook_on_blocks(
        model, {"": "cpu", "blocks.1": "cpu"}, {"": False, "blocks.1": True}, weights_map=state(model)
    )
    assert model.blocks[1][0].weight.is_meta
    assert not model.blocks[0].weight.is_meta
    torch.testing.assert_close(model(x), expected)
    remove_hook_from_module(model, recurse=True)
    attach_align_device_hook_on_blocks(
        model, {"": "cpu", "blocks.1": "cpu"}, {"": True, "blocks.1": False}, weights_map=state(model)
    )
    assert not model.blocks[1][0].weight.is_meta
    assert model.blocks[0].weight.is_meta
    torch.testing.assert_close(model(x), expected)


def test_a_root_block_moves_everything_but_the_blocks_inside():
    model = Model()
    attach_align_device_hook_on_blocks(model, {"": "meta", "blocks.1": "cpu"}, False)
    assert model.scale.is_meta
    assert model.blocks[0].weight.is_meta
    assert not model.blocks[1][0].weight.is_meta
    assert model.blocks[1]._hf_hook.execution_device == "cpu"


def test_modules_inside_of_a_block_move_their_arguments_when_called_alone():
    model = Model()
    attach_align_device_hook_on_blocks(model, {"blocks": "meta"}, False)
    assert model.blocks[1][0](torch.ones(1, 4)).device == META


def test_ties_between_a_block_that_stays_and_one_that_is_offloaded(tied):
    ids = torch.tensor([1, 2])
    expected = tied(ids)
    blocks = {"embed": False, "middle": True, "head": True}
    weights = state(tied)
    attach_align_device_hook_on_blocks(tied, dict.fromkeys(blocks, "cpu"), blocks, weights_map=weights)
    torch.testing.assert_close(tied(ids), expected)
    hook = tied.head._hf_hook
    hook.pre_forward(tied.head)
    assert tied.head.weight is tied.embed.weight  # no second copy on the same device
    hook.post_forward(tied.head, None)
    remove_hook_from_module(tied, recurse=True)
    assert tied.head.weight is tied.embed.weight


def test_the_output_returns_to_the_device_of_the_input():
    model = Model()
    attach_align_device_hook_on_blocks(model, {"blocks": "meta"}, False)
    with pytest.raises(NotImplementedError):  # meta has no data to bring back: it tried
        model(torch.ones(1, 4))


def test_blocks_that_do_not_fit_together_are_named():
    with pytest.raises(ValueError, match=r"same blocks.*blocks\.1"):
        attach_align_device_hook_on_blocks(
            Model(), {"blocks.0": "cpu", "blocks.1": "cpu"}, {"blocks.0": True}
        )
    with pytest.raises(ValueError, match=r"no module named 'block\.7'"):
        attach_align_device_hook_on_blocks(Model(), {"block.7": "cpu"}, False)


def test_a_frozen_offloaded_model_trains_what_stays(tied):
    ids = torch.tensor([1, 2])
    tied.middle.requires_grad_(False)
    tied(ids).sum().backward()
    expected = tied.embed.weight.grad
    tied.embed.weight.grad = None
    blocks = {"embed": False, "middle": True, "head": False}
    attach_align_device_hook_on_blocks(tied, dict.fromkeys(blocks, "cpu"), blocks)
    tied(ids).sum().backward()
    torch.testing.assert_close(tied.embed.weight.grad, expected)


# --- attach_execution_device_hook --------------------------------------------------------------------------------


def test_modules_with_a_state_dict_and_without_a_hook_get_one():
    model = Model()
    mine = ModelHook()
    add_hook_to_module(model.blocks[2], mine)
    attach_execution_device_hook(model, "cpu", skip_keys="past")
    assert hooked(model) == {"", "blocks", "blocks.0", "blocks.1", "blocks.1.0", "blocks.2"}
    assert model.blocks[2]._hf_hook is mine
    assert model.blocks[0]._hf_hook.skip_keys == "past"


def test_nothing_below_a_preloaded_class_gets_one():
    model = nn.Sequential(Block(), nn.Linear(4, 4))
    attach_execution_device_hook(model, "cpu", preload_module_classes=["Block"])
    assert hooked(model) == {"", "0", "1"}


# --- cost --------------------------------------------------------------------------------------------------------


def test_the_work_grows_with_the_number_of_modules_and_no_faster():
    def calls(count: int) -> int:
        model = nn.Sequential(*[nn.Linear(1, 1) for _ in range(count)])
        blocks = {str(i): "cpu" for i in range(count)}
        return count_calls(lambda: attach_align_device_hook_on_blocks(model, blocks, False))

    assert calls(1600) < 9 * calls(200)


def test_offloading_without_a_device_to_run_on_is_refused(net):
    model = net()
    with pytest.raises(ValueError, match="give an execution_device"):
        attach_align_device_hook(model, offload=True)
    assert not any(tensor.is_meta for tensor in model.parameters())


def test_an_entry_that_the_map_lacks_is_named_as_the_map_names_it(net):
    model = net()
    weights = {name: value for name, value in model.state_dict().items() if name != "0.bias"}
    with pytest.raises(ValueError, match=r"has no entry '0.bias'"):
        attach_align_device_hook(model, execution_device="cpu", offload=True, weights_map=weights)


def test_a_lazy_module_is_refused_until_it_has_a_shape():
    model = nn.Sequential(nn.LazyLinear(4))
    with pytest.raises(ValueError, match=r"0.weight has no shape yet"):
        attach_align_device_hook(model, execution_device="cpu", offload=True)
