"""An image has the layout of the file that `save_weights` writes, and a key that changes when the layout would."""

from __future__ import annotations

import pytest
import torch

from acc_bigmodel.image import image_key, plan_image
from acc_bigmodel.save import save_weights


def _filled(state):
    """The bytes of the image, filled tensor by tensor as a copy would."""
    plan = plan_image(state)
    content = bytearray(plan.nbytes)
    content[: len(plan.header)] = plan.header
    for name, at in plan.places.items():
        values = state[name].contiguous().reshape(-1).view(torch.uint8)
        content[at : at + values.numel()] = bytes(values.tolist())
    return bytes(content)


def test_a_filled_image_is_the_file(tmp_path):
    shared = torch.randn(3, 4)
    state = {
        "odd": torch.arange(5, dtype=torch.int8),
        "shared": shared,
        "wide": torch.randn(16, 16, dtype=torch.float64),
        "twin": shared,
        "turned": torch.randn(2, 3).t(),
        "nothing": torch.empty(0),
    }
    save_weights(state, tmp_path, "model")
    assert _filled(state) == (tmp_path / "model.safetensors").read_bytes()
    plan = plan_image(state)
    assert "twin" not in plan.places
    assert all(at % state[name].dtype.itemsize == 0 for name, at in plan.places.items())


def test_the_key_knows_names_shapes_dtypes_and_ties_and_no_values():
    one = {"a": torch.ones(2), "b": torch.ones(2)}
    tied = {"a": one["a"], "b": one["a"]}
    others = [
        {"a": torch.ones(2), "c": torch.ones(2)},
        {"a": torch.ones(2), "b": torch.ones(1, 2)},
        {"a": torch.ones(2), "b": torch.ones(2, dtype=torch.int32)},
        tied,
    ]
    assert image_key({name: torch.zeros(2) for name in one}) == image_key(one)
    assert len({image_key(state) for state in (one, *others)}) == 5


def test_what_cannot_be_saved_is_refused_by_name():
    with pytest.raises(RuntimeError, match="'w' is on the meta device"):
        image_key({"w": torch.empty(2, device="meta")})
    with pytest.raises(ValueError, match="'w': "):
        plan_image({"w": torch.ones(2, dtype=torch.complex128)})
