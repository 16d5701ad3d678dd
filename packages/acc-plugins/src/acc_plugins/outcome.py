"""What became of an optimizer step: whether it ran, and what the optimizer returned."""

from __future__ import annotations

from typing import Any, NamedTuple


class StepOutcome(NamedTuple):
    """`ran` is False when the step was skipped (an fp16 overflow); `result` is what `optimizer.step` returned.

    A named tuple and not a dataclass: one is made per step, and it is three times cheaper.
    """

    ran: bool
    result: Any = None
