"""The specification's launch helpers, for programs that parse their own command line: what a launcher needs, from an argparse namespace.

[Note: which names] The namespace has the script as `training_script` and `training_script_args`, and the options of `acc launch` by their
names; an option that is absent or None was not said. The answers are those of `acc launch`: a plan is made, and read out.
"""

from __future__ import annotations

import argparse
import logging

from acc_ops.environment import parse_choice_from_env
from acc_ops.option_text import text_of
from acc_ops.options import options_of
from acc_ops.processes import get_free_port, is_port_in_use

from .arguments import Arguments
from .errors import LaunchError
from .options import LaunchOptions
from .plan import LaunchPlan, make_plan
from .unbuilt import refusal, turns_on
from .worker import common_environ, inherited

logger = logging.getLogger(__name__)


def env_var_path_add(env_var_name: str, path_to_add: str) -> str:
    """The folders of a variable such as PYTHONPATH with one more at the end, joined with ":"; the variable itself is not changed."""
    folders = [folder for folder in parse_choice_from_env(env_var_name, "").split(":") if folder]
    return ":".join([*folders, str(path_to_add)])


def prepare_simple_launcher_cmd_env(args: argparse.Namespace) -> tuple[list[str], dict[str, str]]:
    """The command and the environment of a script that runs as one process.

    `LaunchError` (a ValueError) for options that cannot be, and for those of things that are not built yet, MPI among them.
    """
    plan = _plan(args, num_processes="1", num_machines="1", multi_gpu="false")
    return plan.command(), common_environ(plan, inherited())


def prepare_multi_gpu_env(args: argparse.Namespace) -> dict[str, str]:
    """The environment of the workers on this machine; `args` gets what torch.distributed.run's parser calls the rest of the plan.

    These are `nproc_per_node`, `nnodes`, `node_rank`, `rdzv_endpoint` (several machines), `master_port` or `standalone` (one). Port 0 is a free
    one. A port in use: on one machine a warning, and `standalone`; on the first of several `ConnectionError`. `LaunchError` as
    `prepare_simple_launcher_cmd_env`.
    """
    plan = _plan(args)
    args.nproc_per_node = str(plan.processes_here)
    args.nnodes = str(plan.num_machines)
    args.node_rank = plan.machine_rank
    port = plan.main_process_port
    taken = port > 0 and plan.machine_rank == 0 and is_port_in_use(port)
    if plan.num_machines > 1:
        if taken:
            raise ConnectionError(
                f"--main_process_port {port} is in use on this machine, on which the others would meet: choose another one on all machines"
            )
        args.rdzv_endpoint = f"{plan.main_process_ip}:{port}"
    elif taken:
        logger.warning("port %d is in use: a free one is taken in its place", port)
        args.standalone = True
    else:
        args.master_port = str(port or get_free_port())
    return common_environ(plan, inherited())


def _plan(args: argparse.Namespace, **fixed: str) -> LaunchPlan:
    said = {name: value for name, value in vars(args).items() if value is not None}
    for name, value in said.items():
        if turns_on(name, value):
            raise LaunchError(refusal(name, f"--{name}"))
    arguments = Arguments()
    known = {chosen.name for chosen in options_of(LaunchOptions)}
    arguments.given = {name: text_of(value) for name, value in said.items() if name in known} | fixed
    arguments.script = said.get("training_script")
    arguments.script_args = [str(word) for word in said.get("training_script_args", ())]
    return make_plan(arguments, inherited())
