"""The fp8 recipes; the libraries stand in by empty modules, for only their presence counts here."""

from __future__ import annotations

import sys
import types
from typing import Any

import pytest

from acc_ops.options import OptionError, from_env, sources, to_env
from acc_plugins import AORecipeKwargs, FP8RecipeKwargs, MSAMPRecipeKwargs, TERecipeKwargs
from acc_plugins.options import fp8


@pytest.fixture(autouse=True)
def float8(monkeypatch: pytest.MonkeyPatch) -> None:
    library = types.SimpleNamespace(Float8LinearConfig=lambda **given: given)
    monkeypatch.setattr(fp8, "require", lambda _name, _purpose: library)


def test_every_te_field_comes_from_its_variable_and_goes_back() -> None:
    given = TERecipeKwargs(True, 1, 2, "E4M3", 16, "max", (False, False, False), True)
    assert from_env(TERecipeKwargs, to_env(given)) == given != TERecipeKwargs()
    overridden = from_env(TERecipeKwargs, {"ACCELERATE_FP8_OVERRIDE_DGRAD": "1"})
    assert overridden.override_linear_precision == (False, True, False)
    assert TERecipeKwargs().to_kwargs() == {}


def test_msamp_and_ao_read_theirs() -> None:
    assert MSAMPRecipeKwargs().opt_level == "O2"
    read = from_env(MSAMPRecipeKwargs, {"ACCELERATE_FP8_OPT_LEVEL": "O1"})
    assert read.opt_level == "O1"
    assert sources(read) == {"opt_level": "environment"}
    made = from_env(AORecipeKwargs, {"ACCELERATE_FP8_PAD_INNER_DIM": "false"})
    assert made.config == {"pad_inner_dim": False, "enable_fsdp_float8_all_gather": True}


def test_the_union_of_both_warns_and_takes_one() -> None:
    with pytest.warns(FutureWarning, match="deprecated"):
        assert FP8RecipeKwargs().opt_level == "O2"
    with pytest.warns(FutureWarning, match="deprecated"):
        assert FP8RecipeKwargs(backend="te").fp8_format == "HYBRID"


@pytest.mark.filterwarnings("ignore::FutureWarning")
@pytest.mark.parametrize(
    ("cls", "given"),
    [
        (MSAMPRecipeKwargs, {"opt_level": "O3"}),
        (TERecipeKwargs, {"fp8_format": "E3M4"}),
        (TERecipeKwargs, {"amax_compute_algo": "mean"}),
        (TERecipeKwargs, {"interval": 0}),
        (AORecipeKwargs, {"config": object(), "pad_inner_dim": True}),
        (FP8RecipeKwargs, {"backend": "AO"}),
    ],
)
def test_impossible_values_are_refused(cls: type, given: dict[str, Any]) -> None:
    with pytest.raises(OptionError):
        cls(**given)


def test_a_missing_library_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.undo()
    monkeypatch.setitem(sys.modules, "transformer_engine", None)
    with pytest.raises(ImportError, match="TERecipeKwargs"):
        TERecipeKwargs()
