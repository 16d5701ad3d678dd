"""What can be done with processes: decorators, printing, waiting, and who goes first."""

from __future__ import annotations

import threading
from dataclasses import replace

import pytest
import torch

from acc_ops.collectives import MismatchError, gather
from acc_ops.comm import CommError
from acc_ops.testing import run_threads
from acc_ops.world import current_world, use_world
from acc_trainer.accelerator import Accelerator
from acc_trainer.state import PartialState


def test_decorators_choose_the_rank_when_called():
    def ask():
        state = PartialState()
        return (
            state.on_main_process(lambda: "main")(),
            state.on_last_process(lambda: "last")(),
            state.on_process(process_index=1)(lambda: "one")(),
            state.on_local_process(lambda: "zero", local_process_index=0)(),
            state.on_local_main_process()(lambda: "local")(),
        )

    assert run_threads(3, ask) == [
        ("main", None, None, "zero", "local"),
        (None, None, "one", None, None),
        (None, "last", None, None, None),
    ]


def test_every_form_of_every_decorator():
    def ask():
        state = PartialState()
        forms = {
            "main": [state.on_main_process, state.on_main_process()],
            "local": [state.on_local_main_process, state.on_local_main_process()],
            "last": [state.on_last_process],
            "one": [state.on_process(process_index=1), lambda fn: state.on_process(fn, 1)],
            "zero": [state.on_process, state.on_process(process_index=None)],
            "local one": [
                state.on_local_process(local_process_index=1),
                lambda fn: state.on_local_process(fn, 1),
            ],
        }
        ran = set()
        for name, decorators in forms.items():
            for decorate in decorators:

                @decorate
                def function(*args, name=name, **kwargs):
                    """Doc."""
                    ran.add(name)
                    return args, kwargs

                assert function.__doc__ == "Doc."
                assert function.__name__ == "function"
                assert function(1, a=2) in (((1,), {"a": 2}), None)
        return ran

    assert run_threads(3, ask) == [{"main", "local", "zero"}, {"one", "local one"}, {"last"}]


def test_a_decorated_method_gets_its_object():
    def ask():
        state = PartialState()

        class Writer:
            written = ()

            @state.on_main_process
            def write(self, line):
                self.written += (line,)

        writer = Writer()
        writer.write("a")
        return writer.written

    assert run_threads(2, ask) == [("a",), ()]


def test_one_process_does_what_any_of_several_would_do():
    state = PartialState()
    decorators = [
        state.on_process(process_index=3),
        state.on_local_process(local_process_index=3),
        state.on_last_process,
    ]
    assert [decorate(lambda: "ran")() for decorate in decorators] == ["ran"] * 3


def test_a_decorator_refuses_what_cannot_be_called():
    with pytest.raises(TypeError, match="takes a function, got 3"):
        PartialState().on_main_process(3)


@pytest.mark.parametrize("wrong", [-1, "1", 1.0, True])
def test_a_decorator_refuses_what_is_no_number_of_a_process(wrong):
    with pytest.raises(ValueError, match=f"process_index must be a process's number, from 0, got {wrong!r}"):
        PartialState().on_process(process_index=wrong)
    with pytest.raises(ValueError, match=f"local_process_index must be .*got {wrong!r}"):
        PartialState().on_local_process(local_process_index=wrong)


def test_a_decorator_of_the_class_or_of_a_reset_state_says_what_is_missing():
    for kind in (PartialState, Accelerator):
        with pytest.raises(ValueError, match=r"belongs to an object.*accelerator = Accelerator\(\)"):
            kind.on_main_process(print)
    state = PartialState()
    PartialState._reset_state()
    with pytest.raises(ValueError, match="this PartialState was reset"):
        state.on_main_process(print)


def test_print_happens_once(capsys):
    run_threads(3, lambda: PartialState().print("hello", end="!"))
    assert capsys.readouterr().out == "hello!"


def test_the_main_process_goes_first():
    order, lock = [], threading.Lock()

    def work():
        state = PartialState()
        with state.main_process_first():
            with lock:
                order.append(state.process_index)

    run_threads(3, work)
    assert order[0] == 0
    assert sorted(order) == [0, 1, 2]


def hear(block):
    """What came out of `block`: its value, or the error as text."""
    try:
        return block()
    except BaseException as error:  # noqa: BLE001 - SystemExit is one of the cases
        return f"{type(error).__name__}: {error}"


@pytest.mark.parametrize("verify", [True, False])
@pytest.mark.parametrize("error", [RuntimeError("no data"), SystemExit(3), KeyboardInterrupt()])
def test_when_the_main_process_fails_the_others_hear_why_and_do_not_run_the_block(error, verify):
    ran = []

    def block():
        state = PartialState()
        with state.main_process_first():
            ran.append(state.process_index)
            if state.is_main_process:
                raise error

    said = run_threads(3, lambda: hear(block), timeout_s=10, verify=verify)
    own = f"{type(error).__name__}: {error}"
    assert said == [own, *[f"CommError: rank 0, which goes first in main_process_first, failed: {own}"] * 2]
    assert ran == [0]


def test_when_a_later_process_fails_the_first_has_gone_on_and_the_error_is_its_own():
    def block():
        state = PartialState()
        with state.main_process_first():
            if not state.is_main_process:
                raise KeyError("my part")
        return "went on"

    assert run_threads(2, lambda: hear(block), timeout_s=10) == ["went on", "KeyError: 'my part'"]


@pytest.mark.parametrize("outer", ["main_process_first", "local_main_process_first"])
def test_blocks_may_be_nested_and_the_processes_meet_again_after_a_failure_that_was_caught(outer):
    def fail(state):
        with getattr(state, outer)(), state.main_process_first():
            raise ValueError("first")

    def block():
        state = PartialState()
        said = hear(lambda: fail(state))
        state.wait_for_everyone()
        with getattr(state, outer)(), state.main_process_first():
            pass
        state.wait_for_everyone()
        return said.partition(":")[0]

    assert on_two_machines(block) == ["ValueError", "CommError", "CommError", "CommError"]


def on_two_machines(ask):
    """`ask()` on four ranks, two on each machine."""

    def work():
        world = current_world()
        with use_world(replace(world, local_rank=world.rank % 2, local_size=2)):
            return ask()

    return run_threads(4, work, timeout_s=10)


def test_the_first_of_each_machine_goes_first_on_it():
    order, lock = [], threading.Lock()

    def work():
        state = PartialState()
        with state.local_main_process_first(), lock:
            order.append(state.process_index)

    on_two_machines(work)
    assert sorted(order[:2]) == [0, 2]
    assert sorted(order[2:]) == [1, 3]


def test_when_the_first_of_one_machine_fails_those_of_the_other_machine_hear_it_too():
    def block():
        state = PartialState()
        with state.local_main_process_first():
            if state.process_index == 2:
                raise OSError("disk full")

    heard = "CommError: rank 2, which goes first in local_main_process_first, failed: OSError: disk full"
    assert on_two_machines(lambda: hear(block)) == [heard, heard, "OSError: disk full", heard]


def test_going_first_can_end_by_return_and_decorate_a_function():
    def ask():
        state = PartialState()

        @state.main_process_first()
        def load():
            return state.process_index

        with state.main_process_first():
            return load()

    assert run_threads(1, ask) == [0]


def test_wait_for_everyone_meets():
    def work():
        PartialState().wait_for_everyone()
        return True

    try:
        assert run_threads(2, work, timeout_s=10) == [True, True]
    except CommError as error:  # pragma: no cover
        pytest.fail(str(error))


@pytest.mark.parametrize("wait", ["wait_for_everyone", "main_process_first"])
def test_a_rank_in_another_collective_is_an_error_on_all_and_no_hang(wait):
    def work():
        state = PartialState()
        try:
            if wait == "wait_for_everyone":
                gather(torch.ones(1)) if state.is_main_process else state.wait_for_everyone()
            else:
                with state.main_process_first():
                    gather(torch.ones(1))
        except MismatchError as error:
            return str(error)

    said = run_threads(2, work, timeout_s=20)
    assert said[0] == said[1]
    assert ("rank 1 barrier" if wait == "wait_for_everyone" else "rank 1 main_process_first") in said[0]
