from __future__ import annotations

import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn

from acc_hooks import tied_groups
from acc_hooks.ties import replace_tensors, shared_parameters, tie_again
from acc_ops.testing import count_calls


def test_names_that_share_a_parameter_or_a_buffer_are_a_group(tied):
    tied.register_buffer("mask", torch.ones(3))
    tied.middle.register_buffer("mask", tied.mask)
    assert tied_groups(tied) == [["mask", "middle.mask"], ["embed.weight", "head.weight"]]


def test_parameters_over_the_same_memory_are_tied_and_parts_of_it_are_not():
    storage = torch.zeros(4, 4)
    model = nn.Module()
    model.a, model.b = nn.Parameter(storage), nn.Parameter(storage)
    model.c = nn.Parameter(storage[:2])
    model.d = nn.Parameter(storage.t())
    assert tied_groups(model) == [["a", "b"]]


def test_a_module_under_two_names_makes_a_group_for_each_tensor():
    layer = nn.Linear(2, 2)
    assert tied_groups(nn.Sequential(layer, layer)) == [["0.weight", "1.weight"], ["0.bias", "1.bias"]]


def test_ties_on_meta_go_by_identity():
    with torch.device("meta"):
        model = nn.Sequential(
            nn.Linear(2, 2, bias=False), nn.Linear(2, 2, bias=False), nn.Linear(2, 2, bias=False)
        )
    model[2].weight = model[0].weight
    assert tied_groups(model) == [["0.weight", "2.weight"]]


def test_empty_tensors_are_not_tied_to_each_other():
    model = nn.Module()
    model.a, model.b = nn.Parameter(torch.empty(0)), nn.Parameter(torch.empty(0))
    assert tied_groups(model) == []


@settings(max_examples=50)
@given(st.lists(st.integers(0, 5), min_size=1, max_size=20))
def test_groups_are_exactly_the_equal_choices(choices):
    pool = [nn.Parameter(torch.zeros(1)) for _ in range(6)]
    model = nn.ParameterDict()
    for index, choice in enumerate(choices):
        model.register_parameter(f"p{index}", pool[choice])
    expected = [
        [f"p{index}" for index, other in enumerate(choices) if other == choice]
        for choice in dict.fromkeys(choices)
        if choices.count(choice) > 1
    ]
    assert tied_groups(model) == expected


def test_parameters_that_came_apart_are_tied_again_to_the_first(tied):
    (places,) = shared_parameters(tied)
    assert [place.name for place in places] == ["embed.weight", "head.weight"]
    for place in places:
        place.module._parameters[place.attribute] = nn.Parameter(torch.zeros(3, 3))
    tie_again(places)
    assert tied.embed.weight is tied.head.weight


def test_a_module_under_two_names_has_no_shared_places():
    layer = nn.Linear(2, 2)
    assert shared_parameters(nn.Sequential(layer, layer)) == []


def test_replaced_tensors_are_made_once_and_stay_tied(tied):
    tied.register_buffer("mask", torch.ones(3))
    tied.middle.register_buffer("mask", tied.mask)
    tied.register_parameter("absent", None)
    before = {name: tensor.clone() for name, tensor in tied.state_dict().items()}
    asked = []

    def doubled(tensor):
        asked.append(tensor)
        new = tensor.detach() * 2
        return nn.Parameter(new) if isinstance(tensor, nn.Parameter) else new

    groups = tied_groups(tied)
    replace_tensors(tied, doubled)
    assert len(asked) == len({id(tensor) for tensor in asked})
    assert tied_groups(tied) == groups
    assert tied.absent is None
    for name, tensor in tied.state_dict().items():
        assert torch.equal(tensor, before[name] * 2)


def test_the_work_grows_with_the_number_of_tensors_and_no_faster():
    def calls(count: int) -> int:
        model = nn.Module()
        for index in range(count):
            model.register_parameter(f"p{index}", nn.Parameter(torch.empty(1)))
        return count_calls(lambda: tied_groups(model))

    assert calls(8000) < 11 * calls(800)
