"""bf16 and fp16 autocast on the CPU."""

from __future__ import annotations

import copy
import pickle
from typing import Any

import pytest
import torch
from torch import nn

from acc_plugins.precisions.amp import BFloat16Autocast, Float16Autocast
from acc_plugins.testing import PrecisionContract


class TestBFloat16(PrecisionContract):
    def make_precision(self) -> BFloat16Autocast:
        return BFloat16Autocast(self.device)


class TestFloat16(PrecisionContract):
    def make_precision(self, **options: Any) -> Float16Autocast:
        return Float16Autocast(self.device, scaler_options={"init_scale": 1024.0, **options})


class Seen(nn.Module):
    """Notes in which format its layer computed."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(2, 2)
        self.seen: list[torch.dtype] = []

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        out = self.layer(x)
        self.seen.append(out.dtype)
        return out


@pytest.mark.parametrize(
    ("kind", "dtype"), [(BFloat16Autocast, torch.bfloat16), (Float16Autocast, torch.float16)]
)
def test_layers_compute_in_the_low_format_and_the_model_answers_in_float32(
    kind: Any, dtype: torch.dtype
) -> None:
    model = kind("cpu").wrap(Seen())
    assert model(torch.ones(1, 2)).dtype == torch.float32
    assert model.seen == [dtype]
    assert not torch.is_autocast_enabled("cpu")


def test_enabled_false_computes_in_float32() -> None:
    model = BFloat16Autocast("cpu", enabled=False).wrap(Seen())
    model(torch.ones(1, 2))
    assert model.seen == [torch.float32]


def test_an_exception_in_the_forward_leaves_no_autocast_behind() -> None:
    model = BFloat16Autocast("cpu").wrap(Seen())
    with pytest.raises(RuntimeError):
        model(torch.ones(1, 3))
    assert not torch.is_autocast_enabled("cpu")


def test_wrapped_models_nest_and_recurse() -> None:
    precision = BFloat16Autocast("cpu")
    outer = precision.wrap(nn.Sequential(precision.wrap(Seen()), precision.wrap(Seen())))
    assert outer(torch.ones(1, 2)).dtype == torch.float32
    assert outer[0].seen == outer[1].seen == [torch.bfloat16]


def test_a_wrapped_model_survives_pickle_and_compile() -> None:
    model = BFloat16Autocast("cpu").wrap(nn.Linear(2, 2))
    x = torch.ones(1, 2)
    twin = pickle.loads(pickle.dumps(model))
    assert torch.equal(twin(x), model(x))
    compiled = torch.compile(copy.deepcopy(model), backend="eager", fullgraph=True)
    assert torch.equal(compiled(x), model(x))


def test_fp16_refuses_closures_and_foreign_states() -> None:
    precision = Float16Autocast("cpu")
    optimizer = torch.optim.SGD([torch.ones(1, requires_grad=True)], lr=1.0)
    with pytest.raises(ValueError, match="closure"):
        precision.step(optimizer, lambda: 1.0)
    with pytest.raises(ValueError, match="'scale'"):
        precision.load_state_dict({"x": 1})
