"""Safetensors files: mapped, written, and refused when they lie."""

from __future__ import annotations

import copy
import json
import pickle
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors import safe_open
from safetensors.torch import save_file

from acc_bigmodel.stores.safetensors import Entry, SafetensorsStore, check_format, write_safetensors
from acc_bigmodel.stores.store import ReplacedFileError

DTYPES = [
    torch.float64, torch.float32, torch.float16, torch.bfloat16, torch.int64, torch.int8, torch.uint8, torch.bool,
    torch.float8_e4m3fn, torch.float8_e5m2, torch.uint16, torch.complex64,
]  # fmt: skip


def write(file: Path, state: dict[str, torch.Tensor], metadata: dict[str, str] | None = None) -> Path:
    write_safetensors(file, {name: Entry.of(tensor) for name, tensor in state.items()}, metadata)
    return file


@settings(max_examples=60)
@given(
    st.lists(st.tuples(st.sampled_from(DTYPES), st.lists(st.integers(0, 3), max_size=3)), max_size=6),
)
def test_what_is_written_is_what_the_library_and_the_store_read(
    tmp_path_factory: pytest.TempPathFactory, kinds: list[tuple[torch.dtype, list[int]]]
) -> None:
    state = {f"t{i}": (torch.rand(shape) * 9).to(dtype) for i, (dtype, shape) in enumerate(kinds)}
    file = write(tmp_path_factory.mktemp("s") / "x.safetensors", state)
    store = SafetensorsStore(file)
    assert set(store) == set(state)
    with safe_open(file, framework="pt") as other:
        for name, tensor in state.items():
            for read in (store[name], other.get_tensor(name)):
                assert read.dtype == tensor.dtype
                assert read.shape == tensor.shape
                assert bytes_of(read) == bytes_of(tensor)
            assert (store.shape(name), store.dtype(name), store.nbytes(name)) == (
                tensor.shape,
                tensor.dtype,
                tensor.nbytes,
            )


def bytes_of(tensor: torch.Tensor) -> list[int]:
    return tensor.contiguous().reshape(-1).view(torch.uint8).tolist()


@pytest.mark.parametrize("padding", range(0, 70, 9))
def test_weights_begin_at_whole_lines_of_64_bytes_whatever_the_header_and_the_others_are(
    tmp_path: Path, padding: int
) -> None:
    odd = {f"odd{'x' * padding}.{i}": torch.ones(i + 1, dtype=dtype) for i, dtype in enumerate(DTYPES)}
    whole = {f"w{i}": torch.ones(64, i + 1, dtype=dtype) for i, dtype in enumerate(DTYPES)}
    store = SafetensorsStore(write(tmp_path / "x.safetensors", {**odd, **whole}))
    assert {name for name in store if store[name].data_ptr() % 64} <= odd.keys()
    assert all(store[name].data_ptr() % store.dtype(name).itemsize == 0 for name in store)


def test_odd_layouts_are_written_in_row_order(tmp_path: Path) -> None:
    base = torch.arange(12.0).reshape(3, 4)
    state = {"t": base.t(), "row": base[1], "step": base[:, ::2], "expanded": base[:1].expand(3, 4)}
    store = SafetensorsStore(write(tmp_path / "x.safetensors", state))
    for name, tensor in state.items():
        assert torch.equal(store[name], tensor)


def test_reading_costs_no_memory_and_changes_never_reach_the_file(
    tmp_path: Path, anonymous_bytes: Callable[[], int]
) -> None:
    file = write(tmp_path / "x.safetensors", {"w": torch.ones(4_000_000)})
    store = SafetensorsStore(file)
    before = anonymous_bytes()
    weight = store["w"]
    assert weight.sum() == 4_000_000
    assert anonymous_bytes() - before < 4_000_000  # of 16 MB
    weight[0] = 7
    assert SafetensorsStore(file)["w"][0] == 1


def test_a_store_travels_as_its_path(tmp_path: Path) -> None:
    store = SafetensorsStore(write(tmp_path / "x.safetensors", {"w": torch.arange(3)}))
    for twin in (pickle.loads(pickle.dumps(store)), copy.deepcopy(store)):
        assert torch.equal(twin["w"], store["w"])


def test_names_of_shared_tensors_are_entries(tmp_path: Path) -> None:
    file = write(
        tmp_path / "x.safetensors", {"embed": torch.arange(3)}, {"head": "embed", "note": "not a name"}
    )
    store = SafetensorsStore(file)
    assert set(store) == {"embed", "head"}
    assert store.alias_of("head") == "embed"
    assert torch.equal(store["head"], store["embed"])


def test_a_file_cut_short_is_named(tmp_path: Path) -> None:
    file = write(tmp_path / "x.safetensors", {"w": torch.arange(100)})
    whole = file.read_bytes()
    for length in (0, 4, 8, 20, len(whole) - 1):
        file.write_bytes(whole[:length])
        with pytest.raises(ValueError, match=r"x\.safetensors is not a whole safetensors file"):
            SafetensorsStore(file)


@settings(max_examples=100)
@given(st.data())
def test_a_lying_header_is_an_error_never_a_crash(
    tmp_path_factory: pytest.TempPathFactory, data: st.DataObject
) -> None:
    file = write(tmp_path_factory.mktemp("f") / "x.safetensors", {"a": torch.arange(4), "b": torch.ones(3)})
    content = bytearray(file.read_bytes())
    size = int.from_bytes(content[:8], "little")
    for _ in range(data.draw(st.integers(1, 3))):
        content[data.draw(st.integers(0, 8 + size - 1))] = data.draw(st.integers(0, 255))
    file.write_bytes(content)
    try:
        store = SafetensorsStore(file)
        for name in store:
            assert store[name].shape == store.shape(name)
    except ValueError:
        pass


@pytest.mark.parametrize(
    "entry",
    [
        {"dtype": "F32", "shape": [5], "data_offsets": [0, 16]},
        {"dtype": "F32", "shape": [4], "data_offsets": [0, 800]},
        {"dtype": "F99", "shape": [4], "data_offsets": [0, 16]},
    ],
)
def test_sizes_that_do_not_add_up_are_refused(tmp_path: Path, entry: dict) -> None:
    header = json.dumps({"w": entry}).encode()
    file = tmp_path / "x.safetensors"
    file.write_bytes(len(header).to_bytes(8, "little") + header + bytes(16))
    with pytest.raises(ValueError, match=r"x\.safetensors"):
        SafetensorsStore(file)


def test_a_missing_file_is_named(tmp_path: Path) -> None:
    with pytest.raises(FileNotFoundError, match=r"nowhere\.safetensors"):
        SafetensorsStore(tmp_path / "nowhere.safetensors")


@pytest.mark.parametrize(
    ("written_for", "error"), [("tf", ValueError), ("flax", ValueError), ("other", OSError)]
)
def test_other_frameworks_are_refused(tmp_path: Path, written_for: str, error: type[Exception]) -> None:
    store = SafetensorsStore(write(tmp_path / "x.safetensors", {"w": torch.ones(1)}, {"format": written_for}))
    with pytest.raises(error, match=written_for):
        check_format(store)


def test_what_the_format_cannot_hold_is_named_before_writing(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"'w': safetensors cannot hold torch.complex128"):
        write(tmp_path / "x.safetensors", {"w": torch.ones(1, dtype=torch.complex128)})
    with pytest.raises(ValueError, match="__metadata__"):
        write(tmp_path / "x.safetensors", {"__metadata__": torch.ones(1)})
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize("name", ["float8_e8m0fnu", "float4_e2m1fn_x2"])
def test_the_smallest_floats_are_read_and_written(tmp_path: Path, name: str) -> None:
    if not hasattr(torch, name):
        pytest.skip(f"this torch has no {name}")
    pytest.importorskip("numpy", reason="safetensors.torch writes through it; ours does not")
    tensor = torch.arange(8, dtype=torch.uint8).reshape(2, 4).view(getattr(torch, name))
    theirs, ours = tmp_path / "theirs.safetensors", tmp_path / "ours.safetensors"
    save_file({"w": tensor}, theirs)
    write(ours, {"w": tensor})
    for file in (theirs, ours):
        store = SafetensorsStore(file)
        assert (store.shape("w"), store.dtype("w"), store.nbytes("w")) == (tensor.shape, tensor.dtype, 8)
        assert (store["w"].shape, store["w"].dtype) == (tensor.shape, tensor.dtype)
        assert torch.equal(store["w"].view(torch.uint8), tensor.view(torch.uint8))
        with safe_open(file, framework="pt") as whole:
            assert torch.equal(whole.get_tensor("w").view(torch.uint8), tensor.view(torch.uint8))


def test_a_copy_of_a_store_never_reads_another_file(tmp_path: Path) -> None:
    store = SafetensorsStore(write(tmp_path / "x.safetensors", {"w": torch.ones(2)}))
    text = pickle.dumps(store)
    write(tmp_path / "new", {"w": torch.zeros(2)}).rename(tmp_path / "x.safetensors")
    with pytest.raises(ReplacedFileError, match=r"x\.safetensors was replaced"):
        pickle.loads(text)
