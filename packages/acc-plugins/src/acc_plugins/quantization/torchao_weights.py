"""Weights in few bits by torchao: any of its configurations for linear layers, applied layer by layer."""

from __future__ import annotations

import logging
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor, nn

from acc_hooks.tensors import is_plain, owner_of, set_module_tensor_to_device
from acc_ops.optional import require
from acc_ops.options import closest
from acc_plugins.quantization.format import WeightFormat

logger = logging.getLogger(__name__)

_SUFFIX = "Config"


class TorchaoFormat(WeightFormat):
    """The bits of a torchao configuration, given as such an object or by name ("int8_weight_only").

    Raises ImportError without torchao, ValueError for a name that torchao does not have, TypeError for an object of another kind.
    """

    def __init__(self, config: Any) -> None:
        require("torchao", "load_and_quantize_model", extra="acc-plugins[torchao]")
        self.library = require(
            "torchao.quantization", "load_and_quantize_model", extra="acc-plugins[torchao]"
        )
        self.config = _named(self.library, config) if isinstance(config, str) else config
        core = require("torchao.core.config", "load_and_quantize_model", extra="acc-plugins[torchao]")
        if not isinstance(self.config, core.AOBaseConfig):
            raise TypeError(
                f"load_and_quantize_model takes a BnbQuantizationConfig, a configuration of torchao or its name, got {config!r}"
            )
        by_name = getattr(self.library, "FqnToConfig", ())
        if isinstance(self.config, by_name):
            raise ValueError(
                "FqnToConfig chooses layers by name, but load_and_quantize_model has chosen them already: give the configuration of the layers, "
                "or load the model and call torchao.quantization.quantize_ on it"
            )

    def put(
        self,
        model: nn.Module,
        name: str,
        value: Tensor,
        statistics: Mapping[str, Tensor],
        device: torch.device,
    ) -> None:
        """Put the value as it is, and let torchao quantise the one layer."""
        del statistics
        set_module_tensor_to_device(
            model, name, device, value=value.clone()
        )  # a mapped one is not ours to keep
        layer: Any = owner_of(model, name)[0]
        self.library.quantize_(layer, self.config)
        if is_plain(layer.weight):
            logger.warning("torchao's %s left %r as it was", type(self.config).__name__, name)


def _named(library: Any, name: str) -> Any:
    known = {_spelled(kind.removesuffix(_SUFFIX)): kind for kind in dir(library) if kind.endswith(_SUFFIX)}
    kind = known.get(_spelled(name.removesuffix(_SUFFIX)))
    if kind is None:
        near = closest(_spelled(name), known)
        meant = f" (is {known[near]!r} meant?)" if near else ""
        raise ValueError(
            f"torchao has no configuration {name!r}{meant}; it has {', '.join(sorted(known.values()))}"
        )
    return getattr(library, kind)()


def _spelled(name: str) -> str:
    return name.replace("_", "").lower()
