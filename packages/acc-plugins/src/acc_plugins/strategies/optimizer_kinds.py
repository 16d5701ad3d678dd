"""Which optimizers can train weights of which each rank has a part: FSDP1's are pieces in a row, without shape; DTensors keep theirs.

[Note: why a table] An optimizer that treats every number alone (Adam) does the same to a piece as to the whole. Others look at rows and columns
(Adafactor), at whole matrices (Muon), or at all parameters together (LBFGS): on pieces they compute something else, and say nothing. Nobody can see that from
outside, so torch's are listed, and of others a warning says what they have to be.
"""

from __future__ import annotations

import logging
from collections.abc import Iterable

from torch.optim import Optimizer

logger = logging.getLogger(__name__)

_EACH_NUMBER_ALONE = frozenset(
    ("SGD", "Adam", "AdamW", "Adamax", "NAdam", "RAdam", "Adagrad", "Adadelta", "RMSprop", "Rprop", "ASGD")
)
_WHOLE = {  # by the names of their classes, torch's or others'
    "adafactor": "keeps means of rows and columns",
    "muon": "makes whole matrices orthogonal",
    "lbfgs": "multiplies the gradients of all parameters with each other",
    "lamb": "scales by the norms of whole weights",
    "lars": "scales by the norms of whole weights",
    "shampoo": "multiplies by matrices for rows and columns",
    "soap": "multiplies by matrices for rows and columns",
}
_NOT_ON_DTENSORS = frozenset(("Adafactor", "Rprop"))


def check_for_pieces(optimizers: Iterable[Optimizer]) -> None:
    """Whether they train FSDP1's pieces as they would train whole weights. ValueError for one that does not, a warning for one that is not known."""
    for optimizer in optimizers:
        kind = _who_steps(optimizer)
        name = type(optimizer).__name__
        why = _WHOLE.get(kind.__name__.lower())
        if why is not None:
            raise ValueError(
                f"{name} {why}, and FSDP version 1 leaves each rank pieces of the weights without their shapes, so it would silently train something "
                "else: use fsdp_version=2 or no FSDP, or an optimizer that treats every number alone (AdamW, SGD)"
            )
        if not _is_torchs(kind) or kind.__name__ not in _EACH_NUMBER_ALONE:
            logger.warning(
                "%s is not known here: under FSDP version 1 each rank has pieces of the weights without their shapes, which is right only for an "
                "optimizer that treats every number alone; use fsdp_version=2 if it needs whole rows, matrices or norms",
                name,
            )


def check_for_dtensors(optimizers: Iterable[Optimizer]) -> None:
    """ValueError for an optimizer of torch whose operations torch does not have for DTensors."""
    for optimizer in optimizers:
        kind = _who_steps(optimizer)
        if _is_torchs(kind) and kind.__name__ in _NOT_ON_DTENSORS:
            raise ValueError(
                f"torch's {type(optimizer).__name__} does not run on DTensors, which the weights of a sharded or split model are (torch has no such "
                "in-place operations for them): use another optimizer, such as AdamW or SGD, or train a whole copy on each rank"
            )


def _who_steps(optimizer: Optimizer) -> type:
    """The class whose `step` it is: a subclass that only chooses defaults is its base."""
    return next(kind for kind in type(optimizer).__mro__ if "step" in vars(kind))


def _is_torchs(kind: type) -> bool:
    return f"{kind.__module__}.".startswith("torch.optim.")
