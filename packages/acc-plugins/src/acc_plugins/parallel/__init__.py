"""Splitting one model, or one sequence, over several ranks: tensor, context and sequence parallelism."""

from __future__ import annotations

from acc_ops.lazy import lazy_exports

_NAMES = {
    "PlanError": "plans",
    "SequenceError": "masks",
    "context_parallel": "context",
    "plan_of": "plans",
    "reach_of": "split",
    "set_plan": "plans",
    "split_batch": "sequence",
    "split_loader": "sequence",
    "split_model": "split",
}
__getattr__, __dir__, __all__ = lazy_exports(__name__, _NAMES)
