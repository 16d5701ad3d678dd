"""Recipes of the libraries that compute in 8 bit floating point: TransformerEngine, torchao and MS-AMP."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Literal

from acc_ops.callers import warn_caller
from acc_ops.handlers import KwargsHandler
from acc_ops.optional import require
from acc_ops.options import OptionError, fill_from_env, from_env, option
from acc_plugins.options.checks import require_at_least, settle


def _fp8(name: str, help: str, **more: Any) -> Any:
    """An option whose flag and key are `fp8_<name>` and whose variable is `ACCELERATE_FP8_<NAME>`."""
    spelled = f"fp8_{name}"
    return option(None, env=f"ACCELERATE_{spelled.upper()}", flag=spelled, key=spelled, help=help, **more)


def _default(instance: Any, **defaults: Any) -> None:
    for name, value in defaults.items():
        if getattr(instance, name) is None:
            setattr(instance, name, value)


@dataclass
class MSAMPRecipeKwargs(KwargsHandler):
    """How far MS-AMP goes. Raises OptionError (a ValueError) for a level other than O1 and O2."""

    opt_level: Literal["O1", "O2"] | None = _fp8(
        "opt_level", "what is kept in 8 bit: O1 gradients, O2 optimizer states too; default: O2"
    )

    def __post_init__(self) -> None:
        fill_from_env(self)
        settle(self)
        _default(self, opt_level="O2")


@dataclass
class LinearOverrides:
    """The three variables that `override_linear_precision` comes from."""

    forward: bool = option(False, env="ACCELERATE_FP8_OVERRIDE_FPROP", flag=False, key=False)
    input_gradient: bool = option(False, env="ACCELERATE_FP8_OVERRIDE_DGRAD", flag=False, key=False)
    weight_gradient: bool = option(False, env="ACCELERATE_FP8_OVERRIDE_WGRAD", flag=False, key=False)


@dataclass
class TERecipeKwargs(KwargsHandler):
    """TransformerEngine's recipe; fields left None come from the environment, then are the default named in their help.

    Raises ImportError without TransformerEngine, OptionError (a ValueError) for values that it does not know.
    """

    use_autocast_during_eval: bool | None = _fp8(
        "use_autocast_during_eval", "compute in 8 bit in evaluation, too; default: false"
    )
    margin: int | None = _fp8("margin", "powers of two left free above the largest value; default: 0")
    interval: int | None = _fp8("interval", "steps between two scales; default: 1")
    fp8_format: Literal["HYBRID", "E4M3", "E5M2"] | None = _fp8(
        "format", "the number format; HYBRID (the default): E4M3 forward, E5M2 backward"
    )
    amax_history_len: int | None = _fp8(
        "amax_history_len", "steps whose largest values are kept; default: 1024"
    )
    amax_compute_algo: Literal["max", "most_recent"] | None = _fp8(
        "amax_compute_algo", "which of them makes the scale; default: most_recent"
    )
    override_linear_precision: tuple[bool, bool, bool] | None = option(
        None,
        flag=False,
        key=False,
        help="what linear layers compute in higher precision: forward, input gradient, weight gradient; default: nothing",
    )
    use_mxfp8_block_scaling: bool | None = _fp8(
        "use_mxfp8_block_scaling", "one scale for each block of 32 values; default: false"
    )

    def __post_init__(self) -> None:
        require("transformer_engine", "TERecipeKwargs")
        self._settle()

    def _settle(self) -> None:
        fill_from_env(self)
        if isinstance(self.fp8_format, str):
            self.fp8_format = self.fp8_format.upper()  # type: ignore[assignment]  # checked by settle
        settle(self)
        if self.override_linear_precision is None:
            asked = from_env(LinearOverrides)
            self.override_linear_precision = (asked.forward, asked.input_gradient, asked.weight_gradient)
        for name, smallest in (("margin", 0), ("interval", 1), ("amax_history_len", 1)):
            require_at_least(self, name, smallest)
        _default(
            self,
            use_autocast_during_eval=False,
            margin=0,
            interval=1,
            fp8_format="HYBRID",
            amax_history_len=1024,
            amax_compute_algo="most_recent",
            use_mxfp8_block_scaling=False,
        )


@dataclass
class AORecipeKwargs(KwargsHandler):
    """torchao's recipe: a ready `config`, or the settings of one; those left None come from the environment, then are true.

    Raises ImportError without torchao, OptionError (a ValueError) for a `config` together with settings of one.
    """

    config: Any = option(None, flag=False, key=False, help="torchao's Float8LinearConfig")
    module_filter_func: Callable[..., bool] | None = option(
        None,
        flag=False,
        key=False,
        help="module, name -> whether to convert; default: linear layers but the first and the last",
    )
    pad_inner_dim: bool | None = _fp8("pad_inner_dim", "pad sizes that 16 does not divide; default: true")
    enable_fsdp_float8_all_gather: bool | None = _fp8(
        "enable_fsdp_float8_all_gather", "FSDP2 gathers weights in 8 bit; default: true"
    )

    def __post_init__(self) -> None:
        float8 = require("torchao.float8", "AORecipeKwargs")
        names = ("pad_inner_dim", "enable_fsdp_float8_all_gather")
        given = [name for name in names if getattr(self, name) is not None]
        if self.config is not None and given:
            raise OptionError(
                f"{given[0]} has no effect beside config: set it in the config, or leave that out"
            )
        fill_from_env(self)
        settle(self)
        _default(self, **dict.fromkeys(names, True))
        if self.config is None:
            self.config = float8.Float8LinearConfig(**{name: getattr(self, name) for name in names})


@dataclass
class FP8RecipeKwargs(TERecipeKwargs, MSAMPRecipeKwargs):
    """Either of two recipes in one, chosen by `backend`; deprecated: `TERecipeKwargs` and `MSAMPRecipeKwargs` say the same."""

    backend: Literal["MSAMP", "TE"] | None = _fp8("backend", "whose recipe it is; default: MSAMP")

    def __post_init__(self) -> None:
        warn_caller("FP8RecipeKwargs is deprecated: use TERecipeKwargs or MSAMPRecipeKwargs", FutureWarning)
        if isinstance(self.backend, str):
            self.backend = self.backend.upper()  # type: ignore[assignment]  # checked by settle
        MSAMPRecipeKwargs.__post_init__(self)
        _default(self, backend="MSAMP")
        if self.backend == "TE":
            TERecipeKwargs.__post_init__(self)
