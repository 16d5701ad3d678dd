"""The specification's launch helpers, for programs that parse their own command line: what a launcher needs, from an argparse namespace.

[Note: which names] The namespace has the script as `training_script` and `training_script_args`, and the options of `acc launch` by their
names; an option that is absent or None was not said. The answers are those of `acc launch`: a plan is made, and read out.
"""

from __future__ import annotations

import argparse
import logging
from collections.abc import Iterable

from acc_ops.environment import parse_choice_from_env
from acc_ops.option_text import text_of
from acc_ops.options import options_of, resolve, to_env
from acc_ops.processes import get_free_port, is_port_in_use
from acc_plugins.options.fp8 import LinearOverrides

from .arguments import Arguments, checked
from .engine_options import check_engines, names_of
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
    plan = plan_of(args, num_processes="1", num_machines="1", multi_gpu="false")
    return plan.command(), common_environ(plan, inherited())


def prepare_multi_gpu_env(args: argparse.Namespace) -> dict[str, str]:
    """The environment of the workers on this machine; `args` gets what torch.distributed.run's parser calls the rest of the plan.

    These are `nproc_per_node`, `nnodes`, `node_rank`, `rdzv_endpoint` (several machines), `master_port` or `standalone` (one). Port 0 is a free
    one. A port in use: on one machine a warning, and `standalone`; on the first of several `ConnectionError`. `LaunchError` as
    `prepare_simple_launcher_cmd_env`.
    """
    plan = plan_of(args)
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


def setup_fp8_env(args: argparse.Namespace, current_env: dict[str, str]) -> dict[str, str]:
    """`current_env` with the variables of fp8 (`ACCELERATE_FP8_*`), as `args` has the options `fp8_*`; the same dictionary.

    An option that was not said has the launcher's default. `LaunchError` for a value that cannot be.
    """
    options = _add_variables(args, names_of("fp8"), current_env)
    checked(check_engines, options, 1)
    current_env.update(to_env(LinearOverrides(*options.fp8_override_linear_precision)))
    return current_env


def prepare_extend_env_parallelism_config(
    args: argparse.Namespace, current_env: dict[str, str]
) -> dict[str, str]:
    """`current_env` with the variables of the axes (`PARALLELISM_CONFIG_*`) and the one that turns them on; the same dictionary.

    An option of `parallelism_config_*` that was not said has the launcher's default. `LaunchError` for a value that cannot be.
    """
    args = argparse.Namespace(**{**vars(args), "use_parallelism_config": True})
    _add_variables(args, ("use_parallelism_config", *names_of("Parallelism")), current_env)
    return current_env


def _add_variables(args: argparse.Namespace, names: Iterable[str], environ: dict[str, str]) -> LaunchOptions:
    """Write the variables of some options into `environ`; all options, with these as `args` has them."""
    chosen = {one.name: one for one in options_of(LaunchOptions) if one.name in set(names)}
    said = {name: text_of(getattr(args, name)) for name in chosen if getattr(args, name, None) is not None}
    options: LaunchOptions = checked(resolve, LaunchOptions, given=said)
    variables = {one.env for one in chosen.values()}
    environ.update({name: text for name, text in to_env(options).items() if name in variables})
    return options


def plan_of(args: argparse.Namespace, **fixed: str) -> LaunchPlan:
    """What `acc launch` would do with these options; `fixed` ones are said whatever `args` has. `LaunchError` as for the command line."""
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
