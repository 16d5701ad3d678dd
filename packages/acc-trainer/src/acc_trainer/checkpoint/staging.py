"""Copies of a state that lie in kept buffers: a copy costs the training one pass over the memory, and can be written later.

[Note: what a copy consists of]
The weights of a safetensors file are copied to their places in an image of that file, which is then written as it is. Of any other state
the tensors are copied, and all the rest is pickled at once, so that nothing that the training changes is in it. A tensor subclass that says
what it is made of (a DTensor: its local shard) is copied in its pieces. Tensors that look at one storage look at one copy of it.
"""

from __future__ import annotations

import ctypes
import io
import mmap
import os
import pickle
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import accumulate
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import is_traceable_wrapper_subclass

from acc_bigmodel.image import ImageKey, image_key, plan_image
from acc_plugins.states.part import Part, WeightsPart, for_each

from .copying import copy_all

_ALIGNMENT_BYTES = 64
_SLICE_BYTES = 1 << 20
_FORKED_CHILDREN_SEE_ZEROS = 18  # MADV_WIPEONFORK of Linux, which Python does not name
_COPYABLE = {
    getattr(torch, name)
    for name in (
        *("float16", "bfloat16", "float32", "float64", "complex64", "complex128", "bool"),
        *("uint8", "uint16", "uint32", "uint64", "int8", "int16", "int32", "int64"),
        *("float8_e4m3fn", "float8_e4m3fnuz", "float8_e5m2", "float8_e5m2fnuz"),
    )
}  # torch copies the values of these; of all others the bytes are copied


_PLAIN = (Tensor, torch.nn.Parameter)
_LayOut = Callable[[list[Tensor]], tuple[Tensor, list[Tensor]]]


class Staging:
    """The buffers of one run, kept from save to save by the names of the parts; a part of another form gets a new one."""

    def __init__(self) -> None:
        self._kept: dict[tuple[str, int], _Kept] = {}

    def copies(self, parts: Iterable[Part]) -> list[Part]:
        """`parts` with copies of their states, made before this returns; the copies of the last call are overwritten.

        What cannot be pickled or copied raises what pickle or torch raise for it.
        """
        copied: list[Part] = []
        seen: Counter[str] = Counter()

        def copy(part: Part) -> None:
            copied.append(self._copy(part, (part.name, seen[part.name])))
            seen[part.name] += 1

        for_each(parts, copy)
        for key in [key for key in self._kept if key[1] >= seen[key[0]]]:
            del self._kept[key]
        return copied

    def _copy(self, part: Part, key: tuple[str, int]) -> Part:
        if isinstance(part, WeightsPart) and part.safe and all(map(_is_plain, part.state.values())):
            form = image_key(part.state)
            sources = [part.state[name] for name, home, _, _ in form if name == home]
            kept = self._kept_for(key, form, sources, lambda _: _image_of(part, form))
            copy_all(kept.copies, sources)
            return ImagePart(name=part.name, state=kept.buffer)
        pickled, tensors = _taken_apart(part.state)
        memory = _Memory(tensors)
        kept = self._kept_for(key, memory.form(), memory.sources, _laid_out)
        copy_all(kept.copies, memory.sources)
        return replace(part, state=_put_together(pickled, memory.rebuilt(tensors, kept.copies)))

    def _kept_for(self, key: tuple[str, int], form: Any, sources: list[Tensor], lay_out: _LayOut) -> _Kept:
        kept = self._kept.get(key)
        if kept is None or kept.form != form:
            kept = None
            self._kept.pop(key, None)  # the old buffer goes before the new one comes
            buffer, copies = lay_out(sources)
            kept = self._kept[key] = _Kept(form=form, buffer=buffer, copies=copies)
        return kept


@dataclass(frozen=True, kw_only=True)
class ImagePart(Part):
    """The bytes of a whole safetensors file, as a tensor, written as `<name>.safetensors`."""

    state: Tensor

    def write(self, folder: str | Path, group: Any = None) -> list[str]:  # noqa: ARG002  one rank writes it
        file = f"{self.name}.safetensors"
        content = memoryview(_bytes_at(self.state, 0, self.state.nbytes))
        with open(Path(folder, file), "wb", buffering=0) as out:
            at = 0
            while at < len(content):  # a slice at a time, so that an interrupt or an error is noticed
                at += out.write(content[at : at + _SLICE_BYTES])
            os.fsync(out.fileno())
        return [file]


@dataclass(frozen=True, kw_only=True)
class _Kept:
    form: Any
    buffer: Tensor
    copies: list[Tensor]


def _is_plain(tensor: Any) -> bool:
    return (
        type(tensor) in _PLAIN
        and tensor.layout is torch.strided
        and tensor.dtype in _COPYABLE
        and not tensor.is_meta
    )


def _image_of(part: WeightsPart, form: ImageKey) -> tuple[Tensor, list[Tensor]]:
    plan = plan_image(part.state)
    buffer = _new_buffer(plan.nbytes, list(part.state.values()))
    buffer[: len(plan.header)] = torch.frombuffer(bytearray(plan.header), dtype=torch.uint8)
    homes = [(plan.places[name], dtype, shape) for name, home, dtype, shape in form if name == home]
    return buffer, [_tensor_at(buffer, at, dtype, shape) for at, dtype, shape in homes]


def _laid_out(sources: list[Tensor]) -> tuple[Tensor, list[Tensor]]:
    sizes = [-(-source.nbytes // _ALIGNMENT_BYTES) * _ALIGNMENT_BYTES for source in sources]
    places = [0, *accumulate(sizes)]
    buffer = _new_buffer(places.pop(), sources)
    return buffer, [
        _tensor_at(buffer, at, source.dtype, source.shape) for at, source in zip(places, sources, strict=True)
    ]


def _tensor_at(buffer: Tensor, at: int, dtype: torch.dtype, shape: torch.Size) -> Tensor:
    """A tensor whose storage is its own part of the buffer: torch.save writes storages whole."""
    nbytes = dtype.itemsize * shape.numel()
    if not nbytes:
        return torch.empty(shape, dtype=dtype)
    return torch.frombuffer(_bytes_at(buffer, at, nbytes), dtype=dtype).view(shape)


def _bytes_at(buffer: Tensor, at: int, nbytes: int) -> Any:
    content = (ctypes.c_char * nbytes).from_address(buffer.data_ptr() + at)
    content.belongs_to = buffer  # type: ignore[attr-defined]
    return content


def _new_buffer(nbytes: int, sources: list[Tensor]) -> Tensor:
    """Bytes that nobody has touched: pinned where a device copies to them, else of their own and in huge pages where the system has them."""
    if any(source.device.type != "cpu" for source in sources):
        try:
            return torch.empty(nbytes, dtype=torch.uint8, pin_memory=True)
        except RuntimeError:  # nothing that can be pinned, or no more of it: a slower copy is a copy too
            return torch.empty(nbytes, dtype=torch.uint8)
    if nbytes == 0:
        return torch.empty(0, dtype=torch.uint8)
    if not hasattr(mmap, "MAP_ANONYMOUS"):
        return torch.frombuffer(mmap.mmap(-1, nbytes), dtype=torch.uint8)
    memory = mmap.mmap(-1, nbytes, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    for advice in (getattr(mmap, "MADV_HUGEPAGE", None), _wiped_in_children()):
        if advice is not None:
            try:
                memory.madvise(advice)
            except OSError:  # a system that does not know it does without it
                continue
    return torch.frombuffer(memory, dtype=torch.uint8)


def _wiped_in_children() -> int | None:
    """Workers that are forked share the memory of a run; without this the next copy would first copy what they share."""
    return _FORKED_CHILDREN_SEE_ZEROS if hasattr(mmap, "MADV_HUGEPAGE") else None


class _Pickler(pickle.Pickler):
    def __init__(self, out: io.BytesIO) -> None:
        super().__init__(out, protocol=pickle.HIGHEST_PROTOCOL)
        self.tensors: list[Tensor] = []
        self._numbers: dict[int, int] = {}

    def persistent_id(self, obj: Any) -> int | None:
        if not isinstance(obj, Tensor):
            return None
        number = self._numbers.setdefault(id(obj), len(self.tensors))
        if number == len(self.tensors):
            self.tensors.append(obj)  # held here, so that no other tensor gets its id
        return number


class _Unpickler(pickle.Unpickler):
    """Of what `_Pickler` wrote in this process: nobody else's bytes are unpickled."""

    def __init__(self, pickled: bytes, tensors: Sequence[Tensor]) -> None:
        super().__init__(io.BytesIO(pickled))
        self._tensors = tensors

    def persistent_load(self, pid: int) -> Tensor:
        return self._tensors[pid]


def _taken_apart(state: Any) -> tuple[bytes, list[Tensor]]:
    """The state without its tensors, as bytes, and each of its tensors once."""
    out = io.BytesIO()
    pickler = _Pickler(out)
    pickler.dump(state)
    return out.getvalue(), pickler.tensors


def _put_together(pickled: bytes, tensors: Sequence[Tensor]) -> Any:
    return _Unpickler(pickled, tensors).load()


class _Memory:
    """What must be copied for some tensors: the values of most, and the bytes of storages that several of them look at."""

    def __init__(self, tensors: Sequence[Tensor]) -> None:
        self.sources: list[Tensor] = []
        self._leaves = [_leaves(tensor) for tensor in tensors]
        self._place_of_leaf: dict[int, int] = {}  # in `sources`, by id
        self._place_of_storage: dict[int, int] = {}
        own = {id(leaf): leaf for leaves in self._leaves for leaf in leaves}
        storages = [leaf.untyped_storage()._cdata for leaf in own.values()]
        lookers = Counter(storages)
        for (number, leaf), storage in zip(own.items(), storages, strict=True):
            if lookers[storage] == 1 and leaf.dtype in _COPYABLE:
                self._place_of_leaf[number] = len(self.sources)
                self.sources.append(leaf)
            elif storage not in self._place_of_storage:
                self._place_of_storage[storage] = len(self.sources)
                whole = torch.empty(0, dtype=torch.uint8, device=leaf.device)
                self.sources.append(whole.set_(leaf.untyped_storage()))

    def form(self) -> list[Any]:
        """Equal where the same buffer serves."""
        return [source.dtype for source in self.sources] + [source.shape for source in self.sources]

    def rebuilt(self, tensors: Sequence[Tensor], copies: Sequence[Tensor]) -> list[Tensor]:
        """The tensors again, over the copies of `sources`."""
        with torch.no_grad():
            return [
                self._copy_of(tensor, leaves, copies)
                for tensor, leaves in zip(tensors, self._leaves, strict=True)
            ]

    def _copy_of(self, tensor: Tensor, leaves: list[Tensor], copies: Sequence[Tensor]) -> Tensor:
        place = self._place_of_leaf.get(id(tensor))
        if place is not None and type(tensor) is Tensor and not tensor.requires_grad and not tensor.__dict__:
            return copies[place]  # as nearly all are
        return self._rebuilt(tensor, iter(leaves), copies) if leaves else _through_a_file(tensor)

    def _rebuilt(self, tensor: Any, leaves: Iterator[Tensor], copies: Sequence[Tensor]) -> Tensor:
        again: Tensor
        if type(tensor) not in _PLAIN:
            names, how = tensor.__tensor_flatten__()
            inner = {name: self._rebuilt(getattr(tensor, name), leaves, copies) for name in names}
            again = type(tensor).__tensor_unflatten__(inner, how, tensor.shape, tensor.stride())
            return again
        leaf = next(leaves)
        place = self._place_of_leaf.get(id(leaf))
        again = self._in_storage(leaf, copies) if place is None else copies[place]
        if type(tensor) is torch.nn.Parameter:
            again = torch.nn.Parameter(again, tensor.requires_grad)
        elif tensor.requires_grad:
            again = again.detach().requires_grad_()
        if tensor.__dict__:
            again = again if again.requires_grad else again.detach()  # the one that is kept stays without
            again.__dict__.update(tensor.__dict__)
        return again

    def _in_storage(self, leaf: Tensor, copies: Sequence[Tensor]) -> Tensor:
        storage = copies[self._place_of_storage[leaf.untyped_storage()._cdata]].untyped_storage()
        again = torch.empty(0, dtype=leaf.dtype).set_(
            storage, leaf.storage_offset(), leaf.shape, leaf.stride()
        )
        again = again.conj() if leaf.is_conj() else again
        return torch._neg_view(again) if leaf.is_neg() else again


def _through_a_file(tensor: Tensor) -> Any:
    """The copy of what has a form of its own (sparse, quantized, a subclass): what torch.save would make of it."""
    out = io.BytesIO()
    torch.save(tensor, out)
    out.seek(0)
    return torch.load(out, weights_only=False)  # our own bytes, a moment old


def _leaves(tensor: Tensor) -> list[Tensor]:
    """The plain tensors that it is, or is made of; none where it can only be copied as a whole."""
    if type(tensor) in _PLAIN:
        plain = tensor.layout is torch.strided and not tensor.is_quantized and not tensor.is_meta
        return [tensor] if plain else []
    subclass: Any = tensor
    if not is_traceable_wrapper_subclass(subclass):
        return []
    names, _ = subclass.__tensor_flatten__()
    inner = [_leaves(getattr(subclass, name)) for name in names]
    return [leaf for leaves in inner for leaf in leaves] if all(inner) else []
