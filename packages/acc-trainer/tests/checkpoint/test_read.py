"""A load gives back everything, or says what is wrong before it touches anything."""

from __future__ import annotations

import os
import random
import warnings

import pytest
import torch

from acc_ops.testing import run_threads
from acc_ops.world import current_world
from acc_trainer.checkpoint import CheckpointError, load_state, save_state


@pytest.fixture(autouse=True)
def _no_warning_is_unexpected():
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        yield


@pytest.mark.parametrize("safe", [True, False])
def test_everything_comes_back_and_the_random_numbers_go_on(runs, tmp_path, safe):
    run = runs.build(models=2, custom=2)
    save_state(run, tmp_path / "c", safe_serialization=safe)
    saved = runs.picture(run)
    following = (random.random(), torch.rand(2).tolist())
    other = runs.build(models=2, custom=2, seed=9)
    runs.advance(other)
    assert runs.picture(other) != saved
    load_state(other, tmp_path / "c")
    assert runs.picture(other) == saved
    assert (random.random(), torch.rand(2).tolist()) == following


def test_a_resumed_run_goes_on_like_the_one_that_never_stopped(runs, tmp_path):
    run = runs.build()
    save_state(run, tmp_path / "c")
    for _ in range(3):
        runs.advance(run)
    resumed = runs.build(seed=3)
    load_state(resumed, tmp_path / "c")
    for _ in range(3):
        runs.advance(resumed)
    assert runs.picture(resumed) == runs.picture(run)


def test_every_rank_gets_its_own_state_back(runs, tmp_path):
    def rank():
        run = runs.build(seed=current_world().rank)
        run._dataloaders[0].position.batches = 10 + run.world.rank
        save_state(run, tmp_path / "c")
        other = runs.build()
        load_state(other, tmp_path / "c")
        return other._dataloaders[0].position.batches, other._models[0].weight.tolist()

    (one, first), (two, second) = run_threads(2, rank)
    assert (one, two) == (10, 11)
    assert first == second  # weights are rank 0's


def test_without_a_folder_the_newest_whole_one_is_taken_and_the_numbering_goes_on(runs, tmp_path):
    run = runs.build(tmp_path)
    for _ in range(3):
        runs.advance(run)
        save_state(run)
    want = runs.picture(run)
    os.makedirs(tmp_path / "checkpoints" / ".checkpoint_3.writing")
    os.makedirs(tmp_path / "checkpoints" / "best")
    other = runs.build(tmp_path)
    load_state(other)
    assert runs.picture(other) == want
    assert save_state(other).name == "checkpoint_3"


def test_a_newest_folder_with_a_foreign_manifest_is_passed_over(runs, tmp_path):
    run = runs.build(tmp_path, limit=2)
    save_state(run)
    want = runs.picture(run)
    runs.advance(run)
    for number, text in ((90, '{"format": 1, "files": []}'), (91, '{"name": "mine"}')):
        (tmp_path / "checkpoints" / f"checkpoint_{number}").mkdir()
        (tmp_path / "checkpoints" / f"checkpoint_{number}" / "manifest.json").write_text(text)
    with pytest.warns(
        UserWarning, match=r"checkpoint_9\d has a higher number than checkpoint_0, which is loaded"
    ):
        load_state(run)
    assert runs.picture(run) == want
    assert save_state(run).name == "checkpoint_92"


def test_a_newest_folder_that_is_not_whole_is_passed_over(runs, tmp_path):
    run = runs.build(tmp_path)
    save_state(run)
    want = runs.picture(run)
    runs.advance(run)
    os.remove(os.path.join(save_state(run), "optimizer.bin"))
    other = runs.build(tmp_path)
    with pytest.warns(UserWarning, match=r"checkpoint_1 has a higher number .* optimizer\.bin is missing"):
        load_state(other)
    assert runs.picture(other) == want
    assert save_state(other).name == "checkpoint_2"


@pytest.mark.parametrize(
    "name", ["optimizer.bin", "model.safetensors", "random_states_0.pkl", "custom_checkpoint_0.pkl"]
)
@pytest.mark.parametrize("damage", ["missing", "short"])
def test_a_folder_that_is_not_whole_changes_nothing_and_names_the_file(runs, tmp_path, name, damage):
    run = runs.build()
    save_state(run, tmp_path / "c")
    runs.advance(run)
    before = runs.picture(run)
    path = tmp_path / "c" / name
    if damage == "missing":
        path.unlink()
    else:
        path.write_bytes(path.read_bytes()[:-1])
    with pytest.raises(CheckpointError, match=f"is not whole: .*{name}"):
        load_state(run, tmp_path / "c")
    assert runs.picture(run) == before


@pytest.mark.parametrize(
    ("gone", "said"),
    [
        ("optimizer.bin", r"neither optimizer\.bin nor a folder optimizer_0 with \.metadata"),
        (
            "model.safetensors",
            r"neither model\.safetensors nor .*pytorch_model_fsdp\.bin, nor a folder pytorch_model_fsdp_0",
        ),
    ],
)
def test_without_a_manifest_the_error_names_every_form_that_could_have_been_there(runs, tmp_path, gone, said):
    run = runs.build()
    save_state(run, tmp_path / "c")
    (tmp_path / "c" / "manifest.json").unlink()
    (tmp_path / "c" / gone).unlink()
    with pytest.warns(UserWarning, match="has no manifest"), pytest.raises(CheckpointError, match=said):
        load_state(run, tmp_path / "c")


def test_a_folder_that_is_not_whole_is_an_error_on_every_rank(runs, tmp_path):
    def rank():
        run = runs.build()
        save_state(run, tmp_path / "c")
        run.world.comm.barrier()
        if run.world.is_main:
            (tmp_path / "c" / "optimizer.bin").unlink()
        run.world.comm.barrier()
        with pytest.raises(CheckpointError, match=r"optimizer\.bin is missing"):
            load_state(run, tmp_path / "c")

    run_threads(2, rank)


@pytest.mark.parametrize(
    ("other", "said"),
    [
        ({"models": 2}, "the models of this run are not those of the checkpoint"),
        ({"custom": 2}, "the custom of this run are not those"),
        ({"custom": 0}, "the custom of this run are not those"),
    ],
)
def test_a_run_with_other_objects_is_refused_before_anything_is_touched(runs, tmp_path, other, said):
    save_state(runs.build(), tmp_path / "c")
    run = runs.build(seed=4, **other)
    before = runs.picture(run)
    with pytest.raises(CheckpointError, match=said):
        load_state(run, tmp_path / "c")
    assert runs.picture(run) == before


def test_the_same_objects_in_another_order_are_refused(runs, tmp_path):
    def build():
        run = runs.build(models=2)
        run._models[1] = torch.nn.Sequential(run._models[1])
        return run

    save_state(build(), tmp_path / "c")
    run = build()
    run._models.reverse()
    with pytest.raises(
        CheckpointError,
        match=r"in the same order: it holds .*Linear.*Sequential.*, this run has .*Sequential",
    ):
        load_state(run, tmp_path / "c")


def test_a_checkpoint_without_a_manifest_loads_with_a_warning(runs, tmp_path):
    run = runs.build()
    save_state(run, tmp_path / "c")
    want = runs.picture(run)
    for name in ("manifest.json", "progress_0.bin"):  # as accelerate writes it
        (tmp_path / "c" / name).unlink()
    other = runs.build(seed=1)
    with (
        pytest.warns(UserWarning, match=r"has no manifest\.json"),
        pytest.warns(UserWarning, match=r"the positions of the loaders .*\(progress_0\.bin\)"),
    ):
        load_state(other, tmp_path / "c")
    for part in ("weights", "optimizers", "rates", "step", "custom"):
        assert runs.picture(other)[part] == want[part]
    (tmp_path / "c" / "scheduler.bin").unlink()
    with (
        pytest.warns(UserWarning, match=r"has no manifest\.json"),
        pytest.raises(CheckpointError, match=r"scheduler\.bin is missing"),
    ):
        load_state(other, tmp_path / "c")


@pytest.mark.parametrize(
    "name", ["model.safetensors", "optimizer.bin", "scheduler.bin", "custom_checkpoint_0.pkl"]
)
@pytest.mark.parametrize("left", [0, 5, 200])
def test_without_a_manifest_a_cut_off_file_is_named_and_nothing_is_touched(runs, tmp_path, name, left):
    run = runs.build()
    save_state(run, tmp_path / "c")
    runs.advance(run)
    (tmp_path / "c" / "manifest.json").unlink()
    os.truncate(tmp_path / "c" / name, min(left, os.path.getsize(tmp_path / "c" / name) - 1))
    before = runs.picture(run)
    with (
        pytest.warns(UserWarning, match=r"has no manifest\.json"),
        pytest.raises(CheckpointError, match=rf"is not whole: .*{name.split('.')[0]}"),
    ):
        load_state(run, tmp_path / "c")
    assert runs.picture(run) == before


@pytest.mark.parametrize("damage", ["cut off", "another shape"])
def test_random_states_that_cannot_be_restored_never_fail_a_load(runs, tmp_path, damage):
    run = runs.build()
    save_state(run, tmp_path / "c")
    want = runs.picture(run)
    (tmp_path / "c" / "manifest.json").unlink()
    path = tmp_path / "c" / "random_states_0.pkl"
    if damage == "cut off":
        os.truncate(path, 5)
    else:
        torch.save({"python": 3, "torch": torch.zeros(2)}, path)
    other = runs.build(seed=8)
    with warnings.catch_warnings(record=True) as said:
        warnings.simplefilter("always")
        load_state(other, tmp_path / "c")
    assert any("go on as they are" in str(warning.message) for warning in said)
    assert runs.picture(other)["optimizers"] == want["optimizers"]


@pytest.mark.parametrize("name", ["model.safetensors", "optimizer.bin", "progress_1.bin"])
def test_changed_bytes_are_an_error_on_every_rank_where_checksums_are_asked_for(runs, tmp_path, name):
    def rank():
        run = runs.build()
        save_state(run, tmp_path / "c")
        before = runs.picture(run)
        if run.world.is_main:
            content = bytearray((tmp_path / "c" / name).read_bytes())
            content[-9] ^= 0xFF
            (tmp_path / "c" / name).write_bytes(content)
        run.world.comm.barrier()
        with pytest.raises(CheckpointError, match=f"the bytes of {name} have changed"):
            load_state(run, tmp_path / "c", checksums=True)
        assert runs.picture(run) == before
        if name.startswith("model"):
            load_state(run, tmp_path / "c")

    run_threads(2, rank)


def test_random_states_of_another_library_never_stop_a_load(runs, tmp_path):
    numpy = pytest.importorskip("numpy")
    run = runs.build()
    save_state(run, tmp_path / "c")
    for name in ("manifest.json", "progress_0.bin"):
        (tmp_path / "c" / name).unlink()
    path = tmp_path / "c" / "random_states_0.pkl"
    torch.save({"step": 42, "theirs": numpy.random.get_state(), "torch": torch.get_rng_state()}, path)
    with warnings.catch_warnings(record=True) as said:
        warnings.simplefilter("always")
        load_state(run, tmp_path / "c")
        assert run.step == 42
        torch.save({"step": 43, "theirs": random.Random(1)}, path)
        load_state(run, tmp_path / "c")
    assert any("theirs" in str(warning.message) for warning in said)
    assert any("the random generators go on as they are" in str(warning.message) for warning in said)


def test_fewer_or_more_ranks_than_saved_are_said_and_work(runs, tmp_path):
    run_threads(2, lambda: save_state(runs.build(), tmp_path / "c"))
    run = runs.build(seed=7)
    with pytest.warns(UserWarning, match="saved by 2 processes, now there are 1"):
        load_state(run, tmp_path / "c")

    def rank():
        run = runs.build(seed=7)
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            load_state(run, tmp_path / "c")
        return run.step

    assert run_threads(3, rank) == [1, 1, 1]


def test_a_hook_may_load_models_itself(runs, tmp_path):
    run = runs.build(models=2)
    save_state(run, tmp_path / "c")
    (tmp_path / "c" / "model_1.safetensors").rename(tmp_path / "kept")
    seen = []
    run._load_model_state_pre_hook["one"] = lambda models, folder: seen.append((models.pop(), folder))
    with pytest.raises(CheckpointError, match=r"model_1\.safetensors is missing"):
        load_state(run, tmp_path / "c")
    (tmp_path / "kept").rename(tmp_path / "c" / "model_1.safetensors")
    load_state(run, tmp_path / "c")
    assert seen == [(run._models[1], str(tmp_path / "c"))]
    assert len(run._models) == 2


def test_wrong_arguments_are_named(runs, tmp_path):
    run = runs.build()
    save_state(run, tmp_path / "c")
    with pytest.raises(TypeError, match="'on_device', got 'cuda'"):
        load_state(run, tmp_path / "c", map_location="cuda")
    with pytest.raises(TypeError, match="does not know stric"):
        load_state(run, tmp_path / "c", stric=False)
    with pytest.raises(ValueError, match="there is no checkpoint folder"):
        load_state(run, tmp_path / "missing")
    with pytest.raises(ValueError, match="input_dir is empty"):
        load_state(run, "")
    with pytest.raises(TypeError, match=r"load_kwargs must be a dict .*, got 5"):
        load_state(run, tmp_path / "c", 5)
    with pytest.raises(ValueError, match="needs input_dir"):
        load_state(run)
    with pytest.raises(ValueError, match="there is no whole checkpoint in"):
        load_state(runs.build(tmp_path / "empty"))
    load_state(run, tmp_path / "c", map_location="on_device", strict=False)


def test_state_that_could_run_code_is_refused_with_the_remedy(runs, tmp_path):
    run = runs.build()
    run._schedulers[0].odd = random.Random(1)  # torch's schedulers save all their attributes
    save_state(run, tmp_path / "c")
    with pytest.raises(
        CheckpointError, match=r"scheduler\.bin holds objects that could run code .*weights_only"
    ):
        load_state(run, tmp_path / "c")
    load_state(run, tmp_path / "c", {"weights_only": False})


def test_a_checkpoint_parked_by_a_death_between_two_renames_loads(runs, tmp_path):
    run = runs.build()
    save_state(run, tmp_path / "c")
    os.rename(tmp_path / "c", tmp_path / ".c.old")
    other = runs.build(seed=2)
    load_state(other, tmp_path / "c")
    assert runs.picture(other) == runs.picture(run)


def _unlike(run, kind):
    """Make the last object of `kind` one that what was saved does not fit."""
    if kind == "shape":
        run._models[-1].weight = torch.nn.Parameter(torch.zeros(5, 2))
    elif kind == "name":
        run._models[-1].register_buffer("more", torch.zeros(1))
    elif kind == "groups":
        run._optimizers[-1].add_param_group({"params": [torch.nn.Parameter(torch.zeros(1))]})
    else:
        run._optimizers[-1].state.clear()
        run._optimizers[-1].param_groups[0]["params"][0] = torch.nn.Parameter(torch.zeros(5, 2))


@pytest.mark.parametrize("kind", ["shape", "name", "groups", "state"])
@pytest.mark.parametrize("error", [CheckpointError, RuntimeError, ValueError])
def test_the_last_object_that_does_not_fit_is_found_before_the_first_is_touched(runs, tmp_path, kind, error):
    save_state(runs.build(models=2), tmp_path / "c")
    other = runs.build(models=2, seed=9)
    _unlike(other, kind)
    before = runs.picture(other)
    with pytest.raises(error, match=r"(model|optimizer)_1 in .*nothing was changed"):
        load_state(other, tmp_path / "c")
    assert runs.picture(other) == before


def test_what_fails_half_way_says_that_the_run_is_a_mixture(runs, tmp_path):
    save_state(runs.build(models=2), tmp_path / "c")
    other = runs.build(models=2, seed=9)

    def fail(*_, **__):
        raise KeyError("momentum")

    other._models[1].load_state_dict = fail
    with pytest.raises(CheckpointError, match=r"model_1 could not take its state .*KeyError.*parts of two"):
        load_state(other, tmp_path / "c")
