"""Which numbered checkpoints go when a new one is safe: a plan, made from what is known of them."""

from __future__ import annotations

from collections.abc import Sequence

from acc_plugins.options.project import CheckpointPolicy

from .layout import Project
from .listing import CheckpointInfo, by_metric


def policy_of(project: Project) -> CheckpointPolicy | None:
    """What the project says about old checkpoints; None: all stay."""
    if project.total_limit is not None:
        return CheckpointPolicy(last=project.total_limit)
    keep: CheckpointPolicy | None = project.keep
    return keep


def to_remove(found: Sequence[CheckpointInfo], newest: int, policy: CheckpointPolicy) -> list[CheckpointInfo]:
    """Which of the numbered ones before number `newest` go, by number: those that no rule of `policy` keeps.

    Of the `last`, whole ones stay before those that are not, new ones before old ones. The other rules keep whole ones only.
    """
    numbers = {one.path: one.number for one in found if one.number is not None and one.number <= newest}
    numbered = sorted((one for one in found if one.path in numbers), key=lambda one: numbers[one.path])
    older = [one for one in numbered if numbers[one.path] < newest]
    by_worth = sorted(older, key=lambda one: (one.whole, numbers[one.path]), reverse=True)
    kept = {one.path for one in by_worth[: policy.last - 1]}
    whole = [one for one in numbered if one.whole]
    kept |= {one.path for one in by_metric(whole, policy.mode)[: policy.best]}
    if policy.every is not None:
        kept |= {one.path for one in whole if numbers[one.path] % policy.every == 0}
    if policy.every_steps is not None:
        kept |= {one.path for one in _first_of_each_stretch(whole, policy.every_steps)}
    return [one for one in older if one.path not in kept]


def _first_of_each_stretch(whole: Sequence[CheckpointInfo], steps: int) -> list[CheckpointInfo]:
    """What was saved first at or after each multiple of `steps`: later saves do not change it."""
    first: dict[int, CheckpointInfo] = {}
    for one in whole:
        first.setdefault((one.step or 0) // steps, one)
    return list(first.values())
