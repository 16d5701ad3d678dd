"""Linear layers of bitsandbytes in the place of torch's: which ones, and the exchange.

[Note: when a weight is quantised] An exchanged layer still holds its weight as it was. bitsandbytes quantises it when the layer is moved to a
device (`model.to("cpu")` counts), once.
"""

from __future__ import annotations

import logging
from collections.abc import Sequence
from types import ModuleType

from torch import nn

from acc_ops.optional import require
from acc_plugins.options.quantization import BnbQuantizationConfig
from acc_plugins.quantization.layers import linear_layers

logger = logging.getLogger(__name__)


def replace_with_bnb_layers(
    model: nn.Module,
    bnb_quantization_config: BnbQuantizationConfig,
    modules_to_not_convert: Sequence[str] | None = None,
    current_key_name: Sequence[str] | None = None,
) -> nn.Module:
    """Put 8-bit or 4-bit layers of bitsandbytes in the place of the linear layers inside `model`; the same object back.

    A name in `modules_to_not_convert` leaves out the layer of that name, and all below it, wherever the name (one or several parts of a dotted
    path) stands in the layer's path. `current_key_name` are the parts of the path of `model` itself. Warns when nothing was exchanged.
    Raises ImportError without bitsandbytes.
    """
    bnb = require("bitsandbytes", "replace_with_bnb_layers", extra="acc-plugins[bnb]")
    exchanged: dict[nn.Module, nn.Module] = {}  # a layer of several names stays one layer
    found = linear_layers(model, modules_to_not_convert or (), ".".join(current_key_name or ()))
    for path, module in found.items():
        if module not in exchanged:
            exchanged[module] = _exchanged(bnb, module, bnb_quantization_config)
        parent, _, own = path.rpartition(".")
        setattr(model.get_submodule(parent), own, exchanged[module])
    if not exchanged:
        logger.warning(
            "no linear layer of %s was exchanged for one of bitsandbytes: it has none, or modules_to_not_convert=%s leaves them all out",
            type(model).__name__,
            list(modules_to_not_convert or ()),
        )
    return model


def has_4bit_bnb_layers(model: nn.Module) -> bool:
    """Whether a layer of `model` is a 4-bit one of bitsandbytes. Raises ImportError without bitsandbytes."""
    bnb = require("bitsandbytes", "has_4bit_bnb_layers", extra="acc-plugins[bnb]")
    return any(isinstance(module, bnb.nn.Linear4bit) for module in model.modules())


def _exchanged(bnb: ModuleType, linear: nn.Linear, settings: BnbQuantizationConfig) -> nn.Module:
    """A layer of bitsandbytes with the weight and bias of `linear`, which do not train."""
    shape = (linear.in_features, linear.out_features, linear.bias is not None)
    if settings.load_in_8bit:
        layer = bnb.nn.Linear8bitLt(
            *shape,
            has_fp16_weights=False,
            threshold=settings.llm_int8_threshold,
            device=linear.weight.device,
        )
    else:
        layer = bnb.nn.Linear4bit(
            *shape,
            compute_dtype=settings.bnb_4bit_compute_dtype,
            compress_statistics=settings.bnb_4bit_use_double_quant,
            quant_type=settings.bnb_4bit_quant_type,
            device=linear.weight.device,
        )
    layer.weight.data = linear.weight.data
    if linear.bias is not None:
        layer.bias.data = linear.bias.data
    layer.train(linear.training)
    return layer.requires_grad_(False)
