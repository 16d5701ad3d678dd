"""The ranks of a world share random generators."""

from __future__ import annotations

from collections.abc import Callable, Iterator

import pytest
import torch

from acc_ops.collectives import gather
from acc_ops.enums import RNGType
from acc_ops.rng_sharing import GeneratorMissing, synchronize_rng_state, synchronize_rng_states
from acc_ops.testing import run_threads
from acc_ops.world import current_world


@pytest.fixture(autouse=True)
def _state_as_before() -> Iterator[None]:
    state = torch.get_rng_state()
    yield
    torch.set_rng_state(state)


def test_ranks_take_over_rank_zeros_generator() -> None:
    def call() -> list[int]:
        generator = torch.Generator().manual_seed(10 + current_world().rank)
        synchronize_rng_states(["generator"], generator)
        return gather(torch.randint(1000, (1,), generator=generator)).tolist()

    for drawn in run_threads(3, call):
        assert len(set(drawn)) == 1


def test_torchs_own_generator_can_be_shared() -> None:
    torch.manual_seed(1)
    expected = torch.rand(1)
    torch.manual_seed(1)
    synchronize_rng_state(RNGType.TORCH)
    assert torch.equal(torch.rand(1), expected)


@pytest.mark.parametrize("kind", ["generator", "npu"])
def test_a_generator_that_is_not_there_is_named(kind: str) -> None:
    with pytest.raises(GeneratorMissing, match=f"'{kind}'"):
        synchronize_rng_state(RNGType(kind))
    assert issubclass(GeneratorMissing, AssertionError)


def test_an_unknown_name_is_refused_before_anything_is_sent() -> None:
    with pytest.raises(ValueError, match="dice"):
        synchronize_rng_states(["torch", "dice"])
    with pytest.raises(ValueError, match=r"one of torch, cuda, .* got None"):
        synchronize_rng_state()
    with pytest.raises(ValueError, match="'dice'"):
        synchronize_rng_states("dice")  # one name counts as a list of it


def errors_of_ranks(num_ranks: int, call: Callable[[int], None]) -> list[str]:
    """What each rank's `call(rank)` raises; the world has to work afterwards."""

    def work() -> str:
        with pytest.raises(Exception) as caught:
            call(current_world().rank)
        assert gather(torch.ones(1)).tolist() == [1.0] * num_ranks
        return f"{type(caught.value).__name__}: {caught.value}"

    return run_threads(num_ranks, work, timeout_s=10)


@pytest.mark.parametrize("without", [0, 2])
def test_a_rank_that_lacks_the_generator_is_an_error_on_every_rank(without: int) -> None:
    one, *others = errors_of_ranks(
        3,
        lambda rank: synchronize_rng_states(
            ["torch", "generator"], None if rank == without else torch.Generator()
        ),
    )
    assert set(others) == {one}
    assert one.startswith("MismatchError: in synchronize_rng_states: ")
    assert "cannot take part: GeneratorMissing: rng_type='generator' needs the generator itself" in one


def test_where_every_rank_lacks_it_each_says_so_itself() -> None:
    errors = errors_of_ranks(2, lambda rank: synchronize_rng_state("npu"))
    assert set(errors) == {
        "GeneratorMissing: rng_type='npu' is asked for, but this machine has no such device"
    }


def test_other_kinds_and_other_lists_are_an_error_on_every_rank() -> None:
    class Elsewhere:
        device = torch.device("cuda")

        def get_state(self) -> torch.Tensor:
            return torch.zeros(torch.get_rng_state().numel(), dtype=torch.uint8)  # only the kind differs

        def set_state(self, state: torch.Tensor) -> None:
            raise AssertionError("nothing may change")

    one, two = errors_of_ranks(
        2, lambda rank: synchronize_rng_state("generator", Elsewhere() if rank else torch.Generator())
    )
    assert one == two
    assert "'generator on cpu'" in one
    assert "'generator on cuda'" in one
    kinds: list[list[str]] = [["torch"], [], ["dice"]]
    for first in range(3):
        one, two = errors_of_ranks(
            2, lambda rank, first=first: synchronize_rng_states(kinds[(first + rank) % 3])
        )
        assert one == two


def test_nothing_changes_when_one_of_several_generators_is_missing() -> None:
    before = torch.get_rng_state()
    with pytest.raises(GeneratorMissing):
        synchronize_rng_states(["torch", "generator"])
    states = []

    def call(rank: int) -> None:
        own = torch.Generator().manual_seed(rank)
        states.append((own.get_state(), own))
        synchronize_rng_states(["generator", "npu"], own)

    errors_of_ranks(2, call)
    assert all(torch.equal(state, own.get_state()) for state, own in states)
    assert torch.equal(before, torch.get_rng_state())


@pytest.mark.parametrize("size", [1, 2])
def test_what_is_no_list_of_generators_is_named(size: int) -> None:
    with pytest.raises(TypeError, match=r"rng_types must be kinds of random generators.*got None"):
        run_threads(size, lambda: synchronize_rng_states(None))


def test_several_generators_travel_in_one_collective() -> None:
    calls: list[int] = []

    def work() -> None:
        comm = current_world().comm
        before = comm._number
        synchronize_rng_states(["torch", "generator"], torch.Generator())
        calls.append(comm._number - before)

    run_threads(2, work)
    assert max(calls) <= 2  # the header, and what does not fit into it
