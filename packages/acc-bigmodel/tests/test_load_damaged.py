"""Files that nobody vouches for: whatever is wrong with one is an error that names it, and the model stays as it was."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn

from acc_bigmodel import OffloadedWeightsLoader, load_checkpoint_in_model, offload_state_dict, save_weights
from acc_bigmodel.stores.safetensors import SafetensorsStore
from acc_bigmodel.stores.torch_file import TorchFileStore


def small_model() -> nn.Module:
    model = nn.Sequential(nn.Linear(3, 4), nn.BatchNorm1d(4), nn.Linear(4, 2))
    model[2].to("meta")  # a part that is filled, beside one that is copied into
    return model


STATE = {
    name: torch.full(value.shape, 3).to(value.dtype) for name, value in small_model().state_dict().items()
}


@st.composite
def damaged(draw: st.DrawFn, content: bytes) -> bytes:
    """The content with some bytes changed, left out or put in, or cut short."""
    damaged = bytearray(content)
    for _ in range(draw(st.integers(1, 4))):
        if not damaged:
            break
        at = draw(st.integers(0, len(damaged) - 1))
        how = draw(st.sampled_from(["change", "change", "insert", "remove", "cut", "repeat"]))
        if how == "change":
            damaged[at] = draw(st.integers(0, 255))
        elif how == "insert":
            damaged[at:at] = draw(st.binary(min_size=1, max_size=9))
        elif how == "remove":
            del damaged[at : at + draw(st.integers(1, 9))]
        elif how == "cut":
            del damaged[at:]
        else:
            damaged[at:at] = damaged[at : at + draw(st.integers(1, 40))]
    return bytes(damaged)


def write_safetensors_file(folder: Path) -> Path:
    return folder / save_weights(STATE, folder, "model")[0]


def write_torch_file(folder: Path) -> Path:
    return folder / save_weights(STATE, folder, "model", safe=False)[0]


def write_old_torch_file(folder: Path) -> Path:
    torch.save(STATE, folder / "old.bin", _use_new_zipfile_serialization=False)
    return folder / "old.bin"


def write_index(folder: Path) -> Path:
    return folder / save_weights(STATE, folder, "model", 40)[-1]


@pytest.mark.filterwarnings("ignore:Detected pickle protocol")
@pytest.mark.parametrize(
    "write", [write_safetensors_file, write_torch_file, write_old_torch_file, write_index]
)
@pytest.mark.parametrize("dtype", [None, torch.float64])
@settings(max_examples=120)
@given(data=st.data())
def test_a_damaged_file_loads_as_it_is_or_is_named_and_leaves_the_model_as_it_was(
    tmp_path_factory: pytest.TempPathFactory,
    write: Callable[[Path], Path],
    dtype: torch.dtype | None,
    data: st.DataObject,
) -> None:
    file = write(tmp_path_factory.mktemp("damaged"))
    file.write_bytes(data.draw(damaged(file.read_bytes())))
    model = small_model()
    tensors = dict(model.state_dict(keep_vars=True))
    before = {name: tensor.detach().clone() for name, tensor in tensors.items()}
    complaint = ""
    try:
        report = load_checkpoint_in_model(model, file, {"": "cpu"}, dtype=dtype)
    except ValueError as error:
        complaint = str(error)
    if not complaint:
        assert {*report.loaded, *report.missing} == set(tensors)
        return
    assert file.name in complaint
    after = model.state_dict(keep_vars=True)
    assert all(after[name] is tensor for name, tensor in tensors.items())
    assert all(after[name].is_meta or torch.equal(after[name], before[name]) for name in tensors)


@settings(max_examples=200)
@given(data=st.data())
def test_a_damaged_offload_index_gives_its_tensors_or_an_error(
    tmp_path_factory: pytest.TempPathFactory, data: st.DataObject
) -> None:
    folder = tmp_path_factory.mktemp("damaged")
    save_weights({"s": torch.ones(3)}, folder, "model")
    offload_state_dict(folder, {"a": torch.ones(2, 3), "b": torch.ones(4, dtype=torch.bfloat16)})
    content = json.loads((folder / "index.json").read_text())
    content["s"] = {"safetensors_file": "model.safetensors", "weight_name": "s", "dtype": "float32"}
    content["c"] = {**content["a"], "same_as": "a"}
    (folder / "index.json").write_bytes(data.draw(damaged(json.dumps(content).encode())))
    loader, complaint = None, ""
    try:
        loader = OffloadedWeightsLoader(save_folder=folder)
    except ValueError as error:
        complaint = str(error)
    if loader is None:
        assert "index.json" in complaint
        return
    for name in loader:
        try:
            tensor = loader[name]
        except (ValueError, FileNotFoundError):
            continue
        assert (tensor.shape, tensor.dtype) == (loader.shape(name), loader.dtype(name))


@pytest.mark.parametrize(
    "entry",
    [
        {"dtype": "float32", "shape": [2, 2]},
        {"dtype": "float32", "shape": [-2, -3]},
        {"dtype": "float32", "shape": [2.0, 3.0]},
        {"dtype": "float32", "shape": [True, 6]},
        {"dtype": "float32", "shape": [2**62, 2**62]},
        {"dtype": "float32", "shape": [2**63, 0]},
        {"dtype": "float32", "shape": "23"},
        {"dtype": "float32"},
        {"dtype": "float31", "shape": [2, 3]},
        {"dtype": 32, "shape": [2, 3]},
        {"shape": [2, 3]},
        {"dtype": "float64", "shape": [2, 3]},
        {"safetensors_file": "model.safetensors", "weight_name": "t"},
        {"safetensors_file": "model.safetensors", "weight_name": "s", "dtype": "float31"},
    ],
)
def test_an_offload_index_that_lies_about_a_tensor_is_an_error(tmp_path: Path, entry: dict) -> None:
    save_weights({"s": torch.ones(3)}, tmp_path, "model")
    offload_state_dict(tmp_path, {"a": torch.ones(2, 3)})
    (tmp_path / "index.json").write_text(json.dumps({"a": entry}))
    with pytest.raises(ValueError, match=r"\ba\b|'a'|float31"):
        OffloadedWeightsLoader(save_folder=tmp_path)["a"]


@pytest.mark.parametrize(
    ("text", "complaint"),
    [
        ('{"a": {"shape": [NaN]}}', "NaN is no number that a size can have"),
        ('{"a": {}, "a": {}}', "'a' stands in it twice"),
        ("[" * 100_000, "nested too deeply"),
        ('{"a": {"safetensors_file": 3}}', "'safetensors_file' of 'a' must be a name, got 3"),
        ('{"a": {"same_as": ["b"]}}', "'same_as' of 'a' must be a name"),
    ],
)
def test_an_ambiguous_index_is_an_error(tmp_path: Path, text: str, complaint: str) -> None:
    (tmp_path / "index.json").write_text(text)
    with pytest.raises(ValueError, match=complaint):
        OffloadedWeightsLoader(save_folder=tmp_path)


def header_of(*entries: tuple[str, dict]) -> bytes:
    return b"{" + b",".join(f"{json.dumps(name)}:{json.dumps(e)}".encode() for name, e in entries) + b"}"


def entry(start: int, end: int, shape: list[int], dtype: str = "F32") -> dict:
    return {"dtype": dtype, "shape": shape, "data_offsets": [start, end]}


@pytest.mark.parametrize(
    "header",
    [
        header_of(("a", entry(0, 8, [2])), ("b", entry(4, 16, [3]))),  # overlapping
        header_of(("a", entry(0, 4, [1])), ("b", entry(8, 16, [2]))),  # a hole
        header_of(("a", entry(4, 16, [3]))),  # a hole in front
        header_of(("a", entry(0, 8, [2]))),  # bytes left over
        header_of(("a", entry(0, 32, [8]))),  # not there
        header_of(("a", entry(16, 0, [4]))),
        header_of(("a", entry(0, 16, [4])), ("a", entry(0, 16, [4], "I32"))),  # twice
        header_of(("a", entry(0, 16, [4])), ("b", entry(16, 16, [2**64 - 1, 0]))),
        header_of(("a", entry(0, 16, [2**62, 4]))),
        header_of(("a", entry(0, 16, [4], "F31"))),
        b"[" * 2000,
    ],
)
def test_a_safetensors_header_that_lies_is_an_error(tmp_path: Path, header: bytes) -> None:
    file = tmp_path / "x.safetensors"
    file.write_bytes(len(header).to_bytes(8, "little") + header + bytes(16))
    with pytest.raises(ValueError, match=r"x\.safetensors"):
        dict(SafetensorsStore(file))


@pytest.mark.parametrize("length", [2**64 - 1, 2**62, 2**31, 100_000_001, 24])
def test_a_header_longer_than_the_file_takes_no_memory(tmp_path: Path, length: int) -> None:
    file = tmp_path / "x.safetensors"
    file.write_bytes(length.to_bytes(8, "little") + b"{}" + bytes(14))
    with pytest.raises(ValueError, match=r"x\.safetensors"):
        SafetensorsStore(file)


def test_a_torch_file_that_lies_about_a_storage_is_named(tmp_path: Path) -> None:
    torch.save({"w": torch.arange(100), "v": torch.ones(77)}, tmp_path / "x.bin")
    content = (tmp_path / "x.bin").read_bytes()
    assert content.count(b"K\x4d") >= 2, "the size 77 is not where this test looks for it"
    (tmp_path / "x.bin").write_bytes(content.replace(b"K\x4d", b"K\x4f"))  # 79: reads on into what follows
    with pytest.raises(ValueError, match=r"'v' in .*x\.bin is said to have another size"):
        TorchFileStore(tmp_path / "x.bin")


def test_a_shard_outside_of_the_folder_is_not_read(tmp_path: Path) -> None:
    save_weights(STATE, tmp_path / "other", "model")
    (tmp_path / "mine").mkdir()
    for shard in ("../other/model.safetensors", str(tmp_path / "other" / "model.safetensors"), "..", ".", ""):
        index = tmp_path / "mine" / "model.safetensors.index.json"
        index.write_text(json.dumps({"weight_map": dict.fromkeys(STATE, shard)}))
        with pytest.raises(ValueError, match=r"shards must be files in the folder|which is not there"):
            load_checkpoint_in_model(small_model(), index)


@pytest.mark.parametrize("layout", [{"shape": [3, 2]}, {"dtype": "int32"}, {"shape": None}])
def test_a_tied_entry_that_claims_another_layout_is_an_error(tmp_path: Path, layout: dict) -> None:
    offload_state_dict(tmp_path, {"a": torch.ones(2, 3)})
    content = json.loads((tmp_path / "index.json").read_text())
    content["c"] = {**content["a"], "same_as": "a", **layout}
    (tmp_path / "index.json").write_text(json.dumps(content))
    loader = OffloadedWeightsLoader(save_folder=tmp_path)
    assert torch.equal(loader["a"], torch.ones(2, 3))
    with pytest.raises(ValueError, match="'c'"):
        loader["c"]
