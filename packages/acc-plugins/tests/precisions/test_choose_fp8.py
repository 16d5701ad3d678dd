"""precisions/choose_fp8.py: whose fp8 a run gets, and what is said where there is none."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from acc_ops.optional import is_available, require
from acc_plugins.options.fp8 import AORecipeKwargs, FP8RecipeKwargs, MSAMPRecipeKwargs
from acc_plugins.precisions import choose_fp8 as subject
from acc_plugins.strategies.registry import choose_precision
from acc_plugins.support import UnsupportedError

needs_torchao = pytest.mark.skipif(not is_available("torchao"), reason="torchao is not installed")


@pytest.fixture(autouse=True)
def nothing_said(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("ACCELERATE_FP8_BACKEND", raising=False)


@pytest.fixture
def chosen(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Notes which library is asked, with both installed."""
    asked: list[str] = []
    for name in ("_torchao", "_transformer_engine"):
        monkeypatch.setattr(subject, name, lambda *_, name=name: asked.append(name))
    for name in ("is_torchao_available", "is_transformer_engine_available"):
        monkeypatch.setattr(subject, name, lambda: True)
    return asked


@pytest.mark.parametrize(
    ("said", "asked"),
    [("", "_torchao"), ("no", "_torchao"), ("ao", "_torchao"), ("TE", "_transformer_engine")],
)
def test_the_variable_chooses_and_torchao_comes_first(
    said: str, asked: str, chosen: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    if said:
        monkeypatch.setenv("ACCELERATE_FP8_BACKEND", said)
    choose_precision("fp8", "cpu")
    assert chosen == [asked]


def test_the_other_library_is_taken_where_there_is_no_torchao(
    chosen: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(subject, "is_torchao_available", lambda: False)
    choose_precision("fp8", "cpu")
    assert chosen == ["_transformer_engine"]


def test_an_unknown_library_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("ACCELERATE_FP8_BACKEND", "xy")
    with pytest.raises(ValueError, match="AO, TE or MSAMP, got 'XY'"):
        choose_precision("fp8", "cpu")


def test_without_a_library_the_error_says_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("is_torchao_available", "is_transformer_engine_available"):
        monkeypatch.setattr(subject, name, lambda: False)
    with pytest.raises(UnsupportedError, match=r"acc-plugins\[torchao\]"):
        choose_precision("fp8", "cpu")


def test_msamp_is_refused_with_the_way_out() -> None:
    with pytest.warns(FutureWarning, match="deprecated"):
        union = FP8RecipeKwargs()
    for recipe in (MSAMPRecipeKwargs(), union):
        with pytest.raises(UnsupportedError, match=r"MS-AMP is not supported.*AORecipeKwargs"):
            choose_precision("fp8", "cpu", fp8_recipe=recipe)


@needs_torchao
def test_the_recipe_reaches_the_precision(monkeypatch: pytest.MonkeyPatch) -> None:
    config = require("torchao.float8", "a test").Float8LinearConfig(emulate=True)

    def wanted(_: Any, name: str) -> bool:
        return name == "0"

    made: Any = choose_precision("fp8", "cpu", fp8_recipe=AORecipeKwargs(config, wanted))
    assert (made.config, made.module_filter_func, made.fp8_backend.value) == (config, wanted, "AO")
    monkeypatch.setenv("ACCELERATE_FP8_PAD_INNER_DIM", "false")
    made = choose_precision("fp8", "cpu")
    assert not made.config.pad_inner_dim


@needs_torchao
def test_a_gpu_without_fp8_is_told_of_the_emulation(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(subject, "check_cuda_fp8_capability", lambda: False)
    with pytest.raises(UnsupportedError, match=r"8\.9.*emulate=True"):
        choose_precision("fp8", torch.device("cuda", 0))
    config = require("torchao.float8", "a test").Float8LinearConfig(emulate=True)
    assert choose_precision("fp8", torch.device("cuda", 0), fp8_recipe=AORecipeKwargs(config)).name == "fp8"
