"""torch's profiler for a block: which traces are written, and that nobody hangs."""

from __future__ import annotations

import json

import pytest
import torch

from acc_ops.testing import run_threads
from acc_plugins.options.kwargs import ProfileKwargs
from acc_trainer import Accelerator
from acc_trainer.profiling import profiled


def handler(folder, **kwargs):
    return ProfileKwargs(
        activities=["cpu"], output_trace_dir=None if folder is None else str(folder), **kwargs
    )


def operations(path):
    return {event.get("name") for event in json.loads(path.read_text())["traceEvents"]}


def test_the_trace_of_the_block_is_written_and_the_profiler_can_be_read(tmp_path):
    accelerator = Accelerator(kwargs_handlers=[handler(tmp_path / "new" / "folder")])
    with accelerator.profile() as profiler:
        torch.ones(3).sum()
    assert any("sum" in event.key for event in profiler.key_averages())
    assert "aten::sum" in operations(tmp_path / "new" / "folder" / "profile_0.json")


def test_without_a_folder_nothing_is_written_and_the_handlers_own_function_is_called(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    seen = []
    with Accelerator().profile(handler(None, on_trace_ready=seen.append)) as profiler:
        torch.ones(3).sum()
    assert seen == [profiler]
    assert list(tmp_path.iterdir()) == []


def test_a_schedule_that_repeats_keeps_every_trace_and_the_newest_under_the_plain_name(tmp_path):
    seen = []
    options = handler(
        tmp_path, schedule_option={"wait": 1, "active": 1, "repeat": 3}, on_trace_ready=seen.append
    )
    with Accelerator().profile(options) as profiler:
        for number in range(8):
            with torch.profiler.record_function(f"step {number}"):
                torch.ones(3).sum()
            profiler.step()
    steps = {path.name: operations(path) & {f"step {i}" for i in range(8)} for path in tmp_path.iterdir()}
    assert steps == {
        "profile_0_1.json": {"step 1"},
        "profile_0_2.json": {"step 3"},
        "profile_0.json": {"step 5"},
    }
    assert len(seen) == 3


def test_a_schedule_that_recorded_nothing_says_so(tmp_path, caplog):
    with Accelerator().profile(handler(tmp_path, schedule_option={"wait": 5, "active": 1})) as profiler:
        profiler.step()
    assert "rank 0 wrote no trace" in caplog.text
    assert "more calls of profiler.step()" in caplog.text


def test_a_trace_that_the_handlers_function_saved_itself_is_left_out_with_a_word(tmp_path, caplog):
    own = tmp_path / "own.json"
    with Accelerator().profile(
        handler(tmp_path, on_trace_ready=lambda profiler: profiler.export_chrome_trace(str(own)))
    ):
        torch.ones(3).sum()
    assert own.exists()
    assert "on_trace_ready saved the trace of rank 0 itself" in caplog.text


def test_an_exception_in_the_block_comes_through_and_its_trace_is_written(tmp_path):
    with pytest.raises(KeyError, match="mine"), Accelerator().profile(handler(tmp_path)):
        torch.ones(3).sum()
        raise KeyError("mine")
    assert "aten::sum" in operations(tmp_path / "profile_0.json")


def test_a_file_that_cannot_be_written_is_an_error_after_the_block(tmp_path):
    (tmp_path / "file").write_text("in the way")
    done = []
    with pytest.raises(OSError, match="file"), Accelerator().profile(handler(tmp_path / "file" / "folder")):
        done.append(True)
    assert done == [True]


class Untraced:
    """Stands for torch's profiler, of which a process has only one: what is tested is who waits for whom."""

    on_trace_ready: object = None

    def __enter__(self):
        return self

    def __exit__(self, *_):
        self.on_trace_ready(self)

    def export_chrome_trace(self, path):
        with open(path, "w") as file:
            file.write("{}")


@pytest.fixture
def untraced(monkeypatch):
    def build(self):
        made = Untraced()
        made.on_trace_ready = self.on_trace_ready
        return made

    monkeypatch.setattr(ProfileKwargs, "build", build)


def test_after_the_block_every_rank_sees_every_file(tmp_path, untraced):
    def work():
        with profiled(handler(tmp_path), Accelerator().world):
            pass
        return sorted(path.name for path in tmp_path.iterdir())

    assert run_threads(3, work) == [["profile_0.json", "profile_1.json", "profile_2.json"]] * 3


def test_a_rank_that_fails_in_the_block_is_named_and_leaves_nobody_waiting(tmp_path, untraced):
    def work():
        accelerator = Accelerator()
        with accelerator.profile(handler(tmp_path)):
            if accelerator.process_index == 1:
                raise KeyError("rank 1 fails")

    with pytest.raises(Exception, match="rank 1 fails"):
        run_threads(3, work)
