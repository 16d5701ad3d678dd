"""Options of the launcher that a plugin declares: the worker's plugin reads back what was said."""

from __future__ import annotations

import pytest

from acc_ops.enums import DynamoBackend
from acc_ops.options import OptionError, from_env, options_of, resolve, to_env
from acc_plugins.options.compile import TorchDynamoPlugin
from acc_trainer.launch.options import LaunchOptions

DYNAMO = {declared.flag: declared for declared in options_of(TorchDynamoPlugin) if declared.flag}
MODES = ("default", "reduce-overhead", "max-autotune", "max-autotune-no-cudagraphs")


@pytest.mark.parametrize(
    ("flag", "text", "value"),
    [
        *(("dynamo_backend", member.value.lower(), member) for member in DynamoBackend),
        *(("dynamo_mode", mode, mode) for mode in MODES),
        ("dynamo_use_fullgraph", "true", True),
        ("dynamo_use_dynamic", "false", False),
        ("dynamo_use_regional_compilation", "true", True),
    ],
)
def test_what_is_said_about_compiling_reaches_the_plugin(flag, text, value):
    options = resolve(LaunchOptions, file={flag: text})
    assert getattr(from_env(TorchDynamoPlugin, to_env(options)), DYNAMO[flag].name) == value


def test_what_the_plugin_would_not_take_the_launcher_does_not_take_either():
    with pytest.raises(OptionError, match="did you mean torchxla_trace_once"):
        resolve(LaunchOptions, file={"dynamo_backend": "torhchxla_trace_once"})


def test_the_launcher_says_nothing_else_about_a_plugins_option():
    launched = {declared.name: declared for declared in options_of(LaunchOptions)}
    assert set(DYNAMO) == {name for name in launched if name.startswith("dynamo_")}
    for flag, declared in DYNAMO.items():
        assert (launched[flag].env, launched[flag].help) == (declared.env, declared.help)
