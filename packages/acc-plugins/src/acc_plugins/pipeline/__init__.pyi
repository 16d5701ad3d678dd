"""The names of `acc_plugins.pipeline`, for type checkers."""

from .errors import PipelineError as PipelineError
from .pipelined import Pipelined as Pipelined
from .saving import PipelineState as PipelineState
