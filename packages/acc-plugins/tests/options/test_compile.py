"""TorchDynamoPlugin."""

from __future__ import annotations

import torch
from torch import nn

from acc_ops.enums import DynamoBackend
from acc_ops.options import environment_is
from acc_plugins.options.compile import TorchDynamoPlugin

LAUNCHED = {
    "ACCELERATE_DYNAMO_BACKEND": "AOT_EAGER",
    "ACCELERATE_DYNAMO_MODE": "reduce-overhead",
    "ACCELERATE_DYNAMO_USE_FULLGRAPH": "true",
    "ACCELERATE_DYNAMO_USE_DYNAMIC": "0",
    "ACCELERATE_DYNAMO_USE_REGIONAL_COMPILATION": "1",
}


def test_without_anything_nothing_is_compiled() -> None:
    with environment_is({}):
        plugin = TorchDynamoPlugin()
    assert plugin.backend is DynamoBackend.NO
    assert (plugin.mode, plugin.fullgraph, plugin.dynamic) == ("default", False, None)
    assert plugin.to_kwargs() == {}


def test_what_the_launcher_said_fills_what_was_left_out() -> None:
    with environment_is(LAUNCHED):
        plugin = TorchDynamoPlugin(fullgraph=False)
        assert plugin.to_kwargs() == {"backend": "aot_eager", "mode": "reduce-overhead", "dynamic": False}
    assert plugin.use_regional_compilation is True
    assert plugin.to_dict()["backend"] == "aot_eager"


def test_its_kwargs_are_torch_compiles() -> None:
    kwargs = TorchDynamoPlugin("EAGER", fullgraph=True, use_regional_compilation=True).to_kwargs()
    model = nn.Linear(2, 2)
    x = torch.ones(1, 2)
    assert torch.equal(torch.compile(model, **kwargs)(x), model(x))


def test_options_take_the_place_of_the_mode() -> None:
    kwargs = TorchDynamoPlugin("inductor", options={"max_autotune": True}).to_kwargs()
    assert kwargs == {"backend": "inductor", "options": {"max_autotune": True}}
