"""Bytes that live while a step runs: what autograd keeps for backward, and the most there is at one time."""

from __future__ import annotations

import functools
import weakref
from collections.abc import Iterable, Mapping
from contextlib import AbstractContextManager
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves


def local(tensor: Tensor) -> Tensor:
    """This rank's part of it: of a DTensor its shard, of anything else the tensor itself."""
    part = getattr(tensor, "_local_tensor", None)
    return tensor if part is None else part


def bytes_of(tensors: Iterable[Tensor | None]) -> int:
    """Bytes of this rank's parts, memory that several share counted once."""
    storages = {}
    for tensor in tensors:
        if tensor is not None:
            storage = local(tensor).untyped_storage()
            storages[storage._cdata] = storage.nbytes()
    return sum(storages.values())


def tensors_in(value: Any) -> list[Tensor]:
    """The tensors of a nested structure."""
    return [leaf for leaf in tree_leaves(value) if isinstance(leaf, Tensor)]


class SavedForBackward:
    """Around a forward: `nbytes()` is what autograd keeps of it, without parameters and buffers of `model` and without `given` (the batch)."""

    def __init__(self, model: nn.Module, given: Any = ()) -> None:
        known = [*model.parameters(), *model.buffers(), *tensors_in(given)]
        self._known = {local(tensor).untyped_storage()._cdata for tensor in known}
        self._kept: dict[int, torch.UntypedStorage] = {}
        self._hooks: AbstractContextManager[Any] = torch.autograd.graph.saved_tensors_hooks(
            self._pack, lambda tensor: tensor
        )

    def _pack(self, tensor: Tensor) -> Tensor:
        storage = local(tensor).untyped_storage()
        if storage._cdata not in self._known:
            self._kept[storage._cdata] = storage  # held, so that its number is not given to another
        return tensor

    def __enter__(self) -> SavedForBackward:
        self._hooks.__enter__()
        return self

    def __exit__(self, *error: Any) -> None:
        self._hooks.__exit__(*error)

    def nbytes(self) -> int:
        """Bytes kept, memory that several tensors share counted once."""
        return sum(storage.nbytes() for storage in self._kept.values())


class LiveBytes(TorchDispatchMode):
    """Around anything: `peak` is the most bytes that tensors made inside, and those `held` before, had at one time.

    Storages are looked at again at every collective, because FSDP frees and fills its gathered parameters by resizing them.
    """

    def __init__(self, held: Iterable[Tensor]) -> None:
        super().__init__()
        self._live: dict[int, tuple[weakref.ref[Any], int]] = {}
        self._total = 0
        for tensor in held:
            self._see(local(tensor))
        self.peak = self._total

    def __torch_dispatch__(
        self, func: Any, types: Any, args: Any = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        if DTensor in types:  # its own dispatch comes first, and then here with this rank's parts
            return NotImplemented
        result = func(*args, **(kwargs or {}))
        if "c10d" in func.namespace:
            self.look_again()
        for tensor in tensors_in(result):
            self._see(tensor)
        self.peak = max(self.peak, self._total)
        return result

    def look_again(self) -> None:
        """Take every storage's present size."""
        self._total = 0
        for key, (reference, _) in list(self._live.items()):
            storage = reference()
            if storage is not None:
                self._live[key] = reference, storage.nbytes()
                self._total += storage.nbytes()
        self.peak = max(self.peak, self._total)

    def _see(self, tensor: Tensor) -> None:
        storage = tensor.untyped_storage()
        key = storage._cdata
        if key in self._live:
            return
        nbytes = storage.nbytes()
        self._live[key] = weakref.ref(storage, functools.partial(self._forget, key)), nbytes
        self._total += nbytes

    def _forget(self, key: int, _: Any) -> None:
        self._total -= self._live.pop(key)[1]
