"""Files written by torch.save."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from acc_bigmodel.stores.store import ReplacedFileError
from acc_bigmodel.stores.torch_file import TorchFileStore


def test_tensors_are_read_and_others_listed(tmp_path: Path) -> None:
    torch.save({"w": torch.arange(3), "step": 4}, tmp_path / "x.bin")
    store = TorchFileStore(tmp_path / "x.bin")
    assert torch.equal(store["w"], torch.arange(3))
    assert store.others == {"step": 4}


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
    for content in (b"", b"garbage", b"abc", whole[: len(whole) // 2]):
        (tmp_path / "x.bin").write_bytes(content)
        with pytest.raises(ValueError, match=r"x\.bin"):
            TorchFileStore(tmp_path / "x.bin")
    with pytest.raises(FileNotFoundError, match=r"y\.bin"):
        TorchFileStore(tmp_path / "y.bin")


def test_what_was_read_stays_when_the_file_is_written_over(tmp_path: Path) -> None:
    file = tmp_path / "x.bin"
    torch.save({"w": torch.arange(3000)}, file)
    store = TorchFileStore(file)
    weight = store["w"]
    with file.open("r+b") as out:  # in place, as torch.save does
        out.write(bytes(file.stat().st_size))
    assert torch.equal(weight, torch.arange(3000))
    with pytest.raises(ReplacedFileError, match=r"x\.bin was written to after it was opened"):
        store["w"]


def test_names_of_one_tensor_are_known_without_reading(tmp_path: Path) -> None:
    weight = torch.arange(4)
    torch.save(
        {"a": weight, "b": weight, "c": weight[:2], "e": weight[:0], "f": torch.ones(0)}, tmp_path / "x.bin"
    )
    store = TorchFileStore(tmp_path / "x.bin")
    assert [store.alias_of(name) for name in store] == ["a", "a", "c", "e", "f"]


@pytest.mark.parametrize(
    ("content", "message"),
    [
        ({1: torch.ones(1)}, r"x\.bin has a tensor called 1, a int: names must be text"),
        (
            {"w": torch.eye(2).to_sparse()},
            r"'w' in .*x\.bin is a tensor of layout torch\.sparse_coo; save its to_dense",
        ),
    ],
)
def test_entries_that_are_no_weights_are_named(tmp_path: Path, content: dict, message: str) -> None:
    torch.save(content, tmp_path / "x.bin")
    with pytest.raises(ValueError, match=message):
        TorchFileStore(tmp_path / "x.bin")
