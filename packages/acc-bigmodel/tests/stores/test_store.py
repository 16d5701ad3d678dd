"""Stores in memory and in chains."""

from __future__ import annotations

import pytest
import torch

from acc_bigmodel.stores.store import ChainedStore, MemoryStore


def test_memory_store_knows_without_reading() -> None:
    store = MemoryStore({"w": torch.ones(2, 3, dtype=torch.bfloat16)})
    assert (store.shape("w"), store.dtype("w"), store.nbytes("w")) == ((2, 3), torch.bfloat16, 12)
    assert store.source("w") is None
    assert "w" in store
    with pytest.raises(KeyError):
        store["v"]


def test_a_chain_reads_each_name_where_it_is() -> None:
    chain = ChainedStore([MemoryStore({"a": torch.zeros(1)}), MemoryStore({"b": torch.ones(2)})])
    assert list(chain) == ["a", "b"]
    assert chain.shape("b") == (2,)
    assert chain.alias_of("a") == "a"
    assert len(chain) == 2


def test_a_name_in_two_files_is_an_error() -> None:
    with pytest.raises(ValueError, match="'a' is in two files"):
        ChainedStore([MemoryStore({"a": torch.zeros(1)}), MemoryStore({"a": torch.ones(2)})])


def test_what_is_in_memory_is_at_hand() -> None:
    chain = ChainedStore([MemoryStore({"a": torch.zeros(1)})])
    assert chain.is_at_hand("a")
    with pytest.raises(KeyError):
        chain.is_at_hand("b")
