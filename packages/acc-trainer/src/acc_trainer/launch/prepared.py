"""A function made ready to be a rank of processes that somebody else starts, such as torch.multiprocessing's or torch_xla's."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from acc_ops.enums import DistributedType  # noqa: TID251  the specification's parameter is one
from acc_ops.environment import get_int_from_env, parse_choice_from_env

from .worker import environment

_ALONE = (DistributedType.NO, DistributedType.XLA)  # no ranks, or ranks that torch_xla numbers itself


class PrepareForLaunch:
    """`launcher` as a function of (index, *args) that can be pickled: it knows which rank it is, and then calls `launcher(*args)`.

    For a `distributed_type` with several processes the rank is `index` after those of the machines before, by the variables NPROC (processes
    on each machine, 1 unless set) and NODE_RANK. With `debug` the ranks meet by gloo through the file that ACCELERATE_DEBUG_RDV_FILE
    names, as many as WORLD_SIZE says; `ValueError` where one of the two is not set.
    """

    def __init__(
        self,
        launcher: Callable[..., Any],
        distributed_type: DistributedType | str = "NO",
        debug: bool = False,
    ) -> None:
        """`ValueError` for a `distributed_type` that there is not, `TypeError` for a `launcher` that cannot be called."""
        if not callable(launcher):
            raise TypeError(f"launcher must be the function to call on every process, got {launcher!r}")
        self.launcher = launcher
        self.distributed_type = DistributedType(distributed_type)
        self.debug = debug

    def __call__(self, index: int, *args: Any) -> None:
        """Be rank `index` of this machine; the environment is put back afterwards."""
        variables = {"FORK_LAUNCHED": "1"}
        if self.debug:
            meeting = parse_choice_from_env("ACCELERATE_DEBUG_RDV_FILE", "")
            size = get_int_from_env(["WORLD_SIZE"], 0)
            if not meeting or size < 1:
                raise ValueError(
                    "with debug=True the ranks meet through a file: set ACCELERATE_DEBUG_RDV_FILE to its path and WORLD_SIZE to their number, "
                    f"got {meeting!r} and {size}"
                )
            store = torch.distributed.FileStore(meeting, size)
            torch.distributed.init_process_group("gloo", rank=index, world_size=size, store=store)
        elif self.distributed_type not in _ALONE:
            before = get_int_from_env(["NPROC"], 1) * get_int_from_env(["NODE_RANK"], 0)
            variables.update(RANK=str(before + index), LOCAL_RANK=str(index))
        with environment(**variables):
            self.launcher(*args)
