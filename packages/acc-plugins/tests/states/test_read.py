from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from acc_bigmodel import save_weights
from acc_plugins.states.files import open_weights
from acc_plugins.states.names import plain_name
from acc_plugins.states.read import load_weights, ready_to_load


def _model() -> nn.Module:
    return nn.Sequential(nn.Linear(2, 3), nn.BatchNorm1d(3))


@pytest.fixture(params=["file", "shards"])
def saved(request: Any, tmp_path: Path, write_shards: Any) -> Any:
    """Writes a state dict as a whole file or as shards, and opens it."""

    def save(state: dict[str, torch.Tensor]) -> Any:
        if request.param == "file":
            save_weights(state, tmp_path, "model")
        else:
            write_shards(
                tmp_path / "pytorch_model_fsdp_0", {("model", name): value for name, value in state.items()}
            )
        return open_weights(tmp_path, "model")

    return save


def test_values_come_into_the_models_own_tensors(saved: Any) -> None:
    expected, model = _model().state_dict(), _model()
    before = {name: p.data_ptr() for name, p in model.named_parameters()}
    load_weights(model, saved(expected))
    assert all(torch.equal(value, expected[name]) for name, value in model.state_dict().items())
    assert {name: p.data_ptr() for name, p in model.named_parameters()} == before


def test_nothing_is_changed_when_a_name_is_missing_or_too_much(saved: Any) -> None:
    state = _model().state_dict()
    state["more"] = state.pop("0.weight")
    model = _model()
    before = {name: value.clone() for name, value in model.state_dict().items()}
    with pytest.raises(RuntimeError, match=r'(?s)Missing key\(s\).*"0.weight".*Unexpected key\(s\).*"more"'):
        load_weights(model, saved(state))
    assert all(torch.equal(value, before[name]) for name, value in model.state_dict().items())


def test_what_fits_is_loaded_when_it_need_not_be_strict(saved: Any) -> None:
    state = _model().state_dict()
    state["more"] = state.pop("0.weight")
    model = _model()
    result = load_weights(model, saved(state), strict=False)
    assert (result.missing_keys, result.unexpected_keys) == (["0.weight"], ["more"])
    assert torch.equal(model.state_dict()["0.bias"], state["0.bias"])


@pytest.mark.parametrize("strict", [True, False])
def test_another_shape_is_an_error_that_names_both(saved: Any, strict: bool) -> None:
    state = {**_model().state_dict(), "0.weight": torch.ones(5, 2)}
    model = _model()
    before = {name: value.clone() for name, value in model.state_dict().items()}
    with pytest.raises(
        RuntimeError,
        match=r"size mismatch for 0\.weight: the checkpoint has \(5, 2\), the model has \(3, 2\)",
    ):
        load_weights(model, saved(state), strict)
    assert all(torch.equal(value, before[name]) for name, value in model.state_dict().items())


def test_values_become_the_models_dtype(saved: Any) -> None:
    state = {
        name: value.double() if value.is_floating_point() else value
        for name, value in _model().state_dict().items()
    }
    model = _model()
    load_weights(model, saved(state))
    assert model.state_dict()["0.weight"].dtype == torch.float32
    assert torch.equal(model.state_dict()["0.weight"], state["0.weight"].float())


def test_a_tied_name_that_the_file_lacks_has_the_value_of_the_other(saved: Any) -> None:
    model = nn.Sequential(nn.Linear(2, 2, bias=False), nn.Linear(2, 2, bias=False))
    model[1].weight = model[0].weight
    load_weights(model, saved({"1.weight": torch.full((2, 2), 4.0)}))
    assert model[0].weight is model[1].weight
    assert model[0].weight[0, 0] == 4


def test_a_view_of_a_weight_under_another_name_is_found_by_the_weight_s(saved: Any) -> None:
    model: Any = nn.Linear(2, 3)
    model.register_buffer("copy", model.weight.detach())
    load_weights(model, saved({"weight": torch.full((3, 2), 2.0), "bias": torch.zeros(3)}))
    assert torch.equal(model.copy, torch.full((3, 2), 2.0))
    assert model.copy.data_ptr() == model.weight.data_ptr()


def test_a_lazy_layer_gets_its_shape_from_the_file(tmp_path: Path) -> None:
    save_weights({"weight": torch.full((3, 2), 2.0), "bias": torch.zeros(3)}, tmp_path, "model")
    model = nn.LazyLinear(3)
    load_weights(model, open_weights(tmp_path, "model"))
    assert torch.equal(model.weight, torch.full((3, 2), 2.0))


def test_old_batch_norms_without_a_count_are_loaded(saved: Any) -> None:
    state = _model().state_dict()
    del state["1.num_batches_tracked"]
    load_weights(_model(), saved(state))


class _Renaming(nn.Linear):
    def _load_from_state_dict(self, state_dict: Any, prefix: str, *others: Any) -> None:
        if prefix + "old" in state_dict:
            state_dict[prefix + "weight"] = state_dict.pop(prefix + "old")
        super()._load_from_state_dict(state_dict, prefix, *others)


def test_a_model_that_renames_while_it_loads_does_so(tmp_path: Path) -> None:
    save_weights({"0.old": torch.ones(2, 2), "0.bias": torch.ones(2)}, tmp_path, "model")
    model = nn.Sequential(_Renaming(2, 2))
    load_weights(model, open_weights(tmp_path, "model"))
    assert torch.equal(model.state_dict()["0.weight"], torch.ones(2, 2))


class _Extra(nn.Linear):
    def get_extra_state(self) -> Any:
        return {"scale": 2}

    def set_extra_state(self, state: Any) -> None:
        self.got = state


def test_extra_state_comes_out_of_shards(tmp_path: Path, write_shards: Any) -> None:
    state = {("model", name): value for name, value in _Extra(2, 2).state_dict().items()}
    write_shards(tmp_path / "pytorch_model_fsdp_0", {**state, ("model", "_extra_state"): {"scale": 7}})
    model = _Extra(2, 2)
    load_weights(model, open_weights(tmp_path, "model"))
    assert model.got == {"scale": 7}


def _compiled(model: nn.Module, inner: bool = True) -> Any:
    """With one layer compiled, or all of it."""
    if inner:
        model[0] = torch.compile(model[0], backend="eager")
        return model
    return torch.compile(model, backend="eager")


@pytest.mark.parametrize("reader", [None, True, False])
@pytest.mark.parametrize("writer", [None, True, False])
def test_what_is_compiled_where_makes_no_difference(saved: Any, writer: Any, reader: Any) -> None:
    source, model = _model(), _model()
    expected = {name: value.clone() for name, value in source.state_dict().items()}
    written = source if writer is None else _compiled(source, writer)
    load_weights(model if reader is None else _compiled(model, reader), saved(written.state_dict()))
    assert all(torch.equal(value, expected[plain_name(name)]) for name, value in model.state_dict().items())


def test_two_names_that_are_one_without_wrappers_are_an_error(saved: Any) -> None:
    state = {"weight": torch.ones(2, 2), "_orig_mod.weight": torch.zeros(2, 2)}
    model = nn.Linear(2, 2, bias=False)
    before = model.weight.clone()
    with pytest.raises(
        ValueError, match=r"_orig_mod\.weight and weight are both|weight and _orig_mod\.weight are both"
    ):
        load_weights(model, saved(state))
    assert torch.equal(model.weight, before)


class _Renamed(nn.Linear):
    """Reads files of an earlier version, where its weight was called `kernel`."""

    def _load_from_state_dict(self, state_dict: Any, prefix: str, *rest: Any) -> None:
        if f"{prefix}kernel" in state_dict:
            state_dict[f"{prefix}weight"] = state_dict.pop(f"{prefix}kernel")
        super()._load_from_state_dict(state_dict, prefix, *rest)


def test_a_compiled_module_that_renames_its_weights_finds_the_old_names(tmp_path: Path) -> None:
    save_weights({"0.kernel": torch.full((2, 2), 3.0)}, tmp_path, "model")
    model = _compiled(nn.Sequential(_Renamed(2, 2, bias=False)))
    load_weights(model, open_weights(tmp_path, "model"))
    assert model[0].weight.tolist() == [[3.0, 3.0]] * 2


class _Expanded(nn.Module):
    def __init__(self, value: float) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.full((2,), value))
        self.register_buffer("shown", torch.full((3, 1), value).expand(3, 4))


def test_what_lies_in_memory_once_and_is_shown_often_comes_back(saved: Any) -> None:
    model = _Expanded(1.0)
    own = model.shown
    result = load_weights(model, saved(_Expanded(2.0).state_dict()))
    assert model.shown is own
    assert own.stride() == (1, 0)
    assert torch.equal(own, torch.full((3, 4), 2.0))
    assert model.weight.tolist() == [2.0, 2.0]
    assert not result.missing_keys


def test_several_values_for_what_is_one_are_an_error_before_anything_is_changed(saved: Any) -> None:
    state = {**_Expanded(2.0).state_dict(), "shown": torch.arange(12.0).view(3, 4)}
    model = _Expanded(1.0)
    with pytest.raises(
        RuntimeError, match=r"shown is one value shown several times .* clone\(\) it in the model"
    ):
        load_weights(model, saved(state))
    assert model.weight.tolist() == [1.0, 1.0]


def test_nothing_is_read_or_changed_until_the_load_is_called(saved: Any) -> None:
    model, expected = _model(), _model().state_dict()
    before = {name: value.clone() for name, value in model.state_dict().items()}
    load = ready_to_load(model, saved(expected))
    assert all(torch.equal(value, before[name]) for name, value in model.state_dict().items())
    load()
    assert all(torch.equal(value, expected[name]) for name, value in model.state_dict().items())
