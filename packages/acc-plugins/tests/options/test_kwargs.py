"""The keyword handlers."""

from __future__ import annotations

from datetime import timedelta

import pytest
import torch

from acc_ops.enums import DDPCommunicationHookType
from acc_ops.options import OptionError
from acc_plugins.options.kwargs import (
    DistributedDataParallelKwargs,
    InitProcessGroupKwargs,
    ProfileKwargs,
)


def test_the_timeout_depends_on_the_backend() -> None:
    assert InitProcessGroupKwargs().timeout == timedelta(seconds=600)
    assert InitProcessGroupKwargs("gloo").timeout == timedelta(seconds=1800)
    assert InitProcessGroupKwargs(timeout=30).timeout == timedelta(seconds=30)


def test_ddp_arguments_leave_out_the_communication_hook() -> None:
    options = DistributedDataParallelKwargs(find_unused_parameters=True, comm_hook="bf16")
    assert options.comm_hook is DDPCommunicationHookType.BF16
    assert options.has_comm_hook
    assert options.to_kwargs() == {"find_unused_parameters": True}
    assert not {"comm_hook", "comm_wrapper", "comm_state_option"} & set(options.to_dict())
    assert "comm_hook" in options.to_dict(ignore_keys=())


def test_a_built_profiler_records_what_was_asked_for() -> None:
    traces = []
    handler = ProfileKwargs(
        activities=["cpu"],
        schedule_option={"active": 1, "repeat": 1},
        record_shapes=True,
        on_trace_ready=lambda profiler: traces.append(profiler.key_averages(group_by_input_shape=True)),
    )
    with handler.build() as profiler:
        torch.ones(2, 3) @ torch.ones(3, 4)
        profiler.step()
    (events,) = traces
    assert any(event.key == "aten::mm" and event.input_shapes == [[2, 3], [3, 4]] for event in events)
    assert handler.build() is not handler.build()


def test_an_activity_this_torch_does_not_record_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    known = torch.profiler.ProfilerActivity.__members__
    if "HPU" in known:
        members = {name: value for name, value in known.items() if name != "HPU"}
        monkeypatch.setattr(torch.profiler, "ProfilerActivity", type("Old", (), {"__members__": members}))
    with pytest.raises(OptionError, match="does not record 'hpu'"):
        ProfileKwargs(activities=["cpu", "hpu"]).build()
