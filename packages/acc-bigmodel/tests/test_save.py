"""Weights to files and back."""

from __future__ import annotations

import errno
import json
import os
import signal
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn

from acc_bigmodel import load_weights, open_store, save, save_weights
from acc_bigmodel.stores import safetensors
from acc_bigmodel.stores.safetensors import SafetensorsStore
from acc_ops.testing import run_threads
from acc_ops.world import current_world


def names(folder: Path) -> list[str]:
    return sorted(file.name for file in folder.iterdir())


def same(first: Mapping[str, torch.Tensor], second: Mapping[str, torch.Tensor]) -> bool:
    return first.keys() == second.keys() and all(torch.equal(first[name], second[name]) for name in first)


@pytest.mark.parametrize("safe", [True, False])
@pytest.mark.parametrize("limit", [None, "0.4KB"])
def test_what_is_saved_is_loaded_ties_included(
    tied_model: nn.Module, tmp_path: Path, safe: bool, limit: str | None
) -> None:
    state = tied_model.state_dict()
    written = save_weights(state, tmp_path, "model", limit, safe)
    loaded = load_weights(tmp_path, "model")
    assert same(state, loaded)
    assert loaded["embed.weight"].data_ptr() == loaded["head.weight"].data_ptr()
    assert names(tmp_path) == sorted(written)
    tied_model.load_state_dict(loaded, strict=True)


def test_files_have_the_names_of_the_specification(tmp_path: Path) -> None:
    state = {"a": torch.zeros(4), "b": torch.zeros(4)}
    assert save_weights(state, tmp_path / "1", "model") == ["model.safetensors"]
    assert save_weights(state, tmp_path / "2", "model", safe=False) == ["pytorch_model.bin"]
    assert save_weights(state, tmp_path / "3", "model_1", safe=False) == ["pytorch_model_1.bin"]
    assert save_weights(state, tmp_path / "4", "adapter", safe=False) == ["adapter.bin"]
    assert save_weights(state, tmp_path / "5", "model", 16) == [
        "model-00001-of-00002.safetensors",
        "model-00002-of-00002.safetensors",
        "model.safetensors.index.json",
    ]
    index = json.loads((tmp_path / "5" / "model.safetensors.index.json").read_text())
    assert index == {
        "metadata": {"total_size": 32},
        "weight_map": {"a": "model-00001-of-00002.safetensors", "b": "model-00002-of-00002.safetensors"},
    }


@settings(max_examples=40)
@given(st.lists(st.integers(0, 12), max_size=8), st.integers(1, 60))
def test_no_shard_is_larger_than_asked_unless_one_tensor_is(
    tmp_path_factory: pytest.TempPathFactory, lengths: list[int], limit: int
) -> None:
    folder = tmp_path_factory.mktemp("save")
    state = {f"t{i}": torch.arange(float(length)) for i, length in enumerate(lengths)}
    for file in save_weights(state, folder, "model", limit):
        if file.endswith(".safetensors"):
            store = SafetensorsStore(folder / file)
            assert sum(map(store.nbytes, store)) <= limit or len(store) == 1
    assert same(load_weights(folder, "model"), state)


def test_a_whole_file_gives_way_to_shards_and_shards_to_a_whole_file(
    tmp_path: Path,
) -> None:  # big/54, trainer/38
    old, new = {"a": torch.zeros(8), "b": torch.zeros(8)}, {"a": torch.ones(8), "b": torch.ones(8)}
    (tmp_path / "model-notes.txt").write_text("mine")
    save_weights({"w": torch.zeros(1)}, tmp_path, "model_1")
    kept = names(tmp_path)
    save_weights(old, tmp_path, "model")
    written = save_weights(new, tmp_path, "model", 32)
    assert same(load_weights(tmp_path, "model"), new)
    assert names(tmp_path) == sorted(kept + written)
    save_weights(old, tmp_path, "model")
    assert same(load_weights(tmp_path, "model"), old)
    assert names(tmp_path) == sorted([*kept, "model.safetensors"])
    save_weights(new, tmp_path, "model", safe=False)
    assert same(load_weights(tmp_path, "model"), new)
    assert names(tmp_path) == sorted([*kept, "pytorch_model.bin"])


def test_a_save_that_fails_leaves_the_earlier_one(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    save_weights({"a": torch.zeros(8)}, tmp_path, "model")

    def fail(*args: object) -> None:
        raise OSError("disk full")

    monkeypatch.setattr(os, "fsync", fail)
    with pytest.raises(OSError, match="disk full"):
        save_weights({"a": torch.ones(8)}, tmp_path, "model")
    assert names(tmp_path) == ["model.safetensors"]
    assert same(load_weights(tmp_path, "model"), {"a": torch.zeros(8)})


class Killed(BaseException):
    pass


@pytest.mark.parametrize("first", [None, 16])
@pytest.mark.parametrize("second", [None, 16])
def test_a_kill_at_any_moment_leaves_old_new_or_nothing_to_load(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, first: int | None, second: int | None
) -> None:
    old, new = {"a": torch.zeros(4), "b": torch.zeros(4)}, {"a": torch.ones(4), "b": torch.ones(4)}
    replace, unlink = os.replace, Path.unlink
    outcomes = set()
    for moment in range(12):
        folder = tmp_path / str(moment)
        save_weights(old, folder, "model", first)
        left = [moment]

        def step(call: Callable, left: list[int] = left) -> Callable:
            def counted(*args: object, **kwargs: object) -> object:
                if left[0] == 0:
                    raise Killed
                left[0] -= 1
                return call(*args, **kwargs)

            return counted

        with monkeypatch.context() as patched:
            patched.setattr(os, "replace", step(replace))
            patched.setattr(Path, "unlink", step(unlink))
            patched.setattr(
                "shutil.rmtree", lambda *args, **kwargs: None
            )  # a killed process cleans nothing up
            try:
                save_weights(new, folder, "model", second)
            except Killed:
                pass
        try:
            loaded = dict(open_store(folder))
        except ValueError:
            outcomes.add("refused")
            continue
        assert same(loaded, old) or same(loaded, new)
        outcomes.add("old" if same(loaded, old) else "new")
    assert {"old", "new"} <= outcomes
    assert "refused" not in outcomes or (first, second) == (16, 16)


def test_views_are_saved_without_their_whole_storage(tmp_path: Path) -> None:
    base = torch.arange(100_000.0)
    for safe in (True, False):
        written = save_weights({"w": base[:2], "v": base[1:3]}, tmp_path, "model", safe=safe)
        assert (tmp_path / written[0]).stat().st_size < 5000
        assert same(load_weights(tmp_path, "model"), {"w": base[:2], "v": base[1:3]})


def test_a_store_is_saved_one_tensor_at_a_time(tmp_path: Path, anonymous_bytes: Callable[[], int]) -> None:
    state = {f"t{i}": torch.full((1_000_000,), float(i)) for i in range(8)}
    save_weights(state, tmp_path / "a", "model")
    del state
    store = open_store(tmp_path / "a")
    before = anonymous_bytes()
    save_weights(store, tmp_path / "b", "model", "9MB")
    assert anonymous_bytes() - before < 12_000_000  # of 32 MB
    assert load_weights(tmp_path / "b", "model")["t7"][5] == 7


def test_a_folder_can_be_saved_over_while_its_weights_are_mapped(tmp_path: Path) -> None:
    save_weights({"a": torch.zeros(4)}, tmp_path, "model")
    mapped = load_weights(tmp_path, "model")
    mapped["a"] += 1
    save_weights(mapped, tmp_path, "model")
    assert torch.equal(load_weights(tmp_path, "model")["a"], torch.ones(4))
    assert torch.equal(mapped["a"], torch.ones(4))


def test_what_cannot_be_saved_is_named(tmp_path: Path) -> None:
    with pytest.raises(RuntimeError, match="'w' is on the meta device"):
        save_weights({"w": torch.ones(2, device="meta")}, tmp_path, "model")
    with pytest.raises(TypeError, match="'step' is a int"):
        save_weights({"step": 3}, tmp_path, "model")
    with pytest.raises(TypeError, match="sparse"):
        save_weights({"w": torch.eye(2).to_sparse()}, tmp_path, "model")
    with pytest.raises(ValueError, match="plain file name"):
        save_weights({}, tmp_path, "../model")
    (tmp_path / "file").touch()
    with pytest.raises(NotADirectoryError):
        save_weights({}, tmp_path / "file", "model")


def test_loading_nothing_says_what_was_looked_for(tmp_path: Path) -> None:
    with pytest.raises(FileNotFoundError, match=r"neither model\.safetensors nor pytorch_model\.bin"):
        load_weights(tmp_path, "model")


def test_a_full_disk_leaves_the_earlier_save(tmp_path: Path) -> None:
    """The limit on the size of files makes real writes fail in their middle, as a full disk does."""
    resource = pytest.importorskip("resource", reason="only POSIX can limit the size of files")
    old = {"a": torch.zeros(1000), "b": torch.zeros(1000)}
    save_weights(old, tmp_path, "model", 4000)
    before = {file.name: file.read_bytes() for file in tmp_path.iterdir()}
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    handler = signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
    resource.setrlimit(resource.RLIMIT_FSIZE, (20_000, hard))
    try:
        for limit, safe in ((None, True), (30_000, True), (None, False)):
            with pytest.raises(OSError, match="File too large"):
                save_weights({"a": torch.ones(5000), "b": torch.ones(9000)}, tmp_path, "model", limit, safe)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
        signal.signal(signal.SIGXFSZ, handler)
    assert {file.name: file.read_bytes() for file in tmp_path.iterdir()} == before
    assert same(load_weights(tmp_path, "model"), old)


def test_no_space_is_said_and_nothing_is_left(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    save_weights({"a": torch.zeros(8)}, tmp_path, "model")

    def no_space(*args: object) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(safetensors, "write_bytes", no_space)
    with pytest.raises(OSError, match="No space left"):
        save_weights({"a": torch.ones(8)}, tmp_path, "model")
    assert names(tmp_path) == ["model.safetensors"]
    assert same(load_weights(tmp_path, "model"), {"a": torch.zeros(8)})


def test_a_folder_that_cannot_be_written_keeps_its_weights(tmp_path: Path) -> None:
    save_weights({"a": torch.zeros(8)}, tmp_path, "model")
    tmp_path.chmod(0o500)
    try:
        if os.access(tmp_path, os.W_OK):
            pytest.skip("this user may write everywhere")
        with pytest.raises(PermissionError, match="model"):
            save_weights({"a": torch.ones(8)}, tmp_path, "model")
    finally:
        tmp_path.chmod(0o700)
    assert same(load_weights(tmp_path, "model"), {"a": torch.zeros(8)})


@pytest.mark.parametrize("safe", [True, False])
def test_what_a_killed_save_left_is_swept_by_the_next(tmp_path: Path, safe: bool) -> None:
    for stem in ("model", "pytorch_model", "model_1"):
        (tmp_path / f".{stem}.writing").mkdir()
        (tmp_path / f".{stem}.writing" / "half").write_bytes(bytes(9))
    written = save_weights({"a": torch.ones(8)}, tmp_path, "model", safe=safe)
    assert names(tmp_path) == [".model_1.writing", *written]  # which is another's


def test_saves_of_one_name_at_once_follow_each_other(tmp_path: Path) -> None:
    def save() -> None:
        value = float(current_world().rank)
        for limit in (None, 40, 80):
            save_weights({f"t{i}": torch.full((10,), value) for i in range(6)}, tmp_path, "model", limit)

    run_threads(6, save)
    loaded = torch.cat(list(load_weights(tmp_path, "model").values()))
    assert loaded.unique().numel() == 1
    assert not [name for name in names(tmp_path) if name.startswith(".")]


def test_a_mixture_of_shards_stays_marked_until_a_save_is_whole(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    old, new = ({name: torch.full((4,), value) for name in "abc"} for value in (0.0, 1.0))
    save_weights(old, tmp_path, "model", 16)
    replace, left = os.replace, [1]

    def killed(*args: object) -> None:
        if left[0] == 0:
            raise Killed
        left[0] -= 1
        replace(*args)

    with monkeypatch.context() as patched:  # between two shards
        patched.setattr(os, "replace", killed)
        with pytest.raises(Killed):
            save_weights(new, tmp_path, "model", 16)

    def fail(*args: object) -> None:
        raise OSError("disk full")

    with monkeypatch.context() as patched:  # the next one does not even come to its commit
        patched.setattr(safetensors, "write_bytes", fail)
        with pytest.raises(OSError, match="disk full"):
            save_weights(new, tmp_path, "model", 16)
    with pytest.raises(ValueError, match="was interrupted while it replaced the shards"):
        open_store(tmp_path)
    save_weights(new, tmp_path, "model", 16)
    assert same(load_weights(tmp_path, "model"), new)
    assert not [name for name in names(tmp_path) if name.startswith(".")]


@pytest.mark.parametrize("stopped", [KeyboardInterrupt, OSError(28, "No space left on device")])
@pytest.mark.parametrize("handling", [False, True])
def test_what_ends_a_write_is_not_hidden_by_an_error_of_torchs(tmp_path, monkeypatch, stopped, handling):
    def write(out, content):
        if len(content) > 1000:
            raise stopped
        return out._out.write(content)

    monkeypatch.setattr(save._Noting, "write", write)  # as a signal that comes before its first line
    with pytest.raises((KeyboardInterrupt, OSError)) as error:
        try:
            raise ValueError("of the caller")
        except ValueError:
            if handling:
                save.write_torch_file(tmp_path / "a.bin", torch.ones(2000))
        save.write_torch_file(tmp_path / "a.bin", torch.ones(2000))
    assert error.type is (stopped if isinstance(stopped, type) else type(stopped))


@pytest.mark.parametrize("limit", [None, 8])
def test_what_is_no_tensor_is_written_to_a_torch_file_and_refused_with_safetensors(
    tmp_path: Path, limit: int | None
) -> None:
    state = {"a": torch.ones(2), "layer._extra_state": {"n": 1}, "b": torch.zeros(2)}
    save_weights(state, tmp_path / "torch", "model", limit, safe=False)
    store = open_store(tmp_path / "torch")
    assert dict(store.others) == {"layer._extra_state": {"n": 1}}
    assert set(store) == {"a", "b"}
    with pytest.raises(
        TypeError, match=r"get_extra_state of the module 'layer' return a tensor, or save as torch file"
    ):
        save_weights(state, tmp_path / "safe", "model", limit)
    assert not (tmp_path / "safe").exists()


@pytest.mark.parametrize("limit", [None, 8])
def test_a_store_s_other_entries_go_into_a_torch_file_and_a_warning_names_them_with_safetensors(
    tmp_path: Path, limit: int | None, caplog: pytest.LogCaptureFixture
) -> None:
    state = {"a": torch.ones(2), "layer._extra_state": {"n": 1}, "b": torch.zeros(2)}
    save_weights(state, tmp_path / "first", "model", limit, safe=False)
    store = open_store(tmp_path / "first")
    save_weights(store, tmp_path / "torch", "model", limit, safe=False)
    copy = open_store(tmp_path / "torch")
    assert dict(copy.others) == {"layer._extra_state": {"n": 1}}
    assert same(copy, store)
    assert caplog.text == ""
    save_weights(store, tmp_path / "safe", "model", limit)
    assert same(load_weights(tmp_path / "safe", "model"), store)
    assert "hold tensors only: layer._extra_state" in caplog.text


class _Noting(Mapping[str, torch.Tensor]):
    """A mapping that makes each tensor when it is asked for."""

    def __init__(self, read: list[str]) -> None:
        self.read = read

    def __getitem__(self, name: str) -> torch.Tensor:
        self.read.append(name)
        return torch.full((2,), float(ord(name)))

    def __iter__(self) -> Iterator[str]:
        return iter("ab")

    def __len__(self) -> int:
        return 2


@pytest.mark.parametrize("safe", [True, False])
def test_every_entry_is_read_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, safe: bool) -> None:
    read: list[str] = []
    save_weights(_Noting(read), tmp_path / "lazy", "model", safe=safe)
    assert read == ["a", "b"]
    read.clear()
    store = open_store(tmp_path / "lazy")
    get = type(store).__getitem__
    monkeypatch.setattr(type(store), "__getitem__", lambda self, name: read.append(name) or get(self, name))
    save_weights(store, tmp_path / "copy", "model", safe=safe)
    assert read == ["a", "b"]
