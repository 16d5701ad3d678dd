"""The functions of the fake accelerator that torch keeps in a module for each kind (`torch.cuda`); used by `fake_accelerator.py` only."""

from __future__ import annotations

import itertools
import threading
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, Protocol

import torch

from acc_ops.fake_driver import KIND, KIND_NUMBER, current_index, set_current_index


class Devices(Protocol):
    """What is behind the functions."""

    count: int

    def allocated_bytes(self, index: int) -> int: ...
    def peak_bytes(self, index: int) -> int: ...
    def free_and_total_bytes(self, index: int) -> tuple[int, int]: ...
    def random_state(self, index: int) -> torch.Tensor: ...
    def set_random_state(self, state: torch.Tensor, index: int) -> None: ...


class Event:
    """An event of the device: it only knows whether it was recorded, since everything is done at once."""

    def __init__(self, enable_timing: bool = False, **_: Any) -> None:
        self.enable_timing = enable_timing
        self.recorded_on: Stream | None = None

    def record(self, stream: Stream | None = None) -> None:
        """Happen on `stream`."""
        self.recorded_on = stream or torch.get_device_module(KIND).current_stream()

    def wait(self, stream: Stream | None = None) -> None:
        """Let `stream` wait for this event."""
        (stream or torch.get_device_module(KIND).current_stream()).wait_event(self)

    def query(self) -> bool:
        """Whether it has happened."""
        return True

    def synchronize(self) -> None:
        """Wait until it has happened."""


class Stream(torch.Stream):
    """A stream of the device: it keeps what was asked of it in `log`, and everything is done at once."""

    priority: int
    log: list[tuple[str, Any]]

    def __new__(cls, device: Any = None, priority: int = 0) -> Stream:
        """A stream that is equal to no other."""
        self = super().__new__(
            cls, stream_id=next(_STREAM_IDS), device_index=_index(device), device_type=KIND_NUMBER
        )
        self.priority, self.log = priority, []
        return self

    def wait_event(self, event: Any) -> None:
        """Wait for an event."""
        self.log.append(("wait_event", event))

    def wait_stream(self, stream: Any) -> None:
        """Wait for all that `stream` was given."""
        self.log.append(("wait_stream", stream))

    def record_event(self, event: Any = None) -> Any:
        """An event that has happened here."""
        event = event or Event()
        event.record(self)
        self.log.append(("record_event", event))
        return event

    def query(self) -> bool:
        """Whether all is done."""
        return True

    def synchronize(self) -> None:
        """Wait until all is done."""
        self.log.append(("synchronize", None))


class Functions:
    """What `torch.get_device_module(kind)` gives for a kind of device; `calls` counts those that wait or clear."""

    def __init__(self) -> None:
        self.Stream, self.Event, self.OutOfMemoryError = Stream, Event, torch.OutOfMemoryError
        self.calls: Counter[str] = Counter()
        self._fake: Devices | None = None
        self._here = threading.local()

    @property
    def fake(self) -> Devices:
        """The devices; RuntimeError where there are none."""
        if self._fake is None:
            raise RuntimeError(f"there is no {KIND} device: fake_accelerator() has ended")
        return self._fake

    def serve(self, fake: Devices | None) -> None:
        """Speak of other devices from now on; None: of none. Who kept these functions has them for longer than the devices."""
        self._fake = fake
        self._here = threading.local()
        self.calls.clear()

    def is_available(self) -> bool:
        """Whether there is a device."""
        return self._fake is not None

    def is_initialized(self) -> bool:
        """Whether the driver is awake: it always is."""
        return True

    def device_count(self) -> int:
        """How many devices there are."""
        return self.fake.count

    def current_device(self) -> int:
        """The index of this thread's current device."""
        return current_index()

    def set_device(self, device: Any) -> None:
        """Make `device` this thread's current one."""
        set_current_index(_index(device))

    @contextmanager
    def device(self, device: Any) -> Iterator[None]:
        """`device` is the current one inside."""
        before = self.current_device()
        self.set_device(device)
        try:
            yield
        finally:
            self.set_device(before)

    def current_stream(self, device: Any = None) -> Stream:
        """The stream of this thread."""
        streams = self._here.__dict__.setdefault("streams", {})
        index = _index(device)
        return streams.setdefault(index, Stream(index))  # type: ignore[no-any-return]

    @contextmanager
    def stream(self, stream: Stream | None) -> Iterator[None]:
        """`stream` is this thread's current one inside."""
        if stream is None:
            yield
            return
        before = self.current_stream(stream.device)
        self._here.streams[stream.device.index] = stream
        try:
            yield
        finally:
            self._here.streams[stream.device.index] = before

    def synchronize(self, device: Any = None) -> None:
        """Wait until everything given to `device` is done."""
        self.current_stream(device).synchronize()
        self.calls["synchronize"] += 1

    def empty_cache(self) -> None:
        """Give kept memory back: none is kept."""
        self.calls["empty_cache"] += 1

    def mem_get_info(self, device: Any = None) -> tuple[int, int]:
        """Free and total bytes."""
        return self.fake.free_and_total_bytes(_index(device))

    def memory_allocated(self, device: Any = None) -> int:
        """The bytes that tensors hold."""
        return self.fake.allocated_bytes(_index(device))

    def max_memory_allocated(self, device: Any = None) -> int:
        """The most bytes that tensors held."""
        return self.fake.peak_bytes(_index(device))

    def manual_seed(self, seed: int) -> None:
        """Seed the current device's generator."""
        self.fake.set_random_state(torch.Generator().manual_seed(seed).get_state(), self.current_device())

    def manual_seed_all(self, seed: int) -> None:
        """Seed the generators of all devices."""
        for index in range(self.fake.count):
            self.fake.set_random_state(torch.Generator().manual_seed(seed).get_state(), index)

    def get_rng_state(self, device: Any = None) -> torch.Tensor:
        """The state of a device's generator."""
        return self.fake.random_state(_index(device))

    def get_rng_state_all(self) -> list[torch.Tensor]:
        """The states of all devices' generators."""
        return [self.fake.random_state(index) for index in range(self.fake.count)]

    def set_rng_state(self, new_state: torch.Tensor, device: Any = None) -> None:
        """Put a device's generator where `get_rng_state` found it."""
        self.fake.set_random_state(new_state, _index(device))


_STREAM_IDS = itertools.count(1)


def _index(device: Any) -> int:
    if isinstance(device, int):
        return device
    index = None if device is None else torch.device(device).index
    return current_index() if index is None else index
