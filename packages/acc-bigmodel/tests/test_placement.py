"""The planner, on names and bytes alone."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator
from typing import Any

import pytest

from acc_bigmodel.atoms import collapse, group_atoms
from acc_bigmodel.placement import Placement, PlacementError, plan
from acc_bigmodel.text import in_units
from acc_ops.testing import count_calls


def layers(*nbytes: int) -> dict[str, int]:
    return {f"layers.{i}.weight": size for i, size in enumerate(nbytes)}


def test_a_model_that_fits_exactly_is_not_offloaded() -> None:
    placement = plan(layers(4, 4, 4), {0: 12, "cpu": 100})
    assert set(placement.homes) == {0}
    assert placement.reserve_bytes == 0
    assert placement.device_map() == {"": 0}


def test_room_for_the_largest_streamed_layer_is_kept_on_the_main_device() -> None:
    placement = plan(layers(4, 4, 4, 4), {0: 12, "cpu": 100})
    assert placement.homes == [0, 0, "cpu", "cpu"]
    assert placement.reserve_bytes == 4
    assert placement.streams("cpu")


def test_buffers_that_stay_need_room_beside_the_streamed_layer() -> None:
    sizes = {"a.weight": 4, "b.weight": 4, "b.buffer": 2, "c.weight": 4, "c.buffer": 2}
    placement = plan(sizes, {0: 12, "cpu": 100}, staying={"b.buffer", "c.buffer"})
    assert (placement.homes, placement.reserve_bytes) == ([0, "cpu", "cpu"], 8)


def test_no_more_is_kept_than_the_plan_streams_although_a_smaller_reserve_would_not_do() -> None:
    placement = plan({"w": 2, "a.buffer": 1, "b.w": 5}, {0: 7, "cpu": None}, staying={"a.buffer"})
    assert placement.homes == [
        "cpu",
        0,
        "cpu",
    ]  # with 5 kept, w were there, and the buffer beside what is streamed
    assert placement.reserve_bytes == 5


def test_a_device_takes_small_layers_behind_one_too_large_for_it() -> None:  # case big/05
    placement = plan(layers(100, 1, 1, 1), {0: 50, 1: 200})
    assert placement.homes == [1, 0, 0, 0]


def test_gaps_are_filled_when_the_order_alone_does_not_fit() -> None:
    placement = plan(layers(6, 5, 4), {0: 10, 1: 5})
    assert sorted(map(str, placement.homes)) == ["0", "0", "1"]
    assert placement.used_bytes == {0: 10, 1: 5}


def test_ties_and_blocks_are_placed_as_one_and_counted_once() -> None:
    sizes = {"embed.w": 6, "mid.a.w": 3, "mid.b.w": 3, "head.w": 6, "head.bias": 1}
    placement = plan(sizes, {0: 7, "cpu": 6}, ties=[["embed.w", "head.w"]], blocks=["mid"], reserve=False)
    assert placement.devices == {
        "embed.w": 0,
        "head.w": 0,
        "head.bias": 0,
        "mid.a.w": "cpu",
        "mid.b.w": "cpu",
    }
    assert placement.device_map(clean=False) == {"embed": 0, "head": 0, "mid": "cpu"}


def test_own_tensors_of_a_split_module_have_their_own_keys() -> None:
    placement = plan({"m.scale": 1, "m.a.w": 2, "m.b.w": 2}, {0: 3, "cpu": 9}, reserve=False)
    assert placement.device_map() == {"m.scale": 0, "m.a": 0, "m.b": "cpu"}


def test_an_impossible_budget_says_what_would_do() -> None:
    sizes, budgets = layers(4, 4, 4), {0: 5, "cpu": 5}
    with pytest.raises(
        PlacementError, match=r"needs 12 B.*0: 5 B, cpu: 5 B.*raise the budget of cpu by (\d+) B"
    ) as error:
        plan(sizes, budgets)
    extra = int(str(error.value).split("(")[1].split(" bytes")[0])
    assert plan(sizes, {**budgets, "cpu": 5 + extra}).homes
    with pytest.raises(PlacementError):
        plan(sizes, {**budgets, "cpu": 5 + extra - 1})


def test_a_change_of_no_more_than_what_is_missing_is_found_where_it_would_do() -> None:
    with pytest.raises(PlacementError, match=r"A change that would do: raise the budget of cpu by 1 B "):
        plan(layers(3, 4, 5), {"cpu": 6, "disk": 5}, reserve=False)


def test_atoms_are_looked_through_once_however_many_devices_there_are() -> None:
    class Counted(list):
        passes = 0

        def __iter__(self) -> Iterator[Any]:
            Counted.passes += 1
            return super().__iter__()

    placement = plan(layers(*[1] * 64), {**dict.fromkeys(range(32), 2), "cpu": None}, reserve=False)
    placement = dataclasses.replace(placement, homes=Counted(placement.homes))
    placement.device_map()
    placement.table()
    placement.svg()
    assert Counted.passes < 8


@pytest.mark.parametrize("budgets", [{}, {"cpu": -1}])
def test_budgets_that_make_no_sense_are_refused(budgets: dict) -> None:
    with pytest.raises(PlacementError):
        plan(layers(1), budgets)


def test_streaming_that_cannot_fit_is_said() -> None:
    placement = plan(layers(100, 10), {0: 50, "cpu": 200})
    assert placement.homes == ["cpu", 0]
    assert "Streaming needs 100 B on 0" in placement.notes[0]


def test_table_and_reasons_name_devices_layers_and_bytes() -> None:
    placement = plan(layers(2048, 2048, 2048), {0: 4096, "cpu": None})
    head, _, first, second, *rest = placement.table().splitlines()
    assert head.split()[:3] == ["device", "used", "budget"]
    assert first.split()[:4] == ["0", "2.0", "KiB", "4.0"]
    assert "no limit" in second
    assert second.split()[-2:] == ["4.0", "KiB"]
    assert "2.0 KiB of 0 are kept free" in rest[0]
    assert placement.why("layers.2").startswith("layers.2 is on cpu: ")
    assert "0 had 0 B left for layers.1 (2.0 KiB)" in placement.why("layers.1.weight")
    with pytest.raises(KeyError, match="nowhere"):
        placement.why("nowhere")


def test_budgets_are_not_changed() -> None:
    budgets = {0: 4, "cpu": 100}
    plan(layers(4, 4), budgets)
    assert budgets == {0: 4, "cpu": 100}


def test_collapse_needs_all_names_below_on_one_device() -> None:
    device_map = {"a.x": 0, "a.y": 0, "b.x": 0, "b.y": 1, "c.x": 1}
    assert collapse(device_map) == {"a": 0, "b.x": 0, "b.y": 1, "c.x": 1}
    assert collapse({"a.x": 0, "a.y": 0, "b.x": 0, "b.y": 0}, "a") == {"a": 0, "b.x": 0, "b.y": 0}
    assert collapse({"a": 0, "a.x": 1, "b": 0}) == {"a": 0, "a.x": 1, "b": 0}
    assert collapse({"a": "cpu", "b": "cpu"}) == {"": "cpu"}


def test_units() -> None:
    assert [in_units(n) for n in (0, 1023, 1536, 3 * 2**20)] == ["0 B", "1023 B", "1.5 KiB", "3.0 MiB"]


def test_planning_is_linear() -> None:
    def calls(count: int) -> int:
        sizes = {f"layers.{i}.experts.{j}.w": 4 for i in range(count) for j in range(32)}
        ties = [[f"layers.{i}.experts.0.w", f"layers.{i}.experts.1.w"] for i in range(count)]
        budgets = {0: count * 32, 1: count * 32, "cpu": None}
        return count_calls(lambda: plan(sizes, budgets, ties=ties).device_map())

    assert calls(800) < 9 * calls(100)


def test_atoms_list_their_tensors_in_order() -> None:
    atoms = group_atoms({"b.w": 1, "a.w": 2, "b.v": 3}, [])
    assert [atoms.tensors_of(i) for i in range(len(atoms))] == [["b.w", "b.v"], ["a.w"]]
    assert atoms.nbytes == [4, 2]


def test_the_same_placement_gives_the_same_picture() -> None:
    def made() -> Placement:
        return plan(layers(3, 4, 5), {0: 9, "cpu": None})

    assert made().svg("<title> & more") == made().svg("<title> & more")
    assert "&lt;title&gt; &amp; more" in made().svg("<title> & more")
