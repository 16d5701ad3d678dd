"""Optimizers follow their parameters into FSDP1's flat ones, or are told why they cannot."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

from torch import Tensor, nn
from torch.optim import Optimizer


class ParameterPlaces:
    """Which parameter stood where before the models were wrapped. Modules stay the same objects, so that a place is found again."""

    def __init__(self, models: Iterable[nn.Module]) -> None:
        self._parameters: dict[tuple[int, str], Tensor] = {}
        self._names: dict[int, str] = {}
        for model in models:
            self._names.update({id(p): name for name, p in model.named_parameters()})
            for module in model.modules():
                own = ((name, p) for name, p in module._parameters.items() if p is not None)
                self._parameters.update({(id(module), name): p for name, p in own})

    def move(self, optimizers: Sequence[Optimizer], units: Iterable[Any]) -> None:
        """Give `optimizers` the flat parameters of the FSDP modules `units` for the originals in them.

        Raises ValueError for an optimizer that has state already, and, without `use_orig_params`, for one that treats the parameters of a
        flat one differently. Nothing is changed then.
        """
        moved: list[tuple[Any, list[Tensor]]] = []
        for unit in units:
            flat = unit._handle.flat_param
            spots = [(id(info.module), info.param_name) for info in flat._param_infos]
            originals = [self._parameters[spot] for spot in spots if spot in self._parameters]
            self._refuse_state(optimizers, originals)
            if originals and flat._params is None:  # use_orig_params=False
                moved.append((flat, originals))
        plans = [(optimizer, self._plan(optimizer, moved)) for optimizer in optimizers]
        for optimizer, groups in plans:
            for group, parameters in zip(optimizer.param_groups, groups, strict=True):
                group["params"] = parameters

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

    def _refuse_state(self, optimizers: Iterable[Optimizer], originals: list[Tensor]) -> None:
        for optimizer in optimizers:
            stepped = next((p for p in originals if optimizer.state.get(p)), None)
            if stepped is not None:
                raise ValueError(
                    f"{type(optimizer).__name__} has state for {self._name(stepped)} already, which FSDP version 1 does not shard: prepare it "
                    "before its first step, and load what was saved afterwards (load_state)"
                )

    def _name(self, p: Tensor) -> str:
        return self._names.get(id(p), "a parameter")


def _settings(group: dict[str, Any]) -> dict[str, Any]:
    return {key: value for key, value in group.items() if key not in ("params", "param_names")}
