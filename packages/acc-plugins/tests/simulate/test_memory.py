from __future__ import annotations

import torch
from torch import nn

from acc_plugins.simulate.memory import LiveBytes, SavedForBackward, bytes_of

_ROWS, _WIDTH = 50, 100
_BYTES = _ROWS * _WIDTH * 4  # of one activation


def _chain(layers: int) -> nn.Sequential:
    return nn.Sequential(*[nn.Linear(_WIDTH, _WIDTH) for _ in range(layers)])


def test_shared_memory_counts_once() -> None:
    weight = torch.zeros(4, 4)
    assert bytes_of([weight, weight[0], weight.view(16), None]) == 64


def test_what_autograd_keeps_is_counted_without_weights_and_batch() -> None:
    model, batch = _chain(10), torch.zeros(_ROWS, _WIDTH)
    with SavedForBackward(model, batch) as saved:
        model(batch)
    assert saved.nbytes() == 9 * _BYTES  # each layer's input, but the batch itself


def test_the_peak_is_what_lives_at_one_time() -> None:
    model, batch = _chain(10), torch.zeros(_ROWS, _WIDTH)
    weights = bytes_of(model.parameters())
    with LiveBytes([*model.parameters(), batch]) as live, torch.no_grad():
        model(batch)
    assert live.peak == weights + _BYTES + 2 * _BYTES  # a layer's input and output: what came before is gone


def test_a_storage_that_is_resized_is_seen_again() -> None:
    with LiveBytes([]) as live:
        gathered = torch.zeros(100)
        gathered.untyped_storage().resize_(0)
        live.look_again()
        torch.zeros(50)
    assert live.peak == 400
