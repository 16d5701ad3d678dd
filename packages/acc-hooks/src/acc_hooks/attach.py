"""Give a whole model its aligning hooks: module by module, or block by block.

A block is a module that a device map names. What it contains belongs to it, down to the blocks named inside it.
"""

from __future__ import annotations

import bisect
import contextlib
import functools
import itertools
from collections.abc import Collection, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

from torch import Tensor, nn

from acc_hooks import hooked
from acc_hooks.align import AlignDevicesHook
from acc_hooks.hook import ModelHook, add_hook_to_module, attached_hook, iterate_hooks
from acc_hooks.prefetch import LAYERS_AHEAD, Prefetcher
from acc_hooks.prefixed import PrefixedDataset
from acc_hooks.resident import Residents
from acc_hooks.tensors import TiedParams
from acc_hooks.ties import every_tensor, tied_groups
from acc_ops.devices import DeviceLike


def attach_align_device_hook(
    module: nn.Module,
    execution_device: DeviceLike | None = None,
    offload: bool = False,
    weights_map: Mapping[str, Tensor] | None = None,
    offload_buffers: bool = False,
    module_name: str = "",
    skip_keys: str | list[str] | None = None,
    preload_module_classes: list[str] | None = None,
    tied_params_map: TiedParams | None = None,
    prefetch: int = LAYERS_AHEAD,
    io_same_device: bool = False,
) -> None:
    """Append an AlignDevicesHook to every module, from `module` down, that has tensors of its own.

    `weights_map` has the names of the whole model, in which `module` is called `module_name`. While offloading, a module
    whose class is named in `preload_module_classes` gets one hook for itself and everything below it. A module that is
    registered under several names gets one hook; ties are found and kept. While a module computes, the weights of up to
    `prefetch` others that run next are fetched (0: none); `module` gets a hook for it that does nothing else. With
    `io_same_device` `module` itself moves its arguments, and its output goes where its input came from.
    """
    options = _Options(
        weights_map=weights_map,
        offload_buffers=offload_buffers,
        skip_keys=skip_keys,
        preload=frozenset(preload_module_classes or ()),
        tied_params_map=tied_params_map,
        residents=_residents(module, module_name),
        prefetcher=Prefetcher(prefetch),
    )
    with options.undone_on_failure():
        _attach_to_all(module, module_name, execution_device, offload, options, io_same_device)
        if offload and prefetch and len(options.attached) > 1 and not _begins_forward(module):
            options.attach(module, options.hook(module_name, None))


def is_attached(hook: ModelHook) -> bool:
    """Whether one of the attach functions made this hook."""
    return isinstance(hook, AlignDevicesHook) and hook._residents is not None


def attach_align_device_hook_on_blocks(
    module: nn.Module,
    execution_device: DeviceLike | Mapping[str, DeviceLike] | None = None,
    offload: bool | Mapping[str, bool] = False,
    weights_map: Mapping[str, Tensor] | None = None,
    offload_buffers: bool = False,
    module_name: str = "",
    skip_keys: str | list[str] | None = None,
    preload_module_classes: list[str] | None = None,
    tied_params_map: TiedParams | None = None,
    prefetch: int = LAYERS_AHEAD,
    staying: Collection[str] = (),
) -> None:
    """Give each block its hooks: block name -> the device it runs on, block name -> whether it is offloaded.

    With two scalars `module` is the only block; one scalar holds for every block of the other mapping. A block that stays
    is moved as a whole; one that is offloaded gets `attach_align_device_hook`, with `prefetch`, where the tensors named in
    `staying` (full names) are put on the execution device for good, as buffers are. All modules with weights move their
    arguments. The output of `module` goes where its input came from. Raises ValueError for a block that one
    mapping lacks, and for a name that is no module.
    """
    if not isinstance(execution_device, Mapping) and not isinstance(offload, Mapping):
        execution_device = {module_name: execution_device}  # type: ignore[dict-item]
    devices, offloaded = _for_each_block(execution_device, offload)
    options = _Options(
        weights_map=weights_map,
        offload_buffers=offload_buffers,
        skip_keys=skip_keys,
        preload=frozenset(preload_module_classes or ()),
        tied_params_map=tied_params_map,
        residents=_residents(module, module_name),
        blocks=frozenset(devices),
        prefetcher=Prefetcher(prefetch),
        staying=frozenset(staying),
    )
    blocks = {path: block for path, block in _every_path(module, module_name) if path in devices}
    _check_names(devices, blocks, module)
    with options.undone_on_failure():
        if module_name not in blocks:
            options.attach(module, options.hook(module_name, None, io_same_device=True))
        for path, block in blocks.items():
            is_root = path == module_name
            _attach_to_block(block, path, devices[path], offloaded[path], options, is_root=is_root)


def attach_execution_device_hook(
    module: nn.Module,
    execution_device: DeviceLike,
    skip_keys: str | list[str] | None = None,
    preload_module_classes: list[str] | None = None,
    tied_params_map: TiedParams | None = None,
) -> None:
    """Give every module with a state dict and without a hook an AlignDevicesHook that moves it and its arguments.

    Nothing below a module whose class is named in `preload_module_classes` gets one.
    """
    options = _Options(
        skip_keys=skip_keys,
        preload=frozenset(preload_module_classes or ()),
        tied_params_map=tied_params_map,
        residents=_residents(module, ""),
    )
    with options.undone_on_failure():
        _attach_execution_device(module, "", execution_device, options)


@dataclass(kw_only=True)
class _Options:
    """What the hooks of one attach call have in common."""

    weights_map: Mapping[str, Tensor] | None = None
    offload_buffers: bool = False
    skip_keys: str | list[str] | None = None
    preload: frozenset[str] = frozenset()
    tied_params_map: TiedParams | None = None
    residents: Residents
    blocks: frozenset[str] = frozenset()
    prefetcher: Prefetcher = field(default_factory=lambda: Prefetcher(0))
    staying: frozenset[str] = frozenset()  # full names of tensors that are not offloaded with their module
    seen: set[int] = field(default_factory=set)  # modules that have their hook
    attached: list[tuple[nn.Module, ModelHook | None, ModelHook]] = field(default_factory=list)  # before, new

    def attach(self, module: nn.Module, hook: ModelHook) -> None:
        """Append a hook, and remember it."""
        before = attached_hook(module)
        add_hook_to_module(module, hook, append=True)
        self.attached.append((module, before, hook))

    @contextlib.contextmanager
    def undone_on_failure(self) -> Iterator[None]:
        """An exception takes back the hooks, and with them the placeholders; what was moved to a device stays there."""
        try:
            yield
        except BaseException:
            for module, before, hook in reversed(self.attached):
                hook.detach_hook(module)
                if before is None:
                    hooked.unwrap(module)
                else:
                    hooked.wrap(module, before)
            raise

    @functools.cached_property
    def sorted_blocks(self) -> list[str]:
        return sorted(self.blocks)

    def hook(
        self, path: str, device: DeviceLike | None, offload: bool = False, **more: Any
    ) -> AlignDevicesHook:
        weights_map = None
        if offload and self.weights_map is not None:
            weights_map = PrefixedDataset(self.weights_map, f"{path}." if path else "")
        hook = AlignDevicesHook(
            execution_device=device,
            offload=offload,
            weights_map=weights_map,
            offload_buffers=self.offload_buffers,
            skip_keys=self.skip_keys,
            tied_params_map=self.tied_params_map,
            **more,
        )
        others = self._blocks_below(path) if hook.place_submodules else ()
        hook._belongs_to(self.residents, path, others, self.prefetcher)
        hook._staying = self.staying
        return hook

    def _blocks_below(self, path: str) -> tuple[str, ...]:
        prefix = f"{path}." if path else ""
        first = bisect.bisect_left(self.sorted_blocks, prefix)
        below = itertools.takewhile(lambda block: block.startswith(prefix), self.sorted_blocks[first:])
        return tuple(block[len(prefix) :] for block in below if block != path)


def _attach_to_block(
    block: nn.Module, path: str, device: DeviceLike | None, offload: bool, options: _Options, is_root: bool
) -> None:
    if offload:
        _attach_to_all(block, path, device, True, options, io_same_device=is_root)
    else:
        options.seen.add(id(block))
        hook = options.hook(path, device, io_same_device=is_root, place_submodules=True)
        options.attach(block, hook)
    if device is not None:
        _attach_execution_device(block, path, device, options)


def _attach_to_all(
    module: nn.Module,
    path: str,
    device: DeviceLike | None,
    offload: bool,
    options: _Options,
    io_same_device: bool = False,
) -> None:
    """`io_same_device` is for `module` itself, which then gets a hook whatever it holds."""
    if offload and device is None:
        raise ValueError(
            f"{path or type(module).__name__} is to be offloaded and there is no device to run on: give an execution_device"
        )
    for name, submodule, is_last in _walk(module, path, options, offload):
        if id(submodule) in options.seen:
            continue
        preload = is_last and offload
        holds = preload or next(every_tensor(submodule, recurse=False), None) is not None
        returns = io_same_device and submodule is module
        if holds or returns:
            options.seen.add(id(submodule))
            hook = options.hook(
                name, device, offload and holds, place_submodules=preload, io_same_device=returns
            )
            options.attach(submodule, hook)


def _attach_execution_device(module: nn.Module, path: str, device: DeviceLike, options: _Options) -> None:
    with_state = _modules_with_state(module)
    for name, submodule, _ in _walk(module, path, options):
        if id(submodule) in with_state and attached_hook(submodule) is None:
            options.attach(submodule, options.hook(name, device))


def _walk(
    module: nn.Module, path: str, options: _Options, offload: bool = False
) -> Iterator[tuple[str, nn.Module, bool]]:
    """(path, module, whether its class is preloaded) of a block; not into other blocks, nor below preloaded modules.

    torch's attention computes with its child's weights without calling it, so that one is loaded whole.
    """
    waiting = [(path, module)]
    while waiting:
        name, submodule = waiting.pop()
        is_last = type(submodule).__name__ in options.preload or (
            offload and isinstance(submodule, nn.MultiheadAttention)
        )
        yield name, submodule, is_last
        if is_last:
            continue
        children = [
            (f"{name}.{child}" if name else child, below)
            for child, below in submodule._modules.items()
            if below is not None
        ]
        waiting += [child for child in reversed(children) if child[0] not in options.blocks]


def _begins_forward(module: nn.Module) -> bool:
    """Whether a hook is there that begins a forward, at whose end what was fetched ahead is dropped."""
    hooks = iterate_hooks(attached_hook(module))
    return any(isinstance(hook, AlignDevicesHook) and (hook.offload or hook.io_same_device) for hook in hooks)


def _every_path(module: nn.Module, module_name: str) -> Iterator[tuple[str, nn.Module]]:
    yield from module.named_modules(prefix=module_name, remove_duplicate=False)


def _modules_with_state(module: nn.Module) -> set[int]:
    """Those that put something into a state dict, by id. Linear: children come after their parents in `modules()`."""
    found: set[int] = set()
    for submodule in reversed(list(module.modules())):
        own = any(parameter is not None for parameter in submodule._parameters.values()) or any(
            buffer is not None and name not in submodule._non_persistent_buffers_set
            for name, buffer in submodule._buffers.items()
        )
        if own or any(id(child) in found for child in submodule.children()):
            found.add(id(submodule))
    return found


def _residents(module: nn.Module, module_name: str) -> Residents:
    prefix = f"{module_name}." if module_name else ""
    return Residents([[prefix + name for name in group] for group in tied_groups(module)])


def _for_each_block(devices: Any, offload: Any) -> tuple[dict[str, Any], dict[str, bool]]:
    """Both as mappings with the same keys."""
    if not isinstance(devices, Mapping):
        devices = dict.fromkeys(offload, devices)
    if not isinstance(offload, Mapping):
        offload = dict.fromkeys(devices, offload)
    missing = [*(devices.keys() - offload.keys()), *(offload.keys() - devices.keys())]
    if missing:
        raise ValueError(
            f"execution_device and offload must name the same blocks; only one of them has {sorted(missing)}"
        )
    return dict(devices), dict(offload)


def _check_names(devices: Mapping[str, Any], blocks: Mapping[str, nn.Module], module: nn.Module) -> None:
    unknown = [name for name in devices if name not in blocks]
    if unknown:
        raise ValueError(f"{type(module).__name__} has no module named {', '.join(map(repr, unknown))}")
