"""The fullest device is as empty as a split into runs allows."""

from __future__ import annotations

import itertools

from hypothesis import given, settings
from hypothesis import strategies as st

from acc_bigmodel.atoms import group_atoms
from acc_bigmodel.balance import balanced_loads


@settings(max_examples=300)
@given(
    st.lists(st.integers(0, 9), min_size=1, max_size=8),
    st.lists(st.integers(0, 40), min_size=1, max_size=4),
    st.booleans(),
)
def test_loads_are_the_best_there_are(nbytes: list[int], budgets: list[int], low_zero: bool) -> None:
    atoms = group_atoms({f"l{i}.w": size for i, size in enumerate(nbytes)})
    splits = [
        loads
        for cuts in itertools.combinations_with_replacement(range(len(nbytes) + 1), len(budgets) - 1)
        for loads in [[sum(nbytes[a:b]) for a, b in itertools.pairwise((0, *cuts, len(nbytes)))]]
        if all(load <= budget for load, budget in zip(loads, budgets, strict=True))
    ]
    loads = balanced_loads(atoms, budgets, low_zero=low_zero)
    if not splits:
        assert loads is None
        return
    assert loads is not None
    assert sum(loads) == sum(nbytes)
    assert all(load <= budget for load, budget in zip(loads, budgets, strict=True))
    if low_zero and len(budgets) > 1:
        least = min(split[0] for split in splits)
        assert loads[0] == least
        splits = [split[1:] for split in splits if split[0] == least]
        loads = loads[1:]
    assert max(loads) == min(max(split) for split in splits)
