"""A process that is killed while it saves or offloads leaves a folder that loads as one of its states, or not at all."""

from __future__ import annotations

import multiprocessing
import os
import random
import signal
import time

import pytest
import torch
from torch import nn

from acc_bigmodel import (
    OffloadedWeightsLoader,
    disk_offload,
    load_checkpoint_in_model,
    load_weights,
    save_weights,
)

pytestmark = pytest.mark.skipif(os.name != "posix", reason="kills by signal, and forks")
KILLS = 24
LIMIT_S = 60


def _state(number):
    return {f"layer.{i}": torch.full((150, 100), float(number)) for i in range(6)}


def _save_for_ever(folder, start, kinds, ready):
    """Save states whose tensors all hold the number of the save, in each of the forms in turn."""
    torch.set_num_threads(1)
    number = start
    ready.set()
    while True:
        number += 1
        limit, safe = kinds[number % len(kinds)]
        save_weights(_state(number), folder, "model", limit, safe)


def _save_models_for_ever(folder, start, kinds, ready):
    """The same through the Accelerator."""
    from acc_trainer.accelerator import Accelerator

    torch.set_num_threads(1)
    accelerator = Accelerator(cpu=True)
    model = nn.ParameterDict({name.replace(".", "_"): nn.Parameter(t) for name, t in _state(0).items()})
    number = start
    ready.set()
    while True:
        number += 1
        with torch.no_grad():
            for parameter in model.parameters():
                parameter.fill_(number)
        limit, safe = kinds[number % len(kinds)]
        accelerator.save_model(model, folder, max_shard_size=limit or "10GB", safe_serialization=safe)


WHOLE, SHARDS, FEWER = (None, True), (130_000, True), (250_000, True)
TORCH, TORCH_SHARDS = (None, False), (130_000, False)


@pytest.mark.parametrize(
    ("saver", "kinds"),
    [
        (_save_for_ever, [WHOLE]),
        (_save_for_ever, [SHARDS]),
        (_save_for_ever, [WHOLE, SHARDS, FEWER, TORCH, TORCH_SHARDS]),
        (_save_models_for_ever, [SHARDS, WHOLE]),
    ],
    ids=["whole", "shards of the same names", "every form in turn", "save_model"],
)
def test_a_save_killed_at_any_moment_leaves_one_state_or_none(tmp_path, saver, kinds):
    import acc_trainer.accelerator  # noqa: F401  for the forked processes

    chance = random.Random(29)
    fork = multiprocessing.get_context("fork")
    newest, leftovers, changes, latest_s = 0, 0, 0, 0.03
    for _ in range(KILLS):
        _kill_after(fork, saver, (str(tmp_path), newest, kinds), chance.uniform(0.0, latest_s))
        leftovers += any(name.startswith(".") for name in os.listdir(tmp_path))
        try:
            numbers = {
                float(value) for tensor in load_weights(tmp_path, "model").values() for value in tensor[0]
            }
        except (FileNotFoundError, ValueError):  # nothing yet, or shards that were being replaced
            latest_s *= 1.2
            continue
        assert len(numbers) == 1, "tensors of two saves were loaded as one"
        number = int(numbers.pop())
        assert number >= newest or newest == 0, "a save that was there has been lost"
        changes += number > newest
        latest_s *= 1.0 if number > newest else 1.2
        newest = max(newest, number)
    assert changes > KILLS / 4
    assert leftovers > 0, "no kill came in the middle of a save: this test has shown nothing"
    save_weights(_state(-1), tmp_path, "model")
    assert os.listdir(tmp_path) == ["model.safetensors"]
    assert all(bool((tensor == -1).all()) for tensor in load_weights(tmp_path, "model").values())


def _model(number):
    model = nn.Sequential(*[nn.Linear(100, 100) for _ in range(8)])
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.fill_(number)
    return model


def _offload_for_ever(folder, start, ready):
    torch.set_num_threads(1)
    number = start
    ready.set()
    while True:
        number += 1
        disk_offload(_model(number), folder)


def test_an_offload_killed_at_any_moment_never_gives_another_models_weights(tmp_path):
    chance = random.Random(31)
    fork = multiprocessing.get_context("fork")
    leftovers = 0
    for kill in range(KILLS):
        _kill_after(fork, _offload_for_ever, (str(tmp_path), 10 * kill), chance.uniform(0.0, 0.05))
        leftovers += any(name.endswith(".writing") for name in os.listdir(tmp_path))
        held = {float(value) for tensor in _held(tmp_path).values() for value in tensor.unique()}
        assert len(held) <= 1, f"the folder holds weights of the models {held}"
        model = disk_offload(_model(-1 - kill), tmp_path)
        assert all(bool((value == -1 - kill).all()) for value in model.state_dict().values())
    assert leftovers > 0, "no kill came in the middle of a write: this test has shown nothing"


def _convert_for_ever(checkpoints, folder, start, ready):
    torch.set_num_threads(1)
    number = start
    ready.set()
    while True:
        number += 1
        model = nn.Sequential(*[nn.Linear(100, 100, device="meta") for _ in range(8)])
        load_checkpoint_in_model(model, checkpoints[number % 2], {"": "disk"}, folder, dtype=torch.float64)


def test_a_converting_load_killed_at_any_moment_leaves_weights_of_one_checkpoint(tmp_path):
    checkpoints, folder = [str(tmp_path / "0"), str(tmp_path / "1")], tmp_path / "off"
    folder.mkdir()
    for number, checkpoint in enumerate(checkpoints):
        save_weights(_model(number).state_dict(), checkpoint, "model")
    chance = random.Random(37)
    fork = multiprocessing.get_context("fork")
    for kill in range(KILLS // 2):
        _kill_after(fork, _convert_for_ever, (checkpoints, str(folder), kill), chance.uniform(0.0, 0.05))
        held = _held(folder)
        assert len({float(value) for tensor in held.values() for value in tensor.reshape(-1)}) <= 1
        assert all(tensor.dtype == torch.float64 for tensor in held.values())


def _held(folder):
    try:
        return dict(OffloadedWeightsLoader(save_folder=folder))
    except FileNotFoundError:  # the first was killed before it had an index
        return {}


def _kill_after(fork, target, args, seconds):
    ready = fork.Event()
    process = fork.Process(target=target, args=(*args, ready))
    process.start()
    assert ready.wait(LIMIT_S)
    time.sleep(seconds)
    os.kill(process.pid, signal.SIGKILL)
    process.join()
    assert process.exitcode == -signal.SIGKILL, "the process ended by itself"
