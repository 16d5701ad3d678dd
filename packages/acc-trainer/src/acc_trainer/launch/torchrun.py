"""Several machines, restarts and log files: the plan as a command line of torch.distributed.run."""

from __future__ import annotations

import sys

from .plan import LaunchPlan


def torchrun_command(plan: LaunchPlan) -> list[str]:
    """The command that runs the plan on this machine."""
    options = plan.options
    command = [
        *(sys.executable, "-m", "torch.distributed.run"),
        *("--nnodes", str(plan.num_machines)),
        *("--nproc-per-node", str(plan.processes_here)),
        *("--max-restarts", str(options.max_restarts)),
        *("--monitor-interval", str(options.monitor_interval)),
        *("--role", options.role),
        *("--tee", options.tee),
    ]
    if options.log_dir is not None:
        command += ["--log-dir", options.log_dir]
    if options.rdzv_backend != "static":
        endpoint = f"{plan.main_process_ip}:{plan.main_process_port}"
        command += ["--rdzv-backend", options.rdzv_backend, "--rdzv-endpoint", endpoint]
    elif plan.num_machines > 1:
        command += ["--node-rank", str(plan.machine_rank)]
        command += ["--master-addr", plan.main_process_ip, "--master-port", str(plan.main_process_port)]
    elif plan.main_process_port:
        command += ["--master-addr", plan.main_process_ip, "--master-port", str(plan.main_process_port)]
    else:
        command += ["--standalone"]
    if options.rdzv_conf:
        command += ["--rdzv-conf", options.rdzv_conf]
    command += ["--module"] if options.module else []
    command += ["--no-python"] if options.no_python else []
    return [*command, plan.script, *plan.script_args]
