"""Plans of tensor parallelism: found, read, and refused before a layer is touched."""

from __future__ import annotations

import gc
import weakref
from types import SimpleNamespace
from typing import Any

import pytest
from torch import nn
from torch.distributed.tensor.parallel import ColwiseParallel

from acc_hooks.ties import shared_parameters
from acc_plugins.parallel.plans import STYLES, PlanError, plan_of, resolve, set_plan, split_dim
from acc_plugins.parallel.tensor import _check_layouts, _style, check_tensor_parallel


class Attention(nn.Module):
    def __init__(self, heads: int = 6) -> None:
        super().__init__()
        self.head_dim = 4
        self.q, self.out = nn.Linear(8, 4 * heads), nn.Linear(4 * heads, 8)


class Model(nn.Module):
    def __init__(self, heads: int = 6) -> None:
        super().__init__()
        self.tokens = nn.Embedding(10, 8)
        self.layers = nn.ModuleList(Attention(heads) for _ in range(2))
        self.head = nn.Linear(8, 10, bias=False)


PLAN = {"layers.*.q": "colwise", "layers.*.out": "rowwise"}


def test_a_plan_that_was_told_counts_more_than_the_model_s_own() -> None:
    model: Any = Model()
    assert plan_of(model) is None
    model._tp_plan = {"head": "colwise"}
    assert plan_of(model) == {"head": "colwise"}
    model.tp_plan = {"tokens": "embedding_rowwise"}
    assert plan_of(model) == {"tokens": "embedding_rowwise"}
    set_plan(model, PLAN)
    assert plan_of(model) == PLAN


def test_what_was_told_does_not_keep_the_model_alive() -> None:
    model = Model()
    set_plan(model, PLAN)
    gone = weakref.ref(model)
    del model
    gc.collect()
    assert gone() is None


@pytest.mark.parametrize("plan", [None, "auto", [("q", "colwise")], {1: "colwise"}])
def test_what_is_no_plan_is_refused(plan: Any) -> None:
    with pytest.raises(TypeError, match="maps names of modules"):
        set_plan(Model(), plan)


def test_a_star_stands_for_one_part_of_a_name_and_a_full_name_counts_more() -> None:
    plan = {
        "layers.1.q": "colwise_gather_output",
        "layers.*.q": "colwise",
        "*.out": "rowwise",
        "head": "colwise",
    }
    assert resolve(Model(), plan, 2) == {
        "layers.0.q": "colwise",
        "layers.1.q": "colwise_gather_output",
        "head": "colwise",
    }


@pytest.mark.parametrize(
    ("plan", "ranks", "message"),
    [
        ({"layers.*.query": "colwise"}, 2, r"layers\.\*\.query: no module has such a name"),
        ({"head.weight": "packed_colwise"}, 2, "'packed_colwise' names a parameter"),
        ({"head": "moe_tp_experts"}, 2, "the style 'moe_tp_experts' is not known here"),
        ({"head": "colwise"}, 4, r"head: out_features=10 of Linear \(10, 8\) is not a multiple of 4"),
        ({"head": "rowwise"}, 3, "in_features=8"),
        ({"tokens": "embedding_rowwise"}, 4, "num_embeddings=10"),
        ({"tokens": "embedding_colwise"}, 3, "embedding_dim=8"),
        ({"tokens": "colwise"}, 3, "embedding_dim=8"),
        ({"head": "embedding_rowwise"}, 2, "splits an nn.Embedding, and this is a Linear"),
        ({"layers.*": "colwise"}, 2, "Attention computes in a way of its own"),
        (
            PLAN,
            4,
            r"layers\.1\.out: 6 heads of 4 \(24 features of Attention\) cannot be divided over 4 ranks",
        ),
        ({"layers.*.q": "colwise", "*.0.q": "rowwise"}, 2, "two patterns give it different styles"),
    ],
)
def test_a_plan_that_cannot_be_followed_names_layer_and_sizes(plan: Any, ranks: int, message: str) -> None:
    model = Model()
    before = {name: id(p) for name, p in model.named_parameters()}
    set_plan(model, plan)
    with pytest.raises(PlanError, match=message):
        check_tensor_parallel(model, ranks)
    assert {name: id(p) for name, p in model.named_parameters()} == before


def test_all_problems_are_named_at_once() -> None:
    model = Model()
    set_plan(model, {**PLAN, "head": "colwise", "gone": "colwise"})
    with pytest.raises(PlanError, match=r"(?s)gone.*layers\.0\.q.*layers\.1\.out.*head.*Choose a tp_size"):
        check_tensor_parallel(model, 4)


def test_a_model_s_own_plan_may_name_what_this_model_has_not() -> None:
    model: Any = Model()
    model._tp_plan = {**PLAN, "layers.*.experts": "moe_tp_experts"}
    assert set(check_tensor_parallel(model, 2)) == {
        "layers.0.q",
        "layers.0.out",
        "layers.1.q",
        "layers.1.out",
    }
    model._tp_plan = {"other.*": "colwise"}
    with pytest.raises(PlanError, match=r"none of other\.\* is the name of a module"):
        check_tensor_parallel(model, 2)


def test_without_a_plan_the_way_out_is_told() -> None:
    with pytest.raises(NotImplementedError, match=r"tp_size=2.*those of Model.*set_plan"):
        check_tensor_parallel(Model(), 2)


def test_a_layer_that_shares_its_weight_with_a_split_one_is_split_too() -> None:
    model: Any = Model()
    model.head.weight = model.tokens.weight
    for plan, other, style in (
        ({"head": "colwise_gather_output"}, "tokens", "embedding_rowwise"),
        ({"tokens": "embedding_rowwise"}, "head", "colwise_gather_output"),
        ({"tokens": "embedding_colwise"}, "head", "rowwise_split_input"),
        ({"head": ColwiseParallel()}, "tokens", "embedding_rowwise"),
    ):
        model._tp_plan = plan
        assert check_tensor_parallel(model, 2)[other] == style
    model._tp_plan = {"head": "colwise", "tokens": "embedding_colwise"}
    with pytest.raises(PlanError, match=r"head and tokens share one weight|tokens and head share one weight"):
        check_tensor_parallel(model, 2)


def test_a_weight_that_a_norm_shares_with_a_split_layer_cannot_follow() -> None:
    class Odd(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.up = nn.Linear(4, 4)
            self.other = nn.Module()
            self.other.scale = self.up.bias

    model: Any = Odd()
    model._tp_plan = {"up": "colwise"}
    with pytest.raises(PlanError, match=r"other\.scale shares its weight with up"):
        check_tensor_parallel(model, 2)


def test_a_model_that_counts_its_heads_itself_is_warned_of(caplog: pytest.LogCaptureFixture) -> None:
    class Counting(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.n_heads = 4
            self.q = nn.Linear(8, 8)

    model: Any = nn.ModuleDict({"attention": Counting()})
    model._tp_plan = {"attention.q": "colwise"}
    check_tensor_parallel(model, 2)
    assert "attention.q is split over its output features, and Counting has n_heads=4" in caplog.text


def test_every_style_by_name_says_what_it_splits() -> None:
    assert {style for style, part in STYLES.items() if part is None} == {
        "sequence_parallel",
        "replicated_with_grad_allreduce",
        "replicate",
    }


@pytest.mark.parametrize("style", [style for style, part in STYLES.items() if part is not None])
def test_the_size_that_is_checked_is_the_one_that_torch_splits(style: str) -> None:
    """Also for torch's object, which a user may give instead of the name."""
    layers = [nn.Embedding(8, 8)] if style.startswith("embedding") else [nn.Embedding(8, 8), nn.Linear(8, 8)]
    for layer in layers:
        at = split_dim(layer, style)
        assert at is not None
        assert split_dim(layer, _style(style, layer)) == at
        sizes = [8, 8]
        sizes[1 - at] = 7  # of the other dimension nothing is asked
        odd = type(layer)(*(sizes if isinstance(layer, nn.Embedding) else sizes[::-1]))
        holder = nn.ModuleDict({"layer": odd})
        assert resolve(holder, {"layer": style}, 2) == {"layer": style}
        with pytest.raises(PlanError, match=r"=8 of .* is not a multiple of 7"):
            resolve(holder, {"layer": style}, 7)


@pytest.mark.parametrize(
    "style", ["colwise_gather_output", "colwise_rep", "rowwise_rep", "rowwise_split_input"]
)
def test_an_embedding_and_a_linear_layer_of_one_style_split_a_shared_weight_in_two_ways(style: str) -> None:
    model = Model()
    model.head.weight = model.tokens.weight
    set_plan(model, {"tokens": style, "head": style})
    with pytest.raises(PlanError, match="tokens and head share one weight, but the plan splits it"):
        check_tensor_parallel(model, 2)


@pytest.mark.parametrize(
    ("tokens", "head"),
    [
        ("rowwise_rep", "colwise_rep"),
        ("embedding_colwise", "rowwise_split_input"),
        ("colwise_rep", "rowwise_rep"),
    ],
)
def test_styles_that_split_a_shared_weight_alike_are_taken(tokens: str, head: str) -> None:
    model = Model()
    model.head.weight = model.tokens.weight
    set_plan(model, {"tokens": tokens, "head": head})
    assert check_tensor_parallel(model, 2) == {"tokens": tokens, "head": head}


def test_a_shared_weight_whose_places_come_apart_is_an_error() -> None:
    """As a style of the user's own may leave it."""
    model = Model()
    model.head.weight = model.tokens.weight
    (group,) = shared_parameters(model)
    layout: Any = SimpleNamespace(placements=("split",))
    model.head._parameters["weight"] = layout
    with pytest.raises(PlanError, match=r"tokens.weight and head.weight shared one weight"):
        _check_layouts(group)
