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

    def move(self, optimizers: Sequence[Optimizer], units: Iterable[Any], comm: Comm) -> None:
        """Give `optimizers` the flat parameters of the FSDP modules `units` for the originals in them. Every rank of `comm` calls it.

        Raises ValueError, on every rank as on rank 0, for an optimizer that has made steps already, and, without `use_orig_params`, for one that
        treats the parameters of a flat one differently. No optimizer is changed then.
        """
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
        plans = [(optimizer, self._plan(optimizer, moved)) for optimizer in optimizers]
        homes += moved
        begins = [self._begins(optimizer, homes) for optimizer in optimizers]
        told = comm.broadcast_object(begins)  # rank 0's: the parameters of others may have had no values
        problem = next((one for one in told if isinstance(one, str)), None)
        if problem is not None:
            raise ValueError(problem)
        for (optimizer, groups), states in zip(plans, told, strict=True):
            for group, parameters in zip(optimizer.param_groups, groups, strict=True):
                group["params"] = parameters
            for (new, originals), state in zip(homes, states, strict=True):
                for p in originals:
                    optimizer.state.pop(p, None)
                if state:
                    optimizer.state[new] = {name: filled(value, new) for name, value in state.items()}

    def _plan(self, optimizer: Optimizer, moved: list[tuple[Any, list[Tensor]]]) -> list[list[Tensor]]:
        """The parameters of each group as they shall be."""
        home = {id(p): index for index, group in enumerate(optimizer.param_groups) for p in group["params"]}
        becomes: dict[int, Any] = {}
        for flat, originals in moved:
            self._refuse_differences(optimizer, originals, home)
            becomes.update({id(p): flat for p in originals})
        placed: set[int] = set()
        groups: list[list[Tensor]] = []
        for group in optimizer.param_groups:
            parameters = []
            for p in group["params"]:
                new = becomes.get(id(p), p)
                if id(new) not in placed:  # in the first group that had one of its originals
                    placed.add(id(new))
                    parameters.append(new)
            groups.append(parameters)
        return groups

    def _refuse_differences(
        self, optimizer: Optimizer, originals: list[Tensor], home: dict[int, int]
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

    def _begins(
        self, optimizer: Optimizer, homes: Iterable[tuple[Any, list[Tensor]]]
    ) -> list[dict[str, Any]] | str:
        """The state of each home, with a `Same` in the place of a tensor in a parameter's shape; what is wrong as text."""
        found: list[dict[str, Any]] = []
        for _, originals in homes:
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


def _settings(group: dict[str, Any]) -> dict[str, Any]:
    return {key: value for key, value in group.items() if key not in ("params", "param_names")}
