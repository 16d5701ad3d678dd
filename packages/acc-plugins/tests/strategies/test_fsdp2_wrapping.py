"""Which modules become units: chosen by class, size or function, through any nesting, and never so that a shared weight is split."""

from __future__ import annotations

import functools
import logging
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from torch import nn
from torch.distributed.fsdp.wrap import ModuleWrapPolicy, lambda_auto_wrap_policy

from acc_plugins.options.fsdp import FullyShardedDataParallelPlugin
from acc_plugins.strategies.fsdp2_wrapping import chosen_blocks, units_of


class Block(nn.Module):
    def __init__(self, inner: nn.Module | None = None) -> None:
        super().__init__()
        self.fc = nn.Linear(4, 4)
        self.inner = inner

    def forward(self, x: Any) -> Any:
        x = self.fc(x)
        return x if self.inner is None else self.inner(x)


class Told(nn.Module):
    """A model that says which its ends are."""

    def __init__(self, *, tied: bool = False) -> None:
        super().__init__()
        self.embedding = nn.Embedding(4, 4)
        self.layers = nn.ModuleList([Block(), Block()])
        self.norm = nn.LayerNorm(4)
        self.head = nn.Linear(4, 4, bias=False)
        if tied:
            self.head.weight = self.embedding.weight

    def get_input_embeddings(self) -> nn.Module:
        return self.embedding

    def get_output_embeddings(self) -> nn.Module:
        return self.head


def plugin(**options: Any) -> FullyShardedDataParallelPlugin:
    return FullyShardedDataParallelPlugin(fsdp_version=2, **options)


BY_CLASS = {"auto_wrap_policy": "transformer_based_wrap", "transformer_cls_names_to_wrap": ["Block"]}


def names(model: nn.Module, **options: Any) -> list[str]:
    called = {id(part): name for name, part in model.named_modules()}
    return [called[id(block)] for block in chosen_blocks(model, plugin(**options))]


def test_without_a_policy_the_root_is_the_only_unit() -> None:
    assert names(Told()) == []
    assert units_of(Told(), plugin(), frozenset()).units == ()


def test_classes_are_found_in_lists_dictionaries_and_inside_each_other_innermost_first() -> None:
    model = nn.ModuleDict({"a": nn.ModuleList([nn.Sequential(Block(Block()))]), "b": Block()})
    assert names(model, **BY_CLASS) == ["a.0.0.inner", "a.0.0", "b"]


def test_a_block_that_stands_twice_is_one_unit() -> None:
    shared = Block()
    assert names(nn.Sequential(shared, shared), **BY_CLASS) == ["0"]


def test_the_model_itself_is_never_its_own_unit() -> None:
    assert names(Block(Block()), **BY_CLASS) == ["inner"]


def test_the_classes_of_transformers_are_the_default_and_unknown_ones_are_refused() -> None:
    model = Told()
    model._no_split_modules = ["Block"]
    assert names(model, auto_wrap_policy="transformer_based_wrap") == ["layers.0", "layers.1"]
    with pytest.raises(ValueError, match="no module of a class 'Blocks': did you mean Block"):
        names(model, **{**BY_CLASS, "transformer_cls_names_to_wrap": ["Blocks"]})


def test_one_plugin_serves_models_of_other_classes() -> None:
    first, second = nn.Sequential(nn.Linear(2, 2)), nn.Sequential(nn.Conv1d(2, 2, 1))
    first._no_split_modules, second._no_split_modules = ["Linear"], ["Conv1d"]
    shared = plugin(auto_wrap_policy="transformer_based_wrap")
    assert [type(chosen_blocks(m, shared)[0]) for m in (first, second)] == [nn.Linear, nn.Conv1d]


@given(sizes=st.lists(st.integers(1, 6), min_size=1, max_size=5), least=st.integers(1, 60))
def test_a_size_never_chooses_a_container_nor_leaves_out_what_is_large_enough(
    sizes: list[int], least: int
) -> None:
    model = nn.ModuleList(nn.ModuleList([nn.Linear(size, size, bias=False)]) for size in sizes)
    chosen = chosen_blocks(model, plugin(auto_wrap_policy="size_based_wrap", min_num_params=least))
    assert [block.weight.numel() for block in chosen] == [s * s for s in sizes if s * s >= least]


def test_a_size_counts_what_found_no_unit_inside() -> None:
    model = nn.Sequential(nn.Sequential(nn.Linear(4, 4), nn.Linear(2, 2)), nn.Linear(1, 1))
    assert names(model, auto_wrap_policy="size_based_wrap", min_num_params=20) == ["0.0"]
    assert names(model, auto_wrap_policy="size_based_wrap", min_num_params=25) == ["0"]


@pytest.mark.parametrize(
    "policy",
    [
        lambda module: isinstance(module, nn.Linear),
        functools.partial(lambda_auto_wrap_policy, lambda_fn=lambda module: isinstance(module, nn.Linear)),
        ModuleWrapPolicy({nn.Linear}),
        lambda module, recurse, nonwrapped_numel: recurse or isinstance(module, nn.Linear),
    ],
)
def test_functions_of_the_users_choose_as_torchs_do(policy: Any) -> None:
    assert names(nn.Sequential(nn.Linear(2, 2), nn.ReLU()), auto_wrap_policy=policy) == ["0"]


def test_ignored_parameters_do_not_count() -> None:
    model = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4))
    ignored = frozenset(id(p) for p in model[0].parameters())
    own = plugin(auto_wrap_policy="size_based_wrap", min_num_params=10)
    assert chosen_blocks(model, own, ignored) == [model[1]]


def test_a_model_that_tells_its_ends_gets_units_for_them() -> None:
    model = Told()
    units = units_of(model, plugin(**BY_CLASS), frozenset())
    assert units.names(model) == ["layers.0", "layers.1", "embedding", "norm + head"]
    assert [unit.reshards for unit in units.units] == [True, True, True, False]
    tied = Told(tied=True)
    assert units_of(tied, plugin(**BY_CLASS), frozenset()).names(tied) == ["layers.0", "layers.1"]


def test_a_weight_that_two_units_share_is_left_to_the_module_around_both(
    caplog: pytest.LogCaptureFixture,
) -> None:
    model = Told()
    model.layers[1].fc.weight = model.layers[0].fc.weight
    with caplog.at_level(logging.WARNING):
        units = units_of(model, plugin(**BY_CLASS), frozenset())
    assert units.names(model) == ["embedding", "norm + head"]
    assert "layers.1.fc.weight is shared with a module elsewhere" in caplog.text
    assert len(units.blocks) == 2
