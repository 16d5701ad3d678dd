"""The real weights of offloaded models."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from torch import nn

from acc_bigmodel import (
    cpu_offload,
    disk_offload,
    get_state_dict_from_offload,
    get_state_dict_offloaded_model,
    save_weights,
)


def test_every_weight_is_found_wherever_it_is(tied_model: nn.Module, tmp_path: Path) -> None:
    wanted = {name: value.clone() for name, value in tied_model.state_dict().items()}
    disk_offload(tied_model, tmp_path)
    state = get_state_dict_offloaded_model(tied_model)
    assert list(state) == list(wanted)
    assert all(torch.equal(state[name], value) for name, value in wanted.items())
    save_weights(state, tmp_path / "out", "model")


def test_what_has_no_values_is_left_out_and_named(
    empty_model: nn.Module, caplog: pytest.LogCaptureFixture
) -> None:
    state = get_state_dict_offloaded_model(empty_model)
    assert set(state) == {"norm.running_mean", "norm.running_var", "norm.num_batches_tracked"}
    assert "embed.weight" in caplog.text


@pytest.mark.parametrize("offloaded", [True, False])
@pytest.mark.parametrize("named", ["layers.0.up", "layers.0.up.weight"])
def test_the_entries_of_one_module_are_filled(tied_model: nn.Module, offloaded: bool, named: str) -> None:
    weight = tied_model.layers[0].up.weight.detach().clone()
    if offloaded:
        cpu_offload(tied_model)
    state = {"layers.0.up.weight": None, "layers.0.down.weight": None}
    assert get_state_dict_from_offload(tied_model.layers[0].up, named, state) is state
    assert torch.equal(state["layers.0.up.weight"], weight)
    assert state["layers.0.down.weight"] is None
    assert set(state) == {"layers.0.up.weight", "layers.0.down.weight"}
