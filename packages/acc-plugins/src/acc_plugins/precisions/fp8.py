"""fp8: the inner linear layers compute in 8-bit floating point, everything else under autocast to bfloat16; weights stay float32.

[Note: how a layer changes and changes back] torchao makes a new layer for each that it converts. Hooks, the module that a user holds and the
parameters that an optimizer has belong to the old one, so the old one takes over the class and the attributes of the new one instead, and gives
them back when it is unwrapped. No name changes: state dicts are the model's own.
"""

from __future__ import annotations

import functools
import logging
from collections.abc import Callable
from dataclasses import replace
from typing import Any, ClassVar

import torch
from torch import nn

from acc_ops.enums import FP8BackendType
from acc_ops.optional import require
from acc_plugins.precisions.amp import BFloat16Autocast
from acc_plugins.precisions.fp8_torchao import filter_linear_layers, find_first_last_linear_layers

logger = logging.getLogger(__name__)


class TorchaoFloat8(BFloat16Autocast):
    """fp8 through torchao: every product of a converted layer, forward and backward, is one of float8 numbers with a scale."""

    name: ClassVar[str] = "fp8"
    fp8_backend: ClassVar[FP8BackendType] = FP8BackendType.AO

    def __init__(
        self,
        device: torch.device | str,
        *,
        config: Any = None,
        module_filter_func: Callable[[nn.Module, str], bool] | None = None,
        gathers_in_fp8: bool = False,
        enabled: bool = True,
        cache_enabled: bool | None = None,
    ) -> None:
        """`config` is a Float8LinearConfig; None is torchao's default, but with inner dimensions padded.

        `module_filter_func(module, name)` chooses among the linear layers; None chooses all but the first, the last and those with a
        dimension that is not a multiple of 16. `gathers_in_fp8`: the strategy shards, and gathers weights in float8 where the config says so;
        elsewhere there is nothing to gather, and parameters stay plain. `enabled` and `cache_enabled` are `torch.autocast`'s. Raises ImportError
        without torchao.
        """
        super().__init__(device, enabled=enabled, cache_enabled=cache_enabled)
        float8 = require("torchao.float8", "mixed_precision='fp8'", extra="acc-plugins[torchao]")
        made = float8.Float8LinearConfig(pad_inner_dim=True) if config is None else config
        if not gathers_in_fp8 and made.enable_fsdp_float8_all_gather:
            made = replace(made, enable_fsdp_float8_all_gather=False)
        self.config = made
        self.module_filter_func = module_filter_func

    def wrap(self, model: nn.Module) -> nn.Module:
        """Convert the layers, in place, and let the forwards run under autocast; the same object back. Says so when no layer is converted."""
        chosen = self._chosen(model)
        for layer in chosen:
            _become(layer, _converted(layer, self.config))
        if not chosen and not has_float8_layers(model):
            logger.warning(
                "mixed_precision='fp8': no layer of %s computes in fp8, only in bfloat16: it has no linear layers but the first and the last, "
                "or 16 does not divide their dimensions. Give AORecipeKwargs(module_filter_func=...) to choose others",
                type(model).__name__,
            )
        return super().wrap(model)

    def unwrap(self, model: nn.Module) -> nn.Module:
        """The layers and the forward as they were."""
        for layer in _float8_layers(model):
            for name in _of_torchao():
                vars(layer).pop(name, None)
            layer.__class__ = nn.Linear
        return super().unwrap(model)

    def _chosen(self, model: nn.Module) -> list[nn.Linear]:
        wanted = self.module_filter_func
        if wanted is None:
            ends = [name for name in find_first_last_linear_layers(model) if name is not None]
            wanted = functools.partial(filter_linear_layers, layers_to_filter=ends)
        # the exact class: the forward of a subclass would be lost
        return [
            layer for name, layer in model.named_modules() if type(layer) is nn.Linear and wanted(layer, name)
        ]


def has_float8_layers(model: nn.Module) -> bool:
    """Whether a layer of `model` computes in float8 through torchao; asked only where torchao was loaded."""
    return bool(_float8_layers(model))


def _float8_layers(model: nn.Module) -> list[nn.Module]:
    kind = type(_converted(nn.Linear(16, 16, device="meta"), None))
    return [module for module in model.modules() if type(module) is kind]


def _converted(layer: nn.Linear, config: Any) -> nn.Module:
    """What torchao makes of one layer; it holds the same parameters, unless they shall be gathered in float8."""
    box = nn.Sequential(layer)
    float8 = require("torchao.float8", "mixed_precision='fp8'", extra="acc-plugins[torchao]")
    float8.convert_to_float8_training(box, config=config, module_filter_fn=lambda *_: True)
    return box[0]


def _become(layer: nn.Module, other: nn.Module) -> None:
    layer._parameters.update(other._parameters)
    layer.__class__ = type(other)
    vars(layer).update({name: value for name, value in vars(other).items() if name in _of_torchao()})


@functools.cache
def _of_torchao() -> frozenset[str]:
    """The attributes that torchao adds to a linear layer."""
    layer = nn.Linear(16, 16, device="meta")
    return frozenset(vars(_converted(layer, None)).keys() - vars(layer).keys())
