"""How weights are quantized by bitsandbytes."""

from __future__ import annotations

import logging
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Literal

from acc_ops.enums import CustomDtype
from acc_ops.options import OptionError, option
from acc_plugins.options.checks import require_at_least, settle

if TYPE_CHECKING:
    import torch

logger = logging.getLogger(__name__)
_DTYPES = {"fp32": "float32", "fp16": "float16", "bf16": "bfloat16"}
_THRESHOLD = 6.0


@dataclass
class BnbQuantizationConfig:
    """8 or 4 bit weights, and what stays as it is.

    Formats may be given as fp32, fp16, bf16 or as a torch dtype, and are torch dtypes once built. Raises OptionError (a ValueError) unless exactly
    one of `load_in_8bit` and `load_in_4bit` is true, and for values that are none.
    """

    load_in_8bit: bool = option(False, help="8 bit weights")
    llm_int8_threshold: float = option(_THRESHOLD, help="8 bit: activations above it are computed in 16 bit")
    load_in_4bit: bool = option(False, help="4 bit weights")
    bnb_4bit_quant_type: Literal["fp4", "nf4"] = option("fp4", help="4 bit: the number format")
    bnb_4bit_use_double_quant: bool = option(False, help="4 bit: quantize the scales, too")
    bnb_4bit_compute_dtype: Any = option(
        "fp16", parse=str, plain=lambda value: _name_of(value), help="4 bit: the format of the arithmetic"
    )
    torch_dtype: Any = option(
        None,
        parse=str,
        plain=lambda value: _name_of(value),
        help="format of the other weights; default: fp16 (8 bit), bnb_4bit_compute_dtype (4 bit)",
    )
    skip_modules: list[str] | None = option(
        None, help="names of modules that are not quantized; default: tied ones and the last"
    )
    keep_in_fp32_modules: list[str] | None = option(None, help="names of modules kept in float32")

    def __post_init__(self) -> None:
        for name in ("skip_modules", "keep_in_fp32_modules"):
            value = getattr(self, name)
            if value is not None and not isinstance(value, list):
                raise OptionError(f"{name} must be a list of module names, got {value!r}")
        settle(self)
        require_at_least(self, "llm_int8_threshold", 0)
        if self.load_in_8bit == self.load_in_4bit:
            raise OptionError(
                f"give exactly one of load_in_8bit and load_in_4bit, got {self.load_in_8bit} and {self.load_in_4bit}"
            )
        if self.load_in_4bit and self.llm_int8_threshold != _THRESHOLD:
            logger.warning("llm_int8_threshold=%s has no effect with load_in_4bit", self.llm_int8_threshold)
        # what every quantized weight counts as when a plan is made
        self.target_dtype: Any = CustomDtype.INT4 if self.load_in_4bit else _dtype("int8", "target_dtype")
        self.bnb_4bit_compute_dtype = _dtype(self.bnb_4bit_compute_dtype, "bnb_4bit_compute_dtype")
        if self.torch_dtype is None:
            self.torch_dtype = self.bnb_4bit_compute_dtype if self.load_in_4bit else _dtype("fp16", "")
        else:
            self.torch_dtype = _dtype(self.torch_dtype, "torch_dtype")


def _name_of(value: Any) -> str:
    """A dtype by the short name that reads back, or by torch's."""
    name = str(value).removeprefix("torch.")
    return next((short for short, long in _DTYPES.items() if long == name), name)


def _dtype(value: Any, name: str) -> torch.dtype:
    # loaded here: option classes are read without torch
    import torch  # noqa: PLC0415

    if isinstance(value, torch.dtype):
        return value
    if value == "int8" and name == "target_dtype":
        return torch.int8
    if value not in _DTYPES:
        raise OptionError(f"{name} must be one of {', '.join(_DTYPES)} or a torch dtype, got {value!r}")
    found: torch.dtype = getattr(torch, _DTYPES[value])
    return found
