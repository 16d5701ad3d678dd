"""Weights written for loading elsewhere, and what is registered for checkpoints."""

from __future__ import annotations

from collections import OrderedDict

import pytest
import torch

from acc_ops.testing import run_threads
from acc_trainer import Accelerator, CheckpointError


def net():
    return torch.nn.Sequential(torch.nn.Linear(3, 4), torch.nn.Tanh(), torch.nn.Linear(4, 1))


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


def test_the_main_process_may_save_a_model_alone_and_all_may_save_it_afterwards(tmp_path):
    def work():
        accelerator = Accelerator()
        model = accelerator.prepare(net())
        if accelerator.is_main_process:
            for name in ("alone", "best"):
                accelerator.save_model(model, tmp_path / name)
        accelerator.save_model(model, tmp_path / "all")
        return (tmp_path / "all" / "model.safetensors").is_file()

    assert run_threads(2, work, timeout_s=20) == [True, True]
    for name in ("alone", "best", "all"):
        assert (tmp_path / name / "model.safetensors").is_file()


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
