"""What a policy promises holds after every save of a run, also where pruning has already taken others away."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from acc_plugins import CheckpointPolicy
from acc_trainer.checkpoint.layout import NotWholeError
from acc_trainer.checkpoint.listing import CheckpointInfo
from acc_trainer.checkpoint.manifest import Manifest
from acc_trainer.checkpoint.policy import policy_of, to_remove


def _info(number, step=0, metric=None, whole=True):
    return CheckpointInfo(
        path=Path(f"checkpoint_{number}"),
        manifest=Manifest(step=step, metric=metric),
        problem=None if whole else NotWholeError("a file is missing"),
    )


POLICIES = st.builds(
    CheckpointPolicy,
    last=st.integers(1, 4),
    every=st.none() | st.integers(1, 5),
    every_steps=st.none() | st.integers(1, 30),
    best=st.integers(0, 3),
    mode=st.sampled_from(["min", "max"]),
)
SAVES = st.lists(
    st.tuples(st.integers(0, 9), st.none() | st.integers(-3, 3).map(float), st.booleans()), max_size=25
)


@given(POLICIES, SAVES)
def test_after_every_save_exactly_what_the_rules_name_is_left(policy, saves):
    step, there, saved = 0, [], []
    for number, (steps, metric, damaged_later) in enumerate(saves):
        step += steps
        newest = _info(number, step, metric)
        there.append(newest)
        saved.append(newest)
        gone = to_remove(there, number, policy)
        assert newest not in gone
        there = [one for one in there if one not in gone]
        if damaged_later:  # it is whole when it is new; then somebody deletes a file
            there[-1] = saved[-1] = _info(number, step, metric, whole=False)
    if not saves or any(damaged for *_, damaged in saves):
        return
    sign = 1 if policy.mode == "min" else -1
    ranked = sorted(
        (one for one in saved if one.metric is not None), key=lambda one: (sign * one.metric, -one.number)
    )
    wanted = {one.number for one in (*saved[-policy.last :], *ranked[: policy.best])}
    if policy.every is not None:
        wanted |= {one.number for one in saved if one.number % policy.every == 0}
    if policy.every_steps is not None:
        stretches = [one.step // policy.every_steps for one in saved]
        wanted |= {stretches.index(stretch) for stretch in stretches}
    assert {one.number for one in there} == wanted


@given(POLICIES, st.lists(st.tuples(st.integers(0, 9), st.booleans()), min_size=1, max_size=12))
def test_a_damaged_checkpoint_never_costs_a_whole_one_its_place(policy, older):
    known = [_info(number, step, 1.0, whole) for number, (step, whole) in enumerate(older)]
    newest = _info(len(known), 100, 1.0)
    gone = to_remove([*known, newest], len(known), policy)
    kept = [one for one in known if one not in gone]
    whole = [one for one in known if one.whole]
    assert sum(one.whole for one in kept) >= min(len(whole), policy.last - 1)
    if any(not one.whole for one in kept):
        assert all(one in kept for one in whole)  # half ones only fill up what whole ones leave


def test_what_is_newer_than_the_one_just_saved_stays():
    assert to_remove([_info(0), _info(1), _info(9)], 1, CheckpointPolicy(last=1)) == [_info(0)]


@pytest.mark.parametrize(
    ("limit", "keep", "wanted"),
    [
        (None, None, None),
        (3, None, CheckpointPolicy(last=3)),
        (None, CheckpointPolicy(best=2), CheckpointPolicy(best=2)),
    ],
)
def test_total_limit_is_the_simple_case_of_a_policy(limit, keep, wanted):
    assert policy_of(SimpleNamespace(total_limit=limit, keep=keep)) == wanted
