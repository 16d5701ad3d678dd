"""The rooms of the Accelerator, each opened when it is first entered.

[Note: why] Importing the Accelerator must cost a script next to nothing, so its facade holds the modules that do the work as
`LazyModule`s, and asks the packages below by their lazy tops (`acc_ops.gather`). The constructor loads what every run needs; what a run
may never use (metrics, trackers, checkpoints, the profiler) is loaded when it is used. A type checker sees the modules themselves.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from acc_ops.lazy import LazyModule

if TYPE_CHECKING:
    from acc_trainer import clipping as clipping
    from acc_trainer import gradient_state as gradient_state
    from acc_trainer import lomo as lomo
    from acc_trainer import metrics as metrics
    from acc_trainer import parallel as parallel
    from acc_trainer import preparing as preparing
    from acc_trainer import profiling as profiling
    from acc_trainer import saving as saving
    from acc_trainer import setup as setup
    from acc_trainer import state as state
    from acc_trainer import timing as timing
    from acc_trainer.data import prepare
    from acc_trainer.data import uneven as uneven
    from acc_trainer.tracking import run

    data, tracking = prepare, run
else:
    clipping = LazyModule("acc_trainer.clipping")
    gradient_state = LazyModule("acc_trainer.gradient_state")
    lomo = LazyModule("acc_trainer.lomo")
    metrics = LazyModule("acc_trainer.metrics")
    parallel = LazyModule("acc_trainer.parallel")
    preparing = LazyModule("acc_trainer.preparing")
    profiling = LazyModule("acc_trainer.profiling")
    saving = LazyModule("acc_trainer.saving")
    setup = LazyModule("acc_trainer.setup")
    state = LazyModule("acc_trainer.state")
    timing = LazyModule("acc_trainer.timing")
    uneven = LazyModule("acc_trainer.data.uneven")
    data = LazyModule("acc_trainer.data.prepare")
    tracking = LazyModule("acc_trainer.tracking.run")
# Any: its protocol asks for attributes where the facade has properties
checkpoint: Any = LazyModule("acc_trainer.checkpoint")
