"""Which modules of a model `fully_shard` gets as units of their own: decided here, from the plugin's policy, before anything is changed.

[Note: what makes a unit] A unit's weights are gathered when its `forward` begins and freed when it ends, so a unit must be a module that is called. Lists and
dictionaries of modules are passed over, and what is in them is asked instead. Weights that two modules share can be gathered once only: where their
modules would fall into different units, those units are left to the module around them both. What is in no unit belongs to the root.
"""

from __future__ import annotations

import copy
import inspect
import logging
from collections.abc import Callable, Container, Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from acc_ops.regions import is_compiled_module
from acc_plugins.options.fsdp import FullyShardedDataParallelPlugin

logger = logging.getLogger(__name__)
Named = list[tuple[str, nn.Parameter]]  # by the names in the model


@dataclass(frozen=True, kw_only=True)
class Unit:
    """Modules that are gathered together. `reshards` False keeps them gathered until their backward."""

    modules: tuple[nn.Module, ...]
    reshards: bool = True


@dataclass(frozen=True, kw_only=True)
class Units:
    """The units of a model, those inside others first, without the root; `blocks` are those that the policy chose."""

    units: tuple[Unit, ...] = ()
    blocks: tuple[nn.Module, ...] = ()

    def names(self, model: nn.Module) -> list[str]:
        """What the units consist of, by the names in `model`."""
        called = {id(module): name for name, module in model.named_modules()}
        return [" + ".join(called[id(module)] for module in unit.modules) for unit in self.units]


def units_of(model: nn.Module, plugin: FullyShardedDataParallelPlugin, ignored: frozenset[int]) -> Units:
    """What the plugin's policy chooses, and around it the embedding and the end of a model that says which those are.

    `ignored` are the ids of parameters that are not sharded. Raises OptionError for a class name that no module has.
    """
    blocks = chosen_blocks(model, plugin, ignored)
    units = [Unit(modules=(block,)) for block in blocks]
    if blocks:
        units += _ends(model, blocks)
    return Units(units=tuple(_without_split_ties(model, units, ignored)), blocks=tuple(blocks))


def gathered_together(
    model: nn.Module, units: Iterable[Sequence[nn.Module]], ignored: Iterable[int]
) -> list[Named]:
    """The parameters of each unit that no unit before it has (those inside others come first), then the rest: that of the root.

    A weight that several share belongs to the first of them. `ignored` are the ids of parameters that belong to none.
    """
    taken = set(ignored)
    called = {id(p): name for name, p in model.named_parameters()}
    found: list[Named] = []
    for modules in [*units, (model,)]:
        own = {id(p): p for module in modules for p in module.parameters() if id(p) not in taken}
        taken.update(own)
        found.append([(called[one], p) for one, p in own.items()])
    return [own for own in found if own]


def check_formats(
    model: nn.Module, units: Units, ignored: Iterable[int], low: Container[torch.dtype]
) -> None:
    """Raises ValueError where one unit would train parameters of two formats, which torch finds in the first forward only.

    Those in one of `low` become float32 before.
    """
    for own in gathered_together(model, (unit.modules for unit in units.units), ignored):
        formats: dict[torch.dtype, str] = {}
        for name, p in own:
            if p.requires_grad:
                formats.setdefault(torch.float32 if p.dtype in low else p.dtype, name)
        if len(formats) > 1:
            (one, first), (other, second), *_ = formats.items()
            raise ValueError(
                f"{first} of {type(model).__name__} holds numbers of {one} and {second} of {other}: both are trained, and FSDP gathers them together. "
                "Give both the same format (model.float()), or make them units of their own by auto_wrap_policy"
            )


def chosen_blocks(
    model: nn.Module, plugin: FullyShardedDataParallelPlugin, ignored: frozenset[int] = frozenset()
) -> list[nn.Module]:
    """The modules that the plugin's policy chooses, those inside others first; never the model itself.

    A policy of the user's takes `(module)`, or as torch's do `(module, recurse, nonwrapped_numel)`. Raises OptionError for a class name that
    no module has.
    """
    own = copy.copy(plugin)  # the policy of another model may be of other classes
    own.set_auto_wrap_policy(model)
    policy = own.auto_wrap_policy
    if policy is None:
        return []
    chosen: dict[int, nn.Module] = {}
    _choose(model, as_torch_asks(policy), _sizes(model, ignored, {}), chosen)
    chosen.pop(id(model), None)
    return list(chosen.values())


def _sizes(
    module: nn.Module, ignored: frozenset[int], found: dict[int, dict[int, int]]
) -> dict[int, dict[int, int]]:
    """For every module, by id: the numbers of elements of all parameters in it, by theirs."""
    if id(module) not in found:
        inside = {
            id(p): p.numel() for p in module._parameters.values() if p is not None and id(p) not in ignored
        }
        for child in module.children():
            inside.update(_sizes(child, ignored, found)[id(child)])
        found[id(module)] = inside
    return found


def _choose(
    module: nn.Module,
    policy: Callable[[nn.Module, bool, int], bool],
    sizes: dict[int, dict[int, int]],
    chosen: dict[int, nn.Module],
) -> set[int]:
    """The parameters of `module` that found a unit, by id."""
    own = sizes[id(module)]
    if id(module) in chosen:
        return set(own)
    if not policy(_seen(module), True, sum(own.values())):
        return set()
    wrapped: set[int] = set()
    for child in module.children():
        wrapped |= _choose(child, policy, sizes, chosen)
    left = sum(size for key, size in own.items() if key not in wrapped)
    if left and _is_called(module) and policy(_seen(module), False, left):
        chosen[id(module)] = module
        return set(own)
    return wrapped


def _seen(module: nn.Module) -> nn.Module:
    """The module that a policy is asked about: the one inside where torch.compile put a shell around it."""
    shell: Any = module
    inner: nn.Module = shell._orig_mod if is_compiled_module(module) else module
    return inner


def _is_called(module: nn.Module) -> bool:
    """Whether it has a forward, which lists and dictionaries of modules have not."""
    return is_compiled_module(module) or type(module).forward is not nn.Module.forward


def as_torch_asks(policy: Callable[..., Any]) -> Callable[..., bool]:
    """The policy as a function of (module, recurse, nonwrapped_numel), also of a user's that takes the module alone."""
    try:
        inspect.signature(policy).bind(None, recurse=True, nonwrapped_numel=0)
        alone = False
    except TypeError:
        alone = True

    def asked(module: nn.Module, recurse: bool, nonwrapped_numel: int) -> bool:
        if alone:
            return True if recurse else bool(policy(module))
        return bool(policy(module, recurse=recurse, nonwrapped_numel=nonwrapped_numel))

    return asked


def _ends(model: nn.Module, blocks: list[nn.Module]) -> Iterator[Unit]:
    """The embedding, and the last norm and the head as one unit, of a model that tells them as those of transformers do."""
    inside = {id(part) for block in blocks for part in block.modules()}
    head = _told(model, "get_output_embeddings", inside)
    embedding = _told(model, "get_input_embeddings", inside)
    if embedding is not None and (head is None or not _share(embedding, head)):
        yield Unit(modules=(embedding,))
    elif embedding is not None:
        return  # one weight at both ends: the root gathers it once
    if head is not None:
        norm = _last_norm(model, blocks[-1], inside)
        yield Unit(modules=(head,) if norm is None else (norm, head), reshards=False)


def _told(model: nn.Module, method: str, inside: set[int]) -> nn.Module | None:
    ask = getattr(model, method, None)
    try:
        found = ask() if callable(ask) else None
    except (NotImplementedError, AttributeError):  # transformers' way to say that it has none
        return None
    if not isinstance(found, nn.Module) or found is model or id(found) in inside or not _is_called(found):
        return None
    return found if any(found is part for part in model.modules()) else None


def _share(one: nn.Module, other: nn.Module) -> bool:
    return not {id(p) for p in one.parameters()}.isdisjoint(id(p) for p in other.parameters())


def _last_norm(model: nn.Module, last: nn.Module, inside: set[int]) -> nn.Module | None:
    """The one norm that comes after the last block, where there is just one."""
    parts = list(model.modules())
    after = parts[next(at for at, part in enumerate(parts) if part is last) :]
    norms = [p for p in after if "norm" in type(p).__name__.lower() and id(p) not in inside]
    return norms[0] if len(norms) == 1 and not list(norms[0].children()) else None


def _without_split_ties(model: nn.Module, units: list[Unit], ignored: frozenset[int]) -> list[Unit]:
    """The units that hold all modules of the weights in them."""
    kept = list(units)
    while (split := _split_weight(model, kept, ignored)) is not None:
        name, innermost = split
        logger.warning(
            "%s is shared with a module elsewhere, so the unit around both gathers it: %s is no unit of its own",
            name,
            " and ".join(type(module).__name__ for module in innermost.modules),
        )
        kept = [unit for unit in kept if unit is not innermost]
    return kept


def _split_weight(model: nn.Module, units: list[Unit], ignored: frozenset[int]) -> tuple[str, Unit] | None:
    """A weight whose modules fall into different units, and the first of those."""
    home: dict[int, int] = {}
    for at, unit in enumerate(units):  # those inside others come first and keep their parts
        for module in unit.modules:
            for part in module.modules():
                home.setdefault(id(part), at)
    homes: dict[int, set[int]] = {}
    root = len(units)
    for prefix, module in model.named_modules():
        for name, p in module._parameters.items():
            if p is None or id(p) in ignored:
                continue
            found = homes.setdefault(id(p), set())
            found.add(home.get(id(module), root))
            if len(found) > 1:
                return f"{prefix}.{name}".lstrip("."), units[min(found)]
    return None
