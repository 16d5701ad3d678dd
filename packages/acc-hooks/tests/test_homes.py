from __future__ import annotations

import pytest
import torch
from torch import nn

from acc_hooks import OffloadedWeightError, PrefixedDataset, attach_align_device_hook
from acc_hooks.homes import differs, entry_of, outside_inference_mode, same_memory, write_home


def test_one_element_with_any_stride_can_be_compared():
    strided = torch.arange(5.0)[None][:, 2]
    assert strided.stride() == (5,)
    assert not differs(strided, torch.tensor([2.0]))
    assert differs(torch.tensor([3.0]), strided)


def test_a_value_goes_home_in_place_where_the_map_keeps_the_object():
    weights = {"w": torch.zeros(2)}
    home = weights["w"]
    write_home(weights, "w", "net.w", torch.ones(2), home)
    assert weights["w"] is home
    assert home.tolist() == [1, 1]
    write_home(weights, "w", "net.w", torch.ones(3), home)
    assert weights["w"].tolist() == [1, 1, 1]


def test_a_read_only_home_is_an_error_with_the_full_name(read_only):
    with pytest.raises(OffloadedWeightError, match=r"net\.w was changed"):
        write_home(read_only({"w": torch.zeros(2)}), "w", "net.w", torch.ones(2), None)


def test_another_tensor_of_the_model_is_found_through_the_prefix():
    whole = {"a.w": torch.zeros(1), "b.w": torch.ones(1)}
    assert entry_of(PrefixedDataset(whole, "a."), "a", "b.w") == (whole, "b.w")
    assert entry_of({"w": torch.zeros(1)}, "a", "a.w")[1] == "w"
    assert entry_of({"w": torch.zeros(1)}, "a", "b.w") is None
    assert entry_of(PrefixedDataset(whole, "a."), "a", "c.w") is None


def test_what_is_made_outside_of_inference_mode_records_no_gradients():
    with torch.inference_mode(), outside_inference_mode():
        assert not torch.is_grad_enabled()
        assert not torch.ones(1).is_inference()
    with outside_inference_mode():
        assert torch.is_grad_enabled()


def test_a_view_of_the_same_elements_is_the_same_memory():
    tensor = torch.ones(2)
    assert same_memory(tensor, tensor.view(2))
    assert not same_memory(tensor, tensor[:1])


def test_a_model_offloaded_in_inference_mode_passes_gradients_later(x):
    model = nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4)).requires_grad_(False).eval()
    with torch.inference_mode():
        attach_align_device_hook(model, execution_device="cpu", offload=True, offload_buffers=True)
        inference = model(x)
    assert inference.is_inference()
    x.requires_grad_()
    output = model(x)
    torch.testing.assert_close(output, inference)
    output.sum().backward()
    assert x.grad is not None


def test_a_map_that_reads_in_inference_mode_gives_weights_for_training_too(x, read_only):
    class Reads(read_only):
        def __getitem__(self, name):
            with torch.inference_mode():
                return super().__getitem__(name)

    model = nn.Linear(4, 4).requires_grad_(False)
    attach_align_device_hook(
        model, execution_device="cpu", offload=True, weights_map=Reads(model.state_dict())
    )
    with torch.inference_mode():
        model(x)
    x.requires_grad_()
    model(x).sum().backward()
    assert x.grad is not None
