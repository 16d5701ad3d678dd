"""A step timer: where the time of a training step goes, for a block of a run that asks for it.

[Note: what is measured] A step is the time from asking a prepared loader for a batch until asking for the next one; without a prepared loader it ends
with `optimizer.step()`. Every moment of it belongs to one phase: `data` (waiting for the batch and its move to the device), `forward` (calls of
prepared models), `backward`, `sync` (from the moment this rank's own gradients are ready until backward returns: what is left to wait
for after communication has overlapped with backward), `step` (the optimizer, with unscaling and clipping) and `other` (everything else, the script's own
code). On the CPU the clock is the processor's; on an accelerator it is events in the device's stream, read later, so that nothing waits for the
device: a phase is then the time that the device spent in it or waited in it.

[Note: who pays] A run that times nothing pays one look at `GradSync.reading` a pass over a loader. While a timer runs, it stands in front of the strategy and
of the optimizers' steps, and prepared models have two hooks; all of it is gone after the block, whatever happened in it.
"""

from __future__ import annotations

import statistics
import time
from array import array
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import torch

if TYPE_CHECKING:
    import os

    from acc_trainer.accelerator import Accelerator

PHASES = ("data", "forward", "backward", "sync", "step", "other")
_DATA, _FORWARD, _BACKWARD, _SYNC, _STEP, _OTHER = range(len(PHASES))
_IN_FRONT = {"backward": _BACKWARD, "unscale": _STEP, "clip_norm": _STEP, "clip_value": _STEP, "step": _STEP}
_TOGETHER = 64  # steps whose stamps are turned into seconds in one go: done at every step, it costs more


class StepTimer:
    """What `Accelerator.time_steps` hands out: seconds of every phase in every step. Read it inside the block or afterwards."""

    def __init__(self, device: torch.device) -> None:
        clock = _clock_of(device)
        self.clock = clock.name
        self._now, self._reached, self._seconds = clock.now, clock.reached, clock.seconds
        self._spent = tuple(array("d") for _ in PHASES)  # one number a step
        self._phases = [_OTHER]  # the open ones, the innermost last
        self._marks: list[Any] = []  # phase, stamp, phase, stamp, ... of the step in progress
        # finished steps whose stamps were not turned into seconds yet
        self._pending: deque[list[Any]] = deque()
        self._by_batch = False
        self._is_step = False  # the marks began with a batch that was handed out
        self.running = False

    # reading -----------------------------------------------------------------------------------------------------------------

    @property
    def steps(self) -> int:
        """How many steps have been timed."""
        self._settle(wait=True)
        return len(self._spent[_OTHER])

    def seconds(self, phase: str) -> list[float]:
        """Seconds of a phase in each step. Raises `ValueError` for a phase that is none of `PHASES`."""
        if phase not in PHASES:
            raise ValueError(f"there is no phase {phase!r}: choose from {', '.join(PHASES)}")
        self._settle(wait=True)
        return list(self._spent[PHASES.index(phase)])

    def means(self) -> dict[str, float]:
        """Mean seconds a step, by phase: `accelerator.log(timer.means())`. Zeros before the first step has ended."""
        return {phase: statistics.fmean(self.seconds(phase) or [0.0]) for phase in PHASES}

    def table(self) -> str:
        """The phases with mean, median and 95th percentile in ms a step, and their share of the whole."""
        count, means = self.steps, self.means()
        whole = sum(means.values())
        title = f"{count} steps of {whole * 1e3:.3g} ms on average ({self.clock})"
        lines = [title, f"{'':10}{'ms':>10}{'median':>10}{'95 %':>10}{'share':>9}"]
        for phase, mean in means.items():
            values = sorted(self.seconds(phase)) or [0.0]
            high = values[min(len(values) - 1, int(0.95 * len(values)))]
            figures = "".join(f"{one * 1e3:10.3f}" for one in (mean, statistics.median(values), high))
            lines.append(f"{phase:10}{figures}{mean / whole if whole else 0:9.1%}")
        return "\n".join(lines)

    def svg(self, title: str = "") -> str:
        """The same as a picture: the mean step, and every step in its order."""
        from acc_trainer.timing_picture import draw  # noqa: PLC0415  a lazy start: few runs draw

        return draw({phase: self.seconds(phase) for phase in PHASES}, title or self.table().splitlines()[0])

    def save(self, path: str | os.PathLike[str], title: str = "") -> Path:
        """Write the picture; the path. Raises `ValueError` for a name that does not end in .svg."""
        file = Path(path)
        if file.suffix != ".svg":
            raise ValueError(f"the picture is an SVG file: give a name that ends in .svg, got {str(path)!r}")
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text(self.svg(title), encoding="utf-8")
        return file

    # marking -----------------------------------------------------------------------------------------------------------------

    def enter(self, phase: int) -> None:
        """From now on it is `phase`, until `leave`."""
        self._phases.append(phase)
        self._marks += (phase, self._now())

    def leave(self) -> None:
        """The phase is over, and the one around it goes on."""
        ended = self._phases.pop()
        self._marks += (self._phases[-1], self._now())
        if ended == _STEP and not self._by_batch:
            self._next_step(True)

    def turn_to(self, phase: int) -> None:
        """The innermost phase becomes another one."""
        self._phases[-1] = phase
        self._marks += (phase, self._now())

    def reading(self, batches: Iterator[Any]) -> Iterator[Any]:
        """The batches of one pass of a loader, each of which begins a step."""
        try:
            while self.running:
                self._by_batch = True
                self.enter(_DATA)
                self._next_step(False)
                try:
                    batch = next(batches, _END)
                finally:
                    self.leave()
                if batch is _END:
                    return
                self._is_step = True
                yield batch
            yield from batches  # the loop outlived the block
        finally:
            if callable(close := getattr(batches, "close", None)):
                close()

    def begin(self) -> None:
        """The block begins."""
        self.running = True
        self._is_step = False
        self._marks = [_OTHER, self._now()]

    def end(self) -> None:
        """The block is over."""
        self.running = False
        self._phases[1:] = []
        self._marks += (_OTHER, self._now())
        self._next_step(False)

    def _next_step(self, done: bool) -> None:
        """The last mark ends a step and begins the next one; what came before the first batch of a pass is no step."""
        if done or self._is_step:
            self._pending.append(self._marks)
        self._marks = self._marks[-2:]
        self._is_step = False
        if len(self._pending) >= _TOGETHER:
            self._settle(wait=False)

    def _settle(self, wait: bool) -> None:
        """Turn stamps into seconds, as far as the device has come."""
        while self._pending:
            marks = self._pending[0]
            if not wait and not self._reached(marks[-1]):
                return
            spent = [0.0] * len(PHASES)
            for at in range(0, len(marks) - 2, 2):
                spent[marks[at]] += self._seconds(marks[at + 1], marks[at + 3])
            for kept, one in zip(self._spent, spent, strict=True):
                kept.append(one)
            self._pending.popleft()


class _Timed:
    """A call that counts as a phase."""

    __slots__ = ("call", "phase", "timer")

    def __init__(self, timer: StepTimer, phase: int, call: Callable[..., Any]) -> None:
        self.timer = timer
        self.phase = phase
        self.call = call

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        self.timer.enter(self.phase)
        try:
            return self.call(*args, **kwargs)
        finally:
            self.timer.leave()


class _TimedStrategy:
    """Stands in front of a strategy while a timer runs."""

    def __init__(self, timer: StepTimer, strategy: Any) -> None:
        self.timed = strategy
        self.timer = timer
        for name, phase in _IN_FRONT.items():
            setattr(self, name, _Timed(timer, phase, getattr(strategy, name)))
        if strategy.synchronises:
            self.backward: Callable[..., Any] = _Timed(timer, _BACKWARD, self._backward)

    def __getattr__(self, name: str) -> Any:
        return getattr(self.timed, name)

    def _backward(self, loss: Any, **kwargs: Any) -> None:
        """The engine runs callbacks in the order they were queued, and this one is queued before any bucket of gradients is ready: it
        comes when this rank's own gradients are there, and before torch's DDP begins to wait for those of the others."""
        if not isinstance(loss, torch.Tensor) or not loss.requires_grad:
            return self.timed.backward(loss, **kwargs)  # which says what is wrong
        queue: Any = torch.autograd.Variable._execution_engine.queue_callback
        handle = loss.register_hook(lambda _: queue(lambda: self.timer.turn_to(_SYNC)))
        try:
            return self.timed.backward(loss, **kwargs)
        finally:
            handle.remove()


@contextmanager
def timed(accelerator: Accelerator) -> Iterator[StepTimer]:
    """Time the steps of what `accelerator` has prepared. Raises `ValueError` inside another such block."""
    if accelerator.grad_sync.reading is not None:
        raise ValueError("time_steps is running already: one block at a time")
    timer = StepTimer(accelerator.device)
    strategy: Any = accelerator.strategy
    front: Any = _TimedStrategy(timer, strategy)
    hooks = [
        hook
        for model in accelerator._models
        for hook in (
            model.register_forward_pre_hook(lambda *_: timer.enter(_FORWARD), prepend=True),
            model.register_forward_hook(lambda *_: timer.leave(), always_call=True),
        )
    ]
    optimizers = list(accelerator._optimizers)
    for optimizer in optimizers:
        optimizer._strategy_step = _Timed(timer, _STEP, optimizer._strategy_step)  # type: ignore[arg-type]
    accelerator.strategy = front
    accelerator.grad_sync.reading = timer.reading
    timer.begin()
    try:
        yield timer
    finally:
        timer.end()
        accelerator.grad_sync.reading = None
        accelerator.strategy = strategy
        for optimizer in (*optimizers, *accelerator._optimizers):  # those prepared in the block, too
            if isinstance(optimizer._strategy_step, _Timed):
                optimizer._strategy_step = optimizer._strategy_step.call
        for hook in hooks:
            hook.remove()


_END: Any = object()


class _Clock(NamedTuple):
    """What gives stamps, and what they say."""

    name: str
    now: Callable[[], Any]
    reached: Callable[[Any], bool]  # whether the device has come to a stamp
    seconds: Callable[[Any, Any], float]  # between two stamps; waits until both are reached


def _clock_of(device: torch.device) -> _Clock:
    """Events in the device's stream, where it has such, else the processor's clock."""
    event: Any = getattr(getattr(torch, device.type, None), "Event", None)
    if device.type == "cpu" or event is None:
        return _Clock("host", time.perf_counter, lambda _: True, lambda begin, end: end - begin)

    def now() -> Any:
        stamp = event(enable_timing=True)
        stamp.record()
        return stamp

    def seconds(begin: Any, end: Any) -> float:
        end.synchronize()
        return float(begin.elapsed_time(end)) / 1e3

    return _Clock(f"{device.type} events", now, lambda stamp: bool(stamp.query()), seconds)
