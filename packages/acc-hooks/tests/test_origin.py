from __future__ import annotations

import gc
import threading

import pytest
import torch
from torch import nn

from acc_hooks import OffloadedWeightError
from acc_hooks.origin import RefuseGradient, origin_of, root_of, stored_form


def test_only_a_placeholder_has_an_origin(offload):
    layer = offload(nn.Linear(2, 2))
    origin = origin_of(layer.weight)
    assert origin is not None
    assert origin.name == "weight"
    for other in (torch.ones(1), nn.Parameter(torch.ones(1, device="meta")), None, "weight"):
        assert origin_of(other) is None


def test_a_placeholder_keeps_no_hook_alive(offload):
    layer = offload(nn.Linear(2, 2).requires_grad_(False))
    weight = layer.weight
    (source,) = origin_of(weight).living_sources()
    assert source is layer._hf_hook
    del layer, source
    gc.collect()
    assert origin_of(weight).living_sources() == []
    with pytest.raises(OffloadedWeightError, match=r"weight is offloaded.*keep the model"):
        weight.sum()


def test_a_weight_in_another_dtype_is_the_whole_of_it_and_a_row_is_not(offload):
    layer = offload(nn.Linear(2, 2).requires_grad_(False))
    weight = layer.weight
    assert root_of(weight) is weight
    assert root_of(weight.detach()) is weight
    assert root_of(weight[0]) is None


def test_a_gradient_is_refused_with_the_name_and_the_remedy():
    with pytest.raises(OffloadedWeightError, match=r"a\.weight is offloaded.*requires_grad_\(False\)"):
        RefuseGradient("a.weight")(torch.ones(1))


def test_what_a_thread_stores_a_placeholder_as_is_its_own_affair(monkeypatch):
    placeholder, found = torch.ones(1), []
    monkeypatch.setattr(stored_form, "placeholder", placeholder)
    monkeypatch.setattr(stored_form, "stored", "stored")
    thread = threading.Thread(target=lambda: found.append(stored_form.of(placeholder)))
    thread.start()
    thread.join()
    assert found == [None]
    assert stored_form.of(placeholder) == "stored"
    assert stored_form.of(torch.ones(1)) is None
