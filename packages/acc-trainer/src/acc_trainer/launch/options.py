"""The options of `acc launch`, each declared once: flag, configuration key, environment variable, help."""

from __future__ import annotations

from dataclasses import dataclass

from acc_ops.options import check_options, option

from .engine_options import EngineOptions, names_of

PRECISIONS = ("no", "fp16", "bf16", "fp8")
SECTIONS: dict[str, tuple[str, ...]] = {  # the order of `acc launch --help`
    "General": ("config_file", "quiet", "debug", "dry_run", "module", "no_python"),
    "What runs where": (
        "cpu",
        "multi_gpu",
        "gpu_ids",
        "num_processes",
        "num_cpu_threads_per_process",
        "enable_cpu_affinity",
    ),
    "How it trains": ("mixed_precision", "gradient_accumulation_steps"),
    "torch.compile": (
        "dynamo_backend",
        "dynamo_mode",
        "dynamo_use_fullgraph",
        "dynamo_use_dynamic",
        "dynamo_use_regional_compilation",
    ),
    "FSDP": ("use_fsdp", *names_of("FSDP")),
    "Parallelism": ("use_parallelism_config", *names_of("Parallelism")),
    "fp8": names_of("fp8"),
    "Several machines": (
        "num_machines",
        "machine_rank",
        "main_process_ip",
        "main_process_port",
        "same_network",
        "rdzv_backend",
        "rdzv_conf",
    ),
    "Restarts and logs (by torch.distributed.run)": (
        "max_restarts",
        "monitor_interval",
        "tee",
        "log_dir",
        "role",
    ),
}
SHORT = {"-q": "quiet", "-m": "module", "-t": "tee"}


@dataclass(
    frozen=True, kw_only=True, init=False, repr=False, eq=False
)  # declares only: LaunchOptions has the methods
class GeneralOptions:
    """What runs where, and how."""

    config_file: str | None = option(
        None,
        key=False,
        help="configuration file; default: $HF_HOME/accelerate/default_config.yaml, unless --cpu",
    )
    quiet: bool = option(False, help="no notes of the launcher's own")
    debug: bool = option(False, env="ACCELERATE_DEBUG_MODE", help="check shapes and devices in collectives")
    dry_run: bool = option(False, key=False, help="print the plan and start nothing")
    module: bool = option(False, help="run the script as `python -m` does")
    no_python: bool = option(False, help="run the script itself, without python")

    cpu: bool = option(False, key="use_cpu", env="ACCELERATE_USE_CPU", help="use the CPU only")
    multi_gpu: bool = option(False, help="use several accelerators: needs two processes at least")
    gpu_ids: str | None = option(None, help="the accelerators of this machine to use, as in 0,1; or all")
    num_processes: int | None = option(
        None, help="processes on all machines together; default: one per accelerator, one on a CPU"
    )
    num_cpu_threads_per_process: int | None = option(
        None,
        env="OMP_NUM_THREADS",
        parse=lambda text: int(text.partition(",")[0]),  # OpenMP allows a list, for nested regions
        help="CPU threads of each process; default: the cores of this machine shared out",
    )
    enable_cpu_affinity: bool = option(
        False, env="ACCELERATE_CPU_AFFINITY", help="keep each process on the cores near its accelerator"
    )

    mixed_precision: str = option(
        "no", env="ACCELERATE_MIXED_PRECISION", choices=PRECISIONS, help="precision of the forward pass"
    )
    gradient_accumulation_steps: int | None = option(
        None,
        env="ACCELERATE_GRADIENT_ACCUMULATION_STEPS",
        help="micro-batches per step; wins over the script's",
    )

    num_machines: int = option(1, help="machines that take part")
    machine_rank: int | None = option(None, help="which of them this is, from 0")
    main_process_ip: str | None = option(None, help="address of machine 0")
    main_process_port: int | None = option(
        None, help="port of machine 0; default: a free one on one machine, 29500 on several"
    )
    same_network: bool = option(False, help="accepted and without effect: torch finds the way by itself")
    rdzv_backend: str = option("static", help="how several machines find each other: static, c10d, ...")
    rdzv_conf: str = option("", help="more settings of it: key=value,key=value")

    max_restarts: int = option(0, help="start the whole group again this many times after a failure")
    monitor_interval: float = option(
        0.1, help="seconds between looks at the processes, for torch.distributed.run"
    )
    tee: str = option("0", help="copy output into log files too: 3, or 0:3,1:1 (see torchrun)")
    log_dir: str | None = option(None, help="folder of log files")
    role: str = option("default", help="name of this group of processes")


@dataclass(frozen=True, kw_only=True)
class LaunchOptions(EngineOptions, GeneralOptions):
    """What can be said to `acc launch`. None means: not said, and chosen when the plan is made."""

    def __post_init__(self) -> None:
        check_options(self)
