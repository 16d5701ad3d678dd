from __future__ import annotations

import functools
import gc
import threading
import weakref

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from acc_hooks import (
    AlignDevicesHook,
    OffloadedWeightError,
    add_hook_to_module,
    align_module_device,
    attach_align_device_hook_on_blocks,
    borrowing,
    remove_hook_from_module,
    values,
)
from acc_hooks.placeholder import is_placeholder


def past_torch_function(call):
    """What a C++ extension does: `__torch_function__` is not asked."""
    with torch._C.DisableTorchFunctionSubclass():
        return call()


class Product(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, weight):
        ctx.save_for_backward(weight)
        return x @ weight

    @staticmethod
    def backward(ctx, gradient):
        (weight,) = ctx.saved_tensors
        return gradient @ weight.t(), None


USES = {
    "linear": lambda w, x: F.linear(x, w),
    "the transpose": lambda w, x: x @ w.T,
    "a method": lambda w, x: w.matmul(x.t()),
    "the right operand": lambda w, x: x - w[:2],
    "einsum": lambda w, x: torch.einsum("bi,oi->bo", x, w),
    "conv1d": lambda w, x: F.conv1d(x[None], w[..., None].expand(-1, -1, 1)[:, :2]),
    "embedding": lambda w, x: F.embedding(torch.tensor([0, 2]), w),
    "a list": lambda w, x: torch.cat([w, x, w]),
    "a nested list": lambda w, x: torch.block_diag(*[w, x]),
    "foreach": lambda w, x: torch._foreach_mul([w, w], [2.0, 3.0])[1],
    "an operator": lambda w, x: torch.ops.aten.mm(x, w),
    "an overload": lambda w, x: torch.ops.aten.mm.default(x, w),
    "a function of one's own": lambda w, x: Product.apply(x, w),
    "past torch_function": lambda w, x: past_torch_function(lambda: F.linear(x, w)),
    "past it in a list": lambda w, x: past_torch_function(lambda: torch.cat([x, w])),
    "a transform": lambda w, x: torch.func.grad(lambda x: F.linear(x, w).sum())(x),
    "a transform of a transform": lambda w, x: torch.func.vmap(
        torch.func.grad(lambda x: (x @ w).sin().sum())
    )(x),
    "vmap": lambda w, x: torch.vmap(lambda row: F.linear(row, w))(x),
    "vmap over it": lambda w, x: torch.vmap(lambda row: row * 2)(w),
    "an item": lambda w, x: w[0, 1].item(),
    "a list of numbers": lambda w, x: w.tolist(),
    "a comparison": lambda w, x: bool(w[0, 0] > 0),
    "text": lambda w, x: f"{w[0, 0]:.4f}",
    "rows": lambda w, x: list(w)[1] * 1,
    "a named result": lambda w, x: w.max(1).values,
    "a view of a view": lambda w, x: w.view(2, 8)[1].reshape(4, 2).t() * 1,
    "another dtype's view": lambda w, x: w.view(torch.int32) * 1,
    "chunks": lambda w, x: torch.chunk(w, 2)[1] + 1,
    "detached": lambda w, x: F.linear(x, w.detach()),
    "by data": lambda w, x: F.linear(x, w.data),
    "a new parameter": lambda w, x: nn.Parameter(w, requires_grad=False) * 2,
    "converted": lambda w, x: F.linear(x.double(), w.to(torch.float64)),
    "moved": lambda w, x: w.to("cpu"),
    "on the cpu": lambda w, x: w.cpu(),
    "what moves to it": lambda w, x: x.double().to(w),
    "clone": lambda w, x: w.clone(),
    "like": lambda w, x: torch.zeros_like(w),
    "new": lambda w, x: w.new_ones(2),
    "packed": lambda w, x: torch.from_dlpack(w.detach()),
    "attention": lambda w, x: F.scaled_dot_product_attention(x[None], w[None], w[None]),
    "in place into another": lambda w, x: x.clone().mul_(w[:2]),
}
WRITES = {
    "zero_": lambda w, x: w.zero_(),
    "data.zero_": lambda w, x: w.data.zero_(),
    "detach().add_": lambda w, x: w.detach().add_(1),
    "init": lambda w, x: nn.init.ones_(w),
    "an item": lambda w, x: w.__setitem__(0, 1.0),
    "an item of a row": lambda w, x: w[1].__setitem__(2, 1.0),
    "a row": lambda w, x: w[0].zero_(),
    "a view of a view": lambda w, x: w.view(-1)[3:6].fill_(7),
    "the transpose": lambda w, x: w.t().mul_(2),
    "a chunk": lambda w, x: torch.chunk(w, 2)[1].neg_(),
    "out": lambda w, x: torch.mm(x.t(), x, out=w),
    "add_": lambda w, x: w.add_(1),
    "foreach": lambda w, x: torch._foreach_mul_([w], 2.0),
    "inplace=True": lambda w, x: F.relu(w, inplace=True),
    "an operator": lambda w, x: torch.ops.aten.mul_.Scalar(w, 3),
    "past torch_function": lambda w, x: past_torch_function(lambda: w.add_(1)),
    "past it into out": lambda w, x: past_torch_function(lambda: torch.mm(x.t(), x, out=w)),
    "renormalised": lambda w, x: F.embedding(torch.tensor([1]), w, max_norm=0.1),
    "copy_": lambda w, x: w.copy_(torch.eye(4)),
    "copy_ to a view": lambda w, x: w[:2].copy_(x),
    "an operator on a part": lambda w, x: w.__setitem__(slice(2), w[:2].__imul__(2)),
    "data = value": lambda w, x: setattr(w, "data", torch.eye(4)),
}


class Parent(nn.Module):
    """Computes with a weight of its child, `times` times."""

    def __init__(self, times: int = 1) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.child = nn.Linear(4, 4)
        self.times = times
        self.requires_grad_(False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for _ in range(self.times):
            x = F.linear(x, self.child.weight, self.child.bias)
        return x


@pytest.mark.parametrize("mode", [torch.enable_grad, torch.no_grad, torch.inference_mode])
@pytest.mark.parametrize("use", USES)
def test_whoever_computes_with_an_offloaded_weight_computes_with_its_value(use, mode, x, net, offloaded):
    plain, model = net(), offloaded(net())
    with mode():
        expected = USES[use](plain[2].weight, x)
        found = USES[use](model[2].weight, x)
    if isinstance(expected, str):
        assert found == expected
    else:
        torch.testing.assert_close(found, expected, rtol=0, atol=0)
    if isinstance(expected, torch.Tensor):
        assert found.stride() == expected.stride()
        assert not found.is_meta
    assert is_placeholder(model[2].weight)
    torch.testing.assert_close(model(x), plain(x))


@pytest.mark.parametrize("map_is", ["the values themselves", "a store"])
@pytest.mark.parametrize("write", WRITES)
def test_writing_to_an_offloaded_weight_reaches_its_weights_map(write, map_is, x, writable, net, offloaded):
    plain, model = net(), net()
    weights = None if map_is == "the values themselves" else writable(model.state_dict())
    offloaded(model, weights_map=weights)
    weight = model[2].weight
    changed = WRITES[write](plain[2].weight, x)
    result = WRITES[write](weight, x)
    if changed is plain[2].weight:
        assert result is weight
    torch.testing.assert_close(dict(model.state_dict()), dict(plain.state_dict()), rtol=0, atol=0)
    assert model[2].weight is weight
    assert weight.is_meta
    torch.testing.assert_close(model(x), plain(x))


@pytest.mark.parametrize("write", WRITES)
def test_writing_to_a_weight_of_a_read_only_store_is_refused_by_name(write, x, read_only, net, offloaded):
    model = net()
    expected = model(x)
    offloaded(model, weights_map=read_only(model.state_dict()))
    with pytest.raises(OffloadedWeightError, match=r"^2\.weight was changed.*read-only ReadOnly"):
        WRITES[write](model[2].weight, x)
    torch.testing.assert_close(model(x), expected)


def test_a_change_that_a_read_only_store_refused_is_not_seen_later_in_the_forward(read_only, offloaded):
    class Tries(Parent):
        def forward(self, x):
            with pytest.raises(OffloadedWeightError, match="read-only"):
                self.child.weight.zero_()
            return super().forward(x)

    model = Tries()
    expected = Parent()(torch.ones(1, 4))
    add_hook_to_module(model, AlignDevicesHook("cpu", io_same_device=True))
    offloaded(model.child, weights_map=read_only(model.child.state_dict()))
    torch.testing.assert_close(model(torch.ones(1, 4)), expected)


@pytest.mark.parametrize("call", ["resize_", "t_", "share_memory_", "squeeze_"])
def test_what_would_change_the_shape_or_the_memory_of_an_offloaded_weight_is_refused(call, net, offloaded):
    weight = offloaded(net())[0].weight
    with pytest.raises(
        OffloadedWeightError, match=rf"^0\.weight is offloaded.*'{call}'.*align_module_device"
    ):
        getattr(weight, call)(*[2, 8] if call == "resize_" else [])


def test_a_parent_that_computes_with_its_childs_weight_gets_it(x, offloaded):
    expected = Parent()(x)
    model = offloaded(Parent())
    for _ in range(2):
        torch.testing.assert_close(model(x), expected)
        assert is_placeholder(model.child.weight)
    remove_hook_from_module(model, recurse=True)
    torch.testing.assert_close(offloaded(model, preload_module_classes=["Parent"])(x), expected)


def test_several_uses_in_one_forward_read_the_map_once(x, read_only):
    model = Parent(times=3)
    expected = model(x)
    weights = read_only(model.state_dict())
    attach_align_device_hook_on_blocks(model, {"child": "cpu"}, {"child": True}, weights_map=weights)
    for calls in (1, 2):
        torch.testing.assert_close(model(x), expected)
        assert sorted(weights.asked) == sorted(["child.weight", "child.bias"] * calls)
    assert not borrowing._thread.kept


def test_what_is_kept_in_a_forward_is_bounded(read_only):
    class Norm(nn.Module):
        def __init__(self):
            super().__init__()
            self.layers = nn.ModuleList(nn.Linear(4, 4, bias=False) for _ in range(40))
            self.requires_grad_(False)

        def forward(self, x):
            kept.extend(
                [x.add_(layer.weight.norm()) is x and len(borrowing._thread.kept) for layer in self.layers]
            )
            return x

    kept: list[int] = []
    model = Norm()
    expected = sum(layer.weight.norm() for layer in model.layers)
    attach_align_device_hook_on_blocks(model, {"layers": "cpu"}, {"layers": True})
    torch.testing.assert_close(model(torch.zeros(1))[0], expected)
    assert max(kept) == 2
    assert not borrowing._thread.kept


def test_an_exception_in_the_forward_lets_go_of_what_was_kept(x):
    class Fails(Parent):
        def forward(self, x):
            super().forward(x)
            seen.append(len(borrowing._thread.kept))
            raise RuntimeError("forward failed")

    seen: list[int] = []
    model = Fails()
    attach_align_device_hook_on_blocks(model, {"child": "cpu"}, {"child": True})
    with pytest.raises(RuntimeError, match="forward failed"):
        model(x)
    assert seen == [2]
    assert not borrowing._thread.kept


def test_a_change_in_the_middle_of_a_forward_is_seen_by_the_next_use(x, writable):
    class Changes(Parent):
        def forward(self, x):
            first = super().forward(x)
            self.child.weight.mul_(2)
            with align_module_device(self.child):
                self.child.bias.zero_()
            return first, super().forward(x), self.child(x)

    model = Changes()
    expected = F.linear(x, model.child.weight * 2)
    before = Parent()(x)
    attach_align_device_hook_on_blocks(
        model, {"child": "cpu"}, {"child": True}, weights_map=writable(model.state_dict())
    )
    first, second, third = model(x)
    torch.testing.assert_close((first, second, third), (before, expected, expected))


def test_a_weight_that_its_module_holds_is_that_one(x, net, offloaded):
    model = offloaded(net())
    placeholder = model[0].weight
    with align_module_device(model[0]):
        placeholder.mul_(2)
        assert torch.equal(placeholder, model[0].weight)
        placeholder.copy_(torch.eye(4))
        assert torch.equal(model[0].weight, torch.eye(4))
    assert torch.equal(model.state_dict()["0.weight"], torch.eye(4))


def test_the_result_of_a_use_keeps_no_weight_alive_once_the_forward_is_over(x, read_only):
    gc.collect()
    gc.disable()
    try:
        made = []

        class Store(read_only):
            def __getitem__(self, name):
                value = super().__getitem__(name)
                made.append(weakref.ref(value.untyped_storage()))
                return value

        model = Parent()
        attach_align_device_hook_on_blocks(
            model, {"child": "cpu"}, {"child": True}, weights_map=Store(model.state_dict())
        )
        model(x)
        view = model.child.weight.t()
        assert len(made) == 3
        assert all(storage() is None for storage in made)
        assert view.shape == (4, 4)
    finally:
        gc.enable()


def test_a_gradient_for_a_borrowed_weight_is_refused_by_name(x, offloaded):
    model = offloaded(Parent().requires_grad_(True))
    with pytest.raises(
        OffloadedWeightError, match=r"child\.(weight|bias) is offloaded: it cannot be trained"
    ):
        model(x).sum().backward()
    with pytest.raises(OffloadedWeightError, match=r"child\.weight is offloaded: it cannot be trained"):
        (x @ model.child.weight.t()).sum().backward()
    with pytest.raises(OffloadedWeightError, match=r"child\.weight is offloaded: it cannot be trained"):
        past_torch_function(lambda: F.linear(x, model.child.weight)).sum().backward()
    with pytest.raises(OffloadedWeightError, match=r"child\.weight is offloaded: it cannot be trained"):
        torch.autograd.grad(model(x).sum(), model.child.weight)
    assert model.child.weight.grad is None


def test_frozen_borrowed_weights_pass_gradients_on(x, offloaded):
    plain, model = Parent(times=2), offloaded(Parent(times=2))
    gradients = []
    for module in (plain, model):
        given = x.clone().requires_grad_()
        module(given).sum().backward()
        gradients.append(given.grad)
    torch.testing.assert_close(*gradients)


def test_the_flag_of_the_placeholder_counts_not_that_of_the_view(x, offloaded):
    model = offloaded(Parent())
    weight = model.child.weight
    assert not (x @ weight).requires_grad
    weight.requires_grad_(True)
    assert (x @ weight).requires_grad
    assert (x @ weight.t()).requires_grad
    assert not (x @ weight.detach()).requires_grad
    trained = weight.detach().requires_grad_()
    with pytest.raises(OffloadedWeightError, match="cannot be trained"):
        (x @ trained).sum().backward()


def test_parameters_of_containers_and_of_the_root_can_be_used(x, offloaded):
    class Bag(nn.Module):
        def __init__(self):
            super().__init__()
            torch.manual_seed(0)
            self.scale = nn.Parameter(torch.rand(4))
            self.items = nn.ParameterList([nn.Parameter(torch.rand(4, 4)) for _ in range(3)])
            self.named = nn.ParameterDict(
                {"a": nn.Parameter(torch.rand(4)), "b": nn.Parameter(torch.rand(4))}
            )
            self.layers = nn.ModuleDict({"one": nn.Linear(4, 4)})
            self.register_buffer("shift", torch.rand(4))
            self.requires_grad_(False)

        def forward(self, x):
            x = functools.reduce(torch.matmul, self.items, x * self.scale)
            return F.linear(
                x + self.shift, self.layers["one"].weight, sum(v * len(k) for k, v in self.named.items())
            )

    expected = Bag()(x)
    model = offloaded(Bag(), offload_buffers=True)
    assert all(is_placeholder(tensor) for tensor in (*model.parameters(), *model.buffers()))
    torch.testing.assert_close(model(x), expected)


def test_a_parent_can_run_a_recurrent_childs_flat_weights(offloaded):
    class Runs(nn.Module):
        def __init__(self):
            super().__init__()
            torch.manual_seed(0)
            self.cell = nn.LSTM(2, 3)
            self.requires_grad_(False)

        def forward(self, x):
            state = (torch.zeros(1, 1, 3), torch.zeros(1, 1, 3))
            return torch._VF.lstm(x, state, self.cell._flat_weights, True, 1, 0.0, False, False, False)[0]

    x = torch.ones(4, 1, 2)
    expected = Runs()(x)
    model = offloaded(Runs())
    torch.testing.assert_close(model(x), expected)
    torch.testing.assert_close(model.cell(x)[0], expected)


def test_a_tie_is_one_copy_however_it_is_used(tied, read_only):
    class Looks(type(tied)):
        def forward(self, ids):
            hidden = self.middle(F.embedding(ids, self.embed.weight))
            return self.head(hidden), hidden @ self.embed.weight.t()

    ids = torch.tensor([1, 2])
    tied.requires_grad_(False)
    expected = tied(ids)
    tied.__class__ = Looks
    weights = read_only(tied.state_dict())
    attach_align_device_hook_on_blocks(
        tied, dict.fromkeys(["embed", "middle", "head"], "cpu"), True, weights_map=weights
    )
    for found in tied(ids):
        torch.testing.assert_close(found, expected)
    assert tied.embed.weight is tied.head.weight
    assert not any(tied.embed._hf_hook._residents._copies)


def test_writing_to_one_name_of_a_tie_reaches_both(tied, writable, offloaded):
    weights = writable(tied.requires_grad_(False).state_dict())
    offloaded(tied, weights_map=weights)
    tied.head.weight.fill_(2)
    assert all((weights[name] == 2).all() for name in ("embed.weight", "head.weight"))
    assert (tied.embed(torch.tensor([3])) == 2).all()


def test_a_weight_tied_after_it_was_offloaded_is_the_others_weight(tied, offloaded):
    ids = torch.tensor([1, 2])
    tied.requires_grad_(False)
    expected = tied(ids)
    tied.head.weight = nn.Parameter(torch.zeros(10, 6), requires_grad=False)
    offloaded(tied)
    tied.head.weight = tied.embed.weight
    torch.testing.assert_close(tied(ids), expected)
    assert tied.head.weight is tied.embed.weight
    tied.head.weight = nn.Parameter(tied.embed.weight.view(6, 10).t(), requires_grad=False)
    expected = F.linear(tied.middle(tied.embed(ids)), tied.state_dict()["embed.weight"].view(6, 10).t())
    torch.testing.assert_close(tied(ids), expected)


@pytest.mark.parametrize("store", [None, True])
def test_buffers_that_are_offloaded_can_be_written_by_a_parent(store, offloaded, writable):
    class Counts(nn.Module):
        def __init__(self):
            super().__init__()
            self.norm = nn.BatchNorm1d(4)
            self.requires_grad_(False)

        def forward(self, x):
            norm = self.norm
            return F.batch_norm(x, norm.running_mean, norm.running_var, norm.weight, norm.bias, training=True)

    x = torch.randn(8, 4, generator=torch.Generator().manual_seed(0))
    plain, model = Counts(), Counts()
    offloaded(model, offload_buffers=True, weights_map=store and writable(model.state_dict()))
    for _ in range(2):
        torch.testing.assert_close(model(x), plain(x))
    torch.testing.assert_close(model.state_dict(), plain.state_dict())
    assert plain.norm.running_mean.any()


def test_without_a_device_to_compute_on_the_weight_is_named():
    layer = add_hook_to_module(nn.Linear(2, 2), AlignDevicesHook(offload=True))
    with pytest.raises(ValueError, match=r"^weight is offloaded and there is no device.*execution_device"):
        layer.weight + 1


def test_kernels_that_take_an_address_get_one_during_a_forward_only(x):
    class Address(Parent):
        def forward(self, x):
            seen.append(self.child.weight.data_ptr())
            return super().forward(x)

    seen: list[int] = []
    model = Address()
    address = model.child.weight.data_ptr()
    attach_align_device_hook_on_blocks(model, {"child": "cpu"}, {"child": True})
    model(x)
    assert seen == [address]
    assert model.child.weight.data_ptr() == 0


def test_threads_borrow_each_for_themselves(x, read_only):
    model = Parent(times=2)
    expected = model(x)
    attach_align_device_hook_on_blocks(
        model, {"child": "cpu"}, {"child": True}, weights_map=read_only(model.state_dict())
    )
    wrong: list[object] = []

    def run():
        try:
            wrong.extend("result" for _ in range(50) if not torch.allclose(model(x), expected))
        except Exception as error:  # noqa: BLE001 - whatever it is, the test reports it
            wrong.append(error)

    threads = [threading.Thread(target=run) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert wrong == []


def test_an_offloaded_weight_can_be_an_argument_of_a_hooked_module(x, net, offloaded, writable):
    class Given(nn.Module):
        def __init__(self):
            super().__init__()
            self.child = nn.Linear(4, 4)
            self.bilinear = Multiplies()

        def forward(self, x):
            before = self.bilinear(self.child.weight, x)
            self.child.weight.mul_(2)
            return before, self.bilinear(self.child.weight, x)

    class Multiplies(nn.Module):
        def forward(self, weight, x):
            return x @ weight

    model = Given().requires_grad_(False)
    weight = model.child.weight.clone()
    attach_align_device_hook_on_blocks(
        model, {"child": "cpu"}, {"child": True}, weights_map=writable(model.state_dict())
    )
    add_hook_to_module(model.bilinear, AlignDevicesHook("cpu", io_same_device=True))
    torch.testing.assert_close(model(x), (x @ weight, x @ (weight * 2)))
    assert not model.bilinear(model.child.weight, x).is_meta


def test_an_optimizer_over_offloaded_parameters_is_told_so_and_changes_nothing(x, net, offloaded):
    model = offloaded(net().requires_grad_(True))
    before = {name: value.clone() for name, value in model.state_dict().items()}
    optimizer = torch.optim.AdamW(model.parameters(), lr=1.0)
    with pytest.raises(
        OffloadedWeightError,
        match=r"\d\.(weight|bias) is offloaded: it cannot be trained.*requires_grad_\(False\)",
    ):
        model(x).sum().backward()
    optimizer.step()
    torch.testing.assert_close(dict(model.state_dict()), before)


def test_what_a_transform_borrowed_first_can_be_used_after_it(x):
    class Transforms(Parent):
        def forward(self, x):
            gradient = torch.func.grad(lambda x: (x @ self.child.weight).sum())(x)
            kept.extend(value.tensor for _, value in borrowing._thread.kept.values())
            return gradient, x @ self.child.weight

    kept: list[torch.Tensor] = []
    model = Transforms()
    expected = model(x)
    attach_align_device_hook_on_blocks(model, {"child": "cpu"}, {"child": True})
    torch.testing.assert_close(model(x), expected)
    assert [type(tensor) for tensor in kept] == [nn.Parameter]
    assert not torch._C._functorch.is_functorch_wrapped_tensor(kept[0])


@pytest.mark.skipif(not hasattr(torch, "OutOfMemoryError"), reason="torch has no such error")
def test_where_memory_is_short_what_is_kept_is_let_go_and_the_read_tried_again(offloaded, monkeypatch):
    class Reads(nn.Module):
        def __init__(self):
            super().__init__()
            self.layers = nn.ModuleList(nn.Linear(4, 4, bias=False) for _ in range(4))

        def forward(self, x):
            for layer in self.layers:
                x = x @ layer.weight.T
            return x

    def full(self, slot, value, device):
        if borrowing._thread.kept:
            failed.append(slot.full)
            raise torch.OutOfMemoryError
        return placed(self, slot, value, device)

    failed: list[str] = []
    model, x = Reads().requires_grad_(False), torch.randn(2, 4)
    expected = model(x)
    offloaded(model)
    placed = values.Values.placed
    monkeypatch.setattr(values.Values, "placed", full)
    assert torch.equal(model(x), expected)
    assert failed == ["layers.1.weight", "layers.2.weight", "layers.3.weight"]


@pytest.mark.parametrize("grad", [False, True])
def test_autocast_keeps_no_copy_of_a_fetched_weight(offloaded, grad):
    made: list[weakref.ref] = []

    class Watched(nn.Linear):
        def forward(self, x):
            made.append(weakref.ref(self.weight))
            return super().forward(x)

    model = offloaded(nn.Sequential(Watched(4, 4), Watched(4, 4)))
    with torch.set_grad_enabled(grad), torch.autocast("cpu", torch.bfloat16):
        for _ in range(5):
            output = model(torch.randn(2, 4))
        assert output.requires_grad is grad
        del output
        assert sum(reference() is not None for reference in made) == 0
