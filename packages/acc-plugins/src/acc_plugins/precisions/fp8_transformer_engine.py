"""fp8 through TransformerEngine: its layers in the place of torch's, and forwards under its autocast.

Tested with stand-ins for the library, which needs a GPU to import; never run on real hardware. Written from TransformerEngine's documented interface:
`pytorch.Linear(in_features, out_features, bias, params_dtype, device)`, `pytorch.LayerNorm(normalized_shape, eps, params_dtype, device)`,
`pytorch.fp8_autocast(enabled, fp8_recipe)`, `common.recipe.DelayedScaling`, `common.recipe.MXFP8BlockScaling` and `common.recipe.Format`.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, ClassVar

import torch
from torch import nn

from acc_ops.device_checks import is_transformer_engine_mxfp8_available
from acc_ops.enums import FP8BackendType
from acc_ops.optional import require
from acc_ops.options import sources
from acc_ops.unwrap import register_unwrap_finalizer
from acc_plugins.precisions.amp import BFloat16Autocast
from acc_plugins.precisions.forward import Nested, surround_forward, surround_inside

if TYPE_CHECKING:
    from types import ModuleType

    from acc_plugins.options.fp8 import TERecipeKwargs

_MULTIPLE = 16  # of both dimensions of a linear layer
_MARK = "_converted_to_transformer_engine"


def convert_model(
    model: nn.Module,
    to_transformer_engine: bool = True,
    _convert_linear: bool = True,
    _convert_ln: bool = True,
) -> None:
    """Put TransformerEngine's linear and normalisation layers in the place of torch's inside `model`, or the other way round.

    Values are copied; parameters are new. A linear layer with a dimension that is not a multiple of 16 stays, as does a normalisation over
    several dimensions, or without a weight. Raises ImportError without TransformerEngine.
    """
    te = _library("convert_model")
    linear, norm = (nn.Linear, nn.LayerNorm) if to_transformer_engine else (te.Linear, te.LayerNorm)
    made: dict[nn.Module, nn.Module] = {}  # a layer of several names stays one layer
    for path, layer in list(model.named_modules(remove_duplicate=False)):
        if not path:
            continue
        if layer not in made:
            new = None
            if _convert_linear and type(layer) is linear:
                new = _linear(te, layer, to_transformer_engine)
            elif _convert_ln and type(layer) is norm:
                new = _norm(te, layer, to_transformer_engine)
            if new is None:
                continue
            made[layer] = _with_values_of(layer, new)
        parent, _, own = path.rpartition(".")
        setattr(model.get_submodule(parent), own, made[layer])


def has_transformer_engine_layers(model: nn.Module) -> bool:
    """Whether a layer of `model` is one of TransformerEngine. Raises ImportError without it."""
    te = _library("has_transformer_engine_layers")
    kinds = tuple(
        kind
        for name in ("Linear", "LayerNorm", "TransformerLayer")
        if (kind := getattr(te, name, None)) is not None
    )
    return any(isinstance(module, kinds) for module in model.modules())


def contextual_fp8_autocast(
    model_forward: Callable[..., Any], fp8_recipe: Any, use_during_eval: bool = False
) -> Callable[..., Any]:
    """A function `forward(self, ...)` that calls `model_forward(...)` under TransformerEngine's autocast while `self` trains.

    With `use_during_eval` in evaluation, too. Raises ImportError without TransformerEngine.
    """
    te = _library("contextual_fp8_autocast")

    @functools.wraps(model_forward)
    def forward(self: nn.Module, *args: Any, **kwargs: Any) -> Any:
        with te.fp8_autocast(enabled=use_during_eval or self.training, fp8_recipe=fp8_recipe):
            return model_forward(*args, **kwargs)

    return forward


def apply_fp8_autowrap(model: nn.Module, fp8_recipe_handler: TERecipeKwargs | None) -> nn.Module:
    """Let the forwards of `model` run under TransformerEngine's autocast, with the recipe of the handler; the same object back.

    Inside whatever a precision does around its forward already. Raises ImportError without TransformerEngine, ValueError for MXFP8 block
    scaling where this GPU has none, or together with options of the scaling by history.
    """
    return surround_inside(model, _autocast(fp8_recipe_handler))


class TransformerEngineFloat8(BFloat16Autocast):
    """fp8 through TransformerEngine: its layers in float8, everything else under autocast to bfloat16."""

    name: ClassVar[str] = "fp8"
    fp8_backend: ClassVar[FP8BackendType] = FP8BackendType.TE

    def __init__(
        self,
        device: torch.device | str,
        *,
        recipe: TERecipeKwargs | None = None,
        enabled: bool = True,
        cache_enabled: bool | None = None,
    ) -> None:
        """`enabled` and `cache_enabled` are `torch.autocast`'s. Raises what `apply_fp8_autowrap` raises."""
        super().__init__(device, enabled=enabled, cache_enabled=cache_enabled)
        self._around = Nested(self._autocast, _autocast(recipe))

    def wrap(self, model: nn.Module) -> nn.Module:
        """Convert the layers in place, with new parameters, which the strategy's optimizers follow; the same object back."""
        if not has_transformer_engine_layers(model):
            convert_model(model)
            vars(model)[_MARK] = True
        return surround_forward(model, self._around)

    def unwrap(self, model: nn.Module) -> nn.Module:
        """torch's layers and the model's own forward again; layers that the user made with TransformerEngine stay."""
        _revert(model)
        return super().unwrap(model)


@dataclass(frozen=True)
class TransformerEngineAutocast:
    """Runs a forward under TransformerEngine's autocast while its model trains."""

    recipe: Any
    use_during_eval: bool = False

    def __call__(self, forward: Callable[..., Any], /, *args: Any, **kwargs: Any) -> Any:
        """The model is what `forward` is bound to, or its first argument."""
        bound = getattr(forward, "__self__", None)
        model = args[0] if bound is None else bound  # a model without items is false
        te = _library("mixed_precision='fp8'")
        with te.fp8_autocast(enabled=self.use_during_eval or model.training, fp8_recipe=self.recipe):
            return forward(*args, **kwargs)


def _revert(model: nn.Module) -> None:
    if vars(model).pop(_MARK, False):
        convert_model(model, to_transformer_engine=False)


register_unwrap_finalizer(_MARK, _revert)


def _library(purpose: str) -> ModuleType:
    require("transformer_engine", purpose, extra="acc-plugins[te]")
    return require("transformer_engine.pytorch", purpose, extra="acc-plugins[te]")


def _autocast(handler: TERecipeKwargs | None) -> TransformerEngineAutocast:
    _library("mixed_precision='fp8'")
    recipes = require("transformer_engine.common.recipe", "mixed_precision='fp8'", extra="acc-plugins[te]")
    if handler is None:
        return TransformerEngineAutocast(recipes.DelayedScaling())
    number = getattr(recipes.Format, str(handler.fp8_format))
    if handler.use_mxfp8_block_scaling:
        _check_mxfp8(handler)
        recipe = recipes.MXFP8BlockScaling(margin=handler.margin, fp8_format=number)
    else:
        recipe = recipes.DelayedScaling(
            margin=handler.margin,
            fp8_format=number,
            amax_history_len=handler.amax_history_len,
            amax_compute_algo=handler.amax_compute_algo,
            override_linear_precision=handler.override_linear_precision,
        )
    return TransformerEngineAutocast(recipe, bool(handler.use_autocast_during_eval))


def _check_mxfp8(handler: TERecipeKwargs) -> None:
    origins = sources(handler)
    given = [name for name in ("amax_history_len", "amax_compute_algo") if origins[name] != "default"]
    if given:
        raise ValueError(
            f"{given[0]}={getattr(handler, given[0])!r} scales by the history of a tensor, which use_mxfp8_block_scaling does not: leave one out"
        )
    if not is_transformer_engine_mxfp8_available():
        raise ValueError(
            "use_mxfp8_block_scaling needs TransformerEngine 2.1 and a GPU with MXFP8 (Blackwell): leave it out, delayed scaling works elsewhere"
        )


def _linear(te: ModuleType, layer: Any, to_te: bool) -> nn.Module | None:
    if to_te and (layer.in_features % _MULTIPLE or layer.out_features % _MULTIPLE):
        return None
    # TransformerEngine keeps an empty tensor where there is no bias
    has_bias = layer.bias is not None and layer.bias.numel() > 0
    shape = (layer.in_features, layer.out_features, has_bias)
    dtype, device = layer.weight.dtype, layer.weight.device
    made: nn.Module = (
        te.Linear(*shape, params_dtype=dtype, device=device)
        if to_te
        else nn.Linear(*shape, dtype=dtype, device=device)
    )
    return made


def _norm(te: ModuleType, layer: Any, to_te: bool) -> nn.Module | None:
    if layer.weight is None or layer.bias is None or layer.weight.dim() != 1:
        return None
    (size,), dtype, device = layer.weight.shape, layer.weight.dtype, layer.weight.device
    made: nn.Module = (
        te.LayerNorm(size, eps=layer.eps, params_dtype=dtype, device=device)
        if to_te
        else nn.LayerNorm(size, eps=layer.eps, dtype=dtype, device=device)
    )
    return made


def _with_values_of(layer: nn.Module, made: nn.Module) -> nn.Module:
    values = dict(layer.named_parameters())
    for name, parameter in made.named_parameters():
        if not parameter.is_meta:
            with torch.no_grad():
                parameter.copy_(values[name])
        parameter.requires_grad_(values[name].requires_grad)
    return made.train(layer.training)
