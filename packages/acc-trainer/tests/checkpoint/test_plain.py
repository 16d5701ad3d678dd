"""The specification's files for objects that no Accelerator holds, written and read one by one."""

from __future__ import annotations

import os
import random

import pytest
import torch

from acc_ops.testing import run_threads
from acc_ops.world import current_world
from acc_trainer import load_accelerator_state, save_accelerator_state
from acc_trainer.checkpoint import CheckpointError, load_state, save_state


def _objects(seed):
    torch.manual_seed(seed)
    models = [torch.nn.Linear(2, 3), torch.nn.Linear(3, 1)]
    optimizers = [torch.optim.Adam(model.parameters(), lr=0.1) for model in models]
    schedulers = [torch.optim.lr_scheduler.StepLR(one, 1, gamma=0.5) for one in optimizers]
    for model, optimizer, scheduler in zip(models, optimizers, schedulers, strict=True):
        model(torch.ones(1, model.in_features)).sum().backward()
        optimizer.step()
        scheduler.step()
    return models, optimizers, schedulers


def _picture(models, optimizers, schedulers):
    states = [[value.tolist() for value in model.state_dict().values()] for model in models]
    moments = [one.state_dict()["state"][0]["exp_avg"].tolist() for one in optimizers]
    return states, moments, [one.get_last_lr() for one in schedulers]


@pytest.mark.parametrize("safe", [True, False])
def test_everything_comes_back_and_the_random_numbers_go_on(tmp_path, safe):
    saved = _objects(0)
    scaler = torch.amp.GradScaler("cpu", init_scale=64.0)
    states = [model.state_dict() for model in saved[0]]
    folder = save_accelerator_state(
        tmp_path / "new", states, *saved[1:], [], 0, 5, scaler, safe_serialization=safe
    )
    assert folder == tmp_path / "new"
    kind = ("model", "safetensors") if safe else ("pytorch_model", "bin")
    files = {f"{kind[0]}.{kind[1]}", f"{kind[0]}_1.{kind[1]}", "optimizer.bin", "optimizer_1.bin"}
    assert set(os.listdir(folder)) == files | {
        *("scheduler.bin", "scheduler_1.bin", "scaler.pt", "random_states_0.pkl")
    }
    following = (random.random(), torch.rand(2).tolist())
    other, other_scaler = _objects(1), torch.amp.GradScaler("cpu")
    assert load_accelerator_state(folder, *other, [], 0, other_scaler) == {"step": 5}
    assert _picture(*other) == _picture(*saved)
    assert other_scaler.get_scale() == 64.0
    assert (random.random(), torch.rand(2).tolist()) == following


def test_a_checkpoint_of_a_run_can_be_read_and_the_other_way_round(runs, tmp_path):
    run = runs.build(custom=0)
    run.step = 9
    save_state(run, tmp_path / "c")
    models, optimizers, schedulers = run._models, run._optimizers, run._schedulers
    want = runs.picture(run)
    runs.advance(run)
    assert load_accelerator_state(tmp_path / "c", models, optimizers, schedulers, [], 0) == {"step": 9}
    for part in ("weights", "optimizers", "rates"):
        assert runs.picture(run)[part] == want[part]
    states = [model.state_dict() for model in models]
    save_accelerator_state(tmp_path / "p", states, optimizers, schedulers, [], 0, 4)
    other = runs.build(custom=0, seed=3)
    with pytest.warns(UserWarning, match=r"manifest\.json|does not hold all"):
        load_state(other, tmp_path / "p")
    assert runs.picture(other)["weights"] == want["weights"]
    assert other.step == 4


@pytest.mark.parametrize("name", ["model_1.safetensors", "optimizer_1.bin", "scheduler_1.bin", "scaler.pt"])
def test_a_missing_file_is_an_error_before_anything_is_touched(tmp_path, name):
    saved, scaler = _objects(0), torch.amp.GradScaler("cpu")
    save_accelerator_state(tmp_path, [m.state_dict() for m in saved[0]], *saved[1:], [], 0, 5, scaler)
    (tmp_path / name).unlink()
    other = _objects(1)
    before = _picture(*other)
    with pytest.raises((FileNotFoundError, CheckpointError), match=name.partition(".")[0]):
        load_accelerator_state(tmp_path, *other, [], 0, scaler)
    assert _picture(*other) == before


def test_random_states_may_be_missing_and_arguments_are_checked(tmp_path):
    saved = _objects(0)
    save_accelerator_state(tmp_path, [m.state_dict() for m in saved[0]], *saved[1:], [], 0, 5)
    with pytest.raises(TypeError, match="'on_device', got 'cuda'"):
        load_accelerator_state(tmp_path, *saved, [], 0, map_location="cuda")
    with pytest.raises(TypeError, match="does not know nonsense; known: strict"):
        load_accelerator_state(tmp_path, *saved, [], 0, nonsense=1)
    (tmp_path / "random_states_0.pkl").unlink()
    assert load_accelerator_state(tmp_path, *saved, [], 0, map_location="on_device", strict=False) == {}


def test_one_rank_writes_what_all_share_and_each_its_random_states(tmp_path):
    def rank():
        world = current_world()
        model = torch.nn.Linear(1, 1)
        torch.nn.init.constant_(model.weight, float(world.rank))
        save_accelerator_state(tmp_path, [model.state_dict()], [], [], [], world.rank, 3)
        world.comm.barrier()
        load_accelerator_state(tmp_path, [model], [], [], [], world.rank)
        return model.weight.item()

    assert run_threads(2, rank) == [0.0, 0.0]
    assert sorted(os.listdir(tmp_path)) == [
        *("model.safetensors", "random_states_0.pkl", "random_states_1.pkl")
    ]


def test_a_stateful_loader_goes_on(tmp_path):
    pytest.importorskip("torchdata")
    from acc_trainer import prepare_data_loader

    def loader():
        data = torch.utils.data.DataLoader(list(range(12)), 2)
        return prepare_data_loader(data, put_on_device=False, use_stateful_dataloader=True)

    first = loader()
    batches = iter(first)
    read = [next(batches).tolist() for _ in range(2)]
    save_accelerator_state(tmp_path, [], [], [], [first], 0, 2)
    assert "dl_state_dict.bin" in os.listdir(tmp_path)
    second = loader()
    load_accelerator_state(tmp_path, [], [], [], [second], 0)
    rest = [batch.tolist() for batch in second]
    assert [sample for batch in (*read, *rest) for sample in batch] == list(range(12))


def test_a_run_goes_on_in_the_loader_of_a_checkpoint_without_progress(tmp_path):
    """As accelerate writes it: the stateful loader's own file is all there is."""
    pytest.importorskip("torchdata")
    from acc_trainer import Accelerator, DataLoaderConfiguration

    accelerator = Accelerator(dataloader_config=DataLoaderConfiguration(use_stateful_dataloader=True))
    loader = accelerator.prepare(torch.utils.data.DataLoader(list(range(12)), 2))
    batches = iter(loader)
    read = [next(batches).tolist() for _ in range(2)]
    save_accelerator_state(tmp_path, [], [], [], [loader], 0, 2)
    batches.close()
    with pytest.warns(UserWarning, match=r"has no manifest\.json|does not hold all of this run"):
        accelerator.load_state(str(tmp_path))
    rest = [batch.tolist() for batch in loader]
    assert [sample for batch in (*read, *rest) for sample in batch] == list(range(12))
    assert accelerator.step == 2
