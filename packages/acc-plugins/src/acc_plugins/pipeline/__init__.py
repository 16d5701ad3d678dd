"""Training through a pipeline of processes: `Pipelined` cuts a model into stages and runs torch's schedules over them."""

from __future__ import annotations

from acc_plugins.pipeline.errors import PipelineError as PipelineError
from acc_plugins.pipeline.pipelined import Pipelined as Pipelined
from acc_plugins.pipeline.saving import PipelineState as PipelineState
