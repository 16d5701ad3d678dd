"""Linear layers that train in float8 through torchao: which layers are converted, and the conversion.

[Note: which layers] The first and the last linear layer of a model lose most from few bits, and float8 kernels need both dimensions to be multiples
of 16. So those layers stay as they are unless the caller's own filter says otherwise.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Collection
from types import ModuleType
from typing import Any

from torch import nn

from acc_ops.optional import require

_MULTIPLE = 16  # of both dimensions of a layer, for float8 matrix products


def convert_model_to_fp8_ao(
    model: nn.Module,
    config: Any = None,
    module_filter_func: Callable[[nn.Module, str], bool] | None = None,
) -> None:
    """Let the linear layers of `model` compute in float8, in place; their weights stay as they are.

    `config` is torchao's recipe (a `Float8LinearConfig`); None is its default (dynamic scaling by tensor). `module_filter_func(module, name)` says which layers are
    converted; None converts all but the first, the last, and those with a dimension that is not a multiple of 16. Raises ImportError without
    torchao.
    """
    torchao_float8 = _torchao_float8("convert_model_to_fp8_ao")
    if module_filter_func is None:
        ends = [name for name in find_first_last_linear_layers(model) if name is not None]
        module_filter_func = functools.partial(filter_linear_layers, layers_to_filter=ends)
    torchao_float8.convert_to_float8_training(model, module_filter_fn=module_filter_func, config=config)


def has_ao_layers(model: nn.Module) -> bool:
    """Whether a layer of `model` computes in float8 through torchao. Raises ImportError without torchao."""
    _torchao_float8("has_ao_layers")
    kind = require("torchao.float8.float8_linear", "has_ao_layers", extra="acc-plugins[torchao]").Float8Linear
    return any(isinstance(module, kind) for module in model.modules())


def find_first_last_linear_layers(model: nn.Module) -> tuple[str | None, str | None]:
    """The names of the first and of the last linear layer, in the order of `named_modules`; None and None where there is none."""
    names = [name for name, module in model.named_modules() if isinstance(module, nn.Linear)]
    return (names[0], names[-1]) if names else (None, None)


def filter_linear_layers(module: nn.Module, fqn: str, layers_to_filter: Collection[str]) -> bool:
    """Whether `module`, called `fqn` in its model, may be converted: not a name of `layers_to_filter`, nor a linear layer of odd dimensions.

    Odd is a dimension that is not a multiple of 16.
    """
    if isinstance(module, nn.Linear) and (module.in_features % _MULTIPLE or module.out_features % _MULTIPLE):
        return False
    return fqn not in layers_to_filter


def filter_first_and_last_linear_layers(module: nn.Module, fqn: str) -> bool:
    """`filter_linear_layers` against the first and the last linear layer inside `module` itself."""
    ends = [name for name in find_first_last_linear_layers(module) if name is not None]
    return filter_linear_layers(module, fqn, ends)


def _torchao_float8(purpose: str) -> ModuleType:
    require("torchao", purpose, extra="acc-plugins[torchao]")
    return require("torchao.float8", purpose, extra="acc-plugins[torchao]")
