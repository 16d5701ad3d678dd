"""A launch plan: what will be started, with which environment. Frozen and printable; making it starts nothing."""

from __future__ import annotations

import os
import sys
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Any

from acc_ops.options import OptionError, options_of, resolve, sources, to_env

from .arguments import Arguments, checked
from .config_path import default_config_path
from .elastic_checks import check_elastic
from .engine_options import check_engines, not_for_workers, override_variables, without_effect
from .errors import LaunchError
from .machine import count_accelerators, count_cores, count_ids, visibility_variable
from .options import LaunchOptions

IN_PLACE = "this process"
SUPERVISED = "our supervisor"
TORCHRUN = "torch.distributed.run"
DEFAULT_PORT = 29500
_LEAST = {
    "num_processes": 1,
    "num_machines": 1,
    "num_cpu_threads_per_process": 1,
    "gradient_accumulation_steps": 1,
    "max_restarts": 0,
}


@dataclass(frozen=True, kw_only=True)
class LaunchPlan:
    """Everything decided: who runs which command how often, and the variables that every worker gets."""

    options: LaunchOptions
    runner: str  # IN_PLACE, SUPERVISED or TORCHRUN
    script: str
    script_args: tuple[str, ...] = ()
    num_processes: int = 1  # on all machines together
    num_machines: int = 1
    machine_rank: int = 0
    main_process_ip: str = "127.0.0.1"
    main_process_port: int = 0  # 0: a free one
    environ: Mapping[str, str] = field(default_factory=dict)  # beside what the launcher itself has
    notes: tuple[str, ...] = ()  # what the user should know

    @property
    def processes_here(self) -> int:
        return self.num_processes // self.num_machines

    def command(self) -> list[str]:
        """What one worker runs."""
        if self.options.no_python:
            return [self.script, *self.script_args]
        # lines of several workers appear when they are written; on a terminal they do, and whole, without -u
        flags = ["-u"] if self.num_processes > 1 and not os.isatty(1) else []
        return [
            sys.executable,
            *flags,
            *(["-m"] if self.options.module else []),
            self.script,
            *self.script_args,
        ]

    def __str__(self) -> str:
        origins = sources(self.options)
        said = [
            f"  {name} = {getattr(self.options, name)} ({origin})"
            for name, origin in origins.items()
            if origin != "default"
        ]
        where = (
            f"{self.processes_here} on each of {self.num_machines} machines"
            if self.num_machines > 1
            else "here"
        )
        lines = [
            f"run by        {self.runner}",
            f"processes     {self.num_processes} ({where})",
            f"command       {' '.join(self.command())}",
            f"rendezvous    {self.main_process_ip}:{self.main_process_port or 'a free port'}",
            "options given",
            *(said or ["  none"]),
            "environment of every process",
            *(f"  {name}={value}" for name, value in self.environ.items()),
        ]
        return "\n".join(lines)


def make_plan(arguments: Arguments, environ: Mapping[str, str]) -> LaunchPlan:
    """Decide from flags over the configuration file over the environment over defaults. LaunchError names what is wrong."""
    options = _options(arguments, environ)
    check_elastic(options)
    script = _script(arguments, options, environ)
    num_machines, machine_rank = _machines(options)
    num_processes, note = _processes(options, num_machines, environ)
    checked(check_engines, options, num_processes)
    note += without_effect(options, sources(options))
    runner = _runner(options, num_processes)
    if options.main_process_ip is None and num_machines > 1:
        raise LaunchError("--num_machines above 1 needs --main_process_ip, the address of machine 0")
    if options.main_process_port is not None and not 0 <= options.main_process_port < 65536:
        raise LaunchError(f"--main_process_port must be between 0 and 65535, got {options.main_process_port}")
    plan = LaunchPlan(
        options=options,
        runner=runner,
        script=script,
        script_args=tuple(arguments.script_args),
        num_processes=num_processes,
        num_machines=num_machines,
        machine_rank=machine_rank,
        main_process_ip=options.main_process_ip or "127.0.0.1",
        main_process_port=options.main_process_port or (DEFAULT_PORT if num_machines > 1 else 0),
        notes=(*arguments.notes, *note),
    )
    return replace(plan, environ=_variables(plan, environ))


def _options(arguments: Arguments, environ: Mapping[str, str]) -> LaunchOptions:
    given: dict[str, Any] = dict(arguments.given)
    path = given.get("config_file")
    if path is None and given.get("cpu") != "true" and os.path.isfile(default_config_path(environ)):
        path = default_config_path(environ)
    file = _file(path) if path is not None else {}
    options: LaunchOptions = checked(resolve, LaunchOptions, given=given, file=file, environ=environ)
    for name, least in _LEAST.items():
        value = getattr(options, name)
        if value is not None and value < least:
            raise LaunchError(f"--{name} must be at least {least}, got {value}")
    if options.cpu and options.multi_gpu and "cpu" in given and "multi_gpu" in given:
        raise LaunchError("--cpu and --multi_gpu exclude each other; leave one out")
    return options


def _file(path: str) -> dict[str, Any]:
    from .config_file import read_config_file  # noqa: PLC0415  most launches have no file, and start sooner without this

    file = read_config_file(path)
    try:
        resolve(LaunchOptions, file=file)
    except OptionError as error:
        raise LaunchError(f"{path}: {error}") from None
    return file


def _script(arguments: Arguments, options: LaunchOptions, environ: Mapping[str, str]) -> str:
    script = arguments.script
    if script is None:
        raise LaunchError("no script was given: acc launch [options] script.py [arguments of the script]")
    if options.module and options.no_python:
        raise LaunchError("--module and --no_python exclude each other; leave one out")
    if options.no_python:
        folders = [""] if os.sep in script else environ.get("PATH", os.defpath).split(os.pathsep)
        if not any(os.access(os.path.join(folder, script), os.X_OK) for folder in folders):
            raise LaunchError(f"{script} is not a program that can be run (--no_python)")
    elif not options.module and not os.path.exists(script):
        raise LaunchError(f"the script {script} does not exist (in {os.getcwd()})")
    return script


def _machines(options: LaunchOptions) -> tuple[int, int]:
    if options.num_machines == 1:
        return 1, 0
    if options.machine_rank is None and options.rdzv_backend == "static":
        raise LaunchError("--num_machines above 1 needs --machine_rank, the number of this machine from 0")
    rank = options.machine_rank or 0
    if not 0 <= rank < options.num_machines:
        raise LaunchError(f"--machine_rank must be from 0 to {options.num_machines - 1}, got {rank}")
    return options.num_machines, rank


def _processes(
    options: LaunchOptions, num_machines: int, environ: Mapping[str, str]
) -> tuple[int, list[str]]:
    count = options.num_processes
    notes = []
    if count is None:
        chosen_ids = options.gpu_ids not in (None, "all")
        seen = count_ids(options.gpu_ids or "") if chosen_ids else count_accelerators(environ)
        count = num_machines * (1 if options.cpu else max(1, seen))
        notes.append(f"--num_processes was not given: starting {count}")
    if count % num_machines:
        raise LaunchError(f"--num_processes {count} cannot be shared out evenly over {num_machines} machines")
    if options.multi_gpu and not options.cpu and count < 2:
        raise LaunchError(f"--multi_gpu needs at least 2 processes, got {count}; say --num_processes")
    return count, notes


def _runner(options: LaunchOptions, num_processes: int) -> str:
    """Several machines, restarts and log files are torch.distributed.run's; systems without process groups too."""
    beyond = (
        options.num_machines > 1,
        options.max_restarts > 0,
        options.rdzv_backend != "static",
        options.tee != "0",
        options.log_dir is not None,
    )
    if any(beyond) or (num_processes > 1 and not hasattr(os, "fork")):
        return TORCHRUN
    return IN_PLACE if num_processes == 1 else SUPERVISED


def _variables(plan: LaunchPlan, environ: Mapping[str, str]) -> dict[str, str]:
    options = plan.options
    origins = sources(options)
    if options.num_cpu_threads_per_process is None and plan.num_processes > 1:
        threads = max(1, count_cores() // plan.processes_here) if options.cpu else 1
        options = replace(options, num_cpu_threads_per_process=threads)
    inherited = {chosen.env for chosen in options_of(LaunchOptions) if origins[chosen.name] == "environment"}
    withheld = not_for_workers(options, origins)
    kept = {chosen.env for chosen in options_of(LaunchOptions) if chosen.name not in withheld} - inherited
    variables = {name: text for name, text in to_env(options).items() if name in kept}
    variables.update(override_variables(options, origins))
    if options.gpu_ids not in (None, "all"):
        variables[visibility_variable(environ)] = options.gpu_ids or ""
    return variables
