"""What a load does to the model and the disk, and what it says about it."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from torch import nn

from acc_bigmodel import (
    CheckpointMismatch,
    apply,
    init_empty_weights,
    load_checkpoint_in_model,
    open_store,
    save_weights,
)
from acc_ops.fake_accelerator import FakeAccelerator
from acc_ops.testing import count_calls


def test_a_report_says_where_everything_is(
    tied_model: nn.Module, empty_model: nn.Module, tmp_path: Path
) -> None:
    state = tied_model.state_dict()
    file = tmp_path / "x.bin"
    torch.save({**state, "step": 4, "notes": {"by": "me"}}, file)
    report = load_checkpoint_in_model(empty_model, file, {"": "cpu", "layers.1": "disk"}, tmp_path / "off")
    assert report.skipped == ("step", "notes")
    assert "its entries 'step', 'notes' are no tensors" in report.complaint()
    (written,) = map(str, (tmp_path / "off").glob("*.safetensors"))
    assert report.where == {
        name: written if name.startswith("layers.1.") else "cpu" for name in report.loaded
    }
    with pytest.raises(CheckpointMismatch, match="'step', 'notes' are no tensors"):
        load_checkpoint_in_model(tied_model, file, strict=True)


class Counting(nn.Module):
    """Keeps more than tensors in its state."""

    def __init__(self, content: object) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.zeros(2))
        self.content = content

    def get_extra_state(self) -> object:
        return self.content

    def set_extra_state(self, state: object) -> None:
        self.content = state


@pytest.mark.parametrize("device_map", [None, {"": "cpu"}])
@pytest.mark.parametrize("content", [{"scale": 3}, torch.arange(3)])
def test_what_modules_keep_beside_tensors_is_loaded(
    tmp_path: Path, device_map: dict | None, content: object
) -> None:
    file = tmp_path / "x.bin"
    torch.save(nn.Sequential(Counting(content), nn.Linear(2, 2)).state_dict(), file)
    model = nn.Sequential(Counting(None), nn.Linear(2, 2))
    report = load_checkpoint_in_model(model, file, device_map, strict=True)
    assert str(model[0].content) == str(content)
    assert (report.skipped, report.unexpected) == ((), ())
    torch.save({"0.weight": torch.zeros(2)}, file)
    with pytest.raises(CheckpointMismatch, match=r"'0\._extra_state'"):
        load_checkpoint_in_model(nn.Sequential(Counting(None)), file, device_map, strict=True)


@pytest.mark.parametrize("safe", [True, False])
@pytest.mark.parametrize("empty", [True, False])
def test_a_load_that_fails_in_its_middle_changes_nothing(
    tied_model: nn.Module,
    new_model: Callable[[], nn.Module],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    safe: bool,
    empty: bool,
) -> None:
    save_weights(tied_model.state_dict(), tmp_path, "model", safe=safe)
    model = new_model()
    if empty:
        model.to("meta")
    tensors = dict(model.state_dict(keep_vars=True))
    before = {name: tensor.detach().clone() for name, tensor in tensors.items()}
    copies = []

    def copy_jobs(target: torch.Tensor, source: torch.Tensor, *args: object) -> list:
        def job() -> None:
            copies.append(source)
            if len(copies) == 5:
                raise MemoryError("no room for the fifth")

        return [job]

    monkeypatch.setattr(apply, "copy_jobs", copy_jobs)
    with pytest.raises(MemoryError, match="no room for the fifth"):
        load_checkpoint_in_model(model, tmp_path, {"": "cpu"}, dtype=torch.float64)
    after = model.state_dict(keep_vars=True)
    assert all(after[name] is tensor for name, tensor in tensors.items())
    assert all(tensor.is_meta or torch.equal(tensor, before[name]) for name, tensor in after.items())


@pytest.mark.parametrize("safe", [True, False])
@pytest.mark.parametrize("dtype", [torch.bfloat16, None])
@pytest.mark.skipif(not Path("/proc/self/clear_refs").exists(), reason="needs /proc")
def test_a_load_needs_little_more_memory_than_its_result(
    tmp_path: Path, safe: bool, dtype: torch.dtype | None
) -> None:
    """By the kernel's own high-water mark, which pages of the file count for, too."""

    def kilobytes(name: str) -> int:
        lines = Path("/proc/self/status").read_text().splitlines()
        return int(next(line for line in lines if line.startswith(name)).split()[1])

    def build() -> nn.Module:
        return nn.Sequential(*[nn.Linear(3000, 2000, bias=False) for _ in range(6)])

    save_weights(build().state_dict(), tmp_path, "model", "60MB", safe)  # 144 MB
    with init_empty_weights():
        model = build()
    load_checkpoint_in_model(nn.Linear(1, 1), _small(tmp_path / "small"), dtype=dtype)  # what starts once
    before = kilobytes("VmRSS")
    Path("/proc/self/clear_refs").write_text("5")
    load_checkpoint_in_model(model, tmp_path, {"": "cpu"}, dtype=dtype)
    mapped = safe and dtype is None
    result = 0 if mapped else sum(parameter.nbytes for parameter in model.parameters())
    assert (kilobytes("VmHWM") - before) * 1024 < result + 70_000_000


def _small(folder: Path) -> Path:
    save_weights(nn.Linear(1, 1).state_dict(), folder, "model")
    return folder


@pytest.mark.parametrize("device_map", [None, {"": "cpu"}, {"": "disk"}])
def test_loading_a_model_of_many_tensors_is_linear(tmp_path: Path, device_map: dict | None) -> None:
    def calls(count: int) -> int:
        with init_empty_weights():
            model = nn.ModuleList([nn.Linear(1, 1) for _ in range(count)])
        state = {name: torch.zeros(value.shape) for name, value in model.state_dict().items()}
        folder = tmp_path / str(count)
        save_weights(state, folder, "model", max(state[name].nbytes for name in state) * count // 2)
        return count_calls(lambda: load_checkpoint_in_model(model, folder, device_map, folder / "off"))

    calls(10)
    assert calls(1200) < 5 * calls(300)


def test_integers_of_another_width_are_converted_on_the_way_to_the_disk(tmp_path: Path) -> None:
    class Table(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.register_buffer("rows", torch.arange(6).reshape(2, 3))

    save_weights({"rows": torch.arange(6, dtype=torch.int32).reshape(2, 3) + 1}, tmp_path, "model")
    model = Table()
    report = load_checkpoint_in_model(model, tmp_path, {"": "disk"}, tmp_path / "off", offload_buffers=True)
    (file,) = (tmp_path / "off").glob("*.safetensors")
    store = open_store(file)
    assert report.cast == ("rows",)
    assert store["rows"].dtype == torch.int64
    assert store["rows"].tolist() == [[1, 2, 3], [4, 5, 6]]


@pytest.mark.parametrize("safe", [True, False])
@pytest.mark.parametrize("dtype", [None, torch.bfloat16])
def test_an_accelerator_gets_its_tensors_and_keeps_the_ones_it_has(
    tied_model: nn.Module,
    new_model: Callable[[], nn.Module],
    tmp_path: Path,
    fake: FakeAccelerator,
    safe: bool,
    dtype: torch.dtype | None,
) -> None:
    save_weights(tied_model.state_dict(), tmp_path, "model", "0.3KB", safe)
    device = fake.device
    model = new_model()
    model.layers[0].to(device)
    kept = model.layers[0].up.weight
    report = load_checkpoint_in_model(model, tmp_path, {"": 0, "layers.1": "cpu"}, dtype=dtype)
    assert (model.layers[0].up.weight is kept) is (dtype is None)
    for name, tensor in model.state_dict().items():
        wanted = tied_model.state_dict()[name]
        assert tensor.device.type == ("cpu" if name.startswith("layers.1.") else device.type), name
        assert torch.equal(tensor.cpu(), wanted.to(tensor.dtype)), name
        assert tensor.dtype == (dtype if dtype and wanted.is_floating_point() else wanted.dtype)
        assert report.where[name] == str(tensor.device)
    assert model.embed.weight is model.head.weight
