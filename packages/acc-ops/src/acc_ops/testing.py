"""Ranks for tests: as threads of one process, or as real gloo processes; and the check of a stub against its package."""

from __future__ import annotations

import ast
import importlib
import importlib.util
import multiprocessing
import pickle
import sys
import tempfile
import threading
import time
import traceback
from collections.abc import Callable, Sequence
from multiprocessing.connection import Connection, wait
from multiprocessing.process import BaseProcess
from pathlib import Path
from types import ModuleType
from typing import Any, TypeVar

import torch
import torch.distributed as dist

from acc_ops.comm import CommError, Meeting, ThreadComm
from acc_ops.devices import DeviceLike, canonical_device
from acc_ops.optional import require
from acc_ops.parting import destroy_group
from acc_ops.watch import say_goodbye
from acc_ops.world import World, use_world

R = TypeVar("R")
_GRACE_S = 5.0  # in which the cause comes after what followed from it


def use_test_profile() -> None:
    """For conftest files: hypothesis draws the same examples everywhere, and judges none by its time. `ImportError` without hypothesis."""
    settings = require("hypothesis", "tests that draw their examples").settings
    settings.register_profile("acc", deadline=None, derandomize=True)
    settings.load_profile("acc")


class RankFailed(RuntimeError):
    """A rank of `run_threads` or `run_processes` did not end well; the message has its traceback."""


def run_threads(
    size: int,
    fn: Callable[[], R],
    *,
    timeout_s: float = 60.0,
    grace_s: float = 5.0,
    verify: bool = True,
    device: DeviceLike = "cpu",
) -> list[R]:
    """What `fn()` returns on each of `size` ranks, which are threads with a World of their own.

    When ranks raise, the exception of the lowest one that was not merely waiting for another is raised again, with its
    rank in a note. Raises RankFailed when a rank does not end within `timeout_s`.

    >>> run_threads(2, lambda: gather(torch.tensor(current_world().rank)).tolist())
    [[0, 1], [0, 1]]
    """
    meeting = Meeting(size, timeout_s)
    results: dict[int, R] = {}
    errors: dict[int, BaseException] = {}

    def run(rank: int) -> None:
        world = World(
            rank=rank,
            size=size,
            local_rank=rank,
            local_size=size,
            device=canonical_device(device),
            comm=ThreadComm(meeting, rank),
            verify=verify,
        )
        why = "ended"
        try:
            with use_world(world):
                results[rank] = fn()
        except BaseException as error:  # noqa: BLE001 - raised again in the caller's thread
            errors[rank] = error
            why = f"raised {type(error).__name__}: {error}"
        finally:
            meeting.leave(rank, why)

    threads = [threading.Thread(target=run, args=(r,), name=f"rank {r}", daemon=True) for r in range(size)]
    for thread in threads:
        thread.start()
    deadline = time.monotonic() + timeout_s + grace_s  # a rank that waits for another says so first
    for thread in threads:
        thread.join(max(0.0, deadline - time.monotonic()))
    if errors:
        _raise_first(errors)
    for rank, thread in enumerate(threads):
        if thread.is_alive():
            frame = sys._current_frames().get(thread.ident or 0)
            stack = "".join(traceback.format_stack(frame)) if frame is not None else "it is ending"
            raise RankFailed(f"rank {rank} did not end within {timeout_s:g} s:\n{stack}")
    return [results[rank] for rank in range(size)]


def run_processes(size: int, target: Callable[..., R], *args: Any, timeout_s: float = 120.0) -> list[R]:
    """What `target(*args)` returns on each of `size` new processes that form a gloo group; picklable, as are the results.

    Raises RankFailed with the traceback of the first rank that raised anything but a CommError, which follows from another rank's end, or
    with the exit code of one that ended without a result, or naming those that did not end within `timeout_s`. The processes are ended
    in any case.
    """
    context = multiprocessing.get_context("spawn")
    home = sys.modules.get(target.__module__)
    work = (target.__module__, getattr(home, "__file__", None), pickle.dumps((target, args)))
    with tempfile.TemporaryDirectory() as folder:
        pipes: dict[Connection, int] = {}
        processes: list[BaseProcess] = []
        for rank in range(size):
            ours, theirs = context.Pipe(duplex=False)
            meeting = str(Path(folder) / "meeting")
            process: BaseProcess = context.Process(
                target=_run_rank, args=(rank, size, meeting, theirs, *work)
            )
            process.start()
            theirs.close()
            pipes[ours] = rank
            processes.append(process)
        try:
            return _collect(pipes, processes, timeout_s)
        finally:
            for process in processes:
                process.join(timeout=1.0)
                if process.is_alive():
                    process.kill()
                    process.join()


def count_calls(fn: Callable[[], object]) -> int:
    """How many Python and C functions are called while `fn()` runs in this thread: work counted, which no busy machine changes.

    >>> count_calls(lambda: algorithm(20 * data)) < 25 * count_calls(lambda: algorithm(data))
    True
    """
    calls = 0

    def note(frame: object, event: str, argument: object) -> None:  # noqa: ARG001 - what a profile function is given
        nonlocal calls
        calls += event in ("call", "c_call")

    before = sys.getprofile()
    sys.setprofile(note)
    try:
        fn()
    finally:
        sys.setprofile(before)
    return calls


def stub_names(package: ModuleType) -> dict[str, str]:
    """Each name that the `__init__.pyi` beside `package` exports, and the submodule (or whole module name) it says it is from.

    >>> stub_names(acc_ops)["gather"]
    'collectives'
    """
    file = getattr(package, "__file__", None)
    if file is None:
        raise ValueError(f"{package.__name__} has no file, so no stub beside it")
    stub = Path(file).with_suffix(".pyi")
    names = {}
    for node in ast.walk(ast.parse(stub.read_text(encoding="utf-8"), str(stub))):
        if (
            isinstance(node, ast.ImportFrom)
            and node.level in (0, 1)
            and node.module not in (None, "__future__")
        ):
            for alias in node.names:
                if alias.asname == alias.name and not alias.name.startswith("__"):
                    names[alias.name] = node.module
    return names


def _raise_first(errors: dict[int, BaseException]) -> None:
    own = [rank for rank in sorted(errors) if not isinstance(errors[rank], CommError)]
    rank = own[0] if own else min(errors)
    error = errors[rank]
    notes = [*getattr(error, "__notes__", []), f"on rank {rank}"]
    setattr(error, "__notes__", notes)  # noqa: B010 - add_note came with Python 3.11
    raise error


def _run_rank(
    rank: int, size: int, meeting: str, pipe: Connection, module: str, file: str | None, work: bytes
) -> None:
    torch.set_num_threads(1)
    try:
        _make_importable(module, file)
        target, args = pickle.loads(work)
        dist.init_process_group("gloo", init_method=f"file://{meeting}", rank=rank, world_size=size)
        result = target(*args)
        answer = pickle.dumps((result, None, False))  # the pipe's own pickling would share memory
        destroy_group()
    except BaseException as error:  # noqa: BLE001 - its text goes to the caller
        follows = isinstance(error, CommError)
        answer = pickle.dumps((None, traceback.format_exc(), follows))
        pipe.send_bytes(answer)
        say_goodbye(f"raised {type(error).__name__}: {error}", follows=follows)
        return
    pipe.send_bytes(answer)


def _make_importable(module: str, file: str | None) -> None:
    """Load `module` from its file where its name alone does not lead to it, as that of a test file does not."""
    try:
        importlib.import_module(module)
    except ModuleNotFoundError as missing:
        if file is None or not (module == missing.name or module.startswith(f"{missing.name}.")):
            raise
        spec = importlib.util.spec_from_file_location(module, file)
        if spec is None or spec.loader is None:
            raise
        for end in [i for i, letter in enumerate(module) if letter == "."]:
            sys.modules.setdefault(
                module[:end], ModuleType(module[:end])
            )  # pickle imports the parents by name
        loaded = importlib.util.module_from_spec(spec)
        sys.modules[module] = loaded
        spec.loader.exec_module(loaded)


def _collect(pipes: dict[Connection, int], processes: Sequence[BaseProcess], timeout_s: float) -> list[Any]:
    """The results in rank order; a rank's own error is raised before those that followed from it, which may come first."""
    results: dict[int, Any] = {}
    followed: dict[int, str] = {}
    waiting = dict(pipes)
    deadline = time.monotonic() + timeout_s
    while waiting:
        ready = wait(list(waiting), max(0.0, deadline - time.monotonic()))
        if not ready and not followed:
            late = ", ".join(str(rank) for rank in sorted(waiting.values()))
            raise RankFailed(f"rank {late} did not end within {timeout_s:g} s")
        if not ready:
            break
        for pipe in [pipe for pipe in waiting if pipe in ready]:
            rank = waiting.pop(pipe)
            try:
                result, error, follows = pickle.loads(pipe.recv_bytes())
            except EOFError:
                processes[rank].join(1.0)
                code = processes[rank].exitcode
                raise RankFailed(f"rank {rank} ended without a result, with exit code {code}") from None
            if error is None:
                results[rank] = result
            elif follows:
                followed[rank] = error
                deadline = min(deadline, time.monotonic() + _GRACE_S)
            else:
                raise RankFailed(f"rank {rank} raised\n{error}")
    if followed:
        rank = min(followed)
        raise RankFailed(f"rank {rank} raised\n{followed[rank]}")
    return [results[rank] for rank in sorted(results)]
