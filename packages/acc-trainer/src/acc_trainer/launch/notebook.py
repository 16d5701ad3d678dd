"""Ranks started from Python: `notebook_launcher` for a notebook, `debug_launcher` for a test on the CPU."""

from __future__ import annotations

import functools
import os
import sys
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
import torch.multiprocessing

from acc_ops.devices import present_kind
from acc_ops.optional import are_libraries_initialized
from acc_ops.world import leave_world
from acc_trainer.state import PartialState, is_initialized

from .options import PRECISIONS
from .port import HeldPort
from .worker import environment, rank_variables


def notebook_launcher(
    function: Callable[..., Any],
    args: Sequence[Any] = (),
    num_processes: int | None = None,
    mixed_precision: str = "no",
    use_port: str | int = "29500",
    master_addr: str = "127.0.0.1",
    node_rank: int = 0,
    num_nodes: int = 1,
    rdzv_backend: str = "static",
    rdzv_endpoint: str = "",
    rdzv_conf: dict[str, Any] | None = None,
    rdzv_id: str = "none",
    max_restarts: int = 0,
    monitor_interval: float = 0.1,
    log_line_prefix_template: str | None = None,
) -> None:
    """Run `function(*args)` on `num_processes` processes of this machine; with one (the default in Colab alone) it is called here.

    They are forked, so `function` may be defined in the notebook, but nothing may have touched an accelerator before.
    `use_port` 0 chooses a free port. More than one node, restarts and other rendezvous go to torch's elastic launcher.

    ValueError for an unknown precision, a missing or wrong number of processes, a port or `node_rank` that does not exist, and
    when an Accelerator was built before; TypeError for a `function`, `args` or number that is none; RuntimeError when an
    accelerator or bitsandbytes was already in use.
    """
    _check_call(function, args)
    _check_numbers(num_processes, mixed_precision, node_rank, num_nodes)
    port_number = _port_of(use_port)
    if num_processes is None and "google.colab" in sys.modules:
        num_processes = 1  # its machines have one accelerator or none
    if num_processes is None:
        raise ValueError("notebook_launcher needs num_processes: how many processes to start on this machine")
    if num_processes * num_nodes == 1:
        with environment(ACCELERATE_MIXED_PRECISION=mixed_precision):
            function(*args)
        return
    _check_untouched()
    common = {"ACCELERATE_MIXED_PRECISION": mixed_precision, "FORK_LAUNCHED": "1"}
    elastic = num_nodes > 1 or max_restarts or rdzv_backend != "static"
    with _port(port_number, num_nodes, rdzv_endpoint) as number:
        if not elastic:
            meeting = {"MASTER_ADDR": master_addr, "MASTER_PORT": str(number)}
            _fork(function, args, num_processes, {**common, **meeting})
            return
        _launch_elastic(
            function,
            args,
            common,
            min_nodes=num_nodes,
            max_nodes=num_nodes,
            nproc_per_node=num_processes,
            rdzv_endpoint=rdzv_endpoint or f"{master_addr}:{number}",
            rdzv_backend=rdzv_backend,
            rdzv_configs={**({"rank": node_rank} if rdzv_backend == "static" else {}), **(rdzv_conf or {})},
            run_id=rdzv_id,
            max_restarts=max_restarts,
            monitor_interval=monitor_interval,
            log_line_prefix_template=log_line_prefix_template,
        )


def debug_launcher(function: Callable[..., Any], args: Sequence[Any] = (), num_processes: int = 2) -> None:
    """Run `function(*args)` on `num_processes` forked CPU processes that speak by gloo; the first error is raised here.

    ValueError when `num_processes` is below 1 or an Accelerator was built before; TypeError as `notebook_launcher`.
    """
    _check_call(function, args)
    _check_numbers(num_processes, "no", 0, 1)
    _check_untouched()
    with HeldPort() as port:
        meeting = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port.number)}
        common = {"ACCELERATE_MIXED_PRECISION": "no", "ACCELERATE_USE_CPU": "yes", "FORK_LAUNCHED": "1"}
        _fork(function, args, num_processes, {**common, **meeting})


def test_launch() -> None:
    """Join the processes that a launcher started and do nothing more: a function to try a launcher with."""
    PartialState()


def _check_call(function: object, args: object) -> None:
    if not callable(function):
        raise TypeError(f"function must be a function to call on every process, got {function!r}")
    if isinstance(args, (str, bytes)) or not isinstance(args, Iterable):
        raise TypeError(
            f"args must be a tuple or list of the arguments of the function, as in ({args!r},); got {args!r}"
        )


def _port_of(use_port: object) -> int:
    text = str(use_port).strip()
    if isinstance(use_port, bool) or not (text.isascii() and text.isdigit()) or int(text) > 65535:
        raise ValueError(f"use_port must be a port from 0 (a free one) to 65535, got {use_port!r}")
    return int(text)


@contextmanager
def _port(number: int, num_nodes: int, rdzv_endpoint: str) -> Iterator[int]:
    """The port where the processes meet, held for them where they are all on this machine."""
    if num_nodes > 1 or rdzv_endpoint:
        if not (number or rdzv_endpoint):
            raise ValueError(
                f"use_port 0 cannot be used with num_nodes={num_nodes}: each machine would choose another port. Give all of them the same one"
            )
        yield number
        return
    with HeldPort(number, named="use_port") as port:
        yield port.number


def _check_numbers(num_processes: int | None, mixed_precision: str, node_rank: int, num_nodes: int) -> None:
    if str(mixed_precision).lower() not in PRECISIONS:
        raise ValueError(f"mixed_precision must be one of {', '.join(PRECISIONS)}, got {mixed_precision!r}")
    for name, value in (("num_processes", num_processes), ("node_rank", node_rank), ("num_nodes", num_nodes)):
        missing = value is None and name == "num_processes"
        if not missing and (isinstance(value, bool) or not hasattr(value, "__index__")):
            raise TypeError(f"{name} must be a whole number, got {value!r}")
    if num_processes is not None and num_processes < 1:
        raise ValueError(f"num_processes must be at least 1, got {num_processes}")
    if not 0 <= node_rank < num_nodes:
        raise ValueError(f"node_rank must be from 0 to {num_nodes - 1} (num_nodes - 1), got {node_rank}")


def _check_untouched() -> None:
    if is_initialized():
        raise ValueError(
            "an Accelerator was built before the processes are started: build it inside the function that is launched, "
            "and restart the notebook if a cell has built one"
        )
    if are_libraries_initialized("bitsandbytes"):
        raise RuntimeError(
            "bitsandbytes was imported before the processes are started; import it inside the function"
        )
    kind = present_kind()
    module = None if kind == "cpu" else getattr(torch, kind, None)
    if module is not None and getattr(module, "is_initialized", bool)():
        raise RuntimeError(
            f"{kind} was used before the processes are started, and a forked process cannot use it then: "
            "move what touches it into the function that is launched, and restart the notebook"
        )


def _fork(function: Callable[..., Any], args: Sequence[Any], count: int, common: dict[str, str]) -> None:
    torch.multiprocessing.start_processes(
        _run_rank, (count, function, tuple(args), common), nprocs=count, start_method="fork"
    )


def _run_rank(
    rank: int, count: int, function: Callable[..., Any], args: tuple[Any, ...], common: dict[str, str]
) -> None:
    if "ACCELERATE_USE_CPU" in common:
        torch.set_num_threads(1)  # the ranks share the cores, and a forked OpenMP pool has lost its threads
    with environment(**common, **rank_variables(rank, count, rank, count)):
        _interrupts_told(function)(*args)
        leave_world()  # not after an error: it would reach the other ranks before the parent hears of it


def _interrupts_told(function: Callable[..., Any]) -> Callable[..., Any]:
    """`function`, whose KeyboardInterrupt becomes an error: torch takes a process that ends with one for a process that succeeded."""

    @functools.wraps(function)
    def told(*args: Any) -> Any:
        try:
            return function(*args)
        except KeyboardInterrupt as interrupt:
            raise RuntimeError(
                f"the process {os.getpid()} was interrupted (KeyboardInterrupt) before its function had ended"
            ) from interrupt

    return told


def _launch_elastic(
    function: Callable[..., Any], args: Sequence[Any], common: dict[str, str], **settings: Any
) -> None:
    from torch.distributed.elastic.multiprocessing import DefaultLogsSpecs  # noqa: PLC0415
    from torch.distributed.launcher.api import LaunchConfig, elastic_launch  # noqa: PLC0415  half a second to import

    template = settings.pop("log_line_prefix_template")
    config = LaunchConfig(
        **settings,
        start_method="fork",
        logs_specs=DefaultLogsSpecs(),
        **({} if template is None else {"log_line_prefix_template": template}),
    )
    with environment(**common):
        elastic_launch(config=config, entrypoint=_interrupts_told(function))(*args)
