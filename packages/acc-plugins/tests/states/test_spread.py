from __future__ import annotations

import subprocess
import sys
from typing import Any

import torch
from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_tensor

from acc_plugins.states.spread import gathered, is_dtensor, local_pieces, map_tensors, shape_of


def test_the_pieces_of_a_tensor_are_its_memory(mesh: Any) -> None:
    plain = torch.zeros(3, 2)
    spread = distribute_tensor(torch.zeros(3, 2), mesh, [Shard(0)])
    for tensor in (plain, spread):
        for box, memory in local_pieces(tensor):
            assert box == ((0, 0), (3, 2))
            memory.fill_(4)
        assert gathered(tensor, keep=True).sum() == 24
        assert shape_of(tensor) == (3, 2)


def test_gathering_keeps_what_is_one_tensor_one_and_gives_others_nothing(mesh: Any) -> None:
    tied = distribute_tensor(torch.ones(2), mesh, [Replicate()])
    state = {"a": tied, "b": tied, "c": [torch.ones(1), 3], "d": (None, "text")}
    whole = gathered(state, keep=True)
    assert whole["a"] is whole["b"]
    assert not isinstance(whole["a"], DTensor)
    assert whole["c"][1] == 3
    assert whole["d"] == (None, "text")
    assert gathered(state, keep=False) is None


def test_tensors_are_mapped_wherever_they_are_nested() -> None:
    state = {"a": [torch.ones(1), {"b": torch.ones(1)}], "c": (torch.ones(1), 2)}
    assert map_tensors(lambda tensor: tensor.item(), state) == {"a": [1.0, {"b": 1.0}], "c": (1.0, 2)}


def test_only_a_tensor_on_a_mesh_is_one(mesh: Any) -> None:
    assert is_dtensor(distribute_tensor(torch.zeros(2), mesh, [Shard(0)]))
    assert not is_dtensor(torch.zeros(2))


def test_whole_states_are_loaded_without_what_shards_need() -> None:
    program = """
import sys, tempfile, torch
from acc_ops.world import current_world
from acc_plugins import Precision
from acc_plugins.strategies.strategy import Bundle, Strategy

strategy = Strategy(current_world(), Precision())
model = torch.nn.Linear(2, 2)
made = strategy.prepare(Bundle(models=[model], optimizers=[torch.optim.SGD(model.parameters())]))
with tempfile.TemporaryDirectory() as folder:
    strategy.save_model(made.models[0], None, folder, "model", safe=False)
    strategy.save_optimizer(made.optimizers[0], folder, "optimizer")
    strategy.load_model(made.models[0], folder, "model")
    strategy.load_optimizer(made.optimizers[0], folder, "optimizer")
assert "torch.distributed.checkpoint" not in sys.modules
"""
    subprocess.run([sys.executable, "-c", program], check=True, timeout=60)
