"""Offloaded, edited, copied, saved, moved and brought back in any order: a plain model holds the same after every step."""

from __future__ import annotations

import copy
import pickle
import shutil
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import (
    RuleBasedStateMachine,
    initialize,
    invariant,
    precondition,
    rule,
    run_state_machine_as_test,
)
from torch import nn

from acc_bigmodel import (
    cpu_offload,
    disk_offload,
    dispatch_model,
    find_tied_parameters,
    get_state_dict_offloaded_model,
    load_checkpoint_and_dispatch,
    load_weights,
    save_weights,
)
from acc_hooks import align_module_device, attached_hook, remove_hook_from_module
from acc_hooks.ties import every_tensor
from acc_ops.fake_accelerator import FakeAccelerator

X = torch.tensor([[0, 3], [5, 1]])


class Layer(nn.Module):
    """A parameter and a buffer of its own beside its children, one of which it computes with without calling it."""

    def __init__(self) -> None:
        super().__init__()
        self.up = nn.Linear(4, 6)
        self.down = nn.Linear(6, 4, bias=False)
        self.gain = nn.Parameter(torch.rand(4) + 0.5)
        self.register_buffer("shift", torch.rand(4))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return nn.functional.linear(torch.tanh(self.up(x)), self.down.weight) * self.gain + self.shift


class Everything(nn.Module):
    """Ties over modules, one module under two names, buffers of both kinds, running statistics, weights of the root."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(6, 4)
        self.layers = nn.ModuleList([Layer() for _ in range(2)])
        self.again = self.layers[0]
        self.unused = nn.Linear(4, 4)  # an expert that nobody asks
        self.attention = nn.MultiheadAttention(4, 2, batch_first=True)
        self.norm = nn.BatchNorm1d(4)
        self.bias = nn.Parameter(torch.rand(4))
        self.register_buffer("steps", torch.tensor(3))
        self.register_buffer("angles", torch.rand(4), persistent=False)
        self.head = nn.Linear(4, 6, bias=False)
        self.head.weight = self.embed.weight

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        hidden = self.embed(tokens) + self.bias * self.steps
        for layer in [*self.layers, self.again]:
            hidden = layer(hidden)
        hidden, _ = self.attention(hidden, hidden, hidden, need_weights=False)
        hidden = self.norm(hidden.transpose(1, 2)).transpose(1, 2)
        return self.head(hidden * self.angles)


def build() -> Everything:
    model = Everything().eval().requires_grad_(False)
    with torch.no_grad():
        for tensor in model.state_dict().values():
            if tensor.is_floating_point():
                tensor.uniform_(0.2, 1.0)
    return model


PARTS = [
    "embed", "layers", "layers.0", "layers.1", "layers.0.up", "layers.1.down", "again", "unused", "attention", "norm", "bias",
    "head", "head.weight", "layers.1.gain", "layers.1.up.weight", "layers.0.shift", "norm.running_mean", "steps",
]  # fmt: skip
TENSORS = [
    "embed.weight", "head.weight", "bias", "layers.0.up.weight", "again.up.weight", "layers.1.gain", "layers.1.down.weight",
    "unused.bias", "norm.weight", "layers.1.shift", "angles", "norm.running_var", "attention.in_proj_weight",
]  # fmt: skip


def values_of(model: nn.Module) -> dict[str, torch.Tensor]:
    return {name: value.detach().cpu().clone() for name, value in model.state_dict().items()}


def owner_and_leaf(model: nn.Module, name: str) -> tuple[nn.Module, str]:
    path, _, leaf = name.rpartition(".")
    return model.get_submodule(path), leaf


def double(model: nn.Module, name: str, how: str) -> None:
    owner, leaf = owner_and_leaf(model, name)
    with torch.no_grad():
        if how == "in place":
            getattr(owner, leaf).mul_(2)
        elif how == "a view":
            getattr(owner, leaf)[:2] *= 2
        elif how == "data":
            getattr(owner, leaf).data = getattr(owner, leaf).data * 2
        elif how == "while it is loaded":
            with align_module_device(owner):
                getattr(owner, leaf).mul_(2)
        elif how == "unseen":
            with align_module_device(owner):
                getattr(owner, leaf).data.mul_(2)
        else:
            raise AssertionError(how)


HOWS = ["in place", "a view", "data", "while it is loaded", "unseen"]


class OneTruth(RuleBasedStateMachine):
    """`model` goes through everything; `plain` never leaves the memory, and has to hold the same."""

    devices: tuple[Any, ...] = ("cpu", "disk")

    def __init__(self) -> None:
        super().__init__()
        self.folder = Path(tempfile.mkdtemp())
        self.others: list[tuple[nn.Module, nn.Module]] = []  # copies, and what they have to hold

    def teardown(self) -> None:
        self.others.clear()
        self.model = self.plain = None
        shutil.rmtree(self.folder)

    @initialize(seed=st.integers(0, 3))
    def start(self, seed: int) -> None:
        torch.manual_seed(seed)
        self.model: Any = build()
        self.plain: Any = copy.deepcopy(self.model)

    def map_of(self, data: st.DataObject) -> dict[str, Any]:
        parts = data.draw(st.lists(st.sampled_from(PARTS), unique=True, max_size=4))
        return {part: data.draw(st.sampled_from(self.devices)) for part in ["", *parts]}

    # where the weights are

    @rule(
        data=st.data(),
        folder=st.sampled_from("ab"),
        buffers=st.booleans(),
        hooks=st.booleans(),
        ahead=st.sampled_from([0, 2]),
    )
    def dispatch(self, data: st.DataObject, folder: str, buffers: bool, hooks: bool, ahead: int) -> None:
        dispatch_model(
            self.model,
            self.map_of(data),
            offload_dir=self.folder / folder,
            offload_buffers=buffers,
            force_hooks=hooks,
            prefetch=ahead,
        )

    @rule(buffers=st.booleans(), data=st.data())
    def offload_to_memory(self, buffers: bool, data: st.DataObject) -> None:
        device = data.draw(st.sampled_from([device for device in self.devices if device != "disk"]))
        cpu_offload(self.model, execution_device=device, offload_buffers=buffers)

    @rule(folder=st.sampled_from("ab"), buffers=st.booleans())
    def offload_to_disk(self, folder: str, buffers: bool) -> None:
        disk_offload(self.model, self.folder / folder, execution_device="cpu", offload_buffers=buffers)

    @rule(to=st.sampled_from([None, "cpu"]))
    def bring_everything_back(self, to: str | None) -> None:
        remove_hook_from_module(self.model, recurse=True)
        assert not any(tensor.is_meta for tensor in [*self.model.parameters(), *self.model.buffers()])
        assert find_tied_parameters(self.model) == find_tied_parameters(self.plain)
        if to is not None:  # what was on several devices comes back to several
            self.model.to(to)

    @rule(data=st.data(), in_place=st.booleans())
    def save_and_load_elsewhere(self, data: st.DataObject, in_place: bool) -> None:
        save_weights(self.model.state_dict(), self.folder / "saved", "model")
        loaded = copy.deepcopy(self.plain)  # for what no checkpoint has
        if not in_place:
            for name, tensor in values_of(loaded).items():
                owner, leaf = owner_and_leaf(loaded, name)
                if leaf in owner._parameters:
                    tensor = nn.Parameter(tensor.to("meta"), requires_grad=False)
                    owner._parameters[leaf] = tensor
            tie_like(loaded, self.plain)
        load_checkpoint_and_dispatch(
            loaded, self.folder / "saved", self.map_of(data), offload_folder=self.folder / "c"
        )
        self.model = loaded

    # what the weights are

    @rule(name=st.sampled_from(TENSORS), how=st.sampled_from(HOWS))
    def edit(self, name: str, how: str) -> None:
        for model in (self.model, self.plain):
            double(model, name, how)

    @rule(seed=st.integers(0, 3), names=st.one_of(st.none(), st.lists(st.sampled_from(TENSORS), unique=True)))
    def load_a_state_dict(self, seed: int, names: list[str] | None) -> None:
        torch.manual_seed(seed)
        state = {
            name: torch.rand_like(value) + 0.1 if value.is_floating_point() else value + 1
            for name, value in values_of(self.plain).items()
            if names is None or name in names
        }
        for name in state.keys() & {"head.weight"}:
            state[name] = state.get("embed.weight", state[name])
        for model in (self.model, self.plain):
            model.load_state_dict(state, strict=names is None)

    @rule(name=st.sampled_from(["unused.weight", "layers.1.gain", "norm.weight"]))
    def assign(self, name: str) -> None:
        value = torch.rand_like(self.plain.get_parameter(name))
        for model in (self.model, self.plain):
            owner, leaf = owner_and_leaf(model, name)
            setattr(owner, leaf, nn.Parameter(value.clone(), requires_grad=False))

    @rule(training=st.booleans())
    def run(self, training: bool) -> None:
        is_hooked = any(attached_hook(module) for module in self.model.modules())
        if not is_hooked and len({tensor.device for _, tensor in every_tensor(self.model)}) > 1:
            return
        with torch.no_grad():
            wanted = self.plain.train(training)(X)
            start = X if is_hooked else X.to(self.model.bias.device)
            got = self.model.train(training)(start)
        assert torch.allclose(got.cpu(), wanted, atol=1e-5, rtol=1e-4)
        self.plain.eval(), self.model.eval()

    # copies

    @rule(how=st.sampled_from([copy.deepcopy, lambda model: pickle.loads(pickle.dumps(model))]))
    def go_on_with_a_copy(self, how: Callable[[nn.Module], nn.Module]) -> None:
        self.others = [*self.others, (self.model, copy.deepcopy(self.plain))][-2:]
        self.model = how(self.model)

    # what has to hold

    @invariant()
    @precondition(lambda self: hasattr(self, "model"))
    def holds_the_same(self) -> None:
        for model, plain in [(self.model, self.plain), *self.others]:
            wanted, got = plain.state_dict(), model.state_dict()
            assert list(got) == list(wanted)
            for name, value in wanted.items():
                assert got[name].dtype == value.dtype, name
                assert torch.equal(got[name].cpu(), value), name
        assert torch.equal(self.model.angles.cpu(), self.plain.angles)

    @rule()
    def everything_can_be_collected_and_saved(self) -> None:
        state = get_state_dict_offloaded_model(self.model)
        save_weights(state, self.folder / "collected", "model")
        read = load_weights(self.folder / "collected", "model")
        wanted = self.plain.state_dict()
        assert read.keys() == wanted.keys()
        assert all(torch.equal(read[name], value) for name, value in wanted.items())

    @rule()
    def moving_by_hand_moves_everything_or_nothing(self) -> None:
        away = [name for name, tensor in self.model.named_parameters() if tensor.is_meta]
        if away:
            with pytest.raises(RuntimeError, match="offloaded"):
                self.model.to("cpu")
        else:
            self.model.to("cpu")


def tie_like(model: nn.Module, plain: nn.Module) -> None:
    for first, *rest in find_tied_parameters(plain):
        owner, leaf = owner_and_leaf(model, first)
        for name in rest:
            other, its_leaf = owner_and_leaf(model, name)
            other._parameters[its_leaf] = owner._parameters[leaf]


class OneTruthWithAnAccelerator(OneTruth):
    devices = ("cpu", "disk", 0)  # of two, the parts of a layer may not be apart


SETTINGS = settings(
    max_examples=30, stateful_step_count=12,
    suppress_health_check=[HealthCheck.too_slow, HealthCheck.data_too_large, HealthCheck.filter_too_much],
)  # fmt: skip


def test_a_model_on_the_cpu_and_the_disk_holds_what_a_plain_model_holds() -> None:
    run_state_machine_as_test(OneTruth, settings=SETTINGS)


def test_a_model_on_an_accelerator_too_holds_what_a_plain_model_holds(fake: FakeAccelerator) -> None:
    run_state_machine_as_test(OneTruthWithAnAccelerator, settings=SETTINGS)
