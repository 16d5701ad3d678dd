"""Weights written for loading elsewhere, and what is registered for checkpoints."""

from __future__ import annotations

import threading
from collections import OrderedDict

import pytest
import torch
from safetensors.torch import load_file

from acc_ops.testing import run_threads
from acc_trainer import Accelerator, CheckpointError
from acc_trainer.checkpoint import meeting


def net():
    return torch.nn.Sequential(torch.nn.Linear(3, 4), torch.nn.Tanh(), torch.nn.Linear(4, 1))


def fill(model, value):
    with torch.no_grad():
        model[0].weight.fill_(value)


def value_in(folder):
    return load_file(folder / "model.safetensors")["0.weight"][0, 0].item()


def test_the_weights_are_saved_for_loading_elsewhere(tmp_path):
    accelerator = Accelerator()
    model = accelerator.prepare(net())
    accelerator.save_model(model, tmp_path / "whole")
    accelerator.save_model(model, tmp_path / "torch", safe_serialization=False)
    accelerator.save_model(model, tmp_path / "shards", max_shard_size="60B")
    assert (tmp_path / "whole" / "model.safetensors").is_file()
    state = torch.load(tmp_path / "torch" / "pytorch_model.bin", weights_only=True)
    assert torch.equal(state["0.weight"], model[0].weight)
    assert (tmp_path / "shards" / "model.safetensors.index.json").is_file()
    assert accelerator.get_state_dict(model).keys() == model.state_dict().keys()
    accelerator.save({"a": torch.ones(1)}, tmp_path / "any.bin")
    assert torch.load(tmp_path / "any.bin", weights_only=True)["a"].item() == 1
    (tmp_path / "file").write_text("x")
    with pytest.raises(NotADirectoryError):
        accelerator.save_model(model, tmp_path / "file")


def test_an_empty_folder_name_is_refused(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    with pytest.raises(ValueError, match=r"empty name; '\.' is this folder"):
        Accelerator().save_model(net(), "")
    assert not list(tmp_path.iterdir())


def test_a_model_that_cannot_be_written_is_an_error_on_every_rank(tmp_path):
    (tmp_path / "file").write_text("x")

    def work():
        accelerator = Accelerator()
        try:
            accelerator.save_model(net(), tmp_path / "file")
        except (NotADirectoryError, CheckpointError) as error:
            return type(error), str(error)

    first, second = run_threads(2, work, timeout_s=20)
    assert first[0] is NotADirectoryError
    assert second[0] is CheckpointError
    assert "rank 0 failed in save_model (saving a model into" in second[1]


@pytest.mark.parametrize("first", [0, 1])
def test_the_main_process_may_save_a_model_alone_and_all_may_save_it_afterwards_into_one_folder(
    tmp_path, first
):
    """`first`: the rank that calls first where all do."""
    gone_on = threading.Event()

    def save(accelerator, model):
        accelerator.save_model(model, tmp_path / "best")

    def work():
        accelerator = Accelerator()
        model = accelerator.prepare(net())
        for value in (1.0, 2.0):
            if accelerator.is_main_process:
                fill(model, value)
                save(accelerator, model)
        if accelerator.process_index != first:
            has_gone_on = gone_on.wait(20.0 if first == 0 else 0.3)
            assert has_gone_on == (first == 0)  # rank 1 waits for the call that rank 0 has not begun
        fill(model, 3.0)
        save(accelerator, model)
        seen = value_in(tmp_path / "best")
        gone_on.set()
        return seen

    assert run_threads(2, work, timeout_s=20) == [3.0, 3.0]


def test_an_error_of_a_save_alone_is_not_that_of_a_later_one_of_all(tmp_path):
    folder = tmp_path / "best"
    folder.write_text("x")

    def work():
        accelerator = Accelerator()
        model = accelerator.prepare(net())
        if accelerator.is_main_process:
            with pytest.raises(NotADirectoryError):
                accelerator.save_model(model, folder)
            folder.unlink()
        accelerator.wait_for_everyone()
        accelerator.save_model(model, folder)
        return (folder / "model.safetensors").is_file()

    assert run_threads(2, work, timeout_s=20) == [True, True]


def test_where_each_rank_has_a_folder_of_its_own_that_of_rank_0_counts(tmp_path):
    def work():
        accelerator = Accelerator()
        model = accelerator.prepare(net())
        for _ in range(3):
            accelerator.save_model(model, tmp_path / f"rank{accelerator.process_index}")
        return (tmp_path / "rank0" / "model.safetensors").is_file()

    with pytest.warns(
        UserWarning, match=r"rank 0, which writes, was .*rank0; rank 1 was .*rank1, where nothing"
    ):
        assert run_threads(2, work, timeout_s=20) == [True, True]
    assert not (tmp_path / "rank1").exists()


def test_a_save_on_another_rank_alone_is_told_with_what_the_main_process_did_not_do(tmp_path, monkeypatch):
    monkeypatch.setattr(meeting, "WAIT_S", 0.1)

    def work():
        accelerator = Accelerator()
        model = accelerator.prepare(net())
        if accelerator.is_main_process:
            accelerator.save_model(model, tmp_path / "m")
        else:
            accelerator.save_model(model, tmp_path / "m")

    with pytest.warns(
        UserWarning, match=r"save_model at .*test_saving\.py:\d+ .*rank 0.* did not come there .*goes on"
    ):
        run_threads(2, work, timeout_s=20)


def test_only_what_has_a_state_is_registered():
    accelerator = Accelerator()
    accelerator.register_for_checkpointing(torch.nn.Linear(1, 1))
    with pytest.raises(ValueError, match=r"state_dict\(\) and load_state_dict\(\).*'text'"):
        accelerator.register_for_checkpointing("text")
    assert len(accelerator._custom_objects) == 1
    handle = accelerator.register_save_state_pre_hook(lambda *_: None)
    assert len(accelerator._save_model_state_pre_hook) == 1
    handle.remove()
    assert not accelerator._save_model_state_pre_hook
    accelerator.register_load_state_pre_hook(lambda *_: None).remove()


def test_weights_without_values_are_named_and_no_file_lacks_them(tmp_path):
    accelerator = Accelerator()
    model = torch.nn.Sequential(torch.nn.Linear(2, 2), torch.nn.Linear(2, 2, device="meta"))
    with pytest.raises(
        RuntimeError, match=r"2 weights of Sequential .* 1\.weight, 1\.bias\. Load them first"
    ):
        accelerator.save_model(model, tmp_path / "m")
    assert not (tmp_path / "m").exists()


def test_states_have_plain_names_and_the_versions_of_their_modules():
    accelerator = Accelerator()
    model = net()
    model[0] = torch.compile(model[0], backend="eager")
    model = accelerator.prepare(torch.compile(model, backend="eager"))
    state = accelerator.get_state_dict(model)
    assert list(state) == ["0.weight", "0.bias", "2.weight", "2.bias"]
    assert isinstance(state, OrderedDict)
    assert state._metadata["0"] == {"version": 1}
    assert net().load_state_dict(state)


class Extra(torch.nn.Linear):
    def __init__(self, extra):
        super().__init__(2, 2)
        self.extra = extra

    def get_extra_state(self):
        return self.extra

    def set_extra_state(self, state):
        self.extra = state


@pytest.mark.parametrize("extra", [None, b"bytes", 3, {"a": torch.ones(2), "b": [1, "x"]}])
@pytest.mark.parametrize("blocking", [True, False])
def test_extra_state_of_any_kind_comes_back_from_a_torch_file(tmp_path, extra, blocking):
    accelerator = Accelerator()
    model = accelerator.prepare(torch.nn.Sequential(Extra(extra)))
    with pytest.raises(
        TypeError,
        match=r"'0\._extra_state' is a .*get_extra_state of the module '0'.*safe_serialization=False",
    ):
        accelerator.save_state(tmp_path / "c")
    accelerator.save_state(tmp_path / "c", safe_serialization=False, blocking=blocking)
    model[0].extra = "other"
    accelerator.load_state(tmp_path / "c")
    assert str(model[0].extra) == str(extra)
