"""What a hook of one's own returns."""

from __future__ import annotations

from types import MappingProxyType

import pytest
import torch
from torch import nn

from acc_hooks import (
    AlignDevicesHook,
    LayerwiseCastingHook,
    ModelHook,
    SequentialHook,
    add_hook_to_module,
    attached_hook,
)


@pytest.mark.parametrize(
    ("returned", "said"),
    [
        (None, "None"),
        (torch.ones(2, 4), "a Tensor"),
        ((torch.ones(1),), r"a tuple of 1 \(Tensor\)"),
        ((torch.ones(1), torch.ones(1)), r"a tuple of 2 \(Tensor, Tensor\)"),
        (((), None), r"a tuple of 2 \(tuple, NoneType\)"),
        ((), "an empty tuple"),
    ],
)
@pytest.mark.parametrize("base", [ModelHook, AlignDevicesHook, LayerwiseCastingHook])
@pytest.mark.parametrize("by", ["call", "chain", "hand"])
def test_a_pre_forward_that_returns_no_arguments_is_named_with_the_remedy(base, by, returned, said, x):
    class Forgetful(base):
        def pre_forward(self, module, *args, **kwargs):
            return returned

    arguments = (torch.bfloat16, torch.float32, False) if base is LayerwiseCastingHook else ()
    hook = Forgetful(*arguments)
    layer = add_hook_to_module(nn.Linear(4, 4), SequentialHook(hook) if by != "call" else hook)
    with pytest.raises(TypeError, match=f"Forgetful.pre_forward .* returned {said}: .*return args, kwargs"):
        attached_hook(layer).pre_forward(layer, x) if by == "hand" else layer(x)


def test_a_pre_forward_may_return_lists_and_other_mappings(x):
    class Lists(ModelHook):
        def pre_forward(self, module, *args, **kwargs):
            return [list(args), MappingProxyType(kwargs)]

    layer = nn.Linear(4, 4)
    expected = layer(x)
    assert torch.equal(add_hook_to_module(layer, Lists())(x), expected)
