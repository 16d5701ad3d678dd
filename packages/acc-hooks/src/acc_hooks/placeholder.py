"""The tensor that stands in a module for an offloaded weight: whoever computes with it computes with the real one.

[Note: what a placeholder answers]
A plain meta tensor is not enough: some kernels of the CPU take one as if it had values, and compute with memory that
nobody wrote. A placeholder is on meta too, of a subclass of the weight's class, and sees every call that torch makes on it:

    shape, dtype, device, flags, hooks ...   answered
    detach, data, views                      another placeholder of the same weight
    everything else                          done with the real tensor, in place too (borrowing.py)
    data = value                             the value goes home, into the weights map
    a conversion of its module               to another dtype: takes effect; to a device: OffloadedWeightError
    deepcopy, pickle                         the real value, or a placeholder where its module is copied (copying.py)

`__torch_function__` sees what comes from Python. What goes past it (C++ extensions, `autograd.Function`, `torch.func`)
meets `__torch_dispatch__` in each operator. Only who reads the memory itself finds none: a meta tensor has a null address.
"""

from __future__ import annotations

import contextlib
import copy
import functools
import types
import weakref
from collections.abc import Iterator, Mapping
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import is_traceable_wrapper_subclass

from acc_hooks.borrowing import address, compute, forget, is_converting, real_value
from acc_hooks.origin import (
    ORIGIN,
    Origin,
    Recipe,
    RefuseGradient,
    Source,
    is_settled,
    origin_of,
    refuse_call,
    refuse_orphan,
    root_of,
    stored_form,
)
from acc_hooks.storage import storage_of
from acc_hooks.untraced import untraced
from acc_ops.devices import known_kinds

_IS_PARAMETER = "_is_param"  # torch's mark: a tensor of another class that counts as an nn.Parameter

_ANSWERED_TEXT = """
shape dtype device layout requires_grad is_leaf grad grad_fn ndim names name output_nr itemsize nbytes retains_grad
is_meta is_cpu is_cuda is_xpu is_mps is_mtia is_maia is_ipu is_hpu is_xla is_vulkan is_mkldnn is_nested is_quantized
is_sparse is_sparse_csr _version _base _grad _grad_fn _cdata _backward_hooks _post_accumulate_grad_hooks grad_dtype
size dim ndimension numel nelement element_size stride storage_offset dim_order get_device
is_contiguous is_floating_point is_complex is_signed is_inference is_same_size is_set_to is_pinned is_shared is_conj
is_neg is_distributed has_names _is_view _is_zerotensor _has_symbolic_sizes_strides _has_compatible_shallow_copy_type
storage_type requires_grad_ retain_grad register_hook
register_post_accumulate_grad_hook detach_ result_type __len__ __hash__ __dir__
"""
_ANSWERED = frozenset(_ANSWERED_TEXT.split())
_CONVERSIONS = frozenset({"to", "type", "double", "float", "half", "bfloat16"})
_MOVES = _CONVERSIONS | {"pin_memory"}  # and the method of each kind of device
_RESHAPES_TEXT = """
set_ resize_ resize_as_ share_memory_ t_ transpose_ swapaxes_ swapdims_ squeeze_ unsqueeze_ as_strided_ rename_
storage _typed_storage
"""
_REFUSED = frozenset([*_RESHAPES_TEXT.split(), "__setstate__"])


class _Placeholder(Tensor):
    """What the classes of placeholders have before the class of their weight; `_stands_for` is that class."""

    _stands_for: Any

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        name = _name_of(func)
        if name in _ANSWERED and func is not torch.autograd.grad:
            with torch._C.DisableTorchFunctionSubclass(), torch._C._DisableTorchDispatch():
                return func(*args, **kwargs)
        return untraced(_serve, name, func, args, kwargs)

    @classmethod
    def __torch_dispatch__(  # type: ignore[override]
        cls, func: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        for value in _flat(args):
            if is_placeholder(value):
                _refuse_gradient(value)
        return compute(functools.partial(_call_and_count, func), args, kwargs or {}, lambda real, _: real)

    def __repr__(self, *, tensor_contents: Any = None) -> str:  # type: ignore[override]
        shape, dtype = tuple(self.shape), self.dtype
        return f"{kind_of(self).__name__}(offloaded {_origin(self).name!r}, {shape=}, {dtype=})"

    def __format__(self, spec: str) -> str:
        return format(real_value(self), spec) if spec else repr(self)

    def __deepcopy__(self, memo: dict[int, Any]) -> Any:
        stored = stored_form.of(self)
        return copy.deepcopy(value_behind(self) if stored is None else stored, memo)

    def __reduce_ex__(self, protocol: Any) -> Any:
        stored = stored_form.of(self)
        return value_behind(self).__reduce_ex__(protocol) if stored is None else (itself, (stored,))


def stand_in(
    tensor: Tensor, name: str, *, like: Tensor | None = None, recipe: Recipe | None = None
) -> Tensor:
    """A placeholder for the weight `name`, with the class, the flags and the attributes of `tensor`, which is on meta.

    `like` is a placeholder of the same weight. Tensors that wrap others have calls of their own to answer, and are
    returned as they are.
    """
    wraps: bool = is_traceable_wrapper_subclass(tensor)
    if wraps:
        return tensor
    kind = kind_of(tensor)
    if kind is Tensor and isinstance(tensor, nn.Parameter):  # torch marks it, where it converts a placeholder
        kind = nn.Parameter
    new = make_placeholder(kind, tensor, tensor.requires_grad, attributes_of(tensor), name)
    if like is not None:
        _origin(new).sources += _origin(like).sources
    _origin(new).recipe = recipe
    return new


def make_placeholder(
    kind: type[Tensor], data: Tensor, requires_grad: bool, attributes: Mapping[str, Any], name: str
) -> Tensor:
    """A placeholder that nobody answers for yet; `data` is on meta."""
    # nn.Parameter(weight) wants weight.detach() to be of the weight's class: a parameter is a tensor with torch's mark
    its_class = _class_for(Tensor if kind is nn.Parameter else kind)
    with _on_meta():
        new: Tensor = torch.Tensor._make_subclass(its_class, Tensor.detach(data), requires_grad)
    new.__dict__.update(attributes)
    if kind is nn.Parameter:
        new.__dict__[_IS_PARAMETER] = True
    new.__dict__[ORIGIN] = Origin(name=name)
    return new


def is_placeholder(tensor: Any) -> bool:
    """Whether this tensor stands for an offloaded weight."""
    return isinstance(tensor, _Placeholder)


def is_of_another(tensor: Tensor, placeholder: Tensor) -> bool:
    """Whether a tensor on meta has values that are not those of `placeholder`: another weight's, or a view."""
    if not is_placeholder(tensor):
        return False
    root = root_of(tensor)
    if root is None or root is placeholder:
        return root is None
    return bool(_origin(root).living_sources()) or is_settled(root)


def value_behind(placeholder: Tensor) -> Tensor:
    """The real value where it is kept; OffloadedWeightError if nobody has it."""
    recipe = _origin(placeholder).recipe
    if recipe is not None and recipe.is_whole:
        value: Tensor = recipe.func(value_behind(recipe.args[0]), *recipe.args[1:], **recipe.kwargs)
        return (
            nn.Parameter(value, placeholder.requires_grad) if kind_of(placeholder) is nn.Parameter else value
        )
    if recipe is not None:
        return real_value(placeholder)
    for source in _origin(placeholder).living_sources():
        kept = source._value_behind(placeholder)
        if kept is not None:
            return kept
    settled = _origin(placeholder).settled
    if settled is not None:
        return settled()
    raise refuse_orphan(_origin(placeholder).name)


def kind_of(tensor: Tensor) -> type[Tensor]:
    """The tensor's class; for a placeholder that of its weight."""
    kind = type(tensor)
    if not issubclass(kind, _Placeholder):
        return kind
    stands_for: type[Tensor] = kind._stands_for
    return nn.Parameter if stands_for is Tensor and _IS_PARAMETER in vars(tensor) else stands_for


def without_class(placeholder: Tensor) -> Tensor:
    """The meta tensor that a placeholder is, without its class."""
    with _on_meta():
        return Tensor.detach(placeholder)


def copy_flag(placeholder: Tensor, requires_grad: bool) -> None:
    """The weight's `requires_grad` was set while it was there: the placeholder has it too."""
    with torch._C.DisableTorchFunctionSubclass():
        if placeholder.requires_grad != requires_grad:
            placeholder.requires_grad_(requires_grad)


def attributes_of(tensor: Tensor) -> dict[str, Any]:
    """What users hung on a tensor."""
    return {name: value for name, value in vars(tensor).items() if name not in (ORIGIN, _IS_PARAMETER)}


def add_source(placeholder: Tensor, source: Source) -> None:
    """Let `source` answer for the placeholder, as long as it lives."""
    if is_placeholder(placeholder):
        _origin(placeholder).sources.append(weakref.ref(source))


@functools.cache
def _class_for(kind: type[Tensor]) -> Any:
    """The class of placeholders for weights of the class `kind`."""
    bases = (_Placeholder,) if kind is Tensor else (_Placeholder, kind)
    names = {"__module__": kind.__module__, "__qualname__": kind.__qualname__, "_stands_for": kind}
    return types.new_class(kind.__name__, bases, exec_body=lambda namespace: namespace.update(names))


@contextlib.contextmanager
def _on_meta() -> Iterator[None]:
    """A placeholder is the meta tensor that it is."""
    with torch._C.DisableTorchFunctionSubclass(), torch._C._DisableTorchDispatch():
        yield


def _serve(name: str, func: Any, args: Any, kwargs: Any) -> Any:
    """What is not answered by the placeholder alone."""
    first: Any = args[0] if args else None
    if is_placeholder(first):
        if name == "data_ptr":
            return address(first)
        if name == "untyped_storage":
            return storage_of(first)
        if name == "to" and not is_converting() and _parse_to(args, kwargs)[0] == first.device:
            return _to_itself(first, _parse_to(args, kwargs)[1])
        if name == "detach" or (name == "data" and len(args) == 1):
            return _converted(first, Recipe(func=Tensor.detach, args=(first,), is_whole=True))
        if name == "data":
            return _assign(first, args[1])
        if name == "copy_" and _origin(first).recipe is None and not is_placeholder(args[1]):
            return _write(first, args[1], first.dtype)  # what is overwritten need not be read
        if is_converting():
            return _convert(first, name, func, args, kwargs)
    if func in (torch.autograd.grad, torch.autograd.backward):
        RefuseGradient(_name_in(args, kwargs))()
    if name in _REFUSED:
        raise refuse_call(_name_in(args, kwargs), name)
    return compute(func, args, kwargs, None if name in _MOVES or name in known_kinds() else _make_view)


def _call_and_count(operator: Any, *args: Any, **kwargs: Any) -> Any:
    """Below autograd a change is not counted by torch, and the count tells what goes home."""
    result = operator(*args, **kwargs)
    schema = operator._schema
    if schema.is_mutable:
        given = {argument.name: value for argument, value in zip(schema.arguments, args, strict=False)}
        given.update(kwargs)
        for argument in schema.arguments:
            if argument.alias_info is not None and argument.alias_info.is_write:
                for tensor in _flat([given.get(argument.name)]):
                    if isinstance(tensor, Tensor) and not tensor.is_inference():
                        torch.autograd.graph.increment_version(tensor)
    return result


def _make_view(real: Tensor, recipe: Recipe) -> Tensor:
    given = _flat([*recipe.args, *recipe.kwargs.values()])
    like = next(value for value in given if is_placeholder(value))
    data = torch.empty_strided(real.shape, real.stride(), dtype=real.dtype, device="meta")
    return stand_in(data.requires_grad_(real.requires_grad), _origin(like).name, like=like, recipe=recipe)


def _converted(placeholder: Tensor, recipe: Recipe) -> Tensor:
    with _on_meta():
        data = recipe.func(*recipe.args, **recipe.kwargs)
    return stand_in(data, _origin(placeholder).name, like=placeholder, recipe=recipe)


def _convert(placeholder: Tensor, name: str, func: Any, args: Any, kwargs: Any) -> Tensor:
    """Its module is converted: to another dtype it may be."""
    if name not in _CONVERSIONS or not _stays_on_meta(name, args, kwargs):
        raise refuse_call(_name_in(args, kwargs), name)
    if _origin(placeholder).recipe is None:  # itself, so that what is written to it later finds its map
        with _on_meta():
            data = func(*args, **kwargs)
        if data.dtype is not placeholder.dtype:
            _become(placeholder, data)
        return placeholder
    made = _converted(placeholder, Recipe(func=func, args=args, kwargs=kwargs, is_whole=True))
    return placeholder if made.dtype is placeholder.dtype else made


def _assign(placeholder: Tensor, value: Tensor) -> None:
    """`placeholder.data = value`."""
    if not (is_placeholder(value) and is_of_another(value, placeholder)) and value.is_meta:
        _become(placeholder, value)
        return
    if value.shape != placeholder.shape:
        raise refuse_call(_origin(placeholder).name, "data")
    if is_placeholder(value):
        value = real_value(value)
    _write(placeholder, value, value.dtype)
    if value.dtype is not placeholder.dtype:
        _become(placeholder, without_class(placeholder).to(value.dtype))


def _become(placeholder: Tensor, data: Tensor) -> None:
    """Take the shape and dtype of `data`, which is on meta."""
    forget(placeholder)
    data = data if is_placeholder(data) else stand_in(data, _origin(placeholder).name)
    with _on_meta():
        placeholder.data = data


def _write(placeholder: Tensor, value: Tensor, dtype: torch.dtype) -> Tensor:
    with torch.no_grad():
        new = torch.empty(placeholder.shape, dtype=dtype, device=value.device).copy_(value)
    origin = _origin(placeholder)
    if any(source._write_behind(placeholder, new) for source in origin.living_sources()):
        return placeholder
    if origin.settled is None:
        raise refuse_orphan(origin.name)
    with torch.no_grad():
        origin.settled().copy_(value)
    return placeholder


def _refuse_gradient(placeholder: Tensor) -> None:
    """Below autograd: who went past `__torch_function__` has a graph that ends in the placeholder itself."""
    origin = _origin(placeholder)
    if placeholder.requires_grad and placeholder.is_leaf and not origin.refuses_gradient:
        origin.refuses_gradient = True
        placeholder.register_hook(RefuseGradient(origin.name))


def itself(placeholder: Tensor) -> Tensor:
    """Unpickles what a placeholder was stored as, the same object wherever it is met."""
    return placeholder


def _origin(placeholder: Tensor) -> Origin:
    known = origin_of(placeholder)
    return known if known is not None else Origin(name="an offloaded weight")


def _name_of(func: Any) -> str:
    """The name of a function of torch; that of the property where it is the getter or setter of one."""
    name = getattr(func, "__name__", str(func))
    return func.__self__.__name__ if name in ("__get__", "__set__") else name


def _parse_to(args: Any, kwargs: Any) -> tuple[torch.device | None, torch.dtype | None]:
    """What `tensor.to(...)` is asked for."""
    kwargs = {name: value for name, value in kwargs.items() if name != "copy"}
    others = [arg for arg in args[1:] if is_placeholder(arg)]
    if others:
        return others[0].device, others[0].dtype
    device, dtype, *_ = torch._C._nn._parse_to(*args[1:], **kwargs)
    return device, dtype


def _to_itself(placeholder: Tensor, dtype: torch.dtype | None) -> Tensor:
    """`weight.to(weight.device)`, as code that knows no placeholders says it: it is there; in another dtype it is a value."""
    if dtype in (None, placeholder.dtype):
        return placeholder
    return real_value(placeholder).to(dtype)


def _stays_on_meta(name: str, args: Any, kwargs: Any) -> bool:
    if name == "to":
        device = _parse_to(args, kwargs)[0]
        return device is None or device.type == "meta"
    if name == "type":
        return not (args[1:] or kwargs) or (len(args) > 1 and isinstance(args[1], torch.dtype))
    return True


def _flat(values: Any) -> Iterator[Any]:
    for value in values:
        if isinstance(value, (list, tuple)):
            yield from _flat(value)
        else:
            yield value


def _name_in(args: Any, kwargs: Any) -> str:
    """The weight that a call is about."""
    return next(_origin(value).name for value in _flat([*args, *kwargs.values()]) if is_placeholder(value))
