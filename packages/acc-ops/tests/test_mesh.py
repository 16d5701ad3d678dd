"""Degrees fit the world or are refused; a mesh has their names and sizes."""

from __future__ import annotations

import pytest
import torch.distributed as dist
from hypothesis import given
from hypothesis import strategies as st

from acc_ops.mesh import build_mesh, mesh_shape
from acc_ops.rendezvous import WorldError
from acc_ops.world import World, current_world


def test_degrees_must_make_the_world() -> None:
    assert mesh_shape({"dp": 2, "tp": 4}, 8) == {"dp": 2, "tp": 4}
    with pytest.raises(ValueError, match="dp=2 x tp=2 make 4 ranks, but the world has 8"):
        mesh_shape({"dp": 2, "tp": 2}, 8)


@given(st.lists(st.integers(1, 6), min_size=1, max_size=4), st.data())
def test_one_degree_can_be_what_remains(degrees: list[int], data: st.DataObject) -> None:
    size = 1
    for degree in degrees:
        size *= degree
    names = {f"axis{i}": degree for i, degree in enumerate(degrees)}
    open_axis = data.draw(st.sampled_from(sorted(names)))
    assert mesh_shape({**names, open_axis: -1}, size) == names


@pytest.mark.parametrize(
    ("degrees", "said"),
    [
        ({}, "at least one axis"),
        ({"dp": 0}, "'dp'.*0"),
        ({"dp": True}, "'dp'.*True"),
        ({"dp": -1, "tp": -1}, "only one degree may be -1"),
        ({"dp": -1, "tp": 3}, "tp=3 make 3 ranks, but the world has 8"),
    ],
)
def test_degrees_that_mean_nothing_are_named(degrees: dict[str, int], said: str) -> None:
    with pytest.raises(ValueError, match=said):
        mesh_shape(degrees, 8)


def test_a_mesh_without_a_process_group_says_what_to_do() -> None:
    with pytest.raises(WorldError, match="join_world"):
        build_mesh({"dp": 1})


def test_a_mesh_has_the_names_and_sizes_of_its_degrees(gloo_group: None) -> None:
    mesh = build_mesh({"dp": -1, "tp": 1})
    assert mesh.mesh_dim_names == ("dp", "tp")
    assert tuple(mesh.mesh.shape) == (1, 1)
    assert isinstance(current_world(), World)
    assert dist.is_initialized()
