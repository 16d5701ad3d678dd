"""A plan carried out: this process becomes the script, workers are supervised, or torch.distributed.run takes over."""

from __future__ import annotations

import os
import signal
import sys
from collections.abc import Mapping, Sequence

from .errors import LaunchError
from .plan import IN_PLACE, SUPERVISED, LaunchPlan
from .supervisor import GRACE_S, Outcome, WorkerStart, restored_signals, supervise
from .torchrun import torchrun_command
from .worker import common_environ, worker_environ


def run_plan(
    plan: LaunchPlan, environ: Mapping[str, str], *, grace_s: float = GRACE_S, command: str = "acc launch"
) -> int:
    """Run it and return the exit code; with one process on this machine it does not return, but becomes the script.

    LaunchError when it cannot be started: a port in use, a program that cannot be run.
    """
    if plan.runner == SUPERVISED:
        outcome = run_workers(plan, environ, grace_s=grace_s)
        if outcome.is_news and not plan.options.quiet:
            print(f"{command}: {outcome.describe()}", file=sys.stderr, flush=True)
        return outcome.code
    words = plan.command() if plan.runner == IN_PLACE else torchrun_command(plan)
    variables = common_environ(plan, environ)
    if plan.runner == IN_PLACE and plan.main_process_port:
        variables.update(MASTER_ADDR=plan.main_process_ip, MASTER_PORT=str(plan.main_process_port))
    return _become(words, variables)


def run_workers(plan: LaunchPlan, environ: Mapping[str, str], *, grace_s: float = GRACE_S) -> Outcome:
    """Start one worker per process of this machine and wait for them; the port is held while they run."""
    from .port import HeldPort  # noqa: PLC0415  a single process needs no sockets

    with HeldPort(plan.main_process_port) as port:
        starts = [
            WorkerStart(
                rank=plan.machine_rank * plan.processes_here + local_rank,
                command=plan.command(),
                environ=worker_environ(plan, environ, local_rank, port.number),
                keeps_stdin=local_rank == 0,
            )
            for local_rank in range(plan.processes_here)
        ]
        try:
            return supervise(starts, grace_s=grace_s)
        except OSError as error:
            raise LaunchError(f"{plan.command()[0]} cannot be started: {error.strerror}") from error


def _become(command: Sequence[str], environ: Mapping[str, str]) -> int:
    """Replace this process, so that signals and the exit code are the script's own; on Windows run it as a child."""
    sys.stdout.flush()
    sys.stderr.flush()
    if os.name == "nt":
        import subprocess  # noqa: PLC0415  Windows alone needs it: exec there returns to the shell at once

        return subprocess.run(list(command), env=dict(environ), check=False).returncode
    for number in restored_signals():
        signal.signal(number, signal.SIG_DFL)
    try:
        os.execvpe(command[0], list(command), dict(environ))
    except OSError as error:
        raise LaunchError(f"{command[0]} cannot be started: {error.strerror}") from error
