"""A device that is not the CPU, for tests on a machine that has no accelerator: another memory, with its own row in the device table.

    with fake_accelerator(count=2, total_bytes=2**20) as fake:
        model.to(fake.device)                    # also tensor.to, .cpu(), copy_, factories with device=, Parameter.data = ...
        model(batch.to(fake.device)).sum().backward()
        assert fake.copies_to_device == len(list(model.parameters())) + 1
        assert fake.peak_bytes() <= 2**20        # more was a torch.OutOfMemoryError

Operations run on this CPU, but on memory that only tensors of `fake.device` have: mixing them with CPU tensors raises torch's RuntimeError of
real devices. Forward, backward, optimizers, in-place operations, views, deepcopy, `torch.save` and `torch.load` work; there are several devices, with
indices. They have random generators, memory figures, streams and events (which only record; `fake.kept` has what `record_stream` kept) behind
`torch.get_device_module(fake.kind)`, like any kind of the table. They are there for all threads, so `run_threads` works inside. `fake.kind` is a
name that torch knows and no build for a CPU uses; do not spell it in a test.

They do not: pin memory, compute at the same time as the CPU (a copy with `non_blocking` has happened when it returns; `fake.log` says that it was
asked for), autocast, torch.compile, process groups of their own. Tensors must not outlive the `with` block.

It needs a torch and a machine that it was tried on, without an accelerator that can be used (`fake_support` has the list): elsewhere it is a
FakeAcceleratorUnavailable before anything is touched, which a fixture answers with a skip.
"""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from typing import Any, NamedTuple

import torch
from torch.multiprocessing.reductions import StorageWeakRef

from acc_ops import devices, fake_driver, fake_kernels, fake_support
from acc_ops.devices import DeviceRow
from acc_ops.fake_driver import KIND
from acc_ops.fake_functions import Functions
from acc_ops.fake_support import FakeAcceleratorUnavailable

__all__ = ["Copy", "FakeAccelerator", "FakeAcceleratorUnavailable", "fake_accelerator"]


class Copy(NamedTuple):
    """One transfer between two memories."""

    source: torch.device
    target: torch.device
    nbytes: int
    non_blocking: bool


class _Memory:
    """What one device has handed out."""

    def __init__(self, total_bytes: int) -> None:
        self.total_bytes = total_bytes
        self.peak_bytes = 0
        self.pieces: list[tuple[StorageWeakRef, int]] = []

    def used_bytes(self) -> int:
        self.pieces = [piece for piece in self.pieces if not piece[0].expired()]
        return sum(nbytes for _, nbytes in self.pieces)


class FakeAccelerator:
    """The devices that `fake_accelerator` made, and what happened on them since then or since `reset()`."""

    kind = KIND

    def __init__(self, count: int, total_bytes: int) -> None:
        self.count = count
        self.device = torch.device(KIND, 0)
        self.log: list[Copy] = []
        self.kept: list[
            tuple[torch.Stream, int]
        ] = []  # what `record_stream` was called with: the stream, and bytes of memory
        self._memory = [_Memory(total_bytes) for _ in range(count)]
        self._random = [torch.Generator().manual_seed(0).get_state() for _ in range(count)]
        self._lock = threading.RLock()

    @property
    def devices(self) -> list[torch.device]:
        """All of them."""
        return [torch.device(KIND, index) for index in range(self.count)]

    @property
    def copies_to_device(self) -> int:
        """How many copies went from the CPU to a device."""
        return len(self._copies(from_host=True))

    @property
    def copies_to_host(self) -> int:
        """How many copies went from a device to the CPU, `item()` included."""
        return len(self._copies(from_host=False))

    @property
    def bytes_to_device(self) -> int:
        """The bytes of `copies_to_device`."""
        return sum(copy.nbytes for copy in self._copies(from_host=True))

    @property
    def bytes_to_host(self) -> int:
        """The bytes of `copies_to_host`."""
        return sum(copy.nbytes for copy in self._copies(from_host=False))

    def allocated_bytes(self, index: int = 0) -> int:
        """The bytes that living tensors hold on device `index`."""
        with self._lock:
            return self._memory[index].used_bytes()

    def peak_bytes(self, index: int = 0) -> int:
        """The most `allocated_bytes` was since the start or `reset()`."""
        return self._memory[index].peak_bytes

    def free_and_total_bytes(self, index: int = 0) -> tuple[int, int]:
        """The bytes that device `index` has left, and has."""
        total = self._memory[index].total_bytes
        return total - self.allocated_bytes(index), total

    def set_total_bytes(self, total_bytes: int, index: int = 0) -> None:
        """Change the memory that device `index` has."""
        self._memory[index].total_bytes = total_bytes

    def reset(self) -> None:
        """Forget the copies, the peaks and what was kept."""
        with self._lock:
            self.log.clear()
            self.kept.clear()
            for memory in self._memory:
                memory.peak_bytes = memory.used_bytes()

    # what `fake_kernels.Device` asks for

    def reserve(self, nbytes: int, index: int) -> None:
        """Raise torch.OutOfMemoryError where `nbytes` more do not fit."""
        if not 0 <= index < self.count:
            raise RuntimeError(
                f"invalid device ordinal: there is no {KIND}:{index}, only {self.count} of them"
            )
        with self._lock:
            memory = self._memory[index]
            used = memory.used_bytes()
            if used + nbytes > memory.total_bytes:
                raise torch.OutOfMemoryError(
                    f"{KIND} out of memory. Tried to allocate {nbytes} bytes. Device {index} has {memory.total_bytes} bytes, "
                    f"of which {memory.total_bytes - used} are free."
                )

    def took(self, memory: torch.UntypedStorage, index: int) -> None:
        """Count a piece of memory until it is freed."""
        with self._lock:
            device = self._memory[index]
            device.pieces.append((StorageWeakRef(memory), memory.nbytes()))
            device.peak_bytes = max(device.peak_bytes, device.used_bytes())

    def copied(self, source: torch.device, target: torch.device, nbytes: int, non_blocking: bool) -> None:
        """Note a transfer."""
        self.log.append(Copy(source, target, nbytes, non_blocking))

    def keep(self, memory: torch.UntypedStorage, stream: torch.Stream) -> None:
        """Note that memory was to be kept for what a stream still has to do."""
        self.kept.append((stream, memory.nbytes()))

    @contextmanager
    def own_random_numbers(self, index: int) -> Iterator[None]:
        """Torch's CPU generator draws the numbers of device `index` inside."""
        with self._lock:
            outside = torch.get_rng_state()
            torch.set_rng_state(self._random[index])
            try:
                yield
            finally:
                self._random[index] = torch.get_rng_state()
                torch.set_rng_state(outside)

    def random_state(self, index: int) -> torch.Tensor:
        """The state of the generator of device `index`."""
        return self._random[index].clone()

    def set_random_state(self, state: torch.Tensor, index: int) -> None:
        """Put the generator of device `index` where `random_state` found it."""
        with self._lock:
            self._random[index] = state.cpu().clone()

    def _copies(self, from_host: bool) -> list[Copy]:
        return [copy for copy in self.log if (copy.source if from_host else copy.target).type == "cpu"]


@contextmanager
def fake_accelerator(count: int = 2, total_bytes: int = 2**30, **columns: Any) -> Iterator[FakeAccelerator]:
    """`count` devices of `total_bytes` each are there inside, as the present kind of this machine.

    `columns` change their row of the device table (`autocast_bf16=False`). One at a time in a process: RuntimeError otherwise.
    FakeAcceleratorUnavailable, and nothing was touched, where this torch or machine was not tried (ACC_TRY_FAKE_ACCELERATOR=1 tries), or has an
    accelerator that can be used. RuntimeError where a tried torch does not do what it did. Afterwards everything is as before, also after an error.
    """
    if hasattr(torch, KIND):
        raise RuntimeError("there is a fake accelerator already, and only one at a time")
    if count < 1 or total_bytes < 0:
        raise ValueError(
            f"count must be at least 1 and total_bytes at least 0, got {count} and {total_bytes}"
        )
    fake_support.check()
    fake = FakeAccelerator(count, total_bytes)
    with ExitStack() as undo:
        _set_up(fake, _ROW._replace(**columns), undo)
        _try_out(fake)
        fake.reset()
        yield fake


def _set_up(fake: FakeAccelerator, row: DeviceRow, undo: ExitStack) -> None:
    """Let torch and the device table know of the devices until `undo` closes."""
    undo.callback(torch._C._set_multithreading_enabled, torch.autograd.is_multithreading_enabled())
    # the first backward of a process starts threads for the devices it finds; it shall not find this one
    torch.ones((), requires_grad=True).backward()
    undo.callback(fake_driver.set_current_index, 0)
    undo.enter_context(fake_driver.driver(fake.count))
    _FUNCTIONS.serve(fake)
    undo.callback(_FUNCTIONS.serve, None)
    setattr(torch, KIND, _FUNCTIONS)
    undo.callback(delattr, torch, KIND)
    _forget_modules()
    undo.callback(_forget_modules)
    fake_kernels.install(fake)
    undo.callback(fake_kernels.uninstall)
    torch.serialization.register_package(_PRIORITY, _location, _restored)
    undo.callback(torch.serialization._package_registry.remove, (_PRIORITY, _location, _restored))
    torch.UntypedStorage.clone = _cloned  # type: ignore[method-assign]  # what deepcopy calls
    undo.callback(delattr, torch.UntypedStorage, "clone")  # the inherited one is back
    table = devices.DEVICE_TABLE
    devices.DEVICE_TABLE = (row, *table)
    undo.callback(setattr, devices, "DEVICE_TABLE", table)


_ROW = DeviceRow(
    kind=KIND,
    module=KIND,
    backend="gloo",
    visibility="FAKE_VISIBLE_DEVICES",
    distributed_type="MULTI_FAKE",
    rng=KIND,
    memory=devices.torch_memory,
)
_FUNCTIONS = Functions()
_PRIORITY = 1000  # after torch's own kinds


def _forget_modules() -> None:
    """Since 2.8 `torch.get_device_module` keeps what it found first, also where it was given no device."""
    forget = getattr(torch.get_device_module, "cache_clear", None)
    if forget is not None:
        forget()


def _try_out(fake: FakeAccelerator) -> None:
    weight = torch.ones(2, 2).to(KIND).requires_grad_()
    (weight @ weight).sum().backward()
    if weight.grad is None or weight.grad.device != fake.device or weight.grad.tolist() != [[4.0, 4.0]] * 2:
        raise RuntimeError(f"torch {torch.__version__} cannot be told of a fake accelerator")


def _cloned(memory: Any) -> Any:
    """`UntypedStorage.clone`, also for memory that torch has no allocator of its own for."""
    if memory.device.type != KIND:
        return torch.storage._StorageBase.clone(memory)
    row = torch.empty(0, dtype=torch.uint8, device=memory.device).set_(memory)
    return row.clone().untyped_storage()


def _location(memory: Any) -> str | None:
    """Where torch.save says that a piece of memory was."""
    return str(memory.device) if memory.device.type == KIND else None


def _restored(memory: Any, location: str) -> Any:
    """What torch.load makes of a piece of memory that was there."""
    if not location.startswith(KIND):
        return None
    host = torch.empty(0, dtype=torch.uint8).set_(memory)
    return host.to(torch.device(location)).untyped_storage()
