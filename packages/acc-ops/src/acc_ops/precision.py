"""Half-precision outputs as float32, whatever structure they come in."""

from __future__ import annotations

import functools
import pickle
from collections.abc import Callable
from typing import Any, ParamSpec

import torch

from acc_ops.tree import recursively_apply

P = ParamSpec("P")


def convert_to_fp32(tensor: Any) -> Any:
    """float16 and bfloat16 tensors of a nested structure as float32; everything else, and a structure without any, is passed on as it is."""
    return recursively_apply(_as_fp32, tensor)


def convert_outputs_to_fp32(model_forward: Callable[P, Any]) -> Callable[P, Any]:
    """A function that calls `model_forward` and gives its half-precision outputs as float32; `__wrapped__` leads back."""

    @functools.wraps(model_forward)
    def forward(*args: P.args, **kwargs: P.kwargs) -> Any:
        return convert_to_fp32(model_forward(*args, **kwargs))

    return forward


class ConvertOutputsToFp32:
    """The same as an object. It cannot be pickled: unwrap the model first."""

    def __init__(self, model_forward: Callable[..., Any]) -> None:
        self.model_forward = model_forward
        functools.update_wrapper(self, model_forward)

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        return convert_to_fp32(self.model_forward(*args, **kwargs))

    def __getstate__(self) -> dict[str, Any]:
        raise pickle.PicklingError(
            "a model whose outputs are converted to float32 cannot be pickled: unwrap it first, "
            "with extract_model_from_parallel(model, keep_fp32_wrapper=False)"
        )


def _as_fp32(leaf: torch.Tensor) -> torch.Tensor:
    dtype = leaf.dtype
    return leaf.float() if dtype is torch.bfloat16 or dtype is torch.float16 else leaf
