"""What a planner may move: groups of tensors that must be on one device. Imports no torch.

[Note: columns]
A model may have hundreds of thousands of tensors. Atoms are kept as columns of plain numbers and names, not as an object
each: that many small objects would cost more in garbage collections than the planning itself.
"""

from __future__ import annotations

import itertools
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TypeVar

D = TypeVar("D")


@dataclass(frozen=True, kw_only=True)
class Atoms:
    """Atoms by number, in model order; the tensors of one are placed together.

    `nbytes` count a shared tensor once; `staying_bytes` are the part that stays on the executing device when the rest is
    streamed there.
    """

    nbytes: list[int]
    staying_bytes: list[int]
    modules: list[str]  # the module of each
    followers: Mapping[int, Sequence[str]] = field(
        default_factory=dict
    )  # further modules of an atom, tied to the first
    split: Collection[str] = ()  # modules of which an atom has only their own tensors
    tensors: list[str]  # of all atoms, one after the other
    ends: list[int]  # where each one's end

    def __len__(self) -> int:
        return len(self.nbytes)

    def tensors_of(self, number: int) -> list[str]:
        """The names of the tensors of one atom."""
        return self.tensors[self.ends[number - 1] if number else 0 : self.ends[number]]

    def keys(self, number: int) -> list[str]:
        """What stands for the atom in a device map: modules, or tensors of modules whose children are placed apart."""
        keys: list[str] = []
        for module in (self.modules[number], *self.followers.get(number, ())):
            if module in self.split:
                keys += [name for name in self.tensors_of(number) if name.rpartition(".")[0] == module]
            else:
                keys.append(module)
        return keys

    def name(self, number: int) -> str:
        """What the atom is called in front of people."""
        modules = [self.modules[number], *self.followers.get(number, ())]
        names = [
            f"own tensors of {module or 'the model'}" if module in self.split else module or "the whole model"
            for module in modules[:3]
        ]
        return " + ".join(names) + (f" + {len(modules) - 3} more" if len(modules) > 3 else "")


def group_atoms(
    sizes: Mapping[str, int],
    ties: Sequence[Sequence[str]] = (),
    blocks: Collection[str] = (),
    staying: Collection[str] = (),
) -> Atoms:
    """The atoms of a model, in its order, from the bytes of its tensors by name.

    A module's own tensors stay together; so does everything below a name in `blocks`; atoms that share a tensor (`ties`)
    are one atom, in the place of the first. `staying` names tensors that are never streamed. Linear in the names.
    """
    whole = frozenset(blocks)
    home = _homes(sizes, whole)
    leaders = _leaders(home, ties)
    number_of: dict[str, int] = {}
    followers: dict[int, list[str]] = {}
    atoms = Atoms(
        nbytes=[],
        staying_bytes=[],
        modules=[],
        followers=followers,
        split=_split(home, whole),
        tensors=[],
        ends=[],
    )
    count: list[int] = []
    for name, module in home.items():
        number = number_of.get(module, -1)
        if number < 0:
            leader = leaders.get(module, module)
            number = number_of[module] = number_of.get(leader, len(count))
            if number < len(count):
                followers.setdefault(number, []).append(module)
            else:
                count.append(0)
                atoms.nbytes.append(0)
                atoms.staying_bytes.append(0)
                atoms.modules.append(module)
        count[number] += 1
        atoms.nbytes[number] += sizes[name]
        if name in staying:
            atoms.staying_bytes[number] += sizes[name]
    for group in ties:
        known = [name for name in group if name in sizes]
        if known:
            nbytes = [sizes[name] for name in known]
            atoms.nbytes[number_of[home[known[0]]]] -= sum(nbytes) - max(nbytes)
    atoms.ends.extend(itertools.accumulate(count))
    _fill_tensors(atoms, home, number_of, count)
    return atoms


def _fill_tensors(
    atoms: Atoms, home: Mapping[str, str], number_of: Mapping[str, int], count: Sequence[int]
) -> None:
    """Sort the names by atom, keeping their order: a counting sort."""
    at = [end - length for end, length in zip(atoms.ends, count, strict=True)]
    atoms.tensors.extend(home)
    for name, module in home.items():
        number = number_of[module]
        atoms.tensors[at[number]] = name
        at[number] += 1


def collapse(device_map: Mapping[str, D], root: str = "") -> dict[str, D]:
    """The same map in fewer names: where all names below a module have one device, the module stands for them.

    Only modules at or below `root` stand for others. Order is kept; linear in names times depth.
    """
    device_of: dict[str, D] = {}
    mixed: set[str] = set()
    several: set[str] = set()  # modules with more than one name
    for name, device in device_map.items():
        for module in and_parents(name):
            if module not in device_of:
                device_of[module] = device
                continue
            several.add(module)
            if device_of[module] != device:
                mixed.add(module)
    result: dict[str, D] = {}
    for name, device in device_map.items():
        standing = name
        for module in and_parents(name):
            if module in mixed:
                break  # so is everything around it
            if module in several and (not root or module == root or module.startswith(root + ".")):
                standing = module
        result[standing] = device
    return result


def and_parents(name: str) -> Iterable[str]:
    """The name and the modules around it, innermost first, "" last."""
    yield name
    while name:
        name = name.rpartition(".")[0]
        yield name


def _homes(sizes: Iterable[str], blocks: frozenset[str]) -> dict[str, str]:
    """Tensor name -> the module it is placed with: its own, or the outermost block around that."""
    known: dict[str, str] = {}
    homes: dict[str, str] = {}
    for name in sizes:
        module = name.rpartition(".")[0]
        home = known.get(module)
        if home is None:
            home = module
            if blocks:
                for outer in and_parents(module):
                    if outer in blocks:
                        home = outer
            known[module] = home
        homes[name] = home
    return homes


def _leaders(home: Mapping[str, str], ties: Sequence[Sequence[str]]) -> dict[str, str]:
    """Tied module -> the first module of those tied to it, directly or through others (union-find)."""
    tied = {home[name] for group in ties for name in group if name in home}
    if not tied:
        return {}
    order: dict[str, int] = {}
    for module in home.values():
        if module in tied:
            order.setdefault(module, len(order))
    leader = {module: module for module in order}

    def find(module: str) -> str:
        while leader[module] != module:
            leader[module] = leader[leader[module]]
            module = leader[module]
        return module

    for group in ties:
        roots = [find(home[name]) for name in group if name in home]
        for other in roots[1:]:
            one, two = find(roots[0]), find(other)
            early, late = (one, two) if order[one] <= order[two] else (two, one)
            leader[late] = early
    return {module: find(module) for module in leader}


def _split(home: Mapping[str, str], whole: frozenset[str]) -> set[str]:
    """The modules of atoms that have other atoms below them."""
    modules = set(home.values())
    return {module for module in _ancestors(modules) & modules if module not in whole}


def _ancestors(modules: Iterable[str]) -> set[str]:
    parents: set[str] = set()
    for module in modules:
        while module:
            module = module.rpartition(".")[0]
            if module in parents:
                break
            parents.add(module)
    return parents
