"""One row per kind of device: a fake row shows that nothing else has to be edited."""

from __future__ import annotations

import types
from collections.abc import Iterator

import pytest
import torch

from acc_ops import devices
from acc_ops.devices import (
    DEVICE_TABLE,
    DeviceError,
    DeviceRow,
    MemoryInfo,
    canonical_device,
    default_device,
    device_row,
    memory_info,
    present_kind,
)


class FakeModule(types.ModuleType):
    """What a vendor's package adds to torch; remembers what it is asked."""

    def __init__(self) -> None:
        super().__init__("torch.privateuseone")
        self.calls: list[object] = []
        self.awake = False
        self.current = 0

    def device_count(self) -> int:
        return 2

    def is_initialized(self) -> bool:
        return self.awake

    def current_device(self) -> int:
        assert self.awake, "asking for the current device would start the driver"
        return self.current

    def set_device(self, device: torch.device) -> None:
        self.calls.append(("set_device", device.index))

    def synchronize(self, device: torch.device) -> None:
        self.calls.append(("synchronize", device.index))

    def empty_cache(self) -> None:
        self.calls.append("empty_cache")

    def mem_get_info(self, index: int) -> tuple[int, int]:
        return 100 + index, 200


@pytest.fixture
def fake(monkeypatch: pytest.MonkeyPatch) -> Iterator[FakeModule]:
    """A machine with two devices of a kind that only a new row of the table knows."""
    module = FakeModule()
    row = DeviceRow(
        kind="privateuseone",
        module="privateuseone",
        backend="fakeccl",
        distributed_type="MULTI_FAKE",
        rng="fake",
        memory=devices.torch_memory,
    )
    monkeypatch.setattr(torch, "privateuseone", module, raising=False)
    monkeypatch.setattr(devices, "DEVICE_TABLE", (row, *DEVICE_TABLE))
    yield module
    devices._has_devices.cache_clear()


@pytest.fixture
def cpu_only(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(devices, "DEVICE_TABLE", (DEVICE_TABLE[-1],))


def test_a_new_row_is_found_and_answers_everything(fake: FakeModule) -> None:
    assert present_kind() == "privateuseone"
    assert canonical_device(1) == torch.device("privateuseone", 1)
    assert default_device(1) == torch.device("privateuseone", 1)
    assert device_row("privateuseone").backend == "fakeccl"
    assert memory_info("privateuseone:1") == MemoryInfo(101, 200)
    devices.set_device("privateuseone:1")
    assert fake.calls == [("set_device", 1)]


def test_the_current_device_is_only_asked_for_when_the_driver_runs(fake: FakeModule) -> None:
    assert canonical_device("privateuseone").index == 0
    fake.awake, fake.current = True, 1
    assert canonical_device("privateuseone").index == 1


def test_nothing_is_waited_for_or_freed_while_the_driver_sleeps(fake: FakeModule) -> None:
    devices.synchronize()
    devices.empty_cache()
    assert fake.calls == []
    fake.awake = True
    devices.synchronize("privateuseone:1")
    devices.empty_cache()
    assert fake.calls == [("synchronize", 1), "empty_cache"]


def test_more_ranks_than_devices_are_refused(fake: FakeModule) -> None:
    with pytest.raises(DeviceError, match=r"local rank 2 has no device.*2 privateuseone devices"):
        default_device(2)


def test_a_rank_that_sees_one_device_takes_it(fake: FakeModule, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(fake, "device_count", lambda: 1)
    assert default_device(3).index == 0


def test_without_an_accelerator_the_device_is_the_cpu(cpu_only: None) -> None:
    assert present_kind() == "cpu"
    assert default_device(5) == torch.device("cpu")
    devices.synchronize()
    devices.empty_cache()
    # an int comes from a device map made for another machine
    assert canonical_device(3) == torch.device("cuda", 3)


@pytest.mark.parametrize("given", ["cpu", "cpu:0", torch.device("cpu", 0)])
def test_the_cpu_has_no_index(given: str | torch.device) -> None:
    assert canonical_device(given) == torch.device("cpu")
    assert canonical_device("meta:0") == torch.device("meta")


@pytest.mark.parametrize("given", ["disk", "cuda:x", -1, True, 1.5, None])
def test_what_is_no_device_is_named(given: object) -> None:
    with pytest.raises(DeviceError, match=str(given)):
        canonical_device(given)


def test_an_unknown_kind_lists_the_known_ones() -> None:
    with pytest.raises(DeviceError, match=r"'abacus'.*cuda.*cpu"):
        device_row("abacus")


def test_the_memory_of_the_cpu_is_the_systems() -> None:
    info = memory_info("cpu")
    assert 0 < info.free_bytes <= info.total_bytes


def test_a_kind_that_cannot_tell_its_memory_says_so(
    fake: FakeModule, monkeypatch: pytest.MonkeyPatch
) -> None:
    silent = devices.DEVICE_TABLE[0]._replace(memory=None)
    monkeypatch.setattr(devices, "DEVICE_TABLE", (silent, *DEVICE_TABLE))
    with pytest.raises(DeviceError, match="memory of privateuseone:0 is not known"):
        memory_info("privateuseone:0")


def test_every_kind_is_one_complete_row() -> None:
    kinds = [row.kind for row in DEVICE_TABLE]
    assert sorted(kinds) == sorted(
        ["cuda", "xpu", "mps", "npu", "mlu", "sdaa", "musa", "hpu", "neuron", "xla", "cpu"]
    )
    for row in DEVICE_TABLE:
        assert row.backend
        assert row.distributed_type in ("NO", "XLA") or row.distributed_type.startswith("MULTI_")


def test_asking_does_not_start_cuda() -> None:
    present_kind()
    canonical_device("cuda")
    assert not torch.cuda.is_initialized()


def test_the_kind_without_float64_is_known() -> None:
    assert [row.kind for row in DEVICE_TABLE if not row.float64] == ["mps"]


def test_a_kind_is_not_there_before_torch_can_use_it(
    fake: FakeModule, monkeypatch: pytest.MonkeyPatch
) -> None:
    later = devices.DEVICE_TABLE[0]._replace(since=(99, 0))
    monkeypatch.setattr(devices, "DEVICE_TABLE", (later, *DEVICE_TABLE))
    assert present_kind() != "privateuseone"
    assert device_row("xpu").since == (2, 7)


def test_a_kind_of_one_device_is_waited_for_without_naming_it(
    fake: FakeModule, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(
        devices, "DEVICE_TABLE", (devices.DEVICE_TABLE[0]._replace(single=True), *DEVICE_TABLE)
    )
    monkeypatch.setattr(fake, "synchronize", lambda: fake.calls.append("synchronize"))
    fake.awake = True
    devices.synchronize()
    assert fake.calls == ["synchronize"]
    assert [row.kind for row in DEVICE_TABLE if row.single] == ["mps"]


def test_mps_scales_losses_from_torch_2_8_on() -> None:
    version = tuple(int(part) for part in torch.__version__.split(".")[:2])
    assert device_row("mps").grad_scaler is (version >= (2, 8))
    assert [row.kind for row in DEVICE_TABLE if not row.grad_scaler and row.kind != "mps"] == [
        "neuron",
        "xla",
    ]


def test_the_package_of_a_kind_is_looked_for_with_the_other_libraries(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    asked: list[str] = []
    monkeypatch.setattr(devices, "is_available", lambda name: asked.append(name) or False)
    packages = {
        row.package for row in DEVICE_TABLE if row.package and row.module and not hasattr(torch, row.module)
    }
    for row in DEVICE_TABLE:
        devices.device_module(row)
    assert set(asked) == packages
    assert "torch_npu" in packages
