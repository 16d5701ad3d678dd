"""One layer's weights, read by another thread before the layer runs, or dropped; what is given out is what the map still has."""

from __future__ import annotations

import threading
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from acc_hooks.homes import version_of
from acc_hooks.prefixed import home_of, is_at_hand, is_writable
from acc_hooks.staging import SideStream, Staged


@dataclass(frozen=True, kw_only=True)
class Wanted:
    """What a layer will read in its next forward."""

    weights_map: Mapping[str, Tensor]
    device: torch.device
    nbytes: Mapping[str, int]  # of each tensor, by name
    staged: frozenset[str]  # which of them may be copied to the device as they are


@dataclass(frozen=True, kw_only=True)
class Fetched:
    value: Tensor  # what the weights map gave
    staged: Tensor | None = None  # a copy of it on the device


class _Thread(threading.local):
    reads_ahead = False


_thread = _Thread()


def refuse_ahead(name: str) -> None:
    """Raises RuntimeError where a map that is read by our thread uses the model: the layer, which may have it, waits for us."""
    if _thread.reads_ahead:
        raise RuntimeError(
            f"the weights map used {name} of its own model while weights were fetched ahead, in another thread"
        )


class Job:
    """One layer's weights: read by our thread, or dropped before."""

    def __init__(
        self, wanted: Wanted, reading: Any, clock: Callable[[], float], stream: SideStream | None
    ) -> None:
        self.bytes = sum(wanted.nbytes.values())
        self.seconds: float | None = None  # what reading took
        self.error: BaseException | None = None
        self._wanted = wanted
        self._reading = reading
        self._clock = clock
        self._stream = stream
        self._begun = threading.Lock()  # whoever gets it decides what becomes of the job
        self._ended = threading.Event()
        self._is_dropped = False
        self._values: dict[str, tuple[Tensor, int | None]] = {}  # with the version
        self._staged: Staged | None = None

    def claim(self) -> bool:
        """Keep our thread from beginning; False if it has begun."""
        return self._begun.acquire(blocking=False)

    def drop(self) -> None:
        """It is not wanted any more: no further tensor is read."""
        self._is_dropped = True

    def run(self) -> None:
        """In our thread."""
        if self._is_dropped or not self.claim():
            return
        _thread.reads_ahead = True
        try:
            with torch.no_grad():
                self._read()
        except BaseException as error:  # noqa: BLE001 - the layer reads again, in its own thread, and raises
            self.error = error.with_traceback(None)
        finally:
            _thread.reads_ahead = False
            self._ended.set()

    def result(self, weights_map: Mapping[str, Tensor], device: torch.device) -> dict[str, Fetched]:
        """In the layer's thread, once it has begun: what the map still has."""
        try:
            self._ended.wait()
        except BaseException:
            self.drop()
            raise
        wanted = self._wanted
        if self.error is not None or wanted.weights_map is not weights_map or wanted.device != device:
            return {}
        staged: Mapping[str, Tensor] = {}
        if self._stream is not None and self._staged is not None:
            self._stream.receive(self._staged)
            staged = self._staged.tensors
        return {
            name: Fetched(value=value, staged=staged.get(name))
            for name, (value, version) in self._values.items()
            if version_of(value) == version and _is_still(weights_map, name, value)
        }

    def _read(self) -> None:
        wanted, began = self._wanted, self._clock()
        for name in wanted.nbytes:
            value = self._value(wanted.weights_map, name)
            if value is None:
                return
            self._values[name] = (value, version_of(value))
        self.seconds = self._clock() - began
        if self._stream is not None:
            on_host = {
                name: value
                for name, (value, _) in self._values.items()
                if name in wanted.staged and value.device.type == "cpu"
            }
            self._staged = self._stream.send(on_host)

    def _value(self, weights_map: Mapping[str, Tensor], name: str) -> Tensor | None:
        with self._reading:
            return None if self._is_dropped else weights_map[name]


def _is_still(weights_map: Mapping[str, Tensor], name: str, value: Tensor) -> bool:
    """Whether the map has this very tensor, where it can be asked without reading."""
    home, key = home_of(weights_map, name)
    try:
        return not is_writable(home) or not is_at_hand(home, key) or home[key] is value
    except KeyError:
        return False
