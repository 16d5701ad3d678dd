"""A save writes the specification's files and ours, all or nothing, and old ones go only afterwards."""

from __future__ import annotations

import dataclasses
import errno
import json
import os
import re
from pathlib import Path

import pytest
import torch

from acc_bigmodel import open_store
from acc_ops.testing import run_threads
from acc_ops.world import current_world
from acc_plugins.states.part import Part, TorchFilePart
from acc_plugins.strategies.strategy import Strategy
from acc_trainer.checkpoint import (
    CheckpointError,
    check_whole,
    commit,
    is_whole,
    load_custom_state,
    load_state,
    parts,
    save_custom_state,
    save_state,
    write,
)
from acc_trainer.checkpoint.staging import Staging

FILES = {
    *("manifest.json", "model.safetensors", "optimizer.bin", "scheduler.bin", "custom_checkpoint_0.pkl"),
    *("random_states_0.pkl", "progress_0.bin", "gradients_0.bin"),
}
OF_A_RANK = {"random_states_{}.pkl", "progress_{}.bin", "gradients_{}.bin"}


def test_the_files_have_the_specifications_names(runs, tmp_path):
    folder = save_state(runs.build(models=2, custom=2), tmp_path / "c")
    more = {"model_1.safetensors", "optimizer_1.bin", "scheduler_1.bin", "custom_checkpoint_1.pkl"}
    assert set(os.listdir(folder)) == FILES | more
    torch_files = save_state(runs.build(), tmp_path / "t", safe_serialization=False)
    assert "pytorch_model.bin" in os.listdir(torch_files)


def test_the_manifest_says_what_was_saved(runs, tmp_path):
    run = runs.build()
    run.step = 12
    folder = save_state(run, tmp_path / "c")
    check_whole(folder, checksums=True)
    manifest = json.loads((tmp_path / "c" / "manifest.json").read_text())
    assert (manifest["step"], manifest["world_size"], manifest["iteration"]) == (12, 1, None)
    assert set(manifest["files"]) == FILES - {"manifest.json"}
    assert manifest["versions"]["torch"] == torch.__version__
    (model,) = manifest["objects"]["models"]
    assert (model["name"], model["class"]) == ("model", "torch.nn.modules.linear.Linear")
    assert manifest["objects"]["optimizers"][0]["class"].endswith("Adam")


def test_every_rank_writes_its_own_part_and_all_get_the_same_folder(runs, tmp_path):
    folders = run_threads(3, lambda: save_state(runs.build(), tmp_path / "c"))
    assert folders == [tmp_path / "c"] * 3
    assert {f"random_states_{r}.pkl" for r in range(3)} | {f"progress_{r}.bin" for r in range(3)} < set(
        os.listdir(folders[0])
    )
    assert check_whole(folders[0]).world_size == 3


@pytest.mark.parametrize("failing", [0, 1])
def test_a_save_that_fails_on_one_rank_raises_on_all_and_leaves_the_old_checkpoint(runs, tmp_path, failing):
    target = tmp_path / "c"

    def rank():
        run = runs.build()
        save_state(run, target)
        before = runs.picture(run)
        runs.advance(run)
        if current_world().rank == failing:
            run._custom_objects[0].fail = OSError(28, "No space left on device")
        with pytest.raises((OSError, CheckpointError), match="No space left on device"):
            save_state(run, target)
        load_state(run, target)
        return runs.picture(run) == before

    assert run_threads(2, rank) == [True, True]
    assert os.listdir(tmp_path) == ["c"]


@pytest.mark.parametrize("blocking", [True, False])
@pytest.mark.parametrize("why", [OSError(errno.ENOSPC, os.strerror(errno.ENOSPC)), TypeError("no tensor")])
@pytest.mark.parametrize("failing", [0, 1])
def test_a_rank_that_fails_still_takes_part_in_what_the_ranks_gather_after_that(
    runs, tmp_path, monkeypatch, failing, why, blocking
):
    """Else the others would wait for it there, and it for them. Its disk fails, or its state cannot be written, or be copied."""
    holder, name = (TorchFilePart, "write") if blocking else (Staging, "_copy")
    real, asked = getattr(holder, name), []

    def refuses_the_optimizer(*args):
        part = next(arg for arg in args if isinstance(arg, Part))
        if part.name == "optimizer" and current_world().rank == failing:
            raise why
        return real(*args)

    def rank():
        run = runs.build()
        thing = run._custom_objects[0]
        plain = thing.state_dict

        def gathered():
            asked.append(current_world().rank)
            current_world().comm.barrier()
            return plain()

        thing.state_dict = gathered
        part = TorchFilePart(name="optimizer", state={})  # one on every rank, as where optimizers are sharded
        run.strategy.optimizer_part = lambda *_: part
        with pytest.raises((type(why), CheckpointError), match=r"No space left on device|no tensor"):
            save_state(run, tmp_path / "c", blocking=blocking)

    with monkeypatch.context() as patch:
        patch.setattr(holder, name, refuses_the_optimizer)
        run_threads(2, rank, timeout_s=20)
    assert sorted(asked) == [0, 1]
    assert os.listdir(tmp_path) == []


@pytest.mark.parametrize("failing", [0, 1])
@pytest.mark.parametrize("what", ["progress_of", "manifest_of"])
def test_a_rank_that_cannot_tell_where_it_stands_is_an_error_on_all_and_the_next_save_works(
    runs, tmp_path, monkeypatch, failing, what
):
    module = parts if what == "progress_of" else write
    real = getattr(module, what)

    def fails(run, *args):
        if run.world.rank == failing and run.step == 1:
            raise LookupError("nobody knows")
        return real(run, *args)

    def rank():
        run = runs.build()
        with pytest.raises((LookupError, CheckpointError), match="nobody knows"):
            save_state(run, tmp_path / "c")
        assert run.world.comm.all_gather_object(run.world.rank) == [0, 1]
        runs.advance(run)
        return save_state(run, tmp_path / "c")

    monkeypatch.setattr(module, what, fails)
    assert run_threads(2, rank, timeout_s=20) == [tmp_path / "c"] * 2


@pytest.mark.parametrize("number", [errno.EROFS, errno.EACCES, errno.EIO, errno.ENOSPC, errno.ESTALE])
@pytest.mark.parametrize("operation", ["mkdir", "fsync", "rename", "write"])
def test_a_disk_that_refuses_leaves_the_old_checkpoint_and_the_run_saves_again(
    runs, tmp_path, operation, number
):
    run = runs.build()
    save_state(run, tmp_path / "c")
    want = runs.picture(run)
    runs.advance(run)

    def refuses(*args, **kwargs):
        raise OSError(number, os.strerror(number))

    with pytest.MonkeyPatch.context() as patch:
        if operation == "rename":  # of an existing folder: the exchange
            patch.setattr(commit, "_exchange", refuses)
        elif operation == "write":
            patch.setattr(TorchFilePart, "write", refuses)
        elif operation == "mkdir":
            patch.setattr(Path, "mkdir", refuses)
        else:
            patch.setattr(os, operation, refuses)
        with pytest.raises(OSError, match=re.escape(os.strerror(number))):
            save_state(run, tmp_path / "c")
    assert os.listdir(tmp_path) == ["c"]
    load_state(run, tmp_path / "c")
    assert runs.picture(run) == want
    runs.advance(run)
    save_state(run, tmp_path / "c")
    check_whole(tmp_path / "c", checksums=True)


def test_a_failure_after_the_rename_does_not_take_the_number_of_the_next_save(runs, tmp_path, monkeypatch):
    def rank():
        run = runs.build(tmp_path)
        with pytest.raises((OSError, CheckpointError), match="Input/output error"):
            save_state(run)
        run.world.comm.barrier()
        monkeypatch.undo()
        run.world.comm.barrier()
        assert run.project_configuration.iteration == 0
        return os.path.basename(save_state(run))

    def refuses(folder):
        if folder.name == "checkpoints":
            raise OSError(errno.EIO, "Input/output error")

    monkeypatch.setattr(commit, "sync_folder", refuses)
    assert run_threads(2, rank) == ["checkpoint_0"] * 2
    assert os.listdir(tmp_path / "checkpoints") == ["checkpoint_0"]


def test_automatic_names_count_up_and_only_the_limit_stays(runs, tmp_path):
    run = runs.build(tmp_path, limit=2)
    folders = [os.path.basename(save_state(run)) for _ in range(4)]
    assert folders == ["checkpoint_0", "checkpoint_1", "checkpoint_2", "checkpoint_3"]
    assert sorted(os.listdir(tmp_path / "checkpoints")) == ["checkpoint_2", "checkpoint_3"]
    assert run.project_configuration.iteration == 4


def test_with_a_limit_of_one_a_failed_save_leaves_the_old_one(runs, tmp_path):
    run = runs.build(tmp_path, limit=1)
    save_state(run)
    run._custom_objects[0].fail = OSError(28, "No space left on device")
    with pytest.raises(OSError, match="No space left"):
        save_state(run)
    assert os.listdir(tmp_path / "checkpoints") == ["checkpoint_0"]
    assert is_whole(tmp_path / "checkpoints" / "checkpoint_0")
    run._custom_objects[0].fail = None
    assert save_state(run).name == "checkpoint_1"
    assert os.listdir(tmp_path / "checkpoints") == ["checkpoint_1"]


def test_the_folder_of_the_next_name_must_not_exist(runs, tmp_path):
    (tmp_path / "checkpoints" / "checkpoint_0").mkdir(parents=True)
    with pytest.raises(ValueError, match=r"checkpoint_0 exists already: load_state\(\) first"):
        save_state(runs.build(tmp_path))


def test_a_folder_is_needed(runs):
    with pytest.raises(TypeError, match="needs output_dir"):
        save_state(runs.build())


def test_options_without_effect_are_said(runs, tmp_path):
    with pytest.warns(UserWarning, match="exclude_frozen_parameters had no effect"):
        save_state(runs.build(), tmp_path / "c", exclude_frozen_parameters=True)
    with pytest.warns(UserWarning, match="output_dir elsewhere has no effect"):
        save_state(runs.build(tmp_path / "p"), "elsewhere")


def test_a_keyword_that_nobody_knows_is_refused_on_all_ranks_before_anything_is_written(runs, tmp_path):
    with pytest.raises(TypeError, match="save_state does not know blockin; known: blocking, metric, wait_s"):
        save_state(runs.build(), tmp_path / "c", blockin=False)

    def rank():
        wrong = {"blockin": False} if current_world().rank == 1 else {}
        with pytest.raises((TypeError, CheckpointError), match="save_state does not know blockin"):
            save_state(runs.build(), tmp_path / "c", **wrong)

    run_threads(2, rank)
    assert os.listdir(tmp_path) == []


def test_ranks_that_want_different_folders_all_hear_of_it(runs, tmp_path):
    def rank():
        with pytest.raises(CheckpointError, match="disagree on the folder to save into"):
            save_state(runs.build(), tmp_path / str(current_world().rank))

    run_threads(2, rank)
    assert os.listdir(tmp_path) == []


def test_a_hook_writes_into_the_transaction_and_takes_weights_out(runs, tmp_path):
    def rank():
        run = runs.build(models=2)

        def hook(models, weights, folder):
            assert [type(model) for model in models] == [torch.nn.Linear] * 2
            if run.world.is_main:  # as downstream hooks do
                with open(os.path.join(folder, "mine.txt"), "w") as file:
                    file.write("mine")
                weights.pop(0)

        run._save_model_state_pre_hook["one"] = hook
        save_state(run, tmp_path / "c")
        return run._models[1].weight.tolist()

    weight = run_threads(2, rank)[0]
    assert "mine.txt" in check_whole(tmp_path / "c").files
    from safetensors.torch import load_file

    assert not (tmp_path / "c" / "model_1.safetensors").exists()
    assert load_file(tmp_path / "c" / "model.safetensors")["weight"].tolist() == weight


def test_a_hook_may_change_the_weights_that_are_written(runs, tmp_path):
    run = runs.build()
    run._save_model_state_pre_hook["one"] = lambda models, weights, folder: weights.__setitem__(
        0, {"w": torch.ones(2)}
    )
    save_state(run, tmp_path / "c")
    from safetensors.torch import load_file

    assert set(load_file(tmp_path / "c" / "model.safetensors")) == {"w"}


def test_a_hook_that_empties_its_list_of_models_leaves_the_run_its_models(runs, tmp_path):
    run = runs.build(models=2)
    run._save_model_state_pre_hook["one"] = lambda models, weights, folder: models.clear()
    save_state(run, tmp_path / "c")
    assert len(run._models) == 2
    load_state(run, tmp_path / "c")


def test_an_empty_name_is_refused(runs):
    with pytest.raises(ValueError, match="output_dir is empty"):
        save_state(runs.build(), "")


def test_a_folder_with_a_manifest_of_the_users_own_is_refused(runs, tmp_path):
    (tmp_path / "c").mkdir()
    (tmp_path / "c" / "manifest.json").write_text('{"name": "my web application"}')
    with pytest.raises(
        CheckpointError, match=r"manifest\.json was not written by save_state, .*another folder"
    ):
        save_state(runs.build(), tmp_path / "c")
    assert os.listdir(tmp_path / "c") == ["manifest.json"]


def test_a_linked_checkpoint_is_pruned_as_a_link_and_saving_goes_on(runs, tmp_path):
    run = runs.build(tmp_path, limit=1)
    home, elsewhere = tmp_path / "checkpoints", tmp_path / "large_disk"
    save_state(run)
    os.rename(home / "checkpoint_0", elsewhere)
    os.symlink(elsewhere, home / "checkpoint_0")
    os.symlink(elsewhere, home / ".checkpoint_7.removing")  # as an older version left it
    for _ in range(3):
        save_state(run)
    assert os.listdir(home) == ["checkpoint_3"]
    assert is_whole(elsewhere)


def test_a_linked_folder_keeps_its_link(runs, tmp_path):
    (tmp_path / "real").mkdir()
    (tmp_path / "link").symlink_to("real")
    assert save_state(runs.build(), tmp_path / "link") == tmp_path / "link"
    assert (tmp_path / "link").is_symlink()
    assert is_whole(tmp_path / "real")


def test_machines_with_a_disk_each_commit_a_folder_each(runs, tmp_path):
    """Two machines of one process each: neither sees the other's folder."""

    def rank():
        run = runs.build()
        run.world = dataclasses.replace(run.world, local_rank=0, local_size=1)
        run.strategy = Strategy(run.world, run.precision, save_on_each_node=True)
        home = tmp_path / f"disk_{run.world.rank}"
        save_state(run, home / "c")
        runs.advance(run)
        save_state(run, home / "c")
        want = runs.picture(run)
        runs.advance(run)
        load_state(run, home / "c")
        assert os.listdir(home) == ["c"]
        return runs.picture(run) == want, sorted(check_whole(home / "c", checksums=True).files)

    (same_0, files_0), (same_1, files_1) = run_threads(2, rank)
    assert same_0
    assert same_1
    shared = FILES - {"manifest.json"} - {name.format(0) for name in OF_A_RANK}
    assert set(files_0) == shared | {name.format(0) for name in OF_A_RANK}
    assert set(files_1) == shared | {name.format(1) for name in OF_A_RANK}


def test_one_registered_object_can_be_written_alone(runs, tmp_path):
    run = runs.build()
    save_custom_state(run._custom_objects[0], tmp_path, index=2)
    other = runs.build()._custom_objects[0]
    other.value = 50
    load_custom_state(other, tmp_path, index=2)
    assert other.value == run._custom_objects[0].value


@pytest.mark.parametrize("ranks", [1, 2])
def test_what_hooks_leave_is_written_whosever_it_is(runs, tmp_path, ranks):
    def pop_and_replace(models, weights, folder):
        weights.pop()
        weights[0] = {"a": torch.ones(1)}

    def add(models, weights, folder):
        weights.append({"more": torch.ones(2)})

    def rank():
        names = []
        for number, hook in enumerate((pop_and_replace, add)):
            run = runs.build(models=2)
            run._save_model_state_pre_hook["one"] = hook if run.world.is_main else lambda *_: None
            folder = save_state(run, tmp_path / str(number))
            names.append({file.name: set(open_store(file)) for file in folder.glob("model*")})
        return names

    own = {"weight", "bias"}
    for replaced, added in run_threads(ranks, rank):
        assert replaced == {"model.safetensors": {"a"}}
        assert added == {
            "model.safetensors": own,
            "model_1.safetensors": own,
            "model_2.safetensors": {"more"},
        }
