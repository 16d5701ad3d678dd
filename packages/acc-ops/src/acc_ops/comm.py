"""How the ranks of a world speak: one protocol, answered by a single rank, by torch.distributed, or by threads."""

from __future__ import annotations

import pickle
import time
from collections.abc import Callable, Sequence
from threading import Condition
from typing import Any, NamedTuple, Protocol

import torch
import torch.distributed as dist
from torch import Tensor

from acc_ops.forks import is_forked_from_a_rank
from acc_ops.wire import (
    arithmetic,
    as_bytes,
    as_typed,
    check_parts,
    check_reduction,
    check_root,
    combine,
    from_bytes,
    from_ordered,
    overwrite,
    same_memory,
    to_bytes,
    to_ordered,
    torch_op,
)


class CommError(RuntimeError):
    """The ranks did not meet: one left, failed, came too late, or asked for something else."""


class Comm(Protocol):
    """What a world needs to speak. Every rank makes the same calls in the same order; each call returns on all of them."""

    rank: int
    size: int

    @property
    def control_device(self) -> torch.device:
        """Where small messages live that the program itself wants to read: the CPU if the ranks can send from there."""

    def all_gather(self, tensor: Tensor) -> Tensor:
        """Every rank's `tensor`, as (size, *tensor.shape) in rank order; all ranks give the same shape and dtype."""

    def all_reduce(self, tensor: Tensor, op: str = "sum") -> Tensor:
        """Overwrite `tensor` with the sum, max, min or product over the ranks; bools: sum and max are `or`, the others `and`."""

    def broadcast(self, tensor: Tensor, root: int = 0) -> Tensor:
        """Overwrite `tensor` with rank `root`'s."""

    def scatter(self, parts: Sequence[Tensor] | None, out: Tensor, root: int = 0) -> Tensor:
        """Overwrite `out` with this rank's of the `parts` that rank `root` gives; all have the shape and dtype of `out`."""

    def barrier(self) -> None:
        """Return when every rank has come here."""

    def all_gather_object(self, obj: Any) -> list[Any]:
        """Every rank's picklable `obj`, in rank order."""

    def broadcast_object(self, obj: Any, root: int = 0) -> Any:
        """Rank `root`'s picklable `obj`."""

    def scatter_object(self, objs: Sequence[Any] | None, root: int = 0) -> Any:
        """This rank's of the picklable objects that rank `root` gives, one for each rank."""


class SoloComm:
    """A world of one rank: nothing is sent."""

    rank = 0
    size = 1
    control_device = torch.device("cpu")

    def all_gather(self, tensor: Tensor) -> Tensor:
        return tensor.detach().clone().unsqueeze(0)

    def all_reduce(self, tensor: Tensor, op: str = "sum") -> Tensor:
        check_reduction(op, tensor.dtype)
        return tensor

    def broadcast(self, tensor: Tensor, root: int = 0) -> Tensor:
        check_root(root, 1)
        return tensor

    def scatter(self, parts: Sequence[Tensor] | None, out: Tensor, root: int = 0) -> Tensor:
        (part,) = check_parts(parts, 1, root)
        with torch.no_grad():
            return out.copy_(part)

    def barrier(self) -> None:
        return None

    def all_gather_object(self, obj: Any) -> list[Any]:
        return [obj]

    def broadcast_object(self, obj: Any, root: int = 0) -> Any:
        check_root(root, 1)
        return obj

    def scatter_object(self, objs: Sequence[Any] | None, root: int = 0) -> Any:
        (obj,) = check_parts(objs, 1, root)
        return obj


class TorchComm:
    """The ranks of a torch.distributed process group (None: the default group). Roots are ranks of that group.

    A rank that waits longer than `warn_after_s` seconds (default: ACC_WARN_AFTER in the environment, or 30) logs which ranks are missing and
    what they do. Raises CommError when a rank has ended, left, or does not come within the group's timeout, and in a process that was forked
    from a rank; what a backend without a CPU part sends is up to that backend.
    """

    def __init__(self, group: dist.ProcessGroup | None = None, *, warn_after_s: float | None = None) -> None:
        if not dist.is_available() or not dist.is_initialized():
            raise CommError(
                "torch.distributed is not initialised: call join_world() or init_process_group() first"
            )
        self.group = group
        self.rank = dist.get_rank(group)
        self.size = dist.get_world_size(group)
        if self.rank < 0:
            raise CommError("this process is not a member of the given process group")
        self._backends = _backends_by_device(group)
        self.control_device = self._wire_device(torch.device("cpu"))
        from acc_ops.watch import watch_of  # noqa: PLC0415 - a process without a group need not wait for it

        self.watch = watch_of(group, warn_after_s)
        self._in_slices = self._backends.get("cpu") == "gloo"

    def backend(self, kind: str) -> str | None:
        """The group's backend for tensors on devices of this kind, such as `nccl` for `cuda`."""
        return self._backends.get(kind)

    def all_gather(self, tensor: Tensor) -> Tensor:
        self._check_process()
        wire = self._to_wire(tensor)
        out = torch.empty(self.size * wire.numel(), dtype=torch.uint8, device=wire.device)
        if wire.numel():
            work = _all_gather_single(out, wire, group=self.group, async_op=True)
            self._finish(work, "all_gather", wire)
        gathered = as_typed(out, tensor.dtype, (self.size, *tensor.shape))
        return gathered if wire is tensor else gathered.to(tensor.device)

    def all_reduce(self, tensor: Tensor, op: str = "sum") -> Tensor:
        self._check_process()
        check_reduction(op, tensor.dtype)
        if (
            op == "product" and tensor.is_complex()
        ):  # a product of complex numbers is no product of their parts
            return overwrite(tensor, self.all_gather(tensor).prod(0))
        wire = arithmetic(tensor, op).to(self._wire_device(tensor.device))
        wire = wire.contiguous()
        ordered = op in ("max", "min") and wire.is_floating_point()
        if ordered:
            wire = to_ordered(wire, op)
        if wire.numel():
            work = dist.all_reduce(wire, torch_op(op, tensor.dtype), group=self.group, async_op=True)
            self._finish(work, "all_reduce", wire)
        if ordered:
            wire = from_ordered(wire)
        if same_memory(wire, tensor):
            return tensor
        return overwrite(tensor, torch.view_as_complex(wire) if tensor.is_complex() else wire)

    def broadcast(self, tensor: Tensor, root: int = 0) -> Tensor:
        self._check_process()
        check_root(root, self.size)
        wire = self._to_wire(tensor)
        if wire.numel():
            work = dist.broadcast(wire, self._global(root), group=self.group, async_op=True)
            self._finish(work, "broadcast", wire)
        if self.rank == root or same_memory(wire, tensor):
            return tensor
        return overwrite(tensor, as_typed(wire, tensor.dtype, tensor.shape))

    def scatter(self, parts: Sequence[Tensor] | None, out: Tensor, root: int = 0) -> Tensor:
        self._check_process()
        check_root(root, self.size)
        wires = None
        if self.rank == root:
            wires = [self._to_wire(part.to(out.device)) for part in check_parts(parts, self.size, root)]
        wire = self._to_wire(out)
        lands = out.dtype == torch.uint8 and same_memory(wire, out)  # received where it belongs
        if not lands:
            wire = torch.empty_like(wire)
        if wire.numel():
            work = dist.scatter(wire, wires, self._global(root), group=self.group, async_op=True)
            self._finish(work, "scatter", wire)
        return out if lands else overwrite(out, as_typed(wire, out.dtype, out.shape))

    def barrier(self) -> None:
        self._check_process()
        ready = torch.ones(1, device=self.control_device)
        self._finish(dist.all_reduce(ready, group=self.group, async_op=True), "barrier", ready)
        ready.item()  # an accelerator's queue has to have come here, too

    def all_gather_object(self, obj: Any) -> list[Any]:
        own = from_bytes(pickle.dumps(obj))  # torch's object functions need NumPy
        lengths: list[int] = self.all_gather(self._control([own.numel()])).flatten().tolist()
        padded = torch.zeros(max(lengths), dtype=torch.uint8)
        padded[: own.numel()] = own
        rows = self.all_gather(padded.to(self.control_device)).cpu()
        return [pickle.loads(to_bytes(row[:n])) for row, n in zip(rows, lengths, strict=True)]

    def broadcast_object(self, obj: Any, root: int = 0) -> Any:
        check_root(root, self.size)
        own = from_bytes(pickle.dumps(obj)) if self.rank == root else torch.empty(0, dtype=torch.uint8)
        length = int(self.broadcast(self._control([own.numel()]), root))
        if self.rank != root:
            own = torch.empty(length, dtype=torch.uint8)
        return pickle.loads(to_bytes(self.broadcast(own.to(self.control_device), root).cpu()))

    def scatter_object(self, objs: Sequence[Any] | None, root: int = 0) -> Any:
        check_root(root, self.size)
        blobs: list[bytes] = []
        if self.rank == root:
            blobs = [pickle.dumps(obj) for obj in check_parts(objs, self.size, root)]
        longest = int(self.broadcast(self._control([max(map(len, blobs), default=0)]), root))
        out = torch.empty(longest, dtype=torch.uint8, device=self.control_device)
        parts = [from_bytes(blob.ljust(longest, b"\0")) for blob in blobs]  # pickles know where they end
        return pickle.loads(to_bytes(self.scatter(parts if self.rank == root else None, out, root).cpu()))

    def _check_process(self) -> None:
        if is_forked_from_a_rank():
            raise CommError(
                f"this process was forked from rank {self.rank} and is no rank: speak to the others in the process that joined "
                "them, or start this one with multiprocessing's spawn method"
            )

    def _finish(self, work: Any, name: str, wire: Tensor) -> None:
        """Wait for a collective: gloo's in slices, which an accelerator's cannot be, as its host does not wait at all."""
        if self._in_slices and wire.device.type == "cpu":
            self.watch.wait(work, name)
        else:
            work.wait()

    def _control(self, numbers: list[int]) -> Tensor:
        return torch.tensor(numbers, dtype=torch.int64, device=self.control_device)

    def _global(self, root: int) -> int:
        return root if self.group is None else dist.get_global_rank(self.group, root)

    def _wire_device(self, device: torch.device) -> torch.device:
        """Where a tensor of `device` is sent from: there, if the group has a backend for it."""
        if device.type in self._backends:
            return device
        kind = next(iter(self._backends))
        if kind == "cpu":
            return torch.device(kind)
        return torch.device(kind, torch.get_device_module(kind).current_device())

    def _to_wire(self, tensor: Tensor) -> Tensor:
        wire = as_bytes(tensor)
        return wire if wire.device.type in self._backends else wire.to(self._wire_device(wire.device))


class Meeting:
    """Where ranks that are threads of one process meet: call number n of each waits for call number n of all others."""

    def __init__(self, size: int, timeout_s: float = 60.0) -> None:
        self.size = size
        self.timeout_s = timeout_s
        self._changed = Condition()
        self._calls: dict[int, dict[int, _Call]] = {}  # call number -> rank -> what it brought
        self._taken: dict[int, int] = {}  # call number -> how many have the result
        self._left: dict[int, str] = {}  # rank -> why
        self._broken: str | None = None

    def leave(self, rank: int, why: str = "ended") -> None:
        """Say that `rank` makes no more calls; whoever waits for it gets an error instead of waiting on."""
        with self._changed:
            self._left[rank] = why
            self._changed.notify_all()

    def exchange(self, rank: int, number: int, name: str, value: Any) -> list[Any]:
        """What every rank brought to its call `number`, in rank order. Raises CommError when one does not come."""
        deadline = time.monotonic() + self.timeout_s
        with self._changed:
            if self._broken is not None:
                raise CommError(self._broken)
            calls = self._calls.setdefault(number, {})
            calls[rank] = _Call(name, value)
            self._changed.notify_all()
            while len(calls) < self.size:
                self._check(calls, rank, name, deadline)
                self._changed.wait(max(0.0, deadline - time.monotonic()))
            self._taken[number] = self._taken.get(number, 0) + 1
            if self._taken[number] == self.size:
                del self._calls[number], self._taken[number]
        names = [calls[r].name for r in range(self.size)]
        if len(set(names)) > 1:
            said = ", ".join(f"rank {r} {n}" for r, n in enumerate(names))
            raise CommError(f"the ranks make different calls: {said}")
        return [calls[r].value for r in range(self.size)]

    def _check(self, calls: dict[int, _Call], rank: int, name: str, deadline: float) -> None:
        missing = [r for r in range(self.size) if r not in calls]
        gone = next((r for r in missing if r in self._left), None)
        if gone is not None:
            raise CommError(f"rank {rank} waits in {name} for rank {gone}, which {self._left[gone]}")
        if self._broken is None and time.monotonic() >= deadline:
            late = ", ".join(str(r) for r in missing)
            self._broken = (
                f"{name} waited {self.timeout_s:g} s on rank {rank}; rank {late} did not make the call"
            )
            self._changed.notify_all()
        if self._broken is not None:
            raise CommError(self._broken)


class _Call(NamedTuple):
    name: str
    value: Any


class ThreadComm:
    """One rank among threads of the same process (`acc_ops.testing.run_threads`): what a rank sends is copied first."""

    def __init__(self, meeting: Meeting, rank: int) -> None:
        check_root(rank, meeting.size, "rank")
        self.meeting = meeting
        self.rank = rank
        self.size = meeting.size
        self.control_device = torch.device("cpu")
        self._number = 0

    def all_gather(self, tensor: Tensor) -> Tensor:
        tensors = self._exchange("all_gather", tensor.detach().clone())
        return torch.stack([other.to(tensor.device) for other in tensors])

    def all_reduce(self, tensor: Tensor, op: str = "sum") -> Tensor:
        check_reduction(op, tensor.dtype)
        tensors = self._exchange(f"all_reduce({op!r})", tensor.detach().clone())
        return overwrite(tensor, combine([other.to(tensor.device) for other in tensors], op))

    def broadcast(self, tensor: Tensor, root: int = 0) -> Tensor:
        check_root(root, self.size)
        sent = tensor.detach().clone() if self.rank == root else None
        tensors = self._exchange(f"broadcast(root={root})", sent)
        return tensor if self.rank == root else overwrite(tensor, tensors[root])

    def scatter(self, parts: Sequence[Tensor] | None, out: Tensor, root: int = 0) -> Tensor:
        check_root(root, self.size)
        sent = None
        if self.rank == root:
            sent = [part.detach().clone() for part in check_parts(parts, self.size, root)]
        return overwrite(out, self._exchange(f"scatter(root={root})", sent)[root][self.rank])

    def barrier(self) -> None:
        self._exchange("barrier", None)

    def all_gather_object(self, obj: Any) -> list[Any]:
        return [pickle.loads(data) for data in self._exchange("all_gather_object", pickle.dumps(obj))]

    def broadcast_object(self, obj: Any, root: int = 0) -> Any:
        check_root(root, self.size)
        sent = pickle.dumps(obj) if self.rank == root else None
        return pickle.loads(self._exchange(f"broadcast_object(root={root})", sent)[root])

    def scatter_object(self, objs: Sequence[Any] | None, root: int = 0) -> Any:
        check_root(root, self.size)
        sent = None
        if self.rank == root:
            sent = [pickle.dumps(obj) for obj in check_parts(objs, self.size, root)]
        return pickle.loads(self._exchange(f"scatter_object(root={root})", sent)[root][self.rank])

    def _exchange(self, name: str, value: Any) -> list[Any]:
        self._number += 1
        return self.meeting.exchange(self.rank, self._number, name, value)


def _backends_by_device(group: dist.ProcessGroup | None) -> dict[str, str]:
    """Device type -> backend of a group, the CPU first: {"cpu": "gloo", "cuda": "nccl"}."""
    pairs = (pair.split(":") for pair in str(dist.get_backend_config(group)).split(","))
    found = dict(pairs)
    return dict(sorted(found.items(), key=lambda pair: pair[0] != "cpu"))


def _no_distributed(*args: Any, **options: Any) -> None:  # noqa: ARG001
    raise CommError("this torch was built without torch.distributed")


# torch 2.13 renamed it and warns about the old name
_all_gather_single: Callable[..., Any] = getattr(
    dist,
    "all_gather_single" if hasattr(dist, "all_gather_single") else "all_gather_into_tensor",
    _no_distributed,
)
