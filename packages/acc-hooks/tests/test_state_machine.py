"""Hooks attached, removed, copied, saved and interrupted in any order: a plain model computes the same after every step."""

from __future__ import annotations

import contextlib
import copy
import gc
import io
import pickle
import weakref
from collections.abc import Callable, Iterator
from typing import Any

import torch
from hooks_interrupts import interrupt_at
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule
from torch import nn

from acc_hooks import (
    AlignDevicesHook,
    LayerwiseCastingHook,
    ModelHook,
    SequentialHook,
    add_hook_to_module,
    align_module_device,
    attached_hook,
    has_offloaded_params,
    inputs,
    iterate_hooks,
    remove_hook_from_module,
    set_module_tensor_to_device,
)

WIDE_EXAMPLES = 3000  # of the profile "wide", see conftest.py

# --- the modules: all map (2, 4) to (2, 4), and raise what `fails` says ---------------------------------------------


class Dense(nn.Linear):
    fails: type[BaseException] | None = None

    def __init__(self) -> None:
        super().__init__(4, 4)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if self.fails:
            raise self.fails
        return super().forward(x)


class Block(Dense):
    """Has everything: a child, a frozen parameter, buffers of three kinds, and counts its calls."""

    def __init__(self) -> None:
        super().__init__()
        self.below = nn.Linear(4, 4)
        self.scale = nn.Parameter(torch.ones(4), requires_grad=False)
        self.register_buffer("shift", torch.ones(4))
        self.register_buffer("unsaved", torch.ones(4), persistent=False)
        self.register_buffer("calls", torch.zeros((), dtype=torch.int64))
        self.register_parameter("absent", None)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = super().forward(x)
        self.calls += 1
        return self.below(x) * self.scale + self.shift * self.unsaved


class Bare(nn.Module):
    """No tensors at all."""

    fails: type[BaseException] | None = None

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if self.fails:
            raise self.fails
        return x + 1


class Recurrent(nn.LSTM):
    """Keeps a second list of its weights."""

    fails: type[BaseException] | None = None

    def __init__(self) -> None:
        super().__init__(4, 4)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if self.fails:
            raise self.fails
        return super().forward(x)[0]


class Twice(Dense):
    """One parameter under three names, one of them in a child."""

    def __init__(self) -> None:
        super().__init__()
        self.again = self.weight
        self.below = nn.Linear(4, 4, bias=False)
        self.below.weight = self.weight

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.below(super().forward(x) @ self.again)


MODELS = {model.__name__: model for model in (Dense, Block, Bare, Recurrent, Twice)}


# --- the hooks -------------------------------------------------------------------------------------------------------


class Doubles(ModelHook):
    """Changes what goes in and what comes out; raises `error` in its pre_forward or post_forward if `where` says so."""

    where = ""
    error: type[BaseException] = RuntimeError

    def pre_forward(self, module: nn.Module, *args: Any, **kwargs: Any) -> Any:
        if self.where == "pre":
            raise self.error
        return tuple(x + 1 for x in args), {name: x + 1 for name, x in kwargs.items()}

    def post_forward(self, module: nn.Module, output: Any) -> Any:
        if self.where == "post":
            raise self.error
        return output * 2


class NoGrad(ModelHook):
    no_grad = True


def _given_map(module: nn.Module) -> AlignDevicesHook:
    weights = {name: value.clone() for name, value in module.state_dict().items()}
    return AlignDevicesHook("cpu", offload=True, weights_map=weights)


HOOKS: dict[str, Callable[[nn.Module], ModelHook]] = {
    "noop": lambda _: ModelHook(),
    "align": lambda _: AlignDevicesHook("cpu"),
    "align_io": lambda _: AlignDevicesHook("cpu", io_same_device=True),
    "offload": lambda _: AlignDevicesHook("cpu", offload=True),
    "offload_map": _given_map,
    "offload_all": lambda _: AlignDevicesHook(
        "cpu", offload=True, offload_buffers=True, place_submodules=True
    ),
    "cast": lambda _: LayerwiseCastingHook(torch.bfloat16, torch.float32, False),
    "doubles": lambda _: Doubles(),
    "no_grad": lambda _: NoGrad(),
    "chain": lambda _: SequentialHook(Doubles(), AlignDevicesHook("cpu"), NoGrad()),
}


@contextlib.contextmanager
def _raises(error: type[BaseException]) -> Iterator[None]:
    """pytest.raises without its record of the exception, which would keep frames, and with them modules, alive."""
    try:
        yield
    except error:
        return
    raise AssertionError(f"no {error.__name__}")


def _offloads(hook: ModelHook) -> bool:
    return any(isinstance(inner, AlignDevicesHook) and inner.offload for inner in iterate_hooks(hook))


def _saved_and_loaded(module: nn.Module) -> nn.Module:
    file = io.BytesIO()
    torch.save(module, file)
    file.seek(0)
    return torch.load(file, weights_only=False)


COPIERS: dict[str, Callable[[Any], Any]] = {
    "deepcopy": copy.deepcopy,
    "pickle": lambda module: pickle.loads(pickle.dumps(module)),
    "torch.save": _saved_and_loaded,
}

# values that every floating dtype here holds exactly, so that casting may round nothing
exact = st.integers(-8, 8).map(lambda eighths: eighths / 8)
ways = st.sampled_from(sorted(HOOKS))
errors = st.sampled_from([RuntimeError, KeyboardInterrupt])


class Hooking(RuleBasedStateMachine):
    """`module` is hooked and unhooked, `plain` never; `chain` is what should be attached."""

    @initialize(kind=st.sampled_from([*sorted(MODELS), "Twice", "Twice"]))  # ties go wrong most easily
    def begin(self, kind: str) -> None:
        torch.manual_seed(0)
        self.plain = MODELS[kind]().eval()
        with torch.no_grad():
            for tensor in self.plain.state_dict().values():
                if tensor.is_floating_point():
                    tensor.copy_(torch.randint(-4, 5, tensor.shape) / 8)
        self.module = copy.deepcopy(self.plain)
        self.kind = type(self.module)
        self.names = list(vars(self.module))
        self.chain: list[ModelHook] = []
        gc.disable()  # what is freed below is freed by its references alone

    # what is attached

    @rule(way=ways)
    def attach(self, way: str) -> None:
        before = attached_hook(self.module)
        if before is not None and way == "offload_map":
            remove_hook_from_module(self.module)
        hook = HOOKS[way](self.module)
        assert add_hook_to_module(self.module, hook) is self.module
        self.chain = [hook]

    @rule(way=ways)
    def append(self, way: str) -> None:
        hook = HOOKS[way](self.module)
        if (
            _offloads(hook)
            and any(_offloads(attached) for attached in self.chain)
            and self._has_tensors(hook)
        ):
            before = attached_hook(self.module)
            with _raises(ValueError):
                add_hook_to_module(self.module, hook, append=True)
            assert attached_hook(self.module) is before
            return
        add_hook_to_module(self.module, hook, append=True)
        self.chain.append(hook)

    @rule(again=st.booleans(), recurse=st.booleans())
    def remove(self, again: bool, recurse: bool) -> None:
        for _ in range(1 + again):
            assert remove_hook_from_module(self.module, recurse=recurse) is self.module
        self.chain = []

    @precondition(lambda self: self.chain)
    @rule()
    def swap_for_an_equal_hook(self) -> None:
        """The hook attribute is read at each call."""
        self.module._hf_hook = SequentialHook(*self.chain)

    # what uses it

    @rule(grad=st.booleans(), keyword=st.booleans())
    def call(self, grad: bool, keyword: bool) -> None:
        x = self._input()
        with torch.set_grad_enabled(grad):
            output = self.module(x=x) if keyword else self.module(x)
            expected = self._expected(x)
        assert torch.equal(output, expected)
        silent = any(hook.no_grad for attached in self.chain for hook in iterate_hooks(attached))
        doubles = any(
            isinstance(hook, Doubles) for attached in self.chain for hook in iterate_hooks(attached)
        )
        if not doubles:
            assert output.requires_grad is (expected.requires_grad and not silent)

    @precondition(lambda self: self.chain)
    @rule()
    def call_by_hand(self) -> None:
        x, hook = self._input(), attached_hook(self.module)
        assert hook is not None
        with torch.no_grad():
            args, kwargs = hook.pre_forward(self.module, x)
            output = hook.post_forward(self.module, self.module._old_forward(*args, **kwargs))
            assert torch.equal(output, self._expected(x))

    @rule(error=errors)
    def fail_in_the_forward(self, error: type[BaseException]) -> None:
        self.module.fails = error
        with _raises(error):
            self.module(self._input())
        del self.module.fails

    @precondition(lambda self: self.kind is not Block and not has_offloaded_params(self.module))
    @rule(event=st.integers(0, 150))
    def interrupt_a_call_anywhere(self, event: int) -> None:
        interrupt_at(event, lambda: self.module(self._input()))

    @precondition(lambda self: self._doubling() is not None)
    @rule(error=errors, where=st.sampled_from(["pre", "post"]))
    def fail_in_a_hook(self, error: type[BaseException], where: str) -> None:
        hook = self._doubling()
        assert hook is not None
        hook.where, hook.error = where, error
        with _raises(error):
            self.module(self._input())
        del hook.where, hook.error
        if where == "post":
            self._expected(self._input())  # its forward has run, and counted

    @rule(error=errors)
    def fail_while_the_weights_are_real(self, error: type[BaseException]) -> None:
        with _raises(error), align_module_device(self.module):
            raise error

    # what reads and writes the weights

    @rule()
    def read_the_weights(self) -> None:
        with align_module_device(self.module, "cpu"):
            now = dict(self.module.named_parameters(recurse=False))
            for name, value in self.plain.named_parameters(recurse=False):
                assert torch.equal(now[name].float(), value)

    @rule(value=exact)
    def write_a_weight(self, value: float) -> None:
        for name, _ in list(self.plain.named_parameters(recurse=False)):
            with torch.no_grad():
                with align_module_device(self.module):
                    getattr(self.module, name).fill_(value)
                getattr(self.plain, name).fill_(value)
            return

    @rule(value=exact, assign=st.booleans())
    def load_a_state_dict(self, value: float, assign: bool) -> None:
        state = {
            name: torch.full_like(tensor, value) if tensor.is_floating_point() else tensor.clone()
            for name, tensor in self.plain.state_dict().items()
        }
        self.plain.load_state_dict(state)
        dtypes = {name: tensor.dtype for name, tensor in self.module.state_dict().items()}
        state = {name: tensor.to(dtypes[name]) for name, tensor in state.items()}
        if assign and self.kind is not Twice and not self._is_offloaded_below():
            self.module.load_state_dict(copy.deepcopy(state), assign=True)
        else:
            self.module.load_state_dict(state)

    @precondition(lambda self: not self.chain)
    @rule(value=exact)
    def set_a_tensor(self, value: float) -> None:
        if self.kind in (Dense, Block):
            new = torch.full((4,), value)
            set_module_tensor_to_device(self.module, "bias", "cpu", value=new)
            set_module_tensor_to_device(self.plain, "bias", "cpu", value=new.clone())

    @rule(value=exact, name=st.sampled_from(["weight", "bias", "shift"]))
    def write_in_place(self, value: float, name: str) -> None:
        for module in (self.module, self.plain):
            tensor = getattr(module, name, None)
            if isinstance(tensor, torch.Tensor):  # the bias of an LSTM is a flag
                with torch.no_grad():
                    tensor[..., 0] = value

    @precondition(lambda self: not any(self._casts(hook) for hook in self.chain))
    @rule(value=exact)
    def change_the_dtype_and_back(self, value: float) -> None:
        self.module.double()
        assert {v.dtype for v in self.module.state_dict().values() if v.is_floating_point()} <= {
            torch.float64
        }
        self.write_in_place(value, "shift")
        self.module.float()

    # what copies it

    @rule(way=st.sampled_from(sorted(COPIERS)))
    def go_on_with_a_copy(self, way: str) -> None:
        hooks = [type(hook) for hook in iterate_hooks(attached_hook(self.module))]
        new = COPIERS[way](self.module)
        self.plain = COPIERS[way](self.plain)
        attached = attached_hook(new)
        assert [type(hook) for hook in iterate_hooks(attached)] == hooks
        assert not {id(tensor) for tensor in new.parameters()} & {
            id(tensor) for tensor in self.module.parameters()
        }
        self._drop(new)
        self.chain = [] if attached is None else [attached]

    # what always holds

    @invariant()
    def the_weights_are_the_plain_models(self) -> None:
        state, expected = self.module.state_dict(), self.plain.state_dict()
        assert list(state) == list(expected)
        for name, value in expected.items():
            assert torch.equal(state[name].to(value.dtype), value), name

    @invariant()
    def the_module_looks_as_it_should(self) -> None:
        attached = attached_hook(self.module)
        expected = [hook for part in self.chain for hook in iterate_hooks(part)]
        assert list(iterate_hooks(attached)) == expected
        assert isinstance(self.module, self.kind)
        assert self.module.forward.__self__ is self.module
        assert has_offloaded_params(self.module) is any(_offloads(hook) for hook in self.chain)
        assert inputs._forward.copies is None
        added = {"_hf_hook"} if attached is not None else set()
        assert set(vars(self.module)) == set(self.names) | added
        if attached is None:
            assert type(self.module) is self.kind
            self._is_like_plain()
        for name, tensor in self.module.named_parameters(recurse=False):
            assert tensor.is_meta is has_offloaded_params(self.module), name
        for name, parameter in self.plain.named_parameters():
            now = self.module.get_parameter(name)
            assert type(parameter) is nn.Parameter
            assert isinstance(now, nn.Parameter)
            assert now.requires_grad is parameter.requires_grad, name
        if self.kind is Twice:
            assert self.module.again is self.module.weight
            if attached is None:
                assert self.module.below.weight is self.module.weight

    def teardown(self) -> None:
        if hasattr(self, "module"):
            self._drop(None)
        gc.enable()

    def _drop(self, new: nn.Module | None) -> None:
        """Go on with `new`; the module, and its weights, are freed at once."""
        left = [weakref.ref(self.module), *(weakref.ref(tensor) for tensor in self.module.parameters())]
        self.module = new
        self.chain = []
        assert all(reference() is None for reference in left)

    def _is_like_plain(self) -> None:
        for name, tensor in [*self.plain.named_parameters(), *self.plain.named_buffers()]:
            owner, _, leaf = name.rpartition(".")
            now = getattr(self.module.get_submodule(owner), leaf)
            assert type(now) is type(tensor), name
            assert (now.dtype, now.device, now.shape) == (tensor.dtype, tensor.device, tensor.shape), name

    def _has_tensors(self, hook: ModelHook) -> bool:
        return next(self.module.parameters(recurse=False), None) is not None

    def _is_offloaded_below(self) -> bool:
        return any(
            isinstance(hook, AlignDevicesHook) and hook.offload and hook.place_submodules
            for attached in self.chain
            for hook in iterate_hooks(attached)
        )

    def _casts(self, hook: ModelHook) -> bool:
        return any(isinstance(inner, LayerwiseCastingHook) for inner in iterate_hooks(hook))

    def _doubling(self) -> Doubles | None:
        hooks = (hook for attached in self.chain for hook in iterate_hooks(attached))
        return next((hook for hook in hooks if isinstance(hook, Doubles)), None)

    def _input(self) -> torch.Tensor:
        return torch.arange(8.0).reshape(2, 4) / 8

    def _expected(self, x: torch.Tensor) -> torch.Tensor:
        count = sum(isinstance(hook, Doubles) for part in self.chain for hook in iterate_hooks(part))
        return self.plain(x + count) * 2**count


# The same examples each time. A wider search, at random: pytest --hypothesis-profile=wide packages/acc-hooks
IS_WIDE = settings.default.max_examples == WIDE_EXAMPLES
Hooking.TestCase.settings = settings(
    max_examples=WIDE_EXAMPLES if IS_WIDE else 150,
    derandomize=not IS_WIDE,
    database=None,
    stateful_step_count=15,
    suppress_health_check=[HealthCheck.too_slow],
)
TestHooking = Hooking.TestCase
