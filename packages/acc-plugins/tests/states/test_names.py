from __future__ import annotations

import gc

import pytest
import torch
from torch import nn

from acc_plugins.states.names import ParameterNames, inner_optimizer, plain_name, stem_and_index


def test_parts_that_wrappers_put_into_a_name_are_left_out() -> None:
    assert (
        plain_name("_fsdp_wrapped_module.blocks.0._checkpoint_wrapped_module.up._orig_mod.weight")
        == "blocks.0.up.weight"
    )
    assert plain_name("my_orig_model.module.weight") == "my_orig_model.module.weight"


@pytest.mark.parametrize(
    ("name", "told"), [("model", ("model", 0)), ("model_12", ("model", 12)), ("my_model_0", ("my_model", 0))]
)
def test_the_number_at_the_end_of_a_name_is_the_place_of_the_object(name: str, told: tuple[str, int]) -> None:
    assert stem_and_index(name) == told


def test_an_empty_name_is_an_error() -> None:
    with pytest.raises(ValueError, match="must not be empty"):
        stem_and_index("")


def test_names_come_in_the_order_of_the_optimizers_groups() -> None:
    model = nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2))
    groups = [{"params": list(model[1].parameters())}, {"params": [model[0].bias]}]
    names = ParameterNames()
    names.add([model])
    assert names.of(torch.optim.SGD(groups, lr=0.1)) == [["1.weight", "1.bias"], ["0.bias"]]


def test_names_are_those_before_the_parameters_were_replaced() -> None:
    model = nn.Linear(2, 2)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    names = ParameterNames()
    names.note([model], [optimizer])
    optimizer.param_groups[0]["params"] = [
        nn.Parameter(torch.zeros(6))
    ]  # as a flat parameter that no model shows
    names.add([model])
    assert names.of(optimizer) == [["weight", "bias"]]


def test_an_optimizer_that_was_prepared_before_its_model_is_known_too() -> None:
    model = nn.Linear(2, 2)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    names = ParameterNames()
    names.note([], [optimizer])
    names.note([model], [])
    optimizer.param_groups[0]["params"] = [nn.Parameter(torch.zeros(6))]
    assert names.of(optimizer) == [["weight", "bias"]]


def test_parameters_of_several_models_in_one_optimizer_do_not_get_one_name() -> None:
    first, second = nn.Linear(2, 2), nn.Linear(2, 2)
    names = ParameterNames()
    names.add([first, second])
    both = torch.optim.SGD([*first.parameters(), second.weight], lr=0.1)
    assert names.of(both) == [["model_0.weight", "model_0.bias", "model_1.weight"]]
    assert names.of(torch.optim.SGD(second.parameters(), lr=0.1)) == [["weight", "bias"]]
    assert names.models_of(both) == [first, second]


def test_parameters_that_no_model_has_are_called_after_their_place() -> None:
    loose = [nn.Parameter(torch.ones(1)), nn.Parameter(torch.ones(1))]
    optimizer = torch.optim.SGD([{"params": loose[:1]}, {"params": loose[1:]}], lr=0.1)
    assert ParameterNames().of(optimizer) == [["parameter.0"], ["parameter.1"]]


def test_models_are_not_kept_alive() -> None:
    names = ParameterNames()
    model = nn.Linear(2, 2)
    names.add([model])
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    del model
    gc.collect()
    assert names.models_of(optimizer) == []


def test_an_optimizer_inside_a_wrapper_is_found() -> None:
    class Wrapper:
        def __init__(self, optimizer: object) -> None:
            self.optimizer = optimizer

    own = torch.optim.SGD([nn.Parameter(torch.ones(1))], lr=0.1)
    assert inner_optimizer(Wrapper(Wrapper(own))) is own
