"""Copies hold what the state held, whatever it is made of, in buffers that are kept; they are written as the state would have been."""

from __future__ import annotations

import copy
from collections import OrderedDict, namedtuple
from contextlib import ExitStack

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from acc_bigmodel import open_store
from acc_ops.fake_accelerator import FakeAcceleratorUnavailable, fake_accelerator
from acc_ops.parting import destroy_group
from acc_ops.testing import count_calls
from acc_plugins.states.part import TorchFilePart, WeightsPart
from acc_trainer.checkpoint.staging import ImagePart, Staging

Pair = namedtuple("Pair", "first second")


def bytes_kept(staging):
    return sum(kept.buffer.nbytes for kept in staging._kept.values())


def copied(state, staging=None):
    (part,) = (staging or Staging()).copies([TorchFilePart(name="x", state=state)])
    return part.state


def test_a_copy_of_nested_state_is_equal_and_apart():
    state = OrderedDict(
        step=torch.tensor(3.0),
        moments=[torch.arange(6).view(2, 3).t(), torch.empty(0, 4), (torch.ones(2, dtype=torch.bool),)],
        pair=Pair(torch.randn(3, dtype=torch.complex64).conj(), {"lr": 0.1, 5: None}),
        weight=torch.nn.Parameter(torch.randn(2), requires_grad=False),
    )
    want = copy.deepcopy(state)
    have = copied(state)
    state["step"] += 1
    state["moments"][0].zero_()
    state["moments"].append("later")
    state["pair"].second["lr"] = 0.2
    assert type(have) is OrderedDict
    assert type(have["pair"]) is Pair
    assert type(have["weight"]) is torch.nn.Parameter
    assert not have["weight"].requires_grad
    assert repr(have) == repr(want)


def test_tensors_that_are_one_stay_one_and_views_of_one_storage_go_on_sharing():
    base = torch.arange(12.0)
    state = {"a": base, "b": base, "row": base[3:6], "column": base.view(3, 4)[:, 1], "own": torch.ones(3)}
    have = copied(state)
    assert have["a"] is have["b"]
    assert have["a"].data_ptr() != base.data_ptr()
    have["a"][4] = 100
    assert have["row"].tolist() == [3, 100, 5]
    assert have["column"].tolist() == [1, 5, 9]


def test_views_of_one_storage_keep_what_they_do_to_its_values():
    base = torch.tensor([1 + 2j, 3 - 4j])
    have = copied([base, base.conj(), base.conj().imag])
    assert [one.tolist() for one in have] == [[1 + 2j, 3 - 4j], [1 - 2j, 3 + 4j], [-2.0, 4.0]]


def test_a_view_alone_takes_only_its_own_values_along():
    staging = Staging()
    have = copied({"row": torch.arange(1e6).view(1000, 1000)[3]}, staging)
    assert have["row"].tolist() == list(range(3000, 4000))
    assert bytes_kept(staging) < 5000
    assert have["row"].untyped_storage().nbytes() == 4000


class Tagged(torch.Tensor):
    """A subclass that does not say what it is made of."""


def test_what_is_no_plain_tensor_is_copied_too():
    tagged = torch.ones(3).as_subclass(Tagged)
    tagged.note = "kept"
    noted = torch.ones(2)
    noted.note = "kept too"
    state = {
        "sparse": torch.eye(3).to_sparse(),
        "tagged": tagged,
        "noted": noted,
        "bits": torch.arange(4, dtype=torch.uint8).view(torch.uint4)
        if hasattr(torch, "uint4")
        else torch.arange(4, dtype=torch.uint8),
        "meta": torch.empty(3, device="meta"),
        "grad": torch.ones(2, requires_grad=True),
        "result": torch.ones(2, requires_grad=True) * 2,
    }
    have = copied(state)
    for tensor in (tagged, noted):
        tensor.zero_()
    assert have["sparse"].to_dense().equal(torch.eye(3))
    assert type(have["tagged"]) is Tagged
    assert (have["tagged"].tolist(), have["tagged"].note) == ([1, 1, 1], "kept")
    assert (have["noted"].tolist(), have["noted"].note) == ([1, 1], "kept too")
    assert have["bits"].dtype == state["bits"].dtype
    assert have["bits"].view(torch.uint8).tolist() == [0, 1, 2, 3]
    assert have["meta"].is_meta
    assert have["grad"].requires_grad
    assert have["result"].tolist() == [2, 2]


def test_shards_are_copied_as_shards_without_a_word_to_other_ranks():
    pytest.importorskip("torch.testing._internal.distributed.fake_pg")
    import torch.distributed.tensor as sharded

    dist = torch.distributed
    dist.init_process_group("fake", store=dist.HashStore(), rank=0, world_size=2)
    try:
        mesh = dist.device_mesh.init_device_mesh("cpu", (2,))
        local = torch.arange(6.0).view(2, 3)
        shard = sharded.DTensor.from_local(local, mesh, [sharded.Shard(0)], run_check=False)
        have = copied({"weight": shard})["weight"]
        local.zero_()
        assert type(have) is sharded.DTensor
        assert (have.shape, have.placements) == (shard.shape, shard.placements)
        assert have.to_local().tolist() == [[0, 1, 2], [3, 4, 5]]
    finally:
        destroy_group()


def test_tensors_of_a_device_are_copied_into_the_memory_of_the_cpu(tmp_path):
    with ExitStack() as stack:
        try:
            fake = stack.enter_context(fake_accelerator(total_bytes=2**20))
        except FakeAcceleratorUnavailable as error:
            pytest.skip(str(error))
        weight = torch.arange(6.0, device=fake.device).view(2, 3)
        base = torch.arange(4.0, device=fake.device)
        parts = [
            WeightsPart(name="model", state={"w": weight.t()}),
            TorchFilePart(
                name="optimizer",
                state={"m": weight, "base": base, "view": base[1:], "step": torch.tensor(1.0)},
            ),
        ]
        image, optimizer = Staging().copies(parts)
        weight.zero_()
        base.zero_()
        image.write(tmp_path)
        del weight, base, parts
    assert {one.device.type for one in optimizer.state.values()} == {"cpu"}
    assert optimizer.state["m"].tolist() == [[0, 1, 2], [3, 4, 5]]
    assert optimizer.state["view"].tolist() == [1, 2, 3]
    weights = open_store(tmp_path / "model.safetensors")
    assert weights["w"].tolist() == [[0, 3], [1, 4], [2, 5]]


def test_the_image_of_weights_is_the_file_that_a_save_that_blocks_writes(tmp_path):
    shared = torch.randn(4, 4)
    state = {
        "a": torch.randn(3, 5).t(),
        "tied": shared,
        "again": shared,
        "scalar": torch.tensor(2.5),
        "nothing": torch.empty(0, 3),
        "flags": torch.tensor([True, False]),
        "half": torch.randn(7, dtype=torch.bfloat16),
        "small": torch.arange(5, dtype=torch.int8),
    }
    part = WeightsPart(name="model", state=state)
    (image,) = Staging().copies([part])
    assert type(image) is ImagePart
    (tmp_path / "one").mkdir()
    (tmp_path / "other").mkdir()
    assert part.write(tmp_path / "one") == image.write(tmp_path / "other") == ["model.safetensors"]
    one, other = (tmp_path / name / "model.safetensors" for name in ("one", "other"))
    assert one.read_bytes() == other.read_bytes()


def test_weights_that_the_image_cannot_hold_are_written_as_they_would_have_been(tmp_path):
    torch_file, strange = (
        WeightsPart(name="model", state={"w": torch.ones(2)}, safe=False),
        WeightsPart(name="model_1", state={"w": torch.ones(2).as_subclass(Tagged)}),
    )
    first, second = Staging().copies([torch_file, strange])
    assert first.write(tmp_path) == ["pytorch_model.bin"]
    assert torch.load(tmp_path / "pytorch_model.bin")["w"].tolist() == [1, 1]
    assert second.write(tmp_path) == ["model_1.safetensors"]


def test_weights_without_values_are_refused_as_by_a_save_that_blocks():
    with pytest.raises(RuntimeError, match="'w' is on the meta device and has no values to save"):
        Staging().copies([WeightsPart(name="model", state={"w": torch.empty(2, device="meta")})])[0].write(
            "."
        )


def test_buffers_serve_again_until_the_state_has_another_form():
    staging = Staging()

    def parts(width, ties=False, more=()):
        weight = torch.full((width,), float(width))
        weights = {"a": weight, "b": weight if ties else weight.clone()}
        return [WeightsPart(name="model", state=weights), TorchFilePart(name="o", state=[weight]), *more]

    def where():
        return [kept.buffer.data_ptr() for kept in staging._kept.values()]

    staging.copies(parts(8))
    first = where()
    (model, optimizer) = staging.copies(parts(8))
    assert where() == first
    assert optimizer.state[0].tolist() == [8] * 8
    assert not staging.copies(parts(8, ties=True))[0].state.equal(model.state)
    staging.copies(parts(8, more=[TorchFilePart(name="o", state=[torch.ones(3)])]))
    assert len(staging._kept) == 3, "two parts of one name do not share a buffer"
    staging.copies(parts(1000)[:1])
    assert len(staging._kept) == 1
    assert 8000 < bytes_kept(staging) < 9000


def test_the_file_of_a_copy_is_as_large_as_that_of_the_state(tmp_path):
    part = TorchFilePart(name="optimizer", state={i: torch.randn(1000) for i in range(20)})
    (copy_of_it,) = Staging().copies([part])
    sizes = []
    for one in (part, copy_of_it):
        one.write(tmp_path)
        sizes.append((tmp_path / "optimizer.bin").stat().st_size)
    assert sizes[0] == sizes[1]


DTYPES = [torch.float32, torch.float16, torch.int64, torch.uint8, torch.bool]


@given(
    st.lists(
        st.tuples(st.lists(st.integers(0, 4), max_size=3), st.sampled_from(DTYPES), st.booleans()), max_size=8
    )
)
def test_any_mixture_of_tensors_is_copied_exactly(forms):
    state = []
    for number, (shape, dtype, turned) in enumerate(forms):
        values = torch.arange(torch.Size(shape).numel()).add(number).to(dtype).view(shape)
        state.append(values.permute(tuple(reversed(range(values.dim())))) if turned else values)
    staging = Staging()
    for _ in range(2):
        for have, want in zip(copied(state, staging), state, strict=True):
            assert have.dtype == want.dtype
            assert have.shape == want.shape
            assert have.equal(want)


def test_the_work_grows_with_the_number_of_tensors_and_no_faster():
    def calls(size):
        staging = Staging()
        parts = [
            WeightsPart(name="model", state={f"w{i}": torch.ones(2) for i in range(size)}),
            TorchFilePart(name="optimizer", state={i: {"m": torch.ones(2)} for i in range(size)}),
        ]
        staging.copies(parts)
        return count_calls(lambda: staging.copies(parts))

    assert calls(800) < 9 * calls(100)
