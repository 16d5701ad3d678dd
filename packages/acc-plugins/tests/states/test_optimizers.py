from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from acc_plugins.states.names import Names, ParameterNames
from acc_plugins.states.optimizers import (
    check_fits,
    open_optimizer,
    saved_keys,
    state_by_name,
    state_to_load,
    state_to_load_by_name,
)

OPTIMIZERS: dict[str, Callable[[Any], Any]] = {
    "adam": lambda p: torch.optim.Adam(p, lr=0.01, amsgrad=True),
    "sgd": lambda p: torch.optim.SGD(p, lr=0.1, momentum=0.9),
    "adagrad": lambda p: torch.optim.Adagrad(p, lr=0.1),
    "adafactor": lambda p: torch.optim.Adafactor(p, lr=0.1),
    "learning rate as a tensor": lambda p: torch.optim.Adam(p, lr=torch.tensor(0.01), foreach=False),
}


def _model() -> nn.Module:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(3, 4), nn.Tanh(), nn.Linear(4, 2))
    model[0].bias.requires_grad_(False)
    return model


def _groups(model: nn.Module) -> list[dict[str, Any]]:
    """All parameters, also the frozen one that never gets a state, in another order than the model's."""
    return [
        {"params": [model[2].weight, model[0].bias]},
        {"params": [model[0].weight, model[2].bias], "weight_decay": 0.1},
    ]


def _names(model: nn.Module, optimizer: Any) -> Names:
    names = ParameterNames()
    names.add([model])
    return names.of(optimizer)


def _step(model: nn.Module, optimizer: Any, seed: int) -> None:
    x = torch.randn(5, 3, generator=torch.Generator().manual_seed(seed))
    model(x).square().mean().backward()
    optimizer.step()
    optimizer.zero_grad()


def _write(folder: Path, kind: str, optimizer: Any, names: Names, write_shards: Any) -> None:
    if kind == "by place":
        torch.save(optimizer.state_dict(), folder / "optimizer.bin")
        return
    state = state_by_name(optimizer, names)
    if kind == "by name":
        torch.save(state, folder / "optimizer.bin")
        return
    entries: dict[Any, Any] = {}
    for name, parts in state["state"].items():
        entries.update({("optimizer", "state", name, part): value for part, value in parts.items()})
    for place, group in enumerate(state["param_groups"]):
        entries.update({("optimizer", "param_groups", place, key): value for key, value in group.items()})
    chunks = {key: [((0, *[0] * (v.dim() - 1)), (1, *v.shape[1:])), ((1, *[0] * (v.dim() - 1)), (v.shape[0] - 1, *v.shape[1:]))]
              for key, v in entries.items() if isinstance(v, Tensor) and v.dim() and v.shape[0] > 1}  # fmt: skip
    write_shards(folder / "optimizer_0", entries, chunks)


@pytest.mark.parametrize("kind", ["by place", "by name", "shards"])
@pytest.mark.parametrize("name", OPTIMIZERS)
def test_a_loaded_optimizer_takes_the_same_steps(
    tmp_path: Path, write_shards: Any, kind: str, name: str
) -> None:
    model = _model()
    optimizer = OPTIMIZERS[name](_groups(model))
    for seed in range(2):
        _step(model, optimizer, seed)
    _write(tmp_path, kind, optimizer, _names(model, optimizer), write_shards)
    other = _model()
    other.load_state_dict(model.state_dict())
    again = OPTIMIZERS[name](_groups(other))
    for group in again.param_groups:
        group["lr"] = 123.0
    again.load_state_dict(state_to_load(open_optimizer(tmp_path, "optimizer"), again, _names(other, again)))
    (tmp_path / "optimizer.bin").unlink(missing_ok=True)  # nothing is read later
    for seed in range(2, 5):
        _step(model, optimizer, seed)
        _step(other, again, seed)
    assert all(torch.equal(value, other.state_dict()[key]) for key, value in model.state_dict().items())


def test_parameters_that_shared_a_value_each_have_their_own(tmp_path: Path) -> None:
    model = _model()
    optimizer = OPTIMIZERS["adam"](_groups(model))
    _step(model, optimizer, 0)
    shared = optimizer.state[model[2].weight]["step"]
    for state in optimizer.state.values():
        state["step"] = shared
    torch.save(optimizer.state_dict(), tmp_path / "optimizer.bin")
    state = state_to_load(open_optimizer(tmp_path, "optimizer"), optimizer, _names(model, optimizer))
    steps = [entry["step"].data_ptr() for entry in state["state"].values()]
    assert len(set(steps)) == len(steps)


def test_places_in_a_file_become_names(tmp_path: Path) -> None:
    model = _model()
    optimizer = OPTIMIZERS["sgd"](_groups(model))
    _step(model, optimizer, 0)
    torch.save(optimizer.state_dict(), tmp_path / "optimizer.bin")
    named = state_to_load_by_name(open_optimizer(tmp_path, "optimizer"), _names(model, optimizer))
    assert sorted(named["state"]) == ["0.weight", "2.bias", "2.weight"]
    assert [group["params"] for group in named["param_groups"]] == [
        ["2.weight", "0.bias"],
        ["0.weight", "2.bias"],
    ]
    assert torch.equal(
        named["state"]["2.bias"]["momentum_buffer"], optimizer.state[model[2].bias]["momentum_buffer"]
    )


@pytest.mark.parametrize("kind", ["by place", "by name"])
def test_another_number_of_groups_is_an_error(tmp_path: Path, write_shards: Any, kind: str) -> None:
    model = _model()
    optimizer = OPTIMIZERS["sgd"](model.parameters())
    _write(tmp_path, kind, optimizer, _names(model, optimizer), write_shards)
    with pytest.raises(ValueError, match="has 1 parameter groups, the optimizer has 2"):
        saved_keys(open_optimizer(tmp_path, "optimizer"), _names(model, OPTIMIZERS["sgd"](_groups(model))))


def test_other_parameters_are_an_error_that_names_them(tmp_path: Path, write_shards: Any) -> None:
    model = _model()
    some, others = OPTIMIZERS["sgd"](model[0].parameters()), OPTIMIZERS["sgd"](model[2].parameters())
    _write(tmp_path, "by name", some, _names(model, some), write_shards)
    with pytest.raises(
        ValueError, match=r"lacks \['2\.bias', '2\.weight'\], and has \['0\.bias', '0\.weight'\]"
    ):
        check_fits(open_optimizer(tmp_path, "optimizer"), others, _names(model, others))
    _write(tmp_path, "by place", some, _names(model, some), write_shards)
    with pytest.raises(ValueError, match="has 2 parameters, that of the optimizer has 4"):
        check_fits(
            open_optimizer(tmp_path, "optimizer"),
            OPTIMIZERS["sgd"](model.parameters()),
            [["a", "b", "c", "d"]],
        )


def test_a_state_of_another_shape_is_an_error_before_anything_is_read(tmp_path: Path) -> None:
    model = _model()
    optimizer = OPTIMIZERS["adam"](model.parameters())
    _step(model, optimizer, 0)
    torch.save(optimizer.state_dict(), tmp_path / "optimizer.bin")
    wider = nn.Sequential(nn.Linear(3, 9), nn.Tanh(), nn.Linear(9, 2))
    other = OPTIMIZERS["adam"](wider.parameters())
    with pytest.raises(ValueError, match=r"exp_avg of shape \(4, 3\) for 0\.weight, whose shape is \(9, 3\)"):
        check_fits(open_optimizer(tmp_path, "optimizer"), other, _names(wider, other))


def test_a_file_with_more_than_plain_data_is_refused(tmp_path: Path) -> None:
    torch.save({"state": {}, "param_groups": [], "code": _model}, tmp_path / "optimizer_1.bin")
    with pytest.raises(ValueError, match=r"optimizer_1\.bin holds objects that torch does not load"):
        open_optimizer(tmp_path, "optimizer_1")


def test_a_file_that_holds_no_optimizer_is_an_error(tmp_path: Path) -> None:
    torch.save({"weight": torch.ones(2)}, tmp_path / "optimizer.bin")
    with pytest.raises(ValueError, match="holds no optimizer's state: it has 'weight'"):
        open_optimizer(tmp_path, "optimizer")


def test_what_an_optimizer_keeps_beside_its_groups_comes_back(tmp_path: Path) -> None:
    model = _model()
    optimizer = OPTIMIZERS["sgd"](model.parameters())
    torch.save({**optimizer.state_dict(), "round": 3, "mean": torch.ones(2)}, tmp_path / "optimizer.bin")
    state = state_to_load(open_optimizer(tmp_path, "optimizer"), optimizer, _names(model, optimizer))
    assert state["round"] == 3
    assert torch.equal(state["mean"], torch.ones(2))


def test_tensors_that_are_there_are_filled_and_the_state_is_not_in_memory_twice(tmp_path: Path) -> None:
    model = _model()
    optimizer = OPTIMIZERS["adam"](model.parameters())
    _step(model, optimizer, 0)
    torch.save(optimizer.state_dict(), tmp_path / "optimizer.bin")
    own = {
        name: value
        for state in optimizer.state.values()
        for name, value in state.items()
        if isinstance(value, Tensor)
    }
    before = {name: value.clone() for name, value in own.items()}
    where = {name: value.data_ptr() for name, value in own.items()}
    _step(model, optimizer, 1)
    saved = open_optimizer(tmp_path, "optimizer")
    optimizer.load_state_dict(state_to_load(saved, optimizer, _names(model, optimizer)))
    last = list(optimizer.state.values())[-1]
    assert {name: last[name].data_ptr() for name in own} == where
    assert all(torch.equal(last[name], before[name]) for name in own)


def test_what_was_opened_is_not_opened_again_unless_it_changed(tmp_path: Path) -> None:
    model = _model()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.5)
    file = tmp_path / "optimizer.bin"
    torch.save(optimizer.state_dict(), file)
    opened = open_optimizer(tmp_path, "optimizer")
    assert opened.latest(tmp_path, "optimizer") is opened
    file.unlink()
    optimizer.param_groups[0]["lr"] = 0.25
    torch.save(optimizer.state_dict(), file)
    assert opened.latest(tmp_path, "optimizer").groups[0]["lr"] == 0.25
    file.unlink()
    with pytest.raises(FileNotFoundError):
        opened.latest(tmp_path, "optimizer")
