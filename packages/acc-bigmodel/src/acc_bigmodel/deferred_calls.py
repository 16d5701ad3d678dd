"""What an empty context does with a call of each torch function: which it defers, and of what shape the result is."""

from __future__ import annotations

import sys
from collections.abc import Callable
from typing import Any

import torch
from torch import nn

META = torch.device("meta")
# looking at a tensor inside costs a fifth of what it does through a mode
unrouted = torch._C.DisableTorchFunction

# looks at what a tensor is / makes one / fills it / computes with numbers / shows it otherwise / asks for its values
LOOK, MAKE, FILL, ARITHMETIC, RESHAPE, ASK, OTHER = (
    "look",
    "make",
    "fill",
    "arithmetic",
    "reshape",
    "ask",
    "other",
)


def is_made_by_a_layer(depth: int) -> bool:
    """Whether the code so many calls above is that of torch's own layers, which make parameters and buffers only."""
    name: str = sys._getframe(depth + 1).f_globals.get("__name__", "")
    return name.startswith("torch.nn.modules.")


def _sized(args: tuple[Any, ...], kwargs: dict[str, Any]) -> torch.Tensor | None:
    """The tensor on meta for `torch.zeros` and those with its arguments; None for unusual ones."""
    if not kwargs.keys() <= _USUAL:
        return None
    if "generator" in kwargs:
        kwargs = {name: value for name, value in kwargs.items() if name != "generator"}
    with unrouted():
        return torch.empty(*args, **{**kwargs, "device": META})


def _full(args: tuple[Any, ...], kwargs: dict[str, Any]) -> torch.Tensor | None:
    if len(args) != 2 or not kwargs.keys() <= _USUAL:
        return None
    size, value = args
    dtype = kwargs.get("dtype")
    if dtype is None:
        dtype = {bool: torch.bool, int: torch.int64, float: torch.get_default_dtype()}.get(type(value))
    if dtype is None or not isinstance(value, (bool, int, float)):
        return None
    with unrouted():
        return torch.empty(size, **{**kwargs, "dtype": dtype, "device": META})


def _by(numbers: int, shape: Callable[..., tuple[Any, ...]]) -> Callable[..., torch.Tensor | None]:
    """For a factory that takes up to so many numbers, or sizes, and nothing else; `shape` tells the shape from these."""

    def sized(args: tuple[Any, ...], kwargs: dict[str, Any]) -> torch.Tensor | None:
        simple = all(isinstance(arg, (int, float)) or type(arg) in (tuple, torch.Size) for arg in args)
        if not simple or len(args) > numbers or not kwargs.keys() <= _USUAL - {"size"}:
            return None
        try:
            return _sized(shape(*args), kwargs)
        except TypeError:
            return None  # torch says what is wrong

    return sized


_USUAL = frozenset(["size", "dtype", "device", "requires_grad", "generator"])
# those that are called with the shape first
BY_SHAPE = frozenset([torch.empty, torch.zeros, torch.ones, torch.rand, torch.randn, torch.full])
SIZED: dict[Any, Callable[[tuple[Any, ...], dict[str, Any]], torch.Tensor | None]] = {
    **dict.fromkeys(BY_SHAPE - {torch.full}, _sized),
    torch.full: _full,
    torch.eye: _by(2, lambda rows, columns=None: (rows, rows if columns is None else columns)),
    torch.normal: _by(3, lambda mean, std, size: tuple(size)),  # noqa: ARG005
    torch.linspace: _by(3, lambda start, end, steps: (steps,)),  # noqa: ARG005
}


def _kinds() -> dict[Any, str]:
    tensor = torch.Tensor
    looks = "dim size numel stride element_size is_floating_point is_complex is_contiguous requires_grad_"
    shown = "grad_fn shape ndim dtype requires_grad is_leaf layout itemsize nbytes"
    # in-place, of the same shape, and changing nothing but values
    fills = "normal_ uniform_ zero_ fill_ erfinv_ clamp_ random_ mul_ div_ add_ sub_"
    initialisers = "normal_ uniform_ constant_ kaiming_uniform_"
    operators = (
        "mul div true_divide add sub __mul__ __rmul__ __truediv__ __add__ __radd__ __sub__ __neg__ neg"
    )
    # the result may share the memory of the tensor
    reshapes = (
        "view reshape t transpose permute squeeze unsqueeze flatten __getitem__ detach contiguous clone to half bfloat16 "
        "float double pow __pow__ abs log exp"
    )
    asked = "item tolist numpy __bool__ __float__ __int__ __index__ __array__ equal allclose"
    return {
        **{getattr(tensor, name): LOOK for name in looks.split()},
        **{getattr(tensor, name).__get__: LOOK for name in shown.split()},
        torch._C._set_grad_enabled: LOOK,
        **dict.fromkeys(SIZED, MAKE),
        **{getattr(tensor, name): FILL for name in fills.split()},
        **{getattr(nn.init, name): FILL for name in initialisers.split()},
        **{getattr(tensor, name): ARITHMETIC for name in operators.split()},
        **{getattr(torch, name): ARITHMETIC for name in ("mul", "div", "true_divide", "add", "sub", "neg")},
        **{getattr(tensor, name): RESHAPE for name in reshapes.split()},
        **{getattr(tensor, name).__get__: RESHAPE for name in ("T", "mT", "data")},
        **{getattr(tensor, name): ASK for name in asked.split()},
        **{getattr(torch, name): ASK for name in ("equal", "allclose")},
    }


KINDS = _kinds()


def is_plain(value: Any) -> bool:
    """Whether an argument is a number, a dtype or an index: nothing that could change until the call is carried out."""
    if isinstance(value, tuple):
        return all(map(is_plain, value))
    return (
        value is None
        or value is Ellipsis
        or isinstance(value, (int, float, slice, torch.dtype, torch.memory_format))
    )


def writes(func: Any) -> bool:
    """Whether a function writes into its first argument."""
    name = getattr(func, "__name__", "")
    if name.startswith("__"):
        return name.startswith("__i") or name in ("__setitem__", "__set__")
    return bool(name.endswith("_"))
