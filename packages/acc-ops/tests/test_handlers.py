"""KwargsHandler."""

from __future__ import annotations

from dataclasses import dataclass, field

import pytest
import torch

from acc_ops.handlers import KwargsHandler
from acc_ops.options import fill_from_env, option, resolve


@dataclass
class Scaler(KwargsHandler):
    init: float = 2.0
    sizes: list[int] = field(default_factory=list)
    weight: torch.Tensor | None = None


@dataclass
class FromEnvironment(KwargsHandler):
    interval: int | None = option(None, env="ACCELERATE_FP8_INTERVAL")

    def __post_init__(self) -> None:
        fill_from_env(self)


def test_only_what_differs_from_the_default_is_passed_on():
    assert Scaler().to_kwargs() == {}
    assert Scaler(init=3.0).to_kwargs() == {"init": 3.0}
    assert Scaler(sizes=[1]).to_kwargs() == {"sizes": [1]}


def test_to_dict_is_a_deep_copy():
    handler = Scaler(sizes=[1])
    copied = handler.to_dict()
    copied["sizes"].append(2)
    assert handler.sizes == [1]
    assert set(copied) == {"init", "sizes", "weight"}


def test_values_without_a_single_truth_count_as_different():
    assert "weight" in Scaler(weight=torch.ones(3)).to_kwargs()


def test_values_from_the_environment_count_as_differences(monkeypatch):
    monkeypatch.setenv("ACCELERATE_FP8_INTERVAL", "4")
    assert FromEnvironment().to_kwargs() == {"interval": 4}
    monkeypatch.delenv("ACCELERATE_FP8_INTERVAL")
    assert FromEnvironment().to_kwargs() == {}


@pytest.mark.parametrize("environ", [{}, {"ACCELERATE_FP8_INTERVAL": "4"}])
def test_where_values_came_from_is_no_argument(environ):
    handler = resolve(FromEnvironment, environ=environ)
    assert set(handler.to_dict()) == {"interval"}
