"""A save beside the training holds the state of the moment it was asked for, one at a time, and no failure of it is lost."""

from __future__ import annotations

import gc
import os
import shutil
import signal
import subprocess
import sys
import threading

import pytest
import torch

from acc_ops.testing import run_threads
from acc_ops.world import current_world
from acc_plugins.states.part import TorchFilePart
from acc_trainer.accelerator import Accelerator
from acc_trainer.checkpoint import CheckpointError, check_whole, is_whole, load_state, save_state
from acc_trainer.checkpoint.background import finish_save


class Gate:
    """Holds the writing of every optimizer file until `open()`; `fail` is raised instead of writing."""

    def __init__(self, monkeypatch):
        self._open = threading.Event()
        self.reached = threading.Event()
        self.fail = None
        write = TorchFilePart.write

        def gated(part, folder, group=None):
            if part.name == "optimizer":
                self.reached.set()
                assert self._open.wait(60)
                if self.fail is not None:
                    raise self.fail
            return write(part, folder, group)

        monkeypatch.setattr(TorchFilePart, "write", gated)

    def open(self):
        self._open.set()


@pytest.fixture
def gate(monkeypatch):
    gate = Gate(monkeypatch)
    yield gate
    gate.open()


def test_the_checkpoint_holds_the_state_at_the_call_however_the_training_goes_on(runs, tmp_path, gate):
    run = runs.build()
    folder = save_state(run, tmp_path / "c", blocking=False)
    want = runs.picture(run)
    assert gate.reached.wait(60)
    assert not os.path.exists(folder), "it is not there before it is whole"
    for _ in range(3):
        runs.advance(run)
    gate.open()
    finish_save(run)
    check_whole(folder, checksums=True)
    load_state(run, folder)
    assert runs.picture(run) == want


def test_it_writes_the_same_files_as_a_save_that_blocks(runs, tmp_path):
    run = runs.build(models=2, custom=2)
    names = []
    for blocking in (True, False):
        folder = save_state(run, tmp_path / str(blocking), blocking=blocking)
        finish_save(run)
        names.append(sorted(os.listdir(folder)))
    assert names[0] == names[1]
    for name in names[0]:
        if name.endswith(".safetensors"):
            assert (tmp_path / "True" / name).read_bytes() == (tmp_path / "False" / name).read_bytes()
        elif name != "manifest.json" and not name.startswith("random"):
            one, other = (torch.load(tmp_path / way / name, weights_only=False) for way in ("True", "False"))
            assert repr(one) == repr(other), name


@pytest.mark.parametrize("second", ["save", "save beside", "load"])
def test_the_next_call_waits_for_the_save_before_it(runs, tmp_path, gate, second):
    run = runs.build()
    folder = save_state(run, tmp_path / "c", blocking=False)
    assert gate.reached.wait(60)
    threading.Timer(0.05, gate.open).start()
    if second == "load":
        load_state(run, folder)  # there would be nothing to load
    else:
        save_state(run, tmp_path / "d", blocking=second == "save")
        assert is_whole(folder)
    finish_save(run)


def test_a_failure_is_raised_once_by_the_next_call_and_the_run_goes_on(runs, tmp_path, gate, capfd):
    run = runs.build(tmp_path)
    gate.open()
    save_state(run)
    gate.fail = OSError(28, "No space left on device")
    folder = save_state(run, blocking=False)
    assert run.project_configuration.iteration == 2
    with pytest.raises(
        CheckpointError, match=r"checkpoint_1 failed in the background: OSError: .*No space left"
    ):
        save_state(run)
    assert "checkpoint_1 failed in the background" in capfd.readouterr().err
    assert os.listdir(tmp_path / "checkpoints") == ["checkpoint_0"]
    assert run.project_configuration.iteration == 1
    gate.fail = None
    assert save_state(run, blocking=False) == folder, "the number is not skipped"
    finish_save(run)
    assert is_whole(folder)


def test_a_failure_on_one_rank_is_an_error_on_all_ranks_at_the_next_call(runs, tmp_path, monkeypatch):
    write = TorchFilePart.write

    def fails_on_rank_1(part, folder, group=None):
        if part.name == "progress_1":
            raise OSError(5, "Input/output error")
        return write(part, folder, group)

    def rank():
        run = runs.build()
        save_state(run, tmp_path / "c")
        want = runs.picture(run)
        runs.advance(run)
        with pytest.MonkeyPatch.context() as patch:
            if current_world().rank == 0:
                patch.setattr(TorchFilePart, "write", fails_on_rank_1)
            current_world().comm.barrier()
            save_state(run, tmp_path / "c", blocking=False)
            with pytest.raises(CheckpointError, match=r"failed in the background.*Input/output error"):
                finish_save(run)
            current_world().comm.barrier()
        load_state(run, tmp_path / "c")
        same = runs.picture(run) == want
        save_state(run, tmp_path / "c", blocking=False)
        finish_save(run)
        return same

    assert run_threads(3, rank) == [True] * 3
    check_whole(tmp_path / "c", checksums=True)
    assert os.listdir(tmp_path) == ["c"]


def test_ranks_save_beside_their_training_while_they_speak_to_each_other(runs, tmp_path):
    def rank():
        run = runs.build(tmp_path, limit=1)
        for _ in range(4):
            save_state(run, blocking=False)
            runs.advance(run)
            for _ in range(5):
                run.world.comm.all_gather_object("training")
        finish_save(run)
        return run.project_configuration.iteration

    assert run_threads(2, rank) == [4, 4]
    assert os.listdir(tmp_path / "checkpoints") == ["checkpoint_3"]
    assert check_whole(tmp_path / "checkpoints" / "checkpoint_3", checksums=True).world_size == 2


def test_a_folder_that_vanished_meanwhile_is_an_error_and_the_next_save_makes_it_anew(runs, tmp_path, gate):
    run = runs.build()
    target = tmp_path / "disk" / "c"
    save_state(run, target, blocking=False)
    assert gate.reached.wait(60)
    shutil.rmtree(tmp_path / "disk")
    gate.open()
    with pytest.raises(CheckpointError, match=r"disk/c failed in the background: FileNotFoundError"):
        finish_save(run)
    save_state(run, target, blocking=False)
    finish_save(run)
    assert is_whole(target)
    assert os.listdir(tmp_path / "disk") == ["c"]


def test_what_cannot_be_copied_is_an_error_at_once(runs, tmp_path):
    run = runs.build()
    run._custom_objects[0].value = threading.Lock()
    with pytest.raises(TypeError, match="pickle"):
        save_state(run, tmp_path / "c", blocking=False)
    assert os.listdir(tmp_path) == []


def test_blocking_must_be_a_bool(runs, tmp_path):
    with pytest.raises(TypeError, match="blocking must be True or False, got 'no'"):
        save_state(runs.build(), tmp_path / "c", blocking="no")


def test_ranks_that_disagree_on_blocking_all_hear_of_it(runs, tmp_path):
    def rank():
        with pytest.raises(CheckpointError, match="disagree on blocking"):
            save_state(runs.build(), tmp_path / "c", blocking=current_world().rank == 0)

    run_threads(2, rank)


def test_hooks_see_the_live_weights_and_what_they_write_is_in_the_checkpoint(runs, tmp_path):
    run = runs.build()

    def hook(models, weights, folder):
        assert weights[0]["weight"].data_ptr() == run._models[0].weight.data_ptr()
        with open(os.path.join(folder, "mine.txt"), "w") as file:
            file.write("mine")

    run._save_model_state_pre_hook["one"] = hook
    folder = save_state(run, tmp_path / "c", blocking=False)
    finish_save(run)
    assert "mine.txt" in check_whole(folder, checksums=True).files


@pytest.mark.parametrize("before", [True, False])
def test_nobody_looks_for_garbage_while_the_state_is_copied(runs, tmp_path, before):
    run = runs.build()
    seen = []
    run._save_model_state_pre_hook[0] = lambda *_: seen.append(gc.isenabled())
    if not before:
        gc.disable()
    try:
        save_state(run, tmp_path / "c", blocking=False)
        after = [gc.isenabled()]
        finish_save(run)
        save_state(run, tmp_path / "c")
        run._custom_objects[0].value = threading.Lock()
        with pytest.raises(TypeError, match="cannot pickle"):
            save_state(run, tmp_path / "c", blocking=False)
        after.append(gc.isenabled())
    finally:
        gc.enable()
    assert seen == [False, before, False]
    assert after == [before, before]


def test_the_buffers_are_kept_and_no_second_copy_of_the_state_is_made(runs, tmp_path):
    run = runs.build()
    sizes = []
    for _ in range(3):
        save_state(run, tmp_path / "c", blocking=False)
        finish_save(run)
        kept = run._background.staging._kept
        sizes.append({key: one.buffer.data_ptr() for key, one in kept.items()})
    assert sizes[0] == sizes[1] == sizes[2]


@pytest.mark.parametrize("door", ["wait_for_save", "end_training"])
def test_the_doors_of_the_accelerator_wait_and_raise(tmp_path, gate, door):
    accelerator = Accelerator(cpu=True)
    model = torch.nn.Linear(2, 2)
    accelerator.prepare(model, torch.optim.SGD(model.parameters(), lr=0.1))
    accelerator.save_state(str(tmp_path / "c"), blocking=False)
    assert gate.reached.wait(60)
    gate.fail = OSError(28, "No space left on device")
    threading.Timer(0.05, gate.open).start()
    with pytest.raises(CheckpointError, match="c failed in the background"):
        getattr(accelerator, door)()
    accelerator.end_training()


def test_free_memory_finishes_the_save_and_lets_the_buffers_go(tmp_path):
    accelerator = Accelerator(cpu=True)
    accelerator.wait_for_save()  # nothing to wait for
    model = accelerator.prepare(torch.nn.Linear(64, 64))
    folder = accelerator.save_state(str(tmp_path / "c"), blocking=False)
    kept = accelerator._background.staging._kept
    assert sum(one.buffer.nbytes for one in kept.values()) > 64 * 64 * 4
    del model
    accelerator.free_memory()
    assert is_whole(folder)
    assert not accelerator._background.staging._kept
    accelerator.end_training()


def test_an_error_that_nobody_asked_for_is_said_when_the_run_is_gone(runs, tmp_path, gate, capfd):
    run = runs.build()
    save_state(run, tmp_path / "c", blocking=False)
    gate.fail = OSError(28, "No space left on device")
    gate.open()
    run._background._join()
    gate.fail = run._background = None  # an exception knows where it was raised
    gc.collect()
    assert "nobody asked for it, so nothing was raised" in capfd.readouterr().err


ENDS = """
import sys, torch
from acc_plugins.states.part import TorchFilePart
from acc_trainer.accelerator import Accelerator
accelerator = Accelerator(cpu=True)
model = torch.nn.Linear(500, 500)
accelerator.prepare(model, torch.optim.SGD(model.parameters(), lr=0.1))
if sys.argv[2] == "fail":
    TorchFilePart.write = lambda *_: 1 / 0
accelerator.save_state(sys.argv[1], blocking=False)
if sys.argv[2] == "raise":
    raise ZeroDivisionError("the script fails")
"""


def test_a_process_that_ends_by_an_error_has_kept_its_promise(tmp_path):
    command = [sys.executable, "-c", ENDS, str(tmp_path / "c"), "raise"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120)
    assert "the script fails" in done.stderr
    assert is_whole(tmp_path / "c")
    assert os.listdir(tmp_path) == ["c"]


def test_a_promise_that_could_not_be_kept_is_said_when_the_process_ends(tmp_path):
    command = [sys.executable, "-c", ENDS, str(tmp_path / "c"), "fail"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120)
    assert "ZeroDivisionError: division by zero; nobody asked for it" in done.stderr
    assert os.listdir(tmp_path) == []


@pytest.mark.skipif(not hasattr(signal, "setitimer"), reason="no timer that sends signals")
def test_after_an_interrupted_wait_the_save_goes_on_and_nobody_writes_into_its_buffers(runs, tmp_path, gate):
    run = runs.build()
    first = save_state(run, tmp_path / "a", blocking=False)
    want = runs.picture(run)
    assert gate.reached.wait(60)
    before = signal.signal(signal.SIGALRM, signal.default_int_handler)
    try:
        signal.setitimer(signal.ITIMER_REAL, 0.05)
        with pytest.raises(KeyboardInterrupt):
            finish_save(run)
    finally:
        signal.signal(signal.SIGALRM, before)
    runs.advance(run)
    threading.Timer(0.2, gate.open).start()
    save_state(run, tmp_path / "b", blocking=False)
    assert is_whole(first), "the next save has waited for it"
    finish_save(run)
    load_state(run, first)
    assert runs.picture(run) == want


INTERRUPTED = """
import signal, sys, time
import torch
from acc_plugins.states.part import TorchFilePart
from acc_trainer.accelerator import Accelerator

write = TorchFilePart.write

def slowly(part, folder, group=None):
    time.sleep(0.3)
    return write(part, folder, group)

TorchFilePart.write = slowly
accelerator = Accelerator(cpu=True)
model = accelerator.prepare(torch.nn.Linear(2, 2))
accelerator.save_state(sys.argv[1], blocking=False)
signal.signal(signal.SIGALRM, signal.default_int_handler)
signal.setitimer(signal.ITIMER_REAL, 0.05)
accelerator.wait_for_save()
"""


@pytest.mark.skipif(not hasattr(signal, "setitimer"), reason="no timer that sends signals")
def test_a_script_that_an_interrupt_ends_keeps_the_save_it_was_promised(tmp_path):
    ended = subprocess.run(
        [sys.executable, "-c", INTERRUPTED, str(tmp_path / "c")], capture_output=True, text=True, check=False
    )
    assert "KeyboardInterrupt" in ended.stderr
    check_whole(tmp_path / "c", checksums=True)


def test_a_forked_child_does_not_wait_for_a_thread_that_only_its_parent_has(runs, tmp_path, gate):
    run = runs.build()
    save_state(run, tmp_path / "c", blocking=False)
    assert gate.reached.wait(60)
    job = run._background._job
    job._process += 1  # as a child sees it
    finish_save(run)
    job._process -= 1
    gate.open()
    job.wait()


def test_a_save_from_within_another_ones_copying_is_refused(runs, tmp_path):
    run = runs.build()
    save_state(run, tmp_path / "c", blocking=False)
    finish_save(run)
    said = []

    def parts():
        with pytest.raises(CheckpointError, match="set a flag") as error:
            run._background.copies([])
        said.append(error)
        return iter(())

    class Parts:
        def __iter__(self):
            return parts()

    assert run._background.copies(Parts()) == []
    assert said
