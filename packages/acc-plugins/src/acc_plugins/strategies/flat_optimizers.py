"""Optimizers follow their parameters into FSDP1's flat ones, or are told why they cannot.

[Note: state from before] Some optimizers make their state when they are built (Adagrad: one sum for each number). FSDP1 does not shard it, but where every
number of it is the same, it is made again in the shape that the parameter has now. What steps have left is not like that, and is refused.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from acc_ops.comm import Comm
from acc_plugins.strategies.begun_states import filled, summary_of


class ParameterPlaces:
    """Which parameter stood where before the models were wrapped. Modules stay the same objects, so that a place is found again."""

    def __init__(self, models: Iterable[nn.Module]) -> None:
        self._parameters: dict[tuple[int, str], Tensor] = {}
        self._names: dict[int, str] = {}
        self._shapes: dict[int, torch.Size] = {}  # torch gives a parameter that stays visible another one
        for model in models:
            self._names.update({id(p): name for name, p in model.named_parameters()})
            self._shapes.update({id(p): p.shape for p in model.parameters()})
            for module in model.modules():
                own = ((name, p) for name, p in module._parameters.items() if p is not None)
                self._parameters.update({(id(module), name): p for name, p in own})

    def check(
        self, optimizers: Sequence[Optimizer], flat: Iterable[Sequence[Tensor]], merged: bool, comm: Comm
    ) -> None:
        """Whether `move` can be called once the parameters of each of `flat` have become one. Every rank of `comm` calls it, before that.

        Raises ValueError, on every rank as on rank 0, for an optimizer that has made steps already, and, where the originals are not shown any
        more (`merged`), for one that treats the parameters of a flat one differently.
        """
        homes = [list(one) for one in flat] if merged else [[p] for one in flat for p in one]
        for optimizer in optimizers if merged else ():
            groups = optimizer.param_groups
            home = {id(p): index for index, group in enumerate(groups) for p in group["params"]}
            for originals in homes:
                self._refuse_differences(optimizer, originals, home)
        self._told_states(optimizers, homes, comm)

    def move(self, optimizers: Sequence[Optimizer], units: Iterable[Any], comm: Comm) -> None:
        """Give `optimizers` the flat parameters of the FSDP modules `units` for the originals in them, after `check`. Every rank of `comm` calls it."""
        moved: list[tuple[Any, list[Tensor]]] = []
        homes: list[tuple[Any, list[Tensor]]] = []  # what is trained now, and the originals in it
        for unit in units:
            flat = unit._handle.flat_param
            spots = [(id(info.module), info.param_name) for info in flat._param_infos]
            originals = [self._parameters[spot] for spot in spots if spot in self._parameters]
            if flat._params is not None:  # use_orig_params=True
                homes += [(p, [p]) for p in originals]
            elif originals:
                moved.append((flat, originals))
        homes += moved
        told = self._told_states(optimizers, [originals for _, originals in homes], comm)
        for optimizer, states in zip(optimizers, told, strict=True):
            for group, parameters in zip(optimizer.param_groups, _groups(optimizer, moved), strict=True):
                group["params"] = parameters
            for (new, originals), state in zip(homes, states, strict=True):
                for p in originals:
                    optimizer.state.pop(p, None)
                if state:
                    optimizer.state[new] = {name: filled(value, new) for name, value in state.items()}

    def _refuse_differences(
        self, optimizer: Optimizer, originals: Sequence[Tensor], home: dict[int, int]
    ) -> None:
        trained = [p for p in originals if id(p) in home]
        if not trained:
            return
        kind = type(optimizer).__name__
        missing = [p for p in originals if id(p) not in home]
        if missing:
            raise ValueError(
                f"{kind} trains {self._name(trained[0])} but not {self._name(missing[0])}, and FSDP puts both into one flat parameter: give "
                "use_orig_params=True (FSDP_USE_ORIG_PARAMS), or wrap them apart by auto_wrap_policy"
            )
        first = _settings(optimizer.param_groups[home[id(trained[0])]])
        for p in trained[1:]:
            other = _settings(optimizer.param_groups[home[id(p)]])
            if other != first:
                name = next(key for key in first if first[key] != other.get(key))
                raise ValueError(
                    f"{kind} trains {self._name(trained[0])} with {name}={first[name]} and {self._name(p)} with {name}={other.get(name)}, "
                    "and FSDP puts both into one flat parameter: give use_orig_params=True (FSDP_USE_ORIG_PARAMS), or wrap them apart by "
                    "auto_wrap_policy"
                )

    def _told_states(
        self, optimizers: Sequence[Optimizer], homes: Sequence[Sequence[Tensor]], comm: Comm
    ) -> list[list[dict[str, Any]]]:
        """For each optimizer the state of each home, as rank 0 has it: the parameters of others may have had no values. ValueError for steps."""
        told = comm.broadcast_object([self._begins(optimizer, homes) for optimizer in optimizers])
        problem = next((one for one in told if isinstance(one, str)), None)
        if problem is not None:
            raise ValueError(problem)
        states: list[list[dict[str, Any]]] = told
        return states

    def _begins(self, optimizer: Optimizer, homes: Iterable[Sequence[Tensor]]) -> list[dict[str, Any]] | str:
        """The state of each home, with a `Same` in the place of a tensor in a parameter's shape; what is wrong as text."""
        found: list[dict[str, Any]] = []
        for originals in homes:
            states = [summary_of(optimizer.state.get(p, {}), self._shapes[id(p)]) for p in originals]
            other = next((at for at, state in enumerate(states) if state is None or state != states[0]), None)
            if other is not None:
                return (
                    f"{type(optimizer).__name__} has state for {self._name(originals[other])} already, which FSDP version 1 does not shard: prepare "
                    "it before its first step, and load what was saved afterwards (load_state)"
                )
            found.append(states[0] or {})
        return found

    def _name(self, p: Tensor) -> str:
        return self._names.get(id(p), "a parameter")


def _groups(optimizer: Optimizer, moved: Iterable[tuple[Any, list[Tensor]]]) -> list[list[Tensor]]:
    """The parameters of each group as they shall be: a flat one in the first group that had one of its originals."""
    becomes = {id(p): flat for flat, originals in moved for p in originals}
    placed: set[int] = set()
    groups: list[list[Tensor]] = []
    for group in optimizer.param_groups:
        parameters = []
        for p in group["params"]:
            new = becomes.get(id(p), p)
            if id(new) not in placed:
                placed.add(id(new))
                parameters.append(new)
        groups.append(parameters)
    return groups


def _settings(group: dict[str, Any]) -> dict[str, Any]:
    return {key: value for key, value in group.items() if key not in ("params", "param_names")}
