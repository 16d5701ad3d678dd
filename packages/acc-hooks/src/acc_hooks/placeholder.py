"""The tensor that stands in a module for an offloaded weight: it tells what it is, and refuses to be computed with.

[Note: what a placeholder answers]
A plain meta tensor is not enough: some kernels of the CPU take one as if it had values, and compute with memory that
nobody wrote. A placeholder is on meta too, of a subclass of the weight's class, and sees every call that torch makes on it:

    shape, dtype, device, flags, hooks ...   answered
    detach, data, a change of dtype          another placeholder of the same weight
    copy_, data = value                      takes effect: the value goes home, into the weights map
    deepcopy                                 a placeholder; one for all names of a tie, as before
    pickle                                   the real value, or a placeholder where a whole module is pickled (`again`)
    everything else                          OffloadedWeightError, with the weight's name and the ways out
"""

from __future__ import annotations

import copy
import functools
import types
import weakref
from collections.abc import Mapping, Sequence
from typing import Any, Protocol

import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import is_traceable_wrapper_subclass

ORIGIN = "_acc_offloaded"  # in the instance dictionary of a placeholder, beside what users hung on the weight

_ANSWERED_TEXT = """
shape dtype device layout requires_grad is_leaf grad grad_fn ndim names name output_nr itemsize nbytes retains_grad
is_meta is_cpu is_cuda is_xpu is_mps is_mtia is_maia is_ipu is_hpu is_xla is_vulkan is_mkldnn is_nested is_quantized
is_sparse is_sparse_csr _version _base _grad _grad_fn _cdata _backward_hooks _post_accumulate_grad_hooks grad_dtype
size dim ndimension numel nelement element_size stride storage_offset dim_order get_device data_ptr
is_contiguous is_floating_point is_complex is_signed is_inference is_same_size is_set_to is_pinned is_shared is_conj
is_neg is_distributed has_names _is_view _is_zerotensor _has_symbolic_sizes_strides _has_compatible_shallow_copy_type
untyped_storage storage storage_type _typed_storage requires_grad_ retain_grad register_hook
register_post_accumulate_grad_hook detach_ result_type __len__ __hash__ __dir__
"""
_ANSWERED = frozenset(_ANSWERED_TEXT.split())
_KEPT = frozenset({"detach", "data", "to", "type", "double", "float", "half", "bfloat16"})


class OffloadedWeightError(RuntimeError):
    """A weight that is offloaded was asked for something only a weight that stays can do."""


class Source(Protocol):
    """Who can give and take the value behind a placeholder."""

    def _value_behind(self, placeholder: Tensor) -> Tensor | None:
        """The real tensor, or None where the placeholder is not this source's."""

    def _write_behind(self, placeholder: Tensor, value: Tensor) -> bool:
        """Bring a new value home; False where the placeholder is not this source's."""


class RefuseGradient:
    """Stops a backward pass that would leave a gradient on a copy nobody keeps."""

    def __init__(self, name: str) -> None:
        self._name = name

    def __call__(self, gradient: Tensor) -> Tensor:  # noqa: ARG002
        raise OffloadedWeightError(
            f"{self._name} is offloaded: it cannot be trained, its gradient would be lost with the copy the forward used. "
            "Call requires_grad_(False) on the weights that are not trained, and keep those that are on their device"
        )


class _Origin:
    """What a placeholder knows of its weight. Sources are held weakly: a placeholder keeps no hook alive."""

    def __init__(self, name: str, is_below: bool, sources: Sequence[weakref.ref[Source]] = ()) -> None:
        self.name = name
        self.is_below = is_below  # in a module without a hook, whose pickling we do not see
        self.sources = list(sources)
        self.again: _Again | None = None


class _Placeholder(Tensor):
    """What the classes of placeholders have before the class of their weight; `_stands_for` is that class."""

    _stands_for: Any

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        name = _name_of(func)
        if name in _ANSWERED or (name in _KEPT and _stays_on_meta(name, func, args, kwargs)):
            with torch._C.DisableTorchFunctionSubclass():
                result = func(*args, **kwargs)
            return stand_in(result, like=args[0]) if name in _KEPT and type(result) is Tensor else result
        if name in ("copy_", "data") and is_placeholder(args[0]) and not is_placeholder(args[1]):
            return _write(args[0], args[1], name)
        raise OffloadedWeightError(_refusal([*args, *kwargs.values()], name))

    def __repr__(self, *, tensor_contents: Any = None) -> str:  # type: ignore[override]
        shape, dtype = tuple(self.shape), self.dtype
        return f"{self._stands_for.__name__}(offloaded {_origin(self).name!r}, {shape=}, {dtype=})"

    def __format__(self, spec: str) -> str:
        return format(repr(self), spec)

    def __deepcopy__(self, memo: dict[int, Any]) -> Any:
        return copy.deepcopy(again(self), memo)

    def __reduce_ex__(self, protocol: Any) -> Any:
        if _origin(self).is_below:
            return _itself, (again(self),)
        for source in _sources(self):
            value = source._value_behind(self)
            if value is not None:
                return value.__reduce_ex__(protocol)
        raise OffloadedWeightError(_refusal([self], "pickle"))


class _Again:
    """Copies and pickles as a new placeholder; there is one for each placeholder, so that ties stay ties."""

    recipe: tuple[Any, ...] = ()

    def __reduce__(self) -> Any:
        return _make_again, self.recipe


def stand_in(tensor: Tensor, name: str = "", *, is_below: bool = False, like: Tensor | None = None) -> Tensor:
    """A placeholder for the weight `name`, with the class, the flags and the attributes of `tensor`, which is on meta.

    `like` is a placeholder of the same weight. Tensors that wrap others have calls of their own to answer, and are
    returned as they are.
    """
    wraps: bool = is_traceable_wrapper_subclass(tensor)
    if wraps:
        return tensor
    known = None if like is None else vars(like).get(ORIGIN)
    kind = kind_of(tensor)
    if kind is Tensor and isinstance(tensor, nn.Parameter):  # torch marks it, where it converts a placeholder
        kind = nn.Parameter
    with torch._C.DisableTorchFunctionSubclass():
        data = Tensor.detach(tensor)
        new: Tensor = torch.Tensor._make_subclass(_class_for(kind), data, tensor.requires_grad)
    new.__dict__.update(attributes_of(tensor))
    new.__dict__[ORIGIN] = (
        _Origin(name, is_below) if known is None else _Origin(known.name, known.is_below, known.sources)
    )
    return new


def is_placeholder(tensor: Any) -> bool:
    """Whether this tensor stands for an offloaded weight."""
    return isinstance(tensor, _Placeholder)


def kind_of(tensor: Tensor) -> type[Tensor]:
    """The tensor's class; for a placeholder that of its weight."""
    kind = type(tensor)
    return kind._stands_for if issubclass(kind, _Placeholder) else kind


def without_class(placeholder: Tensor) -> Tensor:
    """The meta tensor that a placeholder is, without its class."""
    with torch._C.DisableTorchFunctionSubclass():
        return Tensor.detach(placeholder)


def copy_flag(placeholder: Tensor, requires_grad: bool) -> None:
    """The weight's `requires_grad` was set while it was there: the placeholder has it too."""
    with torch._C.DisableTorchFunctionSubclass():
        if placeholder.requires_grad != requires_grad:
            placeholder.requires_grad_(requires_grad)


def attributes_of(tensor: Tensor) -> dict[str, Any]:
    """What users hung on a tensor."""
    return {name: value for name, value in vars(tensor).items() if name != ORIGIN}


def add_source(placeholder: Tensor, source: Source) -> None:
    """Let `source` answer for the placeholder, as long as it lives."""
    if is_placeholder(placeholder):
        _origin(placeholder).sources.append(weakref.ref(source))


def again(tensor: Any) -> Any:
    """What is copied or pickled for `tensor` so that it comes back as a placeholder; anything else is itself."""
    if not is_placeholder(tensor):
        return tensor
    origin = _origin(tensor)
    if origin.again is None:
        origin.again = _Again()
    origin.again.recipe = (
        tensor._stands_for,
        tuple(tensor.shape),
        tensor.stride(),
        tensor.dtype,
        tensor.requires_grad,
        attributes_of(tensor),
        origin.name,
        origin.is_below,
    )
    return origin.again


def without_placeholders(state: dict[str, Any], held: Mapping[int, Tensor]) -> dict[str, Any]:
    """The instance dictionary of a module with `again` in the place of each placeholder, and of each tensor in `held`.

    The same dictionary if there is none. `held`: id of a tensor -> its placeholder.
    """

    def stored(tensor: Any) -> Any:
        return again(held.get(id(tensor), tensor))

    changed: dict[str, Any] = {}
    for key in ("_parameters", "_buffers"):
        tensors = state.get(key) or {}
        new = {name: stored(tensor) for name, tensor in tensors.items()}
        if any(new[name] is not tensor for name, tensor in tensors.items()):
            changed[key] = type(tensors)(new)
    flat = state.get("_flat_weights") or ()
    if any(stored(tensor) is not tensor for tensor in flat):
        changed["_flat_weights"] = [stored(tensor) for tensor in flat]
    return {**state, **changed} if changed else state


@functools.cache
def _class_for(kind: type[Tensor]) -> Any:
    """The class of placeholders for weights of the class `kind`."""
    bases = (_Placeholder,) if kind is Tensor else (_Placeholder, kind)
    names = {"__module__": kind.__module__, "__qualname__": kind.__qualname__, "_stands_for": kind}
    return types.new_class(kind.__name__, bases, exec_body=lambda namespace: namespace.update(names))


def _make_again(
    kind: type[Tensor],
    shape: Sequence[int],
    stride: Sequence[int],
    dtype: torch.dtype,
    requires_grad: bool,
    attributes: dict[str, Any],
    name: str,
    is_below: bool,
) -> Tensor:
    data = torch.empty_strided(shape, stride, dtype=dtype, device="meta")
    new = torch.Tensor._make_subclass(_class_for(kind), data, requires_grad)
    new.__dict__.update(attributes)
    new.__dict__[ORIGIN] = _Origin(name, is_below)
    return new


def _itself(placeholder: Tensor) -> Tensor:
    """Unpickles what `again` became, the same object wherever it is met."""
    return placeholder


def _write(placeholder: Tensor, value: Tensor, call: str) -> Tensor:
    if call == "data" and (value.shape, value.dtype) != (placeholder.shape, placeholder.dtype):
        raise OffloadedWeightError(_refusal([placeholder], call))
    with torch.no_grad():
        new = torch.empty(placeholder.shape, dtype=placeholder.dtype, device=value.device).copy_(value)
    for source in _sources(placeholder):
        if source._write_behind(placeholder, new):
            return placeholder
    raise OffloadedWeightError(_refusal([placeholder], call))


def _sources(placeholder: Tensor) -> list[Source]:
    return [source for reference in _origin(placeholder).sources if (source := reference()) is not None]


def _origin(placeholder: Tensor) -> _Origin:
    known = vars(placeholder).get(ORIGIN)
    return known if known is not None else _Origin("an offloaded weight", True)


def _name_of(func: Any) -> str:
    """The name of a function of torch; that of the property where it is the getter or setter of one."""
    name = getattr(func, "__name__", str(func))
    return func.__self__.__name__ if name in ("__get__", "__set__") else name


def _stays_on_meta(name: str, func: Any, args: Any, kwargs: Any) -> bool:
    if name == "data":
        return func.__name__ == "__get__" or args[1].is_meta
    if name == "to":
        device = torch._C._nn._parse_to(*args[1:], **kwargs)[0]
        return device is None or device.type == "meta"
    if name == "type":
        return not (args[1:] or kwargs) or (len(args) > 1 and isinstance(args[1], torch.dtype))
    return True


def _refusal(values: Any, call: str) -> str:
    names: list[str] = []
    waiting = list(values)
    while waiting and not names:
        value = waiting.pop(0)
        if is_placeholder(value):
            names.append(_origin(value).name)
        elif isinstance(value, (list, tuple)):
            waiting += value
    return (
        f"{names[0] if names else 'a weight'} is offloaded: it has no values outside of its module's forward, and {call!r} "
        "needs them. Use it inside `with align_module_device(module)`; where the forward of a parent computes with it, give "
        "the parent's class in preload_module_classes when you offload; to move, fill or offload the model anew, call "
        "remove_hook_from_module(model, recurse=True) first"
    )
