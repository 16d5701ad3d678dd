"""Device maps of real modules."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

from acc_bigmodel import (
    check_device_map,
    clean_device_map,
    compute_module_sizes,
    describe_device_map,
    expand_device_map,
    fallback_allocate,
    infer_auto_device_map,
    init_empty_weights,
    plan_model,
)
from acc_bigmodel.device_map import state_names
from acc_ops.testing import count_calls


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.q = nn.Linear(16, 16, bias=False)
        self.k = nn.Linear(16, 16, bias=False)


class Stack(nn.Module):
    def __init__(self, count: int) -> None:
        super().__init__()
        self.layers = nn.ModuleList([Block() for _ in range(count)])


class EncoderDecoder(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.encoder, self.decoder = Stack(4), Stack(4)
        for one, two in zip(self.encoder.layers, self.decoder.layers, strict=True):
            two.q.weight, two.k.weight = one.q.weight, one.k.weight


@pytest.mark.parametrize("whole", [None, "Block", ["Block"]])
@pytest.mark.parametrize("units", range(1, 14))
def test_tied_encoder_and_decoder_can_be_split_anywhere(
    units: int, whole: list[str] | None
) -> None:  # case big/04
    model, unit = EncoderDecoder(), 16 * 16 * 4
    device_map = infer_auto_device_map(model, {0: unit * units, 1: unit * units, "cpu": unit * 40}, whole)
    homes = expand_device_map(device_map, state_names(model))
    assert set(homes) == set(model.state_dict())
    for device, budget in {0: unit * units, 1: unit * units}.items():
        placed = {id(model.get_parameter(name)) for name, home in homes.items() if home == device}
        assert len(placed) * unit <= budget
    for name, home in homes.items():
        if name.startswith("encoder"):
            assert homes[name.replace("encoder", "decoder")] == home


def test_the_given_budgets_are_not_changed() -> None:  # case big/02
    budgets = {0: "1MiB", "cpu": "10MiB"}
    infer_auto_device_map(nn.Linear(4, 4), max_memory=budgets)
    assert budgets == {0: "1MiB", "cpu": "10MiB"}


def test_small_layers_use_a_small_device() -> None:  # case big/05
    with init_empty_weights():
        model = nn.Sequential(nn.Linear(512, 512), *[nn.Linear(16, 16) for _ in range(20)])
    big, small = (512 * 512 + 512) * 4, (16 * 16 + 16) * 4
    device_map = infer_auto_device_map(
        model, {0: small * 100, 1: big * 2, "cpu": big * 4}, clean_result=False
    )
    assert list(device_map.values()).count(0) == 20


def test_half_of_a_model_goes_to_disk_on_a_machine_without_accelerator(tied_model: nn.Module) -> None:
    total = compute_module_sizes(tied_model)[""]
    placement = plan_model(tied_model, {"cpu": total // 2}, no_split_module_classes=["Block"])
    assert placement.main == "cpu"
    assert placement.used_bytes["cpu"] + placement.reserve_bytes <= total // 2
    assert placement.used_bytes["disk"] > 0
    assert placement.devices.keys() == {*tied_model.state_dict(), "scale"}
    assert placement.devices["embed.weight"] == placement.devices["head.weight"]


def test_what_the_planner_returns_is_accepted(
    tied_model: nn.Module, caplog: pytest.LogCaptureFixture
) -> None:
    total = compute_module_sizes(tied_model)[""]
    for clean in (True, False):
        check_device_map(
            tied_model, infer_auto_device_map(tied_model, {"cpu": total // 2}, clean_result=clean)
        )
    assert not caplog.text


def test_verbose_prints_the_plan(tied_model: nn.Module, capsys: pytest.CaptureFixture[str]) -> None:
    infer_auto_device_map(tied_model, {"cpu": "1MB"}, verbose=True)
    assert capsys.readouterr().out.startswith("device")


def test_devices_in_any_form_are_one(tied_model: nn.Module) -> None:  # case big/12
    homes = expand_device_map(
        {"embed": torch.device("cuda", 1), "head": "cuda:1", "": torch.device("cpu")},
        ["embed.w", "head.w", "x"],
    )
    assert homes == {"embed.w": 1, "head.w": 1, "x": "cpu"}


def test_the_longest_key_wins() -> None:
    device_map = {"": "cpu", "a": 0, "a.b": 1, "a.b.w": "disk"}
    assert expand_device_map(device_map, ["a.b.w", "a.b.v", "a.c.w", "ab.w"]) == {
        "a.b.w": "disk",
        "a.b.v": 1,
        "a.c.w": 0,
        "ab.w": "cpu",
    }


def test_a_tensor_without_a_device_is_named(tied_model: nn.Module) -> None:
    with pytest.raises(ValueError, match=r"no device to 'embed\.weight'"):
        check_device_map(tied_model, {"layers": 0, "norm": 0, "head": 0})
    check_device_map(tied_model, {"": 0})


def test_a_key_that_names_nothing_is_said_with_the_closest(
    tied_model: nn.Module, caplog: pytest.LogCaptureFixture
) -> None:
    check_device_map(tied_model, {"": 0, "layer.1": 0})
    assert "'layer.1', which is not in the model: did you mean 'layers.1'?" in caplog.text


def test_a_device_that_is_none_is_named(tied_model: nn.Module) -> None:
    with pytest.raises(ValueError, match="'gpu' is no device"):
        check_device_map(tied_model, {"": "gpu"})


def test_cleaning_works_in_place() -> None:
    device_map = {"a.0": 1, "a.1": 1, "b.0": 0, "b.1": 1}
    assert clean_device_map(device_map) is device_map
    assert device_map == {"a": 1, "b.0": 0, "b.1": 1}
    below = {"a.0": 1, "a.1": 1, "b.0": 1, "b.1": 1}
    assert clean_device_map(below, "b") == {"a.0": 1, "a.1": 1, "b": 1}


def test_fallback_finds_the_first_that_fits_breadth_first() -> None:
    model = nn.ModuleDict({"big": nn.Sequential(nn.Linear(8, 8), nn.Linear(4, 4)), "small": nn.Linear(4, 5)})
    sizes, modules = compute_module_sizes(model), list(model.named_children())
    name, module, rest = fallback_allocate(modules, sizes, sizes["small"])
    assert (name, module, [n for n, _ in rest]) == ("small", model["small"], ["big"])
    name, module, rest = fallback_allocate(modules, sizes, sizes["big.1"])
    assert (name, module, [n for n, _ in rest]) == ("big.1", model["big"][1], ["big.0", "small"])
    assert fallback_allocate(modules, sizes, sizes["big.1"], ["Sequential"])[0] is None
    assert fallback_allocate(modules, sizes, "nonsense") == (None, None, modules)


def test_fallback_counts_what_is_tied() -> None:
    model = nn.ModuleDict(
        {"a": nn.Linear(4, 4, bias=False), "b": nn.Sequential(nn.Linear(4, 4, bias=False), nn.Linear(1, 1))}
    )
    model["b"][0].weight = model["a"].weight
    sizes, ties = compute_module_sizes(model), [["a.weight", "b.0.weight"]]
    name, *_ = fallback_allocate(list(model.named_children()), sizes, 63, tied_parameters=ties)
    assert name == "b.1"
    assert fallback_allocate(list(model.named_children()), sizes, 64, tied_parameters=ties)[0] == "a"


def test_any_map_can_be_shown(tied_model: nn.Module) -> None:
    placement = describe_device_map(tied_model, {"": 0, "layers.1": "disk", "layers.2.up": "cuda:1"})
    assert placement.devices["layers.1.down.bias"] == "disk"
    assert placement.devices["layers.2.down.bias"] == 0
    assert (placement.main, list(placement.budgets)) == (0, [0, 1, "disk"])
    assert "layers.1" in placement.table()


def test_the_work_of_planning_grows_with_the_modules_and_no_faster() -> None:  # case big/07
    def calls(count: int) -> int:
        with torch.device("meta"):
            model = nn.Sequential(*[Stack(32) for _ in range(count)])
        size = sum(p.numel() * p.element_size() for p in model.parameters())
        budgets = {0: size // 4, 1: size // 4, 2: size // 4, "cpu": size * 2}
        return count_calls(lambda: infer_auto_device_map(model, max_memory=budgets))

    assert calls(40) < 9 * calls(5)


def test_a_given_map_is_explained_as_given_and_says_what_it_streams() -> None:
    model = nn.Sequential(*[nn.Linear(16, 16, bias=False) for _ in range(3)])
    placement = describe_device_map(model, {"": "disk", "0": "cpu"}, max_memory={"cpu": "1KiB"})
    assert placement.why("1") == "1 is on disk: the device map says so; it takes 1.0 KiB there"
    assert "Running it needs 1.0 KiB on cpu for what is streamed there." in placement.table()
    assert "That is 1.0 KiB more than the budget of cpu." in placement.table()


def test_classes_of_which_the_model_has_none_are_said(caplog: pytest.LogCaptureFixture) -> None:
    infer_auto_device_map(nn.Sequential(Block()), {"cpu": "1GB"}, no_split_module_classes=["Blok"])
    assert "no_split_module_classes names Blok, but the model has no such module" in caplog.text
    assert "Block" in caplog.text
    caplog.clear()
    infer_auto_device_map(nn.Sequential(Block()), {"cpu": "1GB"}, no_split_module_classes=["Block", "Vision"])
    assert not caplog.text


@pytest.mark.parametrize(
    ("device_map", "said"),
    [({0: "cpu"}, "the key 0, but keys are names"), ([("", "cpu")], "must map names of modules to devices")],
)
def test_what_is_no_map_of_names_is_refused(device_map: Any, said: str) -> None:
    for ask in (check_device_map, describe_device_map):
        with pytest.raises(ValueError, match=said):
            ask(nn.Linear(2, 2), device_map)
