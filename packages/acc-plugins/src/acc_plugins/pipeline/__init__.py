"""Training through a pipeline of processes: `Pipelined` cuts a model into stages and runs torch's schedules over them."""

from __future__ import annotations

from acc_ops.lazy import lazy_exports

_NAMES = {
    "PipelineError": "errors",
    "PipelineState": "saving",
    "Pipelined": "pipelined",
}
__getattr__, __dir__, __all__ = lazy_exports(__name__, _NAMES)
