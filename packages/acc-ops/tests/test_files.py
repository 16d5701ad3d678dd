"""Saving and loading."""

from __future__ import annotations

import io
import logging
import pickle
import threading
from collections import OrderedDict

import pytest
import torch

from acc_ops.files import clean_state_dict_for_safetensors, load, save
from acc_ops.optional import is_available
from acc_ops.testing import run_threads
from acc_ops.world import current_world

needs_safetensors = pytest.mark.skipif(
    not (is_available("safetensors") and is_available("numpy")), reason="safetensors and numpy are needed"
)
needs_numpy = pytest.mark.skipif(not is_available("numpy"), reason="numpy is not installed")


def test_objects_come_back(tmp_path):
    save({"a": torch.arange(3), "b": [1, "x"]}, tmp_path / "o.bin")
    loaded = load(tmp_path / "o.bin")
    assert loaded["b"] == [1, "x"]
    assert torch.equal(loaded["a"], torch.arange(3))


def test_loading_is_limited_to_weights_unless_told_otherwise(tmp_path):
    save({"lock": Custom()}, tmp_path / "o.bin")
    with pytest.raises(pickle.UnpicklingError, match="Weights only load failed"):
        load(tmp_path / "o.bin")
    assert isinstance(load(tmp_path / "o.bin", weights_only=False)["lock"], Custom)


class Custom:
    pass


@needs_numpy
def test_states_of_numpys_generator_load_and_the_allow_list_is_restored(tmp_path):
    import numpy

    before = set(torch.serialization.get_safe_globals())
    save({"numpy": numpy.random.get_state()}, tmp_path / "r.pkl")
    state = load(tmp_path / "r.pkl")["numpy"]
    assert numpy.array_equal(state[1], numpy.random.get_state()[1])
    with pytest.raises(OSError):
        load(tmp_path / "missing")
    assert set(torch.serialization.get_safe_globals()) == before


@needs_numpy
def test_loading_in_many_threads_keeps_the_allow_list(tmp_path):
    import numpy

    before = set(torch.serialization.get_safe_globals())
    save(numpy.random.get_state(), tmp_path / "r.pkl")
    failures = []

    def work():
        try:
            for _ in range(20):
                load(tmp_path / "r.pkl")
        except (pickle.UnpicklingError, RuntimeError) as error:
            failures.append(error)

    threads = [threading.Thread(target=work) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert failures == []
    assert set(torch.serialization.get_safe_globals()) == before


def test_only_the_main_rank_writes(tmp_path):
    def work():
        save(current_world().rank, tmp_path / f"{current_world().rank}.bin")

    run_threads(3, work)
    assert [file.name for file in tmp_path.iterdir()] == ["0.bin"]


@needs_safetensors
@pytest.mark.parametrize("kind", [dict, OrderedDict])
def test_shared_tensors_are_written_once_as_safetensors(tmp_path, kind):
    from safetensors import safe_open
    from safetensors.torch import load_file

    weight = torch.randn(3, 4)
    save(kind(a=weight, b=weight, c=weight.T), tmp_path / "m.safetensors", safe_serialization=True)
    loaded = load_file(tmp_path / "m.safetensors")
    assert set(loaded) == {"a", "c"}
    assert torch.equal(loaded["c"], weight.T)
    with safe_open(tmp_path / "m.safetensors", "pt") as file:
        assert file.metadata() == {"format": "pt"}


@needs_safetensors
def test_safetensors_go_into_open_files_too():
    from safetensors.torch import load as read

    file = io.BytesIO()
    save({"a": torch.ones(2)}, file, safe_serialization=True)
    assert torch.equal(read(file.getvalue())["a"], torch.ones(2))


def test_cleaning_keeps_the_first_name_and_says_what_it_dropped(caplog):
    weight = torch.randn(4, 4)
    with caplog.at_level(logging.WARNING):
        cleaned = clean_state_dict_for_safetensors(
            {"embed": weight, "head": weight, "alias": weight.view(4, 4)}
        )
    assert list(cleaned) == ["embed"]
    assert cleaned["embed"] is weight
    assert "head (is embed)" in caplog.text
    assert "alias (is embed)" in caplog.text


def test_different_views_of_one_storage_are_all_kept(caplog):
    flat = torch.arange(10.0)
    cleaned = clean_state_dict_for_safetensors({"a": flat[:4], "b": flat[4:], "c": flat[2:6], "t": "text"})
    assert torch.equal(cleaned["b"], torch.arange(4.0, 10.0))
    assert torch.equal(cleaned["c"], torch.arange(2.0, 6.0))
    assert cleaned["t"] == "text"
    assert (
        len(
            {tensor.untyped_storage().data_ptr() for tensor in cleaned.values() if tensor is not cleaned["t"]}
        )
        == 3
    )
    assert not caplog.records


def test_cleaning_makes_tensors_contiguous_and_leaves_the_given_dict_alone():
    given = {"t": torch.randn(2, 3).T, "e": torch.zeros(0), "f": torch.zeros(0)}
    cleaned = clean_state_dict_for_safetensors(given)
    assert cleaned["t"].is_contiguous()
    assert not given["t"].is_contiguous()
    assert set(cleaned) == {"t", "e", "f"}
