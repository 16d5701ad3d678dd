"""What a worker finds in its environment. The only file that writes it; names are torchrun's and the specification's."""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping
from contextlib import contextmanager

from .plan import LaunchPlan

_OF_A_WORKER = (
    "RANK",
    "LOCAL_RANK",
    "WORLD_SIZE",
    "LOCAL_WORLD_SIZE",
    "GROUP_RANK",
    "ROLE_RANK",
    "ROLE_NAME",
    "ROLE_WORLD_SIZE",
)


def inherited() -> dict[str, str]:
    """This process's environment, without what a launcher above us has told this process about itself.

    A worker that launches workers must not hand on its rank, nor the store that its own launcher keeps.
    """
    environ = dict(os.environ)
    if "LOCAL_RANK" in environ:
        for name in (*_OF_A_WORKER, "MASTER_ADDR", "MASTER_PORT"):
            environ.pop(name, None)
    return {name: value for name, value in environ.items() if not name.startswith("TORCHELASTIC_")}


def common_environ(plan: LaunchPlan, environ: Mapping[str, str]) -> dict[str, str]:
    """`environ` and what the plan gives to every worker."""
    return {**environ, **plan.environ}


def worker_environ(
    plan: LaunchPlan, environ: Mapping[str, str], local_rank: int, port: int
) -> dict[str, str]:
    """The environment of one of the workers on this machine, which meet at `port`."""
    here = plan.processes_here
    rank = plan.machine_rank * here + local_rank
    return {
        **common_environ(plan, environ),
        **rank_variables(rank, plan.num_processes, local_rank, here),
        "GROUP_RANK": str(plan.machine_rank),
        "ROLE_NAME": plan.options.role,
        "ROLE_RANK": str(rank),
        "ROLE_WORLD_SIZE": str(plan.num_processes),
        "MASTER_ADDR": plan.main_process_ip,
        "MASTER_PORT": str(port),
    }


def rank_variables(rank: int, size: int, local_rank: int, local_size: int) -> dict[str, str]:
    """Who a worker is."""
    return {
        "RANK": str(rank),
        "WORLD_SIZE": str(size),
        "LOCAL_RANK": str(local_rank),
        "LOCAL_WORLD_SIZE": str(local_size),
    }


@contextmanager
def environment(**variables: str | None) -> Iterator[None]:
    """Set variables of this process inside the block (None removes one), for launchers that fork; put back afterwards."""
    before = {name: os.environ.get(name) for name in variables}
    _write(variables)
    try:
        yield
    finally:
        _write(before)


def _write(variables: Mapping[str, str | None]) -> None:
    for name, value in variables.items():
        if value is None:
            os.environ.pop(name, None)
        else:
            os.environ[name] = value
