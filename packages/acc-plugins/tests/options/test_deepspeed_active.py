"""Which DeepSpeed plugin is in use, and functions that need one."""

from __future__ import annotations

from collections.abc import Iterator
from types import SimpleNamespace

import pytest

from acc_ops.enums import DistributedType
from acc_plugins import DeepSpeedPlugin, deepspeed_required, get_active_deepspeed_plugin
from acc_plugins.options import deepspeed_active


@pytest.fixture
def nobody_answers() -> Iterator[None]:
    before = list(deepspeed_active._ASK)
    deepspeed_active._ASK.clear()
    yield
    deepspeed_active._ASK[:] = before


def test_the_selected_one_of_several_plugins_is_active() -> None:
    plugins = {"a": DeepSpeedPlugin(), "b": DeepSpeedPlugin()}
    state = SimpleNamespace(distributed_type=DistributedType.DEEPSPEED, deepspeed_plugins=plugins)
    with pytest.raises(ValueError, match="select_deepspeed_plugin with one of a, b"):
        get_active_deepspeed_plugin(state)
    plugins["b"].select(_from_accelerator_state=True)
    assert get_active_deepspeed_plugin(state) is plugins["b"]
    state.deepspeed_plugins = None
    assert get_active_deepspeed_plugin(state) is None


def test_another_kind_of_run_has_no_active_plugin() -> None:
    with pytest.raises(ValueError, match="this run is NO"):
        get_active_deepspeed_plugin(SimpleNamespace(distributed_type=DistributedType.NO))


def test_a_function_that_needs_deepspeed_runs_with_it_and_without_any_run(nobody_answers: None) -> None:
    @deepspeed_required
    def double(value: int) -> int:
        """Twice the value."""
        return 2 * value

    assert (double(2), double.__name__, double.__doc__) == (4, "double", "Twice the value.")
    deepspeed_active.answer_with(lambda: None)
    assert double(2) == 4
    deepspeed_active.answer_with(lambda: SimpleNamespace(distributed_type=DistributedType.DEEPSPEED))
    assert double(2) == 4
    deepspeed_active.answer_with(lambda: SimpleNamespace(distributed_type=DistributedType.MULTI_CPU))
    with pytest.raises(ValueError, match="double needs a run with DeepSpeed, and this one is MULTI_CPU"):
        double(2)
