"""The names of `acc_plugins.parallel`, for type checkers."""

from .context import context_parallel as context_parallel
from .masks import SequenceError as SequenceError
from .plans import PlanError as PlanError
from .plans import plan_of as plan_of
from .plans import set_plan as set_plan
from .sequence import split_batch as split_batch
from .sequence import split_loader as split_loader
from .split import reach_of as reach_of
from .split import split_model as split_model
