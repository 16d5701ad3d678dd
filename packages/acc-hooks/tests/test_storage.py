"""Writing to the storage of a placeholder is refused by name."""

import pytest
import torch
from torch import nn

from acc_hooks import OffloadedWeightError


@pytest.mark.parametrize(
    "write",
    [
        lambda weight: weight.untyped_storage().fill_(1),
        lambda weight: weight.untyped_storage().copy_(torch.ones(4, 4).untyped_storage()),
        lambda weight: weight.untyped_storage().__setitem__(0, 1),
        lambda weight: weight.storage().__setitem__(0, 1.0),
        lambda weight: weight.detach().untyped_storage().resize_(0),
    ],
)
def test_writing_past_the_weight_is_refused(write, offload):
    layer = offload(nn.Linear(4, 4).requires_grad_(False))
    with pytest.raises(OffloadedWeightError, match=r"weight is offloaded.*storage"):
        write(layer.weight)


def test_the_size_of_a_storage_is_answered(offload):
    storage = offload(nn.Linear(4, 4)).weight.untyped_storage()
    assert (storage.nbytes(), storage.data_ptr(), storage.device.type) == (64, 0, "meta")
