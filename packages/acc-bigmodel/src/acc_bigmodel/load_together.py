"""Loading on several ranks at once: rank 0 reads for all, the same error everywhere, and models of sharded tensors.

[Note: who reads]
With `broadcast_from_rank0` only rank 0 opens the checkpoint. The others hear of its names, shapes and dtypes, plan their own
load with them, and get the tensors that some rank needs one after the other. The ranks meet after each part of the load: the
arguments, the plan, the tensors, the new values and what is written for them, the change of the model. A rank that cannot go on
says so there, and every rank raises the error of the first that failed. Up to the last meeting no model has changed.
"""

from __future__ import annotations

import functools
import os
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from acc_bigmodel.checkpoint_files import open_store
from acc_bigmodel.load_plan import CheckpointMismatch, LoadReport, LoadWishes, plan_load
from acc_bigmodel.stores.pieces import give_back
from acc_bigmodel.stores.store import FileSlice, WeightStore
from acc_ops.exchange import raise_together, together, tried
from acc_ops.optional import require
from acc_ops.world import World


class BroadcastStore(WeightStore):
    """What rank 0 has in its checkpoint: the layouts at once, a tensor after `receive`. To be made by all ranks together.

    Raises on every rank what opening the checkpoint raises on rank 0.
    """

    def __init__(self, checkpoint: str | os.PathLike[str], world: World) -> None:
        self._world = world
        self._own: WeightStore | None = None
        self._received: dict[str, torch.Tensor] = {}
        layouts, error = tried(lambda: self._open(checkpoint)) if world.is_main else (None, None)
        raise_together(world, error)
        told: tuple[dict[str, _Layout], dict[str, Any]] = world.comm.broadcast_object(layouts)
        self._layouts, self.others = told

    def receive(self, names: Iterable[str]) -> None:
        """Get the tensors that this rank or another needs; for all ranks together, which raise what one of them raises."""
        needed = {name for wanted in self._world.comm.all_gather_object(sorted(names)) for name in wanted}
        needed_here = [name for name in self._layouts if name in needed]  # in the same order everywhere
        if self._own is None:
            self._received = together(self._world, lambda: {name: self._room(name) for name in needed_here})
        else:
            together(self._world, lambda: None)
        error: Exception | None = None
        for name in needed_here:
            if self._own is None:
                self._received[name] = self._world.comm.broadcast(self._received[name])
                continue
            tensor, failure = tried(functools.partial(self._own.peek, name))
            error = error or failure
            # the others wait for as many tensors, whatever happened
            self._world.comm.broadcast(self._room(name) if tensor is None else tensor.detach().contiguous())
            if tensor is not None and self._own.is_mapped(name):
                give_back(tensor)
        raise_together(self._world, error)

    def __getitem__(self, name: str) -> torch.Tensor:
        return self._received[name] if self._own is None else self._own[name]

    def __iter__(self) -> Iterator[str]:
        return iter(self._layouts)

    def __len__(self) -> int:
        return len(self._layouts)

    def __contains__(self, name: object) -> bool:
        return name in self._layouts

    def shape(self, name: str) -> torch.Size:
        return self._layouts[name].shape

    def dtype(self, name: str) -> torch.dtype:
        return self._layouts[name].dtype

    def source(self, name: str) -> FileSlice | None:
        return None if self._own is None else self._own.source(name)

    def alias_of(self, name: str) -> str:
        return self._layouts[name].alias_of

    def is_at_hand(self, name: str) -> bool:
        return name in self if self._own is None else self._own.is_at_hand(name)

    def peek(self, name: str) -> torch.Tensor:
        return self._received[name] if self._own is None else self._own.peek(name)

    def is_mapped(self, name: str) -> bool:
        return self._own is not None and self._own.is_mapped(name)

    def _room(self, name: str) -> torch.Tensor:
        """Memory for a tensor."""
        return torch.empty(self._layouts[name].shape, dtype=self._layouts[name].dtype, device="cpu")

    def _open(self, checkpoint: str | os.PathLike[str]) -> tuple[dict[str, _Layout], Mapping[str, Any]]:
        store = open_store(checkpoint)
        layouts = {}
        for name in store:
            store.peek(name)  # what cannot be read should be known before the others wait for it
            layouts[name] = _Layout(
                shape=store.shape(name), dtype=store.dtype(name), alias_of=store.alias_of(name)
            )
        self._own = store
        return layouts, dict(store.others)


@dataclass(frozen=True, kw_only=True)
class _Layout:
    shape: torch.Size
    dtype: torch.dtype
    alias_of: str


def load_sharded(
    model: nn.Module,
    checkpoint: str | os.PathLike[str],
    world: World,
    *,
    strict: bool,
    full_state_dict: bool,
    broadcast_from_rank0: bool,
) -> LoadReport:
    """Load a checkpoint into a model of sharded tensors (DTensor), by torch.distributed.checkpoint.

    Raises on every rank what one of them raises: CheckpointMismatch, or what `open_store` does.
    """
    checkpointing = require("torch.distributed.checkpoint.state_dict", "loading into a sharded model")
    called, reads = os.fspath(checkpoint), not broadcast_from_rank0 or world.is_main

    def checked() -> tuple[WeightStore, LoadReport] | None:
        if not reads:
            return None
        store = open_store(checkpoint)
        # of a state dict of shards every rank has its own shapes
        _, report = plan_load(model, store, None, LoadWishes(), called=called, same_shapes=full_state_dict)
        if strict and report.complaint():
            raise CheckpointMismatch(f"{called} does not fit the model: {report.complaint()}")
        return store, report

    read = together(world, checked)
    report: LoadReport = read[1] if read is not None else LoadReport(loaded={})
    if broadcast_from_rank0:
        report = world.comm.broadcast_object(report)
    state: dict[str, torch.Tensor] = together(
        world, lambda: {} if read is None else {name: read[0][name] for name in report.loaded}
    )
    options = checkpointing.StateDictOptions(
        full_state_dict=full_state_dict, strict=False, broadcast_from_rank0=broadcast_from_rank0
    )
    checkpointing.set_model_state_dict(model, state, options=options)
    return report
