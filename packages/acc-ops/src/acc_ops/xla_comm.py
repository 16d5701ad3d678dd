"""How the ranks of torch_xla speak: the protocol of `comm.py` over XLA's collectives.

[Note: on XLA] Tensors of a rank are computed lazily, as one graph. A collective is part of the graph, and reading its result on the host (the
header of a call, a length, an object) runs what was asked for so far. Headers have one size, so XLA compiles their exchange once; each new
size of a payload is compiled once, too. Bytes travel as `uint8`, which XLA views any dtype as, float8 included. Lazy tensors have no
address, so nothing here asks whether two share memory. Groups of ranks are not supported: a call is for all of them.
"""

from __future__ import annotations

import pickle
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from acc_ops.optional import require
from acc_ops.wire import arithmetic, as_bytes, as_typed, check_parts, check_reduction, check_root, overwrite
from acc_ops.xla import read_xla_ranks, this_device

# op -> its name in torch_xla.core.xla_model, for numbers and for bools, which travel as 0 and 1
_REDUCE_TYPES = {
    "sum": ("REDUCE_SUM", "REDUCE_MAX"),
    "max": ("REDUCE_MAX", "REDUCE_MAX"),
    "min": ("REDUCE_MIN", "REDUCE_MIN"),
    "product": ("REDUCE_MUL", "REDUCE_MIN"),
}


class XlaComm:
    """All ranks that torch_xla started, whether each is a process or a thread of one."""

    def __init__(self) -> None:
        ranks = read_xla_ranks()
        self.rank = ranks.rank
        self.size = ranks.size
        self.control_device = this_device()
        self._model: Any = require("torch_xla.core.xla_model", "collectives on XLA devices")

    def all_gather(self, tensor: Tensor) -> Tensor:
        wire = self._to_wire(tensor)  # (bytes)
        if wire.numel():
            wire = self._model.all_gather(wire, dim=0)  # (size * bytes)
        return as_typed(wire, tensor.dtype, (self.size, *tensor.shape)).to(tensor.device)

    def all_reduce(self, tensor: Tensor, op: str = "sum") -> Tensor:
        check_reduction(op, tensor.dtype)
        if not tensor.numel():
            return tensor
        if op == "product" and tensor.is_complex():  # is no product of the parts
            return overwrite(tensor, self.all_gather(tensor).prod(0))
        wire = arithmetic(tensor, op).to(self.control_device)
        name = _REDUCE_TYPES[op][tensor.dtype == torch.bool]
        total = self._model.all_reduce(getattr(self._model, name), wire)
        return overwrite(tensor, torch.view_as_complex(total) if tensor.is_complex() else total)

    def broadcast(self, tensor: Tensor, root: int = 0) -> Tensor:
        check_root(root, self.size)
        wire = self._from_root(self._to_wire(tensor), root)
        return tensor if self.rank == root else overwrite(tensor, as_typed(wire, tensor.dtype, tensor.shape))

    def scatter(self, parts: Sequence[Tensor] | None, out: Tensor, root: int = 0) -> Tensor:
        check_root(root, self.size)
        if self.rank == root:  # XLA has no scatter: every rank gets all parts, and keeps its own
            rows = torch.stack([self._to_wire(part) for part in check_parts(parts, self.size, root)])
        else:
            num_bytes = out.numel() * out.element_size()
            rows = torch.empty(self.size, num_bytes, dtype=torch.uint8, device=self.control_device)
        if not rows.numel():
            return out
        own = self._from_root(rows, root)[self.rank]
        return overwrite(out, as_typed(own, out.dtype, out.shape))

    def barrier(self) -> None:
        self._model.rendezvous("acc_ops.barrier")

    def all_gather_object(self, obj: Any) -> list[Any]:
        return [pickle.loads(data) for data in self._payloads(pickle.dumps(obj))]

    def broadcast_object(self, obj: Any, root: int = 0) -> Any:
        check_root(root, self.size)
        return pickle.loads(self._payloads(pickle.dumps(obj) if self.rank == root else b"")[root])

    def scatter_object(self, objs: Sequence[Any] | None, root: int = 0) -> Any:
        check_root(root, self.size)
        sent = b""
        if self.rank == root:
            sent = pickle.dumps([pickle.dumps(obj) for obj in check_parts(objs, self.size, root)])
        return pickle.loads(pickle.loads(self._payloads(sent)[root])[self.rank])

    def _payloads(self, data: bytes) -> list[bytes]:
        """Every rank's `data`, of any length, in rank order."""
        return list(self._model.rendezvous("acc_ops.objects", data))

    def _from_root(self, wire: Tensor, root: int) -> Tensor:
        """Rank `root`'s bytes; the given tensor stays as it is."""
        received = wire.clone()
        if received.numel():
            self._model.collective_broadcast([received], root_ordinal=root)
        return received

    def _to_wire(self, tensor: Tensor) -> Tensor:
        return as_bytes(tensor).to(self.control_device)
