"""The fake accelerator behaves as a real one where tests look: another memory, with torch's own rules."""

from __future__ import annotations

import copy
import ctypes
import gc
import io
import mmap
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import nn

from acc_ops import devices, fake_driver, fake_kernels
from acc_ops.fake_accelerator import Copy, FakeAccelerator, fake_accelerator
from acc_ops.testing import run_threads


@pytest.fixture
def fake(needs_fake_accelerator: None) -> Iterator[FakeAccelerator]:
    with fake_accelerator(count=2, total_bytes=2**20) as accelerator:
        yield accelerator


def test_a_tensor_moves_there_and_back_and_both_copies_are_counted(fake: FakeAccelerator) -> None:
    here = torch.arange(6.0).reshape(2, 3)
    there = here.to(fake.devices[1], non_blocking=True)
    assert there.device == fake.devices[1]
    assert not there.is_cpu
    assert there.to(fake.devices[1]) is there
    assert torch.equal(there.cpu(), here)
    host = torch.device("cpu")
    assert fake.log == [Copy(host, fake.devices[1], 24, True), Copy(fake.devices[1], host, 24, False)]
    assert (fake.copies_to_device, fake.bytes_to_device, fake.copies_to_host, fake.bytes_to_host) == (
        1,
        24,
        1,
        24,
    )
    fake.reset()
    assert there.sum().item() == 15
    assert (fake.copies_to_device, fake.bytes_to_host) == (0, 4)


def test_the_memory_is_another_one(fake: FakeAccelerator) -> None:
    here = torch.zeros(3)
    there = here.to(fake.device)
    here += 1
    assert there.tolist() == [0, 0, 0]
    there.copy_(here)
    view = there[1:]
    view *= 5
    assert there.tolist() == [1, 5, 5]
    assert view.data_ptr() == there.data_ptr() + 4
    assert here.tolist() == [1, 1, 1]


def test_mixing_devices_is_the_error_that_torch_raises(fake: FakeAccelerator) -> None:
    here, there, other = (torch.ones(2).to(device) for device in ("cpu", *fake.devices))
    for operation in (
        lambda: here + there,
        lambda: there + other,
        lambda: torch.cat([here, there]),
        lambda: there.add_(here),
        lambda: nn.Linear(2, 2)(there),
        lambda: nn.Linear(2, 2, device=fake.device)(here),
        lambda: nn.functional.embedding(torch.tensor([0]), there.reshape(1, 2)),
    ):
        with pytest.raises(RuntimeError, match="same device"):
            operation()
    assert (there + torch.tensor(1.0)).tolist() == [2, 2]  # a number, for torch
    assert there[torch.tensor([1])].device == fake.device  # an index may be on the CPU


@pytest.mark.parametrize(
    "dtype", [torch.float64, torch.bfloat16, torch.float8_e4m3fn, torch.int16, torch.bool, torch.complex64]
)
def test_every_dtype_keeps_its_values(fake: FakeAccelerator, dtype: torch.dtype) -> None:
    here = torch.tensor([0.0, 1.0, -2.0]).to(dtype)
    there = here.to(fake.device)
    assert there.dtype == dtype
    assert there.cpu().view(torch.uint8).tolist() == here.view(torch.uint8).tolist()


def test_numbers_keep_the_dtype_they_have_on_the_cpu(fake: FakeAccelerator) -> None:
    for here in (
        torch.tensor([7, 8]),
        torch.tensor([7.0]).half(),
        torch.tensor([1 / 3], dtype=torch.float64),
    ):
        there = here.to(fake.device)
        for operation in (
            lambda x: x % 3,
            lambda x: x * 0.1,
            lambda x: x / 3,
            lambda x: x**2,
            lambda x: torch.where(x > 7, x, 0),
            lambda x: x.clamp(1, 7),
        ):
            assert torch.equal(operation(there).cpu(), operation(here))
            assert operation(there).dtype == operation(here).dtype


def test_factories_make_tensors_there(fake: FakeAccelerator) -> None:
    made = [
        torch.zeros(2, device=fake.device),
        torch.tensor([1, 2], device=fake.kind),
        torch.arange(3, device=fake.device),
        torch.eye(2, device=fake.device),
        torch.full((2,), 3.0, device=fake.device),
        torch.randperm(4, device=fake.device),
        torch.ones(2).to(fake.device).new_zeros(2),
        torch.empty_like(torch.ones(2), device=fake.device),
    ]
    with fake.device:
        made += [torch.rand(2), nn.Linear(1, 1).weight]
    assert {tensor.device for tensor in made} == {fake.device}
    assert made[5].sort().values.tolist() == [0, 1, 2, 3]
    with torch.get_device_module(fake.kind).device(1):
        assert torch.zeros(1, device=fake.kind).device == fake.devices[1]
    with pytest.raises(RuntimeError, match="only 2"):
        torch.zeros(1, device=torch.device(fake.kind, 2))


def test_moving_a_module_keeps_its_parameters(fake: FakeAccelerator) -> None:
    model = nn.ModuleDict({"a": nn.Linear(2, 2), "b": nn.BatchNorm1d(2)})
    model["c"] = nn.Linear(2, 2)
    model["c"].weight = model["a"].weight
    before = list(model.parameters())
    model.to(fake.device)
    assert all(one is other for one, other in zip(before, model.parameters(), strict=True))
    assert model["c"].weight is model["a"].weight
    assert {tensor.device for tensor in model.state_dict().values()} == {fake.device}
    model.cpu()
    assert {tensor.device.type for tensor in model.state_dict().values()} == {"cpu"}
    parameter = nn.Parameter(torch.zeros(2))
    parameter.data = torch.ones(2, device=fake.device)
    assert parameter.device == fake.device
    assert parameter.tolist() == [1, 1]


def _train(model: nn.Module, batch: torch.Tensor) -> tuple[list[torch.Tensor], torch.Tensor]:
    optimizer = torch.optim.AdamW(model.parameters(), 0.1, eps=1.0)
    for _ in range(2):
        optimizer.zero_grad()
        loss = model(batch).square().mean() + sum(p.square().sum() for p in model.parameters())
        loss.backward()
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
    return [parameter.detach().cpu() for parameter in model.parameters()], loss.detach().cpu()


@pytest.mark.parametrize("name", ["mlp", "convolution", "transformer", "lstm"])
def test_training_gives_what_it_gives_on_the_cpu(fake: FakeAccelerator, name: str) -> None:
    class Lstm(nn.LSTM):
        def forward(self, batch: torch.Tensor) -> torch.Tensor:
            return super().forward(batch)[0]

    models = {
        "mlp": (nn.Sequential(nn.Linear(4, 8), nn.LayerNorm(8), nn.GELU(), nn.Linear(8, 2)), (3, 4)),
        "convolution": (
            nn.Sequential(nn.Conv2d(2, 4, 3), nn.BatchNorm2d(4), nn.ReLU(), nn.ConvTranspose2d(4, 2, 2)),
            (2, 2, 5, 5),
        ),
        "transformer": (nn.TransformerEncoderLayer(4, 2, 8, dropout=0.0, batch_first=True), (2, 3, 4)),
        "lstm": (Lstm(3, 4), (2, 2, 3)),
    }
    model, shape = models[name]
    there = copy.deepcopy(model).to(fake.device)
    batch = torch.rand(shape)
    wanted, wanted_loss = _train(model, batch)
    got, loss = _train(there, batch.to(fake.device))
    torch.testing.assert_close(loss, wanted_loss, rtol=1e-3, atol=1e-3)
    torch.testing.assert_close(got, wanted, rtol=1e-3, atol=1e-3)


def test_memory_is_counted_while_tensors_live(fake: FakeAccelerator) -> None:
    weights = torch.zeros(1000, device=fake.device)
    assert fake.allocated_bytes() == 4000
    temporary = weights + 1
    assert fake.allocated_bytes() == 8000
    part = temporary[:1]
    del temporary
    assert fake.allocated_bytes() == 8000  # the view keeps it
    del part
    assert (fake.allocated_bytes(), fake.peak_bytes(), fake.allocated_bytes(1)) == (4000, 8000, 0)
    assert devices.memory_info(fake.device) == (2**20 - 4000, 2**20)
    fake.reset()
    assert fake.peak_bytes() == 4000


def test_too_much_is_torchs_out_of_memory_error(fake: FakeAccelerator) -> None:
    with pytest.raises(torch.OutOfMemoryError, match="out of memory"):
        torch.zeros(2**20, device=fake.device)
    fake.set_total_bytes(10, index=1)
    with pytest.raises(torch.OutOfMemoryError, match="Device 1 has 10 bytes"):
        torch.zeros(3).to(fake.devices[1])
    gc.collect()
    assert fake.allocated_bytes() == fake.allocated_bytes(1) == 0


def test_random_numbers_are_the_devices_own(fake: FakeAccelerator) -> None:
    functions = torch.get_device_module(fake.kind)
    functions.manual_seed_all(7)
    before = torch.get_rng_state()
    states = functions.get_rng_state_all()
    first = torch.rand(3, device=fake.device)
    dropped = nn.functional.dropout(torch.ones(8, device=fake.device))
    assert torch.equal(torch.get_rng_state(), before)
    assert torch.equal(functions.get_rng_state(1), states[1])
    assert not torch.equal(functions.get_rng_state(0), states[0])
    functions.set_rng_state(states[0], 0)
    assert torch.equal(torch.rand(3, device=fake.device), first)
    assert torch.equal(nn.functional.dropout(torch.ones(8, device=fake.device)), dropped)
    assert torch.equal(torch.rand(3, device=fake.devices[1]), first.to(fake.devices[1]))


def test_outputs_are_resized_and_memory_can_be_shared(fake: FakeAccelerator) -> None:
    one = torch.ones(2, 2, device=fake.device)
    out = torch.empty(0, device=fake.device)
    torch.add(one, one, out=out)
    assert out.tolist() == [[2, 2], [2, 2]]
    out.resize_(3)
    assert out.tolist() == [2, 2, 2]
    assert out.resize_(5).shape == (5,)
    other = torch.empty(0, device=fake.device).set_(one.untyped_storage())
    other[0] = 9
    assert one[0, 0].item() == 9


def test_deepcopy_save_and_load_keep_the_device(fake: FakeAccelerator) -> None:
    there = torch.arange(4.0, device=fake.devices[1])[1:]
    assert copy.deepcopy(there).device == fake.devices[1]
    assert copy.deepcopy(there).tolist() == [1, 2, 3]
    number = torch.tensor(3, device=fake.device)
    assert (copy.deepcopy(number).device, copy.deepcopy(number).item()) == (fake.device, 3)
    file = io.BytesIO()
    torch.save({"there": there}, file)
    for where, device in ((None, fake.devices[1]), ("cpu", torch.device("cpu")), (fake.device, fake.device)):
        file.seek(0)
        loaded = torch.load(file, map_location=where)["there"]
        assert loaded.device == device
        assert loaded.tolist() == [1, 2, 3]


def test_threads_share_it_and_train_on_it(fake: FakeAccelerator) -> None:
    def rank(index: int) -> list[float]:
        weight = torch.ones(2, device=fake.devices[index], requires_grad=True)
        (weight * (index + 1)).sum().backward()
        assert weight.grad is not None
        assert weight.grad.device == fake.devices[index]
        return weight.grad.tolist()

    from acc_ops import current_world

    assert run_threads(2, lambda: rank(current_world().rank)) == [[1, 1], [2, 2]]


def test_memory_that_is_kept_for_a_stream_is_noted(fake: FakeAccelerator) -> None:
    functions = torch.get_device_module(fake.kind)
    first, second = functions.Stream(fake.device), functions.Stream(fake.device)
    assert first != second
    assert first.device == fake.device
    for stream in (first, second):
        torch.ones(3, device=fake.device).record_stream(stream)
    assert fake.kept == [(first, 12), (second, 12)]
    fake.reset()
    assert fake.kept == []


def test_streams_and_events_record_what_they_are_asked(fake: FakeAccelerator) -> None:
    functions = torch.get_device_module(fake.kind)
    side = functions.Stream(fake.devices[1])
    usual = functions.current_stream(1)
    with functions.stream(side):
        assert functions.current_stream(1) is side
        assert functions.current_stream(0) is not side
        event = side.record_event()
    assert functions.current_stream(1) is usual
    assert event.query()
    assert event.recorded_on is side
    usual.wait_event(event)
    usual.wait_stream(side)
    assert usual.log == [("wait_event", event), ("wait_stream", side)]


@pytest.mark.usefixtures("needs_fake_accelerator")
def test_it_is_the_present_kind_only_inside() -> None:
    before, threads = devices.present_kind(), torch.autograd.is_multithreading_enabled()
    with fake_accelerator(count=3, autocast_bf16=False) as fake:
        assert devices.present_kind() == fake.kind
        assert devices.device_count(fake.kind) == 3
        assert not devices.device_row(fake.device).autocast_bf16
        left = torch.ones(1, device=fake.device)
        with pytest.raises(RuntimeError, match="only one at a time"), fake_accelerator():
            pass
    assert devices.present_kind() == before
    assert torch.autograd.is_multithreading_enabled() == threads
    assert not hasattr(torch, fake.kind)
    for operation in (lambda: torch.ones(1, device=torch.device(fake.kind, 0)), lambda: left + left):
        with pytest.raises(RuntimeError, match=fake.kind):
            operation()
    with fake_accelerator() as again:
        assert torch.ones(1, device=again.device).tolist() == [1]
        assert again.copies_to_host == 1
    with pytest.raises(ValueError, match="count"), fake_accelerator(count=0):
        pass


@pytest.mark.usefixtures("needs_fake_accelerator")
def test_an_error_inside_leaves_nothing_behind() -> None:
    table = devices.DEVICE_TABLE
    with pytest.raises(KeyError), fake_accelerator():
        raise KeyError
    assert devices.DEVICE_TABLE is table
    with fake_accelerator() as fake:
        assert torch.ones(1, device=fake.device).tolist() == [1]


def _what_torch_says() -> list[Any]:
    weight = torch.ones(2, requires_grad=True)
    (weight * 3).sum().backward()
    assert weight.grad is not None
    said: list[Any] = [
        torch.autograd.is_multithreading_enabled(),
        torch.UntypedStorage.clone,
        list(torch.serialization._package_registry),
        devices.DEVICE_TABLE,
        weight.grad.tolist(),
    ]
    for ask in (
        torch.cuda.is_available,
        torch.cuda.is_initialized,
        torch.cuda.device_count,
        torch.backends.cuda.is_built,
        torch.accelerator.is_available,
        torch.accelerator.current_accelerator,
        torch.accelerator.device_count,
        torch.get_device_module,
    ):
        try:
            said.append(ask())
        except RuntimeError as error:  # some versions, where there is no accelerator
            said.append(str(error))
    return said


@pytest.mark.usefixtures("needs_fake_accelerator")
def test_afterwards_torch_says_what_it_said_before(monkeypatch: pytest.MonkeyPatch) -> None:
    before = _what_torch_says()
    with fake_accelerator() as fake:
        assert torch.get_device_module(fake.kind).device_count() == fake.count
        assert not torch.cuda.is_available()
    assert _what_torch_says() == before
    with pytest.raises(KeyError), fake_accelerator():
        raise KeyError
    assert _what_torch_says() == before

    def broken(_: Any) -> None:
        raise OSError("cannot be set up")

    monkeypatch.setattr(fake_kernels, "install", broken)
    with pytest.raises(OSError, match="cannot be set up"), fake_accelerator():
        pass
    assert _what_torch_says() == before
    assert not hasattr(torch, FakeAccelerator.kind)


@pytest.mark.usefixtures("needs_fake_accelerator")
def test_what_is_behind_the_last_page_of_a_table_is_not_read() -> None:
    page = mmap.PAGESIZE
    with mmap.mmap(-1, 2 * page) as memory:
        memory.write(bytes(range(1, 9)) * (2 * page // 8))
        first = ctypes.c_char.from_buffer(memory)
        start = ctypes.addressof(first)
        protect = ctypes.CDLL(None).mprotect
        protect.argtypes = [ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int]
        assert fake_driver._readable(start + page - 16, 64) == bytes(range(1, 9)) * 8
        assert protect(start + page, page, 0) == 0
        assert fake_driver._readable(start + page - 16, 64) == bytes(range(1, 9)) * 2
        assert protect(start + page, page, mmap.PROT_READ | mmap.PROT_WRITE) == 0
        del first
