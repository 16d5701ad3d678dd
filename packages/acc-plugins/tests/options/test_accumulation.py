"""GradientAccumulationPlugin."""

from __future__ import annotations

from acc_ops.options import from_env, sources
from acc_plugins.options.accumulation import GradientAccumulationPlugin


def test_the_number_of_steps_comes_from_the_launcher_and_arguments_win() -> None:
    variables = {"ACCELERATE_GRADIENT_ACCUMULATION_STEPS": "8"}
    plugin = from_env(GradientAccumulationPlugin, variables)
    assert plugin.num_steps == 8
    assert sources(plugin)["num_steps"] == "environment"
    assert from_env(GradientAccumulationPlugin, variables, num_steps=2).num_steps == 2


def test_text_becomes_a_number() -> None:
    assert GradientAccumulationPlugin("4").num_steps == 4
