"""What all option classes have in common: one declaration from which everything else follows."""

from __future__ import annotations

import argparse
import copy
import dataclasses
import inspect
import json
from datetime import timedelta
from typing import Any

import pytest

from acc_ops.handlers import KwargsHandler
from acc_ops.options import (
    OptionError,
    add_flags,
    as_table,
    from_env,
    from_mapping,
    options_of,
    to_env,
    to_mapping,
)
from acc_plugins.options.accumulation import GradientAccumulationPlugin
from acc_plugins.options.compile import TorchDynamoPlugin
from acc_plugins.options.dataloader import DataLoaderConfiguration
from acc_plugins.options.kwargs import (
    AutocastKwargs,
    DistributedDataParallelKwargs,
    GradScalerKwargs,
    InitProcessGroupKwargs,
    ProfileKwargs,
)
from acc_plugins.options.project import CheckpointPolicy, ProjectConfiguration

# parameters in order, with a value that is not the default
CLASSES: dict[type, dict[str, Any]] = {
    GradientAccumulationPlugin: {
        "num_steps": 4,
        "adjust_scheduler": False,
        "sync_with_dataloader": False,
        "sync_each_batch": True,
        "average_short_window": True,
    },
    DataLoaderConfiguration: {
        "split_batches": True,
        "dispatch_batches": False,
        "even_batches": False,
        "use_seedable_sampler": True,
        "data_seed": 7,
        "non_blocking": True,
        "use_stateful_dataloader": True,
    },
    ProjectConfiguration: {
        "project_dir": "a",
        "logging_dir": "b",
        "automatic_checkpoint_naming": True,
        "total_limit": 3,
        "iteration": 2,
        "save_on_each_node": True,
        "keep": None,  # not beside total_limit: see test_project.py
    },
    TorchDynamoPlugin: {
        "backend": "eager",
        "mode": "default",
        "fullgraph": True,
        "dynamic": False,
        "options": {"trace.enabled": True},
        "disable": True,
        "use_regional_compilation": True,
    },
    AutocastKwargs: {"enabled": False, "cache_enabled": True},
    GradScalerKwargs: {
        "init_scale": 2.0,
        "growth_factor": 3.0,
        "backoff_factor": 0.25,
        "growth_interval": 5,
        "enabled": False,
    },
    InitProcessGroupKwargs: {"backend": "gloo", "init_method": "env://", "timeout": timedelta(seconds=5)},
    DistributedDataParallelKwargs: {
        "dim": 1,
        "broadcast_buffers": False,
        "bucket_cap_mb": 5,
        "find_unused_parameters": True,
        "check_reduction": True,
        "gradient_as_bucket_view": True,
        "static_graph": True,
        "comm_hook": "power_sgd",
        "comm_wrapper": "fp16",
        "comm_state_option": {"matrix_approximation_rank": 2},
    },
    ProfileKwargs: {
        "activities": ["cpu"],
        "schedule_option": {"active": 1},
        "on_trace_ready": print,
        "record_shapes": True,
        "profile_memory": True,
        "with_stack": True,
        "with_flops": True,
        "with_modules": True,
        "output_trace_dir": "traces",
    },
}


@pytest.fixture(params=CLASSES, ids=lambda cls: cls.__name__)
def cls(request: pytest.FixtureRequest) -> type:
    return request.param


def test_parameters_come_in_the_documented_order(cls: type) -> None:
    assert list(inspect.signature(cls).parameters) == list(CLASSES[cls])
    by_position, by_name = cls(*CLASSES[cls].values()), cls(**CLASSES[cls])
    assert by_position == by_name != cls()


def test_every_field_is_declared_with_a_help_text(cls: type) -> None:
    declared = {option.name: option for option in options_of(cls)}
    assert list(declared) == [field.name for field in dataclasses.fields(cls)]
    assert all(option.help for option in declared.values())
    assert all(f"`{name}`" in as_table(cls) for name in declared)


def test_environment_round_trip(cls: type) -> None:
    instance = cls(**CLASSES[cls])
    variables = to_env(instance)
    again = from_env(cls, variables)
    for option in options_of(cls):
        if option.env is not None:
            assert option.env in variables
            assert getattr(again, option.name) == getattr(instance, option.name)


def test_file_round_trip(cls: type) -> None:
    given = {name: value for name, value in CLASSES[cls].items() if name != "on_trace_ready"}
    instance = cls(**given)
    assert from_mapping(cls, json.loads(json.dumps(to_mapping(instance)))) == instance


def test_flags_are_derived_from_the_declaration(cls: type) -> None:
    parser = argparse.ArgumentParser(allow_abbrev=False)
    add_flags(parser, cls)
    shown = parser.format_help()
    for option in options_of(cls):
        assert option.flag is None or f"--{option.flag}" in shown


def test_building_one_writes_nothing_to_the_environment(cls: type, monkeypatch: pytest.MonkeyPatch) -> None:
    import os

    before = dict(os.environ)
    cls(**CLASSES[cls])
    assert dict(os.environ) == before


@pytest.mark.parametrize("handler", [kind for kind in CLASSES if issubclass(kind, KwargsHandler)])
def test_a_default_handler_has_no_kwargs_and_a_changed_one_those_that_differ(
    handler: type[KwargsHandler],
) -> None:
    assert handler().to_kwargs() == {}
    name, value = next(iter(CLASSES[handler].items()))
    assert name in handler(**{name: value}).to_kwargs()


def test_copies_are_equal_and_independent(cls: type) -> None:
    instance = cls(**CLASSES[cls])
    assert copy.deepcopy(instance) == instance


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: GradientAccumulationPlugin(0), "num_steps must be at least 1, got 0"),
        (lambda: GradientAccumulationPlugin(num_steps=2.5), "num_steps: expected a whole number, got 2.5"),
        (lambda: DataLoaderConfiguration(split_batches="perhaps"), "split_batches"),
        (lambda: DataLoaderConfiguration(data_seed="x"), "data_seed: expected a whole number, got 'x'"),
        (lambda: ProjectConfiguration(total_limit=0), "total_limit must be at least 1, got 0"),
        (lambda: ProjectConfiguration(iteration=-1), "iteration must be at least 0, got -1"),
        (lambda: ProjectConfiguration(keep=3), "keep must be a CheckpointPolicy, got 3"),
        (lambda: ProjectConfiguration(keep=CheckpointPolicy()), "keep has no effect without automatic"),
        (
            lambda: ProjectConfiguration(
                keep=CheckpointPolicy(), total_limit=2, automatic_checkpoint_naming=True
            ),
            "total_limit=2 and keep=.* both say what stays",
        ),
        (lambda: CheckpointPolicy(last=0), "last must be at least 1, got 0"),
        (lambda: CheckpointPolicy(every=0), "every must be at least 1, got 0"),
        (lambda: CheckpointPolicy(best=-1), "best must be at least 0, got -1"),
        (lambda: CheckpointPolicy(mode="least"), "mode: .*'least'"),
        (lambda: TorchDynamoPlugin("cudnn"), "'cudnn'"),
        (lambda: TorchDynamoPlugin(mode="fast"), "mode: .*'fast'"),
        (lambda: TorchDynamoPlugin(mode="max-autotune", options={}), "not both"),
        (lambda: GradScalerKwargs(init_scale=0), "init_scale must be above 0, got 0"),
        (lambda: GradScalerKwargs(growth_factor=1), "growth_factor must be above 1, got 1"),
        (lambda: GradScalerKwargs(backoff_factor=1), "backoff_factor must be between 0 and 1, got 1"),
        (lambda: GradScalerKwargs(growth_interval=0), "growth_interval must be at least 1, got 0"),
        (lambda: InitProcessGroupKwargs(timeout=-5), "positive timedelta"),
        (lambda: InitProcessGroupKwargs(timeout=timedelta(0)), "positive timedelta"),
        (lambda: DistributedDataParallelKwargs(comm_hook="zip"), "comm_hook: .*'zip'"),
        (lambda: DistributedDataParallelKwargs(comm_wrapper="fp16"), "no effect without comm_hook"),
        (
            lambda: DistributedDataParallelKwargs(comm_hook="fp16", comm_wrapper="power_sgd"),
            "comm_wrapper: .*power_sgd",
        ),
        (
            lambda: DistributedDataParallelKwargs(comm_hook="fp16", comm_state_option={"a": 1}),
            "belongs to power_sgd",
        ),
        (lambda: DistributedDataParallelKwargs(bucket_cap_mb=0), "bucket_cap_mb must be at least 1, got 0"),
        (lambda: ProfileKwargs(activities=["gpu"]), "activities: .*'gpu'"),
        (lambda: ProfileKwargs(schedule_option={"warm_up": 1}), "'warm_up': did you mean 'warmup'"),
    ],
)
def test_impossible_values_are_refused_when_the_object_is_built(make: Any, message: str) -> None:
    with pytest.raises(OptionError, match=message):
        make()
