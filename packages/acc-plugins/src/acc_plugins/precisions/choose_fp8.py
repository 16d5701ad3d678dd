"""Which library computes in fp8, and the precision that it makes: answered here, once."""

from __future__ import annotations

from typing import Any

import torch

from acc_ops.enums import FP8BackendType
from acc_ops.environment import parse_choice_from_env
from acc_ops.handlers import KwargsHandler
from acc_ops.nvidia import check_cuda_fp8_capability
from acc_ops.optional import is_torchao_available, is_transformer_engine_available
from acc_plugins.options.fp8 import AORecipeKwargs, FP8RecipeKwargs, MSAMPRecipeKwargs, TERecipeKwargs
from acc_plugins.precisions.precision import Precision
from acc_plugins.support import UnsupportedError

_BACKENDS = {AORecipeKwargs: "AO", TERecipeKwargs: "TE", MSAMPRecipeKwargs: "MSAMP"}


def choose_fp8(
    device: torch.device,
    recipe: KwargsHandler | None,
    autocast: dict[str, Any],
    gathers_in_fp8: bool = False,
) -> Precision:
    """The fp8 precision of the library that `recipe` belongs to, else of the one that ACCELERATE_FP8_BACKEND names, else of the first installed.

    A recipe that is not given comes from the environment. `gathers_in_fp8` is `TorchaoFloat8`'s. Raises UnsupportedError without a library, for MS-AMP, and for a GPU without fp8.
    """
    backend = _backend(recipe)
    if backend is FP8BackendType.AO:
        return _torchao(device, recipe, autocast, gathers_in_fp8)
    if backend is FP8BackendType.TE:
        return _transformer_engine(device, recipe, autocast)
    if backend is FP8BackendType.MSAMP:
        raise UnsupportedError(
            "MS-AMP is not supported: it has had no release since 2023 and does not run with this torch. Use torchao (AORecipeKwargs) or "
            "TransformerEngine (TERecipeKwargs)"
        )
    raise UnsupportedError(
        "mixed_precision='fp8' needs a library that computes in fp8, and neither torchao nor TransformerEngine is installed: "
        'pip install "acc-plugins[torchao]"'
    )


def _backend(recipe: KwargsHandler | None) -> FP8BackendType:
    if isinstance(recipe, FP8RecipeKwargs):
        return FP8BackendType(str(recipe.backend))
    named = next((name for kind, name in _BACKENDS.items() if isinstance(recipe, kind)), None)
    text = named or parse_choice_from_env("ACCELERATE_FP8_BACKEND", "NO").upper()
    try:
        said = FP8BackendType(text)
    except ValueError:
        raise ValueError(f"ACCELERATE_FP8_BACKEND must be AO, TE or MSAMP, got {text!r}") from None
    if said is not FP8BackendType.NO:
        return said
    if is_torchao_available():
        return FP8BackendType.AO
    return FP8BackendType.TE if is_transformer_engine_available() else FP8BackendType.NO


# each library takes seconds to load, so its precision is loaded only where it is chosen
def _torchao(device: torch.device, recipe: Any, autocast: dict[str, Any], gathers_in_fp8: bool) -> Precision:
    from acc_plugins.precisions.fp8 import TorchaoFloat8  # noqa: PLC0415

    made = AORecipeKwargs() if recipe is None else recipe
    if not getattr(made.config, "emulate", False):
        _check_hardware(
            device, ", or torchao's emulation: AORecipeKwargs(config=Float8LinearConfig(emulate=True))"
        )
    return TorchaoFloat8(
        device,
        config=made.config,
        module_filter_func=made.module_filter_func,
        gathers_in_fp8=gathers_in_fp8,
        **autocast,
    )


def _transformer_engine(device: torch.device, recipe: Any, autocast: dict[str, Any]) -> Precision:
    from acc_plugins.precisions.fp8_transformer_engine import TransformerEngineFloat8  # noqa: PLC0415

    _check_hardware(device, "")
    return TransformerEngineFloat8(device, recipe=TERecipeKwargs() if recipe is None else recipe, **autocast)


def _check_hardware(device: torch.device, way_out: str) -> None:
    if device.type == "cuda" and not check_cuda_fp8_capability():
        raise UnsupportedError(
            f"this GPU has no 8-bit floating point (compute capability 8.9 or more): use mixed_precision='bf16' or 'fp16'{way_out}"
        )
