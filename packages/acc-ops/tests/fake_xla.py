"""A torch_xla for tests: its documented functions, for ranks that are threads, on tensors of the CPU."""

from __future__ import annotations

import threading
import types
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from acc_ops.comm import Meeting
from acc_ops.world import bound_world

COMBINE = {
    "sum": torch.Tensor.add_,
    "mul": torch.Tensor.mul_,
    "max": lambda one, two: one.copy_(torch.maximum(one, two)),
    "min": lambda one, two: one.copy_(torch.minimum(one, two)),
}


class FakeXla:
    """The modules `torch_xla`, `torch_xla.runtime` and `torch_xla.core.xla_model`; ranks are those of `run_threads`."""

    def __init__(self) -> None:
        self.calls: list[str] = []  # what rank 0 called
        self.seeds: dict[int, int] = {}
        self.devices_of_process = 1
        self._meetings: dict[int, Meeting] = {}
        self._numbers = threading.local()
        self._lock = threading.Lock()
        self.root = types.ModuleType("torch_xla")
        self.root.device = lambda index=None: torch.device("cpu")
        self.root.sync = lambda wait=False: self._note("sync")
        self.runtime = types.ModuleType("torch_xla.runtime")
        self.runtime.world_size = lambda: self._ranks()[1]
        self.runtime.global_ordinal = lambda: self._ranks()[0]
        self.runtime.local_ordinal = lambda: self._ranks()[0]
        self.runtime.local_device_count = lambda: self._ranks()[1]
        self.runtime.addressable_device_count = lambda: self.devices_of_process
        self.runtime.is_bf16_supported = lambda: True
        self.runtime.device_type = lambda: "TPU"
        self.core = types.ModuleType("torch_xla.core")
        self.model = types.ModuleType("torch_xla.core.xla_model")
        for name in ("SUM", "MUL", "MAX", "MIN"):
            setattr(self.model, f"REDUCE_{name}", name.lower())
        for function in (self.all_gather, self.all_reduce, self.collective_broadcast, self.rendezvous):
            setattr(self.model, function.__name__, function)
        self.model.set_rng_state = lambda seed, device=None: self.seeds.update({self._ranks()[0]: seed})
        self.model.get_rng_state = lambda device=None: self.seeds.get(self._ranks()[0], 0)
        self.model.wait_device_ops = lambda devices=(): self._note("wait_device_ops")
        self.model.get_memory_info = lambda device=None: {"bytes_used": 30, "bytes_limit": 100}
        self.root.runtime, self.root.core, self.core.xla_model = self.runtime, self.core, self.model

    def modules(self) -> dict[str, types.ModuleType]:
        """What `sys.modules` has once it is imported."""
        return {module.__name__: module for module in (self.root, self.runtime, self.core, self.model)}

    def all_gather(self, value: Tensor, dim: int = 0) -> Tensor:
        return torch.cat(self._meet("all_gather", value.clone()), dim=dim)

    def all_reduce(self, reduce_type: str, inputs: Tensor, scale: float = 1.0) -> Tensor:
        first, *others = self._meet(f"all_reduce {reduce_type}", inputs.clone())
        total = first.clone()
        for other in others:
            COMBINE[reduce_type](total, other)
        return total if scale == 1.0 else total * scale

    def collective_broadcast(self, tensors: list[Tensor], root_ordinal: int = 0) -> None:
        sent: Sequence[list[Tensor]] = self._meet(
            f"collective_broadcast {root_ordinal}", [tensor.clone() for tensor in tensors]
        )
        for tensor, value in zip(tensors, sent[root_ordinal], strict=True):
            tensor.copy_(value)

    def rendezvous(self, tag: str, payload: bytes = b"", replicas: Sequence[int] = ()) -> list[bytes]:
        return self._meet(f"rendezvous {tag}", payload)

    def _ranks(self) -> tuple[int, int]:
        world = bound_world()
        return (0, 1) if world is None else (world.rank, world.size)

    def _note(self, call: str) -> None:
        if self._ranks()[0] == 0:
            self.calls.append(call)

    def _meet(self, call: str, value: Any) -> list[Any]:
        rank, size = self._ranks()
        self._note(call.split()[0])
        with self._lock:
            meeting = self._meetings.setdefault(size, Meeting(size, timeout_s=10))
        self._numbers.value = getattr(self._numbers, "value", 0) + 1
        number = self._numbers.value * 1000 + size  # threads are new in each run_threads
        return meeting.exchange(rank, number, call, value)
