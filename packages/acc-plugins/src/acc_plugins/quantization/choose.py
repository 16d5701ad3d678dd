"""Which way to keep weights in few bits a user asks for: answered here, once."""

from __future__ import annotations

from typing import Any

from acc_plugins.options.quantization import BnbQuantizationConfig
from acc_plugins.quantization.format import WeightFormat


def weight_format(config: Any) -> WeightFormat:
    """The format that a `BnbQuantizationConfig`, a configuration of torchao, or the name of one asks for; a format is itself.

    Raises ImportError (for bitsandbytes also a ValueError) where its library is absent, ValueError and TypeError for anything else.
    """
    if isinstance(config, WeightFormat):
        return config
    # each needs what the other user has not installed, and takes its time to load
    if isinstance(config, BnbQuantizationConfig):
        from acc_plugins.quantization.bnb_weights import BnbFormat  # noqa: PLC0415

        return BnbFormat(config)
    from acc_plugins.quantization.torchao_weights import TorchaoFormat  # noqa: PLC0415

    return TorchaoFormat(config)
