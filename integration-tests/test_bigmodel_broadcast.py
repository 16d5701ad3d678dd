"""Rank 0 reads a checkpoint for all: the others touch no file, get every weight, and raise what rank 0 raises."""

from __future__ import annotations

import builtins
import contextlib
import os

import pytest
import torch
from torch import nn

from acc_bigmodel import (
    CheckpointMismatch,
    init_empty_weights,
    load_checkpoint_and_dispatch,
    load_checkpoint_in_model,
    save_weights,
)
from acc_ops.testing import run_processes
from acc_ops.world import current_world

LIMIT_S = 120


class Tied(nn.Module):
    def __init__(self, width=8):
        super().__init__()
        self.embed = nn.Embedding(12, width)
        self.norm = nn.BatchNorm1d(width)
        self.head = nn.Linear(width, 12, bias=False)
        self.head.weight = self.embed.weight

    def forward(self, tokens):
        return self.head(self.norm(self.embed(tokens)))


def _model(width=8, empty=True):
    torch.manual_seed(current_world().rank + 1)
    if not empty:
        return Tied(width).eval()
    with init_empty_weights(include_buffers=True):
        return Tied(width).eval()


def _checkpoint(folder, **changes):
    torch.manual_seed(99)
    state = {**Tied().state_dict(), **changes}
    state = {name: tensor for name, tensor in state.items() if tensor is not None}
    for tensor in state.values():
        if tensor.is_floating_point():
            tensor.uniform_(0.1, 1.0)
    save_weights(state, folder, "model", 300)
    return state


class _NoFiles:
    """Opening or listing anything below `folder` fails in this process."""

    def __init__(self, folder):
        self.folder = str(folder)

    def __enter__(self):
        self.before = {name: getattr(os, name) for name in ("stat", "open", "scandir", "listdir")}
        self.open = builtins.open
        for name, call in self.before.items():
            setattr(os, name, self._guarded(call))
        builtins.open = self._guarded(self.open)

    def __exit__(self, *exception):
        for name, call in self.before.items():
            setattr(os, name, call)
        builtins.open = self.open

    def _guarded(self, call):
        def guarded(path=".", *args, **kwargs):
            if str(path).startswith(self.folder):
                raise PermissionError(f"this rank must not read {path}")
            return call(path, *args, **kwargs)

        return guarded


def _own_folder(folder, on_every_rank):
    """The checkpoint on rank 0; a folder that does not exist elsewhere, as on a node that has no copy."""
    return folder if on_every_rank or current_world().is_main else os.path.join(folder, "nowhere")


WISHES = [  # device map, dtype, built empty, whether every rank could read the checkpoint
    (None, None, True, False),
    ({"": "cpu"}, torch.bfloat16, True, True),
    (None, None, False, True),
]


def _load(folder):
    results = []
    for device_map, dtype, empty, on_every_rank in WISHES:
        model = _model(empty=empty)
        checkpoint = _own_folder(folder, on_every_rank)
        with contextlib.nullcontext() if current_world().is_main else _NoFiles(folder):
            report = load_checkpoint_in_model(
                model, checkpoint, device_map, dtype=dtype, strict=True, broadcast_from_rank0=True
            )
        assert model.embed.weight is model.head.weight
        results.append(({name: value.clone() for name, value in model.state_dict().items()}, report.loaded))
    return results


@pytest.mark.parametrize("size", [2, 3])
def test_the_other_ranks_get_every_weight_and_read_nothing(tmp_path, size):
    state = _checkpoint(tmp_path)
    for results in run_processes(size, _load, str(tmp_path), timeout_s=LIMIT_S):
        for (_, dtype, _, _), (loaded, names) in zip(WISHES, results, strict=True):
            assert names.keys() == state.keys()
            for name, tensor in state.items():
                wanted = tensor.to(dtype) if dtype is not None and tensor.is_floating_point() else tensor
                assert torch.equal(loaded[name], wanted), name


def _dispatched(folder, offload):
    own = os.path.join(offload, str(current_world().rank))
    model = load_checkpoint_and_dispatch(
        _model(),
        _own_folder(folder, False),
        {"embed": "disk", "head": "disk", "norm": "cpu"},
        offload_folder=own,
        broadcast_from_rank0=True,
    )
    with torch.no_grad():
        return model(torch.tensor([0, 3, 11]))


def test_every_rank_can_offload_what_rank_0_read(tmp_path):
    state = _checkpoint(tmp_path / "checkpoint")
    plain = Tied().eval()
    plain.load_state_dict(state)
    results = run_processes(
        2, _dispatched, str(tmp_path / "checkpoint"), str(tmp_path / "off"), timeout_s=LIMIT_S
    )
    assert all(torch.equal(out, plain(torch.tensor([0, 3, 11]))) for out in results)


FAILURES = {  # widths of the model on the three ranks, and what the error says
    "nothing there": ((8, 8, 8), "neither a weights file"),
    "cut short": ((8, 8, 8), "is not a whole safetensors file"),
    "a name is missing": ((8, 8, 8), "it lacks 'norm.bias'"),
    "another shape": ((9, 9, 9), "'embed.weight' has the shape (12, 8)"),
    "another shape on one rank": ((8, 8, 9), "'embed.weight' has the shape (12, 8)"),
}


def _failing(folder):
    """The errors of this rank, and whether its models are untouched."""
    results = {}
    for kind, (widths, _) in FAILURES.items():
        model = _model(widths[current_world().rank], empty=False)
        before = {name: tensor.clone() for name, tensor in model.state_dict().items()}
        with pytest.raises((ValueError, RuntimeError)) as caught:
            load_checkpoint_in_model(
                model, os.path.join(folder, kind), strict=True, broadcast_from_rank0=True
            )
        untouched = all(torch.equal(tensor, before[name]) for name, tensor in model.state_dict().items())
        results[kind] = (type(caught.value).__name__, str(caught.value), untouched)
    return results


def test_every_rank_raises_the_same_error_and_keeps_its_model(tmp_path):
    for kind in FAILURES:
        if kind != "nothing there":
            _checkpoint(tmp_path / kind, **{"norm.bias": None} if kind == "a name is missing" else {})
    file = next((tmp_path / "cut short").glob("*.safetensors"))
    file.write_bytes(file.read_bytes()[:-1])
    results = run_processes(3, _failing, str(tmp_path), timeout_s=LIMIT_S)
    assert all(result == results[0] for result in results)
    for kind, (_, text) in FAILURES.items():
        name, message, untouched = results[0][kind]
        assert name in ("ValueError", "CheckpointMismatch")
        assert text in message
        assert untouched, kind


def _failing_on_rank_1(folder):
    """What every rank raises, what it gets in the next collective, and whether its model is untouched, by what rank 1 does wrong."""
    world, results = current_world(), {}
    wrong = world.rank == 1
    busy = os.path.join(folder, "a file")
    open(busy, "a").close()
    own = os.path.join(folder, f"off{world.rank}")
    disk = {"": "disk"}
    faults = {
        "device": lambda load, model: load(model, {"": "cuda:7" if wrong else "cpu"}),
        "no folder": lambda load, model: load(model, disk if wrong else {"": "cpu"}),
        "folder": lambda load, model: load(model, disk, busy if wrong else own, dtype=torch.float16),
        "map": lambda load, model: load(model, {"embed": "cpu"} if wrong else {"": "cpu"}),
        "strict": lambda load, model: load(model, strict=wrong),
        "dtype": lambda load, model: load(model, dtype="float31" if wrong else None),
    }
    for kind, fault in faults.items():
        model = _model(empty=False)
        before = {name: tensor.clone() for name, tensor in model.state_dict().items()}

        def load(model, device_map=None, offload_folder=None, **kwargs):
            checkpoint = os.path.join(folder, "untied")
            return load_checkpoint_in_model(
                model, checkpoint, device_map, offload_folder, broadcast_from_rank0=True, **kwargs
            )

        with pytest.raises((ValueError, OSError)) as caught:
            fault(load, model)
        untouched = all(torch.equal(tensor, before[name]) for name, tensor in model.state_dict().items())
        results[kind] = (str(caught.value), world.comm.all_gather_object(kind), untouched)
    budgets = {"cpu": 10 if wrong else 10**6, "disk": 0}
    with pytest.raises(ValueError, match="raise the budget"):
        load_checkpoint_and_dispatch(
            _model(), os.path.join(folder, "untied"), "auto", budgets, broadcast_from_rank0=True
        )
    return results


def test_what_is_wrong_on_one_rank_is_an_error_on_all_which_stay_in_step(tmp_path):
    state = _checkpoint(tmp_path / "untied")
    untied = {**state, "head.weight": state["head.weight"] + 1}
    save_weights(untied, tmp_path / "untied", "model")
    results = run_processes(2, _failing_on_rank_1, str(tmp_path), timeout_s=LIMIT_S)
    assert results[0] == results[1]
    assert results[0].keys() == ERRORS_OF_RANK_1.keys()
    for kind, (message, told, untouched) in results[0].items():
        assert ERRORS_OF_RANK_1[kind] in message
        assert told == [kind, kind]
        assert untouched, kind
    assert not list(tmp_path.glob("off0/*"))


ERRORS_OF_RANK_1 = {
    "device": "sends 'the whole model' to 'cuda:7'",
    "no folder": "give an offload_folder",
    "folder": "a file",
    "map": "gives no device to",
    "strict": "ties 'head.weight' to another name whose value differs",
    "dtype": "'float31' is not a torch dtype",
}


def _sharded(folder):
    from torch.distributed.fsdp import fully_shard

    results = []
    for broadcast, on_meta in [(True, True), (True, False), (False, True), (False, False)]:
        model = Tied().to("meta") if on_meta else Tied()
        for part in (model.norm, model):
            fully_shard(part)

        def load(name, model=model, broadcast=broadcast):
            reads = current_world().is_main or not broadcast
            checkpoint = os.path.join(folder, name if reads else "nowhere")
            return load_checkpoint_in_model(model, checkpoint, strict=True, broadcast_from_rank0=broadcast)

        with pytest.raises(CheckpointMismatch, match=r"it lacks 'norm\.bias' \(is 'norm\.bais' meant\?\)"):
            load("misnamed")
        report = load("good")
        values = {
            name: (tensor.full_tensor() if hasattr(tensor, "full_tensor") else tensor).clone()
            for name, tensor in model.state_dict().items()
        }
        results.append((values, report.loaded))
    return results


def test_a_sharded_model_is_filled_by_every_rank_or_by_rank_0_and_hears_of_names_that_do_not_fit(tmp_path):
    state = _checkpoint(tmp_path / "good")
    misnamed = {"norm.bais" if name == "norm.bias" else name: value for name, value in state.items()}
    save_weights(misnamed, tmp_path / "misnamed", "model")
    for results in run_processes(2, _sharded, str(tmp_path), timeout_s=LIMIT_S):
        for values, names in results:
            assert names.keys() == state.keys()
            assert all(torch.equal(values[name].cpu(), state[name]) for name in state)
