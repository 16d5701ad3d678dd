"""Weights in 8 or 4 bits by bitsandbytes: quantised on the way to a device, or packed already in the checkpoint.

[Note: what a checkpoint of bitsandbytes has] As its layers' state dicts have it:
    8 bit   `weight` int8 (out, in), `SCB` float32 (out,) the largest magnitude of each row, `weight_format` 0 (by rows)
    4 bit   `weight` uint8 (out * in / 2, 1), `weight.absmax`, `weight.quant_map` and, with double quantization, `weight.nested_absmax` and
            `weight.nested_quant_map`; `weight.quant_state.bitsandbytes__nf4` (or fp4) is JSON as bytes
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from os import PathLike
from typing import Any

import torch
from torch import Tensor, nn

from acc_bigmodel import quantize_and_offload_8bit
from acc_bigmodel.stores.store import WeightStore
from acc_hooks.tensors import owner_of, put_tensor, set_module_tensor_to_device
from acc_ops.optional import require
from acc_plugins.options.quantization import BnbQuantizationConfig
from acc_plugins.quantization.bnb_layers import replace_with_bnb_layers
from acc_plugins.quantization.format import Stored, WeightFormat

_OF_4_BITS = (
    "absmax",
    "quant_map",
    "nested_absmax",
    "nested_quant_map",
    "quant_state.bitsandbytes__nf4",
    "quant_state.bitsandbytes__fp4",
)
_OF_8_BITS = ("SCB", "weight_format")
_BY_ROWS = 0  # the one `weight_format` that bitsandbytes still reads
_FIRST = {8: "0.37.2", 4: "0.39"}  # the versions that have these layers


class MissingBitsandbytes(ImportError, ValueError):
    """bitsandbytes is not there or too old."""


class BnbFormat(WeightFormat):
    """8 or 4 bits as a `BnbQuantizationConfig` says. Raises MissingBitsandbytes."""

    def __init__(self, settings: BnbQuantizationConfig) -> None:
        self.settings = settings
        self.bits = 8 if settings.load_in_8bit else 4
        try:
            self.bnb = require(
                "bitsandbytes",
                "load_and_quantize_model",
                extra="acc-plugins[bnb]",
                min_version=_FIRST[self.bits],
            )
        except ImportError as error:
            raise MissingBitsandbytes(str(error)) from error
        self.target_dtype = settings.target_dtype
        self.rest_dtype = settings.torch_dtype
        self.skip_modules = settings.skip_modules
        self.keep_in_fp32 = settings.keep_in_fp32_modules or ()
        self.can_offload = self.bits == 8  # bitsandbytes keeps what 4 bits mean on the weight, not in a file

    def exchange(self, model: nn.Module, left_out: Sequence[str]) -> None:
        """bitsandbytes' layers in the place of the linear ones; warns when there are none of either."""
        if super().names(model, left_out) or not self.names(model, left_out):
            replace_with_bnb_layers(model, self.settings, left_out)

    def names(self, model: nn.Module, left_out: Sequence[str]) -> list[str]:
        """The weights of linear layers, and of bitsandbytes' layers that have all their bits."""
        kinds = (self.bnb.nn.Linear8bitLt, self.bnb.nn.Linear4bit)
        exchanged = [
            f"{path}.weight"
            for path, module in model.named_modules(remove_duplicate=False)
            if isinstance(module, kinds) and module.weight.is_floating_point()
        ]
        return [*super().names(model, left_out), *exchanged]

    def statistics_of(self, name: str, store: WeightStore) -> dict[str, str]:
        """See [Note: what a checkpoint of bitsandbytes has]."""
        path = name.rpartition(".")[0]
        wanted = {
            **{local: f"{path}.{local}" for local in _OF_8_BITS},
            **{local: f"{name}.{local}" for local in _OF_4_BITS},
        }
        return {local: entry for local, entry in wanted.items() if entry in store}

    def check(self, layer: Any, stored: Stored, store: WeightStore) -> str | None:
        """Packed weights must have the bits that are asked for."""
        if not stored.statistics:
            return super().check(layer, stored, store)
        bits = 8 if "SCB" in stored.statistics else 4
        if bits != self.bits:
            return f"{stored.values!r} has {bits} bits in the checkpoint, not {self.bits}: give load_in_{bits}bit=True"
        if bits == 8:
            return super().check(layer, stored, store) or _other_format(stored, store)
        kinds = {local.rpartition("__")[2] for local in stored.statistics if "__" in local}
        if kinds != {self.settings.bnb_4bit_quant_type}:
            found = ", ".join(sorted(kinds)) or "not said"
            return f"the 4 bit format of {stored.values!r} is {found}, not {self.settings.bnb_4bit_quant_type}: give bnb_4bit_quant_type"
        nbytes = (layer.out_features * layer.in_features + 1) // 2
        if store.nbytes(stored.values) != nbytes:
            return f"{stored.values!r} has {store.nbytes(stored.values)} bytes in the checkpoint, the model needs {nbytes}"
        return None

    def put(
        self,
        model: nn.Module,
        name: str,
        value: Tensor,
        statistics: Mapping[str, Tensor],
        device: torch.device,
    ) -> None:
        """bitsandbytes quantises on the way to the device; packed values are put as they are."""
        layer: Any
        layer, local = owner_of(model, name)
        if not statistics:
            set_module_tensor_to_device(model, name, device, value=value, dtype=self.settings.torch_dtype)
        elif self.bits == 8:
            made = self.bnb.nn.Int8Params(value, requires_grad=False, has_fp16_weights=False)
            made.SCB = statistics["SCB"]
            put_tensor(layer, local, made.to(device))
        else:
            made = self.bnb.nn.Params4bit.from_prequantized(
                value,
                {f"weight.{key}": tensor for key, tensor in statistics.items()},
                device=device,
                module=layer,
            )
            put_tensor(layer, local, made)
        if layer.weight.is_floating_point():
            raise ValueError(
                f"bitsandbytes {self.bnb.__version__} does not quantise {name!r} on {device}: update it (pip install -U bitsandbytes)"
            )

    def offload(
        self,
        model: nn.Module,
        name: str,
        value: Tensor,
        statistics: Mapping[str, Tensor],
        folder: str | PathLike[str],
    ) -> dict[str, Any]:
        """In 8 bits, quantised on the first device of this machine."""
        index: dict[str, Any] = {}
        dtype = value.dtype if statistics else self.settings.torch_dtype
        quantize_and_offload_8bit(model, value, name, dtype, folder, index, statistics.get("SCB"))
        return index

    def mark(self, model: nn.Module) -> None:
        """`is_loaded_in_8bit` and `is_loaded_in_4bit`, as transformers has them."""
        model.is_loaded_in_8bit = self.bits == 8  # type: ignore[assignment]
        model.is_loaded_in_4bit = self.bits == 4  # type: ignore[assignment]


def is_statistics(entry: str) -> bool:
    """Whether an entry of a checkpoint, by its name, says what the few bits of another entry mean."""
    return entry.endswith(
        (*(f".{local}" for local in _OF_8_BITS), *(f".weight.{local}" for local in _OF_4_BITS))
    )


def _other_format(stored: Stored, store: WeightStore) -> str | None:
    entry = stored.statistics.get("weight_format")
    if entry is None or int(store[entry]) == _BY_ROWS:
        return None
    return f"{entry!r} is {int(store[entry])}: bitsandbytes reads weights that are kept by rows ({_BY_ROWS}) only; save them anew"
