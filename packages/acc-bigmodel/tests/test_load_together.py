"""Loading on several ranks at once; with real processes in integration-tests/test_bigmodel_broadcast.py."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from torch import nn

from acc_bigmodel import load_checkpoint_in_model, save_weights
from acc_bigmodel.load_together import BroadcastStore
from acc_bigmodel.stores.store import ReplacedFileError
from acc_ops.testing import run_threads
from acc_ops.world import current_world


@pytest.mark.parametrize("safe", [True, False])
@pytest.mark.parametrize("size", [1, 2, 4])
def test_rank_0_reads_for_all(
    tied_model: nn.Module, new_model: Callable[[], nn.Module], tmp_path: Path, size: int, safe: bool
) -> None:
    save_weights(tied_model.state_dict(), tmp_path, "model", "0.3KB", safe)
    models = [new_model() for _ in range(size)]

    def load() -> None:
        world = current_world()
        checkpoint = tmp_path if world.is_main else tmp_path / "nowhere"
        report = load_checkpoint_in_model(
            models[world.rank], checkpoint, strict=True, broadcast_from_rank0=True
        )
        assert report.loaded.keys() == tied_model.state_dict().keys()

    run_threads(size, load)
    wanted = tied_model.state_dict()
    for model in models:
        assert all(torch.equal(value, wanted[name]) for name, value in model.state_dict().items())
        assert model.embed.weight is model.head.weight


def test_only_what_some_rank_needs_is_sent(tmp_path: Path) -> None:
    state = {name: torch.full((3,), float(i)) for i, name in enumerate("abcd")}
    save_weights(state, tmp_path, "model")
    wanted = {0: ["a"], 1: ["c", "a"], 2: []}

    def receive() -> dict[str, torch.Tensor]:
        world = current_world()
        store = BroadcastStore(tmp_path, world)
        assert list(store) == list(state)
        assert (store.shape("d"), store.dtype("d"), store.nbytes("d")) == ((3,), torch.float32, 12)
        store.receive(wanted[world.rank])
        return store._received

    for received in run_threads(3, receive)[1:]:
        assert received.keys() == {"a", "c"}
        assert all(torch.equal(tensor, state[name]) for name, tensor in received.items())


def test_a_rank_that_cannot_read_any_more_is_an_error_on_all_and_the_ranks_go_on(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    torch.save({name: torch.full((3,), float(i)) for i, name in enumerate("abcd")}, tmp_path / "x.bin")

    def receive() -> list[int]:
        world = current_world()
        store = BroadcastStore(tmp_path / "x.bin", world)
        if store._own is not None:
            monkeypatch.setattr(store._own, "peek", _fails_at("b", store._own.peek))
        with pytest.raises(ReplacedFileError, match="was written to"):
            store.receive("abcd")
        return world.comm.all_gather_object(world.rank)

    assert run_threads(3, receive) == [[0, 1, 2]] * 3


def _fails_at(name: str, peek: Callable[[str], torch.Tensor]) -> Callable[[str], torch.Tensor]:
    def failing(wanted: str) -> torch.Tensor:
        if wanted == name:
            raise ReplacedFileError("x.bin was written to after it was opened")
        return peek(wanted)

    return failing
