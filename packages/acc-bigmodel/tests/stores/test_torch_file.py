"""Files written by torch.save."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from acc_bigmodel.stores.torch_file import TorchFileStore


def test_tensors_are_read_and_others_listed(tmp_path: Path) -> None:
    torch.save({"w": torch.arange(3), "step": 4}, tmp_path / "x.bin")
    store = TorchFileStore(tmp_path / "x.bin")
    assert torch.equal(store["w"], torch.arange(3))
    assert store.others == ["step"]


def test_the_old_format_can_be_read_too(tmp_path: Path) -> None:
    torch.save({"w": torch.arange(3)}, tmp_path / "x.bin", _use_new_zipfile_serialization=False)
    assert torch.equal(TorchFileStore(tmp_path / "x.bin")["w"], torch.arange(3))


class Evil:
    def __reduce__(self) -> tuple:
        return (print, ("code ran",))


def test_code_is_never_run(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    torch.save({"w": Evil()}, tmp_path / "x.bin")
    with pytest.raises(ValueError, match="could run code"):
        TorchFileStore(tmp_path / "x.bin")
    assert "code ran" not in capsys.readouterr().out


@pytest.mark.parametrize("content", [[torch.ones(1)], {"model": {"w": torch.ones(1)}}])
def test_what_is_no_state_dict_is_refused(tmp_path: Path, content: object) -> None:
    torch.save(content, tmp_path / "x.bin")
    with pytest.raises(ValueError, match=r"x\.bin holds"):
        TorchFileStore(tmp_path / "x.bin")


def test_damaged_and_missing_files_are_named(tmp_path: Path) -> None:
    torch.save({"w": torch.arange(300)}, tmp_path / "x.bin")
    whole = (tmp_path / "x.bin").read_bytes()
    for content in (b"", b"garbage", whole[: len(whole) // 2]):
        (tmp_path / "x.bin").write_bytes(content)
        with pytest.raises(ValueError, match=r"x\.bin"):
            TorchFileStore(tmp_path / "x.bin")
    with pytest.raises(FileNotFoundError, match=r"y\.bin"):
        TorchFileStore(tmp_path / "y.bin")
