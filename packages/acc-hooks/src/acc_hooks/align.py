"""A hook that brings a module's arguments, and if they are offloaded its weights, to the device the module runs on."""

from __future__ import annotations

import contextlib
from collections.abc import Collection, Iterator, Mapping
from contextlib import AbstractContextManager
from typing import Any

import torch
from torch import Tensor, nn

from acc_hooks.calling import Use
from acc_hooks.elsewhere import bring_home, fill_state_dict
from acc_hooks.fetching import Wanted
from acc_hooks.homes import outside_inference_mode
from acc_hooks.hook import ModelHook, attached_hook
from acc_hooks.inputs import are_on, bring_back, move
from acc_hooks.loading import around_load
from acc_hooks.offloaded import OffloadedTensors
from acc_hooks.origin import Home, Loan, OffloadedWeightError, refuse_twice
from acc_hooks.placeholder import is_placeholder
from acc_hooks.prefetch import Prefetcher
from acc_hooks.resident import Residents, find_residents
from acc_hooks.tensors import TiedParams, buffer_names, owner_of, place, put_tensor, shared_copies
from acc_hooks.ties import every_tensor, group_by_tensor
from acc_hooks.untraced import is_exporting, untraced
from acc_hooks.values import META
from acc_ops.devices import DeviceLike, canonical_device
from acc_ops.tree import first_tensor


class AlignDevicesHook(ModelHook, own_calls=True):
    """Arguments go to `execution_device` before the forward; `io_same_device` sends the output to the input's device.

    Without `offload` the module's tensors are put on `execution_device` once, when the hook is attached. With it they are
    placeholders on meta, read from `weights_map[name]` for each forward and let go after it, whatever happens in it;
    buffers stay on `execution_device` unless `offload_buffers`. `weights_map` defaults to the module's own values on the
    CPU. `place_submodules` treats everything below the module like its own tensors. `skip_keys` names keyword arguments
    that are not moved. `tied_params_map[address of a value][device]` shares a loaded tensor between hooks; ties with
    what is below the module, and those the attach functions find in a model, are kept without it.

    The attributes are the arguments, and may be set later. `original_devices` says where offloaded tensors came from.
    Raises OffloadedWeightError in a backward pass that would leave a gradient on an offloaded weight.
    """

    _planned_by = ModelHook._planned_by | {"execution_device", "offload", "io_same_device", "_is_above"}
    _device: torch.device | None  # execution_device, in its one form

    # what a plan made in the middle of __init__ reads
    execution_device: DeviceLike | None = None
    offload: bool = False
    io_same_device: bool = False
    _is_above: bool = False  # other modules, which could be given the same arguments

    def __init__(
        self,
        execution_device: DeviceLike | None = None,
        offload: bool = False,
        io_same_device: bool = False,
        weights_map: Mapping[str, Tensor] | None = None,
        offload_buffers: bool = False,
        place_submodules: bool = False,
        skip_keys: str | list[str] | None = None,
        tied_params_map: TiedParams | None = None,
    ) -> None:
        self.execution_device = execution_device
        self.offload = offload
        self.io_same_device = io_same_device
        self.weights_map = weights_map
        self.offload_buffers = offload_buffers
        self.place_submodules = place_submodules
        self.skip_keys = skip_keys
        self.tied_params_map = tied_params_map

        self.input_device: torch.device | None = None  # noted by a pre_forward called by hand
        self.original_devices: dict[str, torch.device] = {}
        self.param_original_devices: dict[str, torch.device] = {}
        self.buffer_original_devices: dict[str, torch.device] = {}
        self.tied_params_names: set[str] = set()

        self._residents: Residents | None = None  # the ties of the model, if the attach functions know it
        self._path = ""  # of the module in that model
        self._others: tuple[str, ...] = ()  # modules below which belong to other hooks
        self._prefetcher: Prefetcher | None = None  # of that model
        self._staying: frozenset[str] = frozenset()  # its tensors that are not offloaded with their modules
        self._offloaded: OffloadedTensors | None = None

    def __repr__(self) -> str:
        return (
            f"AlignDevicesHook(execution_device={self.execution_device}, offload={self.offload}, "
            f"io_same_device={self.io_same_device}, offload_buffers={self.offload_buffers}, "
            f"place_submodules={self.place_submodules}, skip_keys={self.skip_keys!r})"
        )

    @outside_inference_mode()
    def init_hook(self, module: nn.Module) -> nn.Module:
        if module._modules:
            self._is_above = True
        bring_home(module)
        if self._offloaded is not None:
            raise ValueError(
                f"this hook already offloads the weights of {self._path or 'a module'}; make one hook for each module"
            )
        device = None if self.execution_device is None else canonical_device(self.execution_device)
        if self.offload:
            self._take_weights(module, device)
        elif device is not None:
            tensors = self._tensors(module)
            self._settle(module, tensors, device, self._ties(tensors))
        return module

    def pre_forward(
        self, module: nn.Module, *args: Any, **kwargs: Any
    ) -> tuple[tuple[Any, ...], dict[str, Any]]:
        if self.io_same_device:
            self.input_device = self._input_device(args, kwargs)
        self._hold(module)
        return self._move_inputs(args, kwargs)

    def post_forward(self, module: nn.Module, output: Any) -> Any:
        self._let_go(module)
        return bring_back(output, self.input_device, self.skip_keys) if self.io_same_device else output

    def detach_hook(self, module: nn.Module) -> nn.Module:
        if self._offloaded is not None:
            stayed = self._tensors(module).keys() - self._offloaded.names()
            self._offloaded.give_back(module, self._map(), self.tied_params_map)
            self._offloaded = None
            self._send_back(module, stayed)
        return module

    def _replan(self) -> None:
        super()._replan()
        device = None if self.execution_device is None else canonical_device(self.execution_device)
        only_moves = not (self.no_grad or self._is_overridden or self.offload)
        object.__setattr__(self, "_device", device)
        object.__setattr__(self, "_returns_output", only_moves and self.io_same_device)
        is_checked = only_moves and not (self.io_same_device and self._is_above)
        object.__setattr__(self, "_device_to_check", device if is_checked else None)

    def _enter(self, module: nn.Module, args: Any, kwargs: Any) -> tuple[Any, Any, Any]:
        if self._is_overridden:
            try:
                args, kwargs = self._call_pre_forward(module, args, kwargs)
            except BaseException:
                self._abort(module, None)
                raise
            return args, kwargs, None
        use = Use()
        try:
            use.begin()
            if self.io_same_device:
                use.input_device = self._input_device(args, kwargs)
            self._hold_for(use, module)
            args, kwargs = self._move_inputs(args, kwargs)
        except BaseException:
            use.end()
            raise
        return args, kwargs, use

    def _leave(self, module: nn.Module, output: Any, token: Any) -> Any:
        if token is None:
            try:
                return self.post_forward(module, output)
            except BaseException:
                self._abort(module, None)
                raise
        token.end()
        return bring_back(output, token.input_device, self.skip_keys)

    def _abort(self, module: nn.Module, token: Any) -> None:
        if token is None:
            self._let_go(module)
        else:
            token.end()

    def _input_device(self, args: Any, kwargs: Any) -> torch.device | None:
        """Where the output goes; an offloaded weight counts as being where it is computed with."""
        first = first_tensor([args, kwargs], 0)
        if first is None:
            return None
        return self._device if is_placeholder(first) else first.device

    def _move_inputs(self, args: Any, kwargs: Any) -> tuple[Any, Any]:
        device = self._device
        if device is None or are_on(args, kwargs, device):
            return args, kwargs
        return move(args, device), move(kwargs, device, self.skip_keys)

    def _hold_for(
        self, use: Use, module: nn.Module, device: torch.device | None = None, compare: bool = False
    ) -> None:
        if self._offloaded is not None:
            self._refuse_export(module)
            use.hold(
                lambda key: self._hold(module, key, device), lambda key: self._let_go(module, key, compare)
            )

    def _hold(
        self, module: nn.Module, holder: object | None = None, device: torch.device | None = None
    ) -> None:
        if self._offloaded is not None:
            self._refuse_export(module)
            weights_map, ties = self._map(), self.tied_params_map
            device = device or self._running_device(module)
            untraced(self._offloaded.hold, module, weights_map, device, ties, holder)

    def _let_go(self, module: nn.Module, holder: object | None = None, compare: bool = False) -> None:
        if self._offloaded is not None:
            untraced(self._offloaded.let_go, module, self._map(), self.tied_params_map, holder, compare)

    def _refuse_export(self, module: nn.Module) -> None:
        if is_exporting():
            raise OffloadedWeightError(
                f"the weights of {self._path or type(module).__name__} are offloaded, and an exported program holds its "
                "weights: call remove_hook_from_module(model, recurse=True) before torch.export"
            )

    def _known_ties(self) -> Residents | None:
        return self._residents

    def _holds_weights(self) -> bool:
        return self._offloaded is not None

    @contextlib.contextmanager
    def _visit(
        self, module: nn.Module, device: torch.device | None = None, compare: bool = False
    ) -> Iterator[None]:
        """Real weights for a block of code; `compare` finds changes made by `.data` too."""
        use = Use()
        try:
            self._hold_for(use, module, device, compare)
            yield
        finally:
            use.end()

    def _around_call(self, module: nn.Module) -> AbstractContextManager[None]:
        return self._visit(module)

    def _held_placeholders(self) -> dict[int, Tensor]:
        return {} if self._offloaded is None else self._offloaded.held_placeholders()

    def _lend(self, placeholder: Tensor) -> Loan | None:
        offloaded = self._offloaded
        return None if offloaded is None else offloaded.lend(placeholder, self._map(), self._device)

    def _value_behind(self, placeholder: Tensor) -> Tensor | None:
        offloaded = self._offloaded
        return None if offloaded is None else offloaded.value_behind(placeholder, self._map())

    def _home_behind(self, placeholder: Tensor) -> Home | None:
        offloaded = self._offloaded
        return None if offloaded is None else offloaded.home_behind(placeholder, self._map())

    def _write_behind(self, placeholder: Tensor, value: Tensor) -> bool:
        offloaded = self._offloaded
        return offloaded is not None and offloaded.write_behind(placeholder, value, self._map())

    def _wants_next(self) -> Wanted | None:
        offloaded, weights_map, device = self._offloaded, self.weights_map, self._device
        if offloaded is None or weights_map is None or device is None:
            return None
        return offloaded.wants_next(weights_map, device)

    def _map(self) -> Mapping[str, Tensor]:
        if self.weights_map is None:
            raise ValueError(
                f"{self._path or 'this module'} is offloaded and its hook's weights_map was set to None"
            )
        return self.weights_map

    def _running_device(self, module: nn.Module) -> torch.device:
        if self._device is None:
            raise ValueError(
                f"the weights of {self._path or type(module).__name__} are offloaded and there is no device to run on: "
                "give the hook an execution_device"
            )
        return self._device

    def _take_weights(self, module: nn.Module, device: torch.device | None) -> None:
        tensors = self._tensors(module)
        buffers, lasting = buffer_names(module, self.place_submodules)
        here = buffers - lasting if self.offload_buffers else buffers
        away = [name for name in tensors if name not in here and self._full(name) not in self._staying]
        self.original_devices = {name: tensor.device for name, tensor in tensors.items()}
        self.param_original_devices = {k: v for k, v in self.original_devices.items() if k not in buffers}
        self.buffer_original_devices = {k: v for k, v in self.original_devices.items() if k in buffers}
        if self.weights_map is None:
            self.weights_map = {name: self._real(name, tensors[name]).to("cpu") for name in away}
        residents = self._residents or find_residents(module, away, self.weights_map)
        self.tied_params_names = {name for name in away if residents.tie_of(self._full(name)) is not None}
        offloaded = OffloadedTensors(residents, self._path, self._prefetcher)
        offloaded.take(module, away, self.weights_map)
        self._offloaded = offloaded
        offloaded.answer_for(self)
        if device is None:
            return
        try:
            self._settle(
                module, {name: tensors[name] for name in tensors.keys() - set(away)}, device, residents
            )
        except BaseException:
            self.detach_hook(module)
            raise

    def _send_back(self, module: nn.Module, names: Collection[str]) -> None:
        """Buffers that stayed where the module ran go back to where they came from."""
        tensors = self._tensors(module)
        for name in names:
            device = self.original_devices.get(name, META)
            if (
                name in tensors
                and tensors[name].device == self._device
                and META not in (device, self._device)
            ):
                self._settle(module, {name: tensors[name]}, device, self._ties(tensors))

    def _settle(
        self, module: nn.Module, tensors: Mapping[str, Tensor], device: torch.device, residents: Residents
    ) -> None:
        """Put tensors on `device` to stay; the names of a tie get one tensor."""
        for name, tensor in tensors.items():
            owner, leaf = owner_of(module, name)
            if is_placeholder(tensor) or (tensor.is_meta and (_offloads(module) or _offloads(owner))):
                continue  # the placeholder of a hook that is there already

            def make(tensor: Tensor = tensor, name: str = name) -> Tensor:
                return _shared_or_placed(tensor, device, self._full(name), self.tied_params_map)

            tie = residents.tie_of(self._full(name))
            new = make() if tie is None else residents.settle(tie, device, make)
            if new is not tensor:
                put_tensor(owner, leaf, new)

    def _belongs_to(
        self, residents: Residents, path: str, others: tuple[str, ...], prefetcher: Prefetcher
    ) -> None:
        """Tell the hook about the model around it, before it is attached."""
        self._residents, self._path, self._others, self._prefetcher = residents, path, others, prefetcher

    def _tensors(self, module: nn.Module) -> dict[str, Tensor]:
        every = every_tensor(module, recurse=self.place_submodules)
        if not self._others:
            return dict(every)
        prefixes = tuple(f"{other}." for other in self._others)
        return {name: tensor for name, tensor in every if not name.startswith(prefixes)}

    def _real(self, name: str, tensor: Tensor) -> Tensor:
        if is_placeholder(tensor):
            raise refuse_twice(self._full(name))
        if tensor.is_meta:
            raise ValueError(
                f"{self._full(name)} is on the meta device and has no value to offload: give the hook a weights_map"
            )
        return tensor.detach()

    def _ties(self, tensors: Mapping[str, Tensor]) -> Residents:
        return self._residents if self._residents is not None else Residents(group_by_tensor(tensors.items()))

    def _full(self, name: str) -> str:
        return f"{self._path}.{name}" if self._path else name

    def _fill_state_dict(self, module: nn.Module, destination: dict[str, Any], prefix: str) -> None:  # noqa: ARG002
        if self._offloaded is not None:
            self._offloaded.fill(destination, prefix, self._map())
        fill_state_dict(destination, prefix)  # weights that somebody put under another name, or tied

    def _loading_state_dict(
        self, module: nn.Module, state_dict: Mapping[str, Any], prefix: str
    ) -> AbstractContextManager[None]:
        offloaded = self._offloaded
        if offloaded is None or not offloaded.wants(module, state_dict, prefix):
            return contextlib.nullcontext()
        device = offloaded.device_in_use or torch.device("cpu")
        return around_load(lambda: self._visit(module, device), offloaded.is_block)

    def __getstate__(self) -> dict[str, Any]:
        return {**self.__dict__, "tied_params_map": None}  # its addresses mean nothing to a copy

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__dict__.update(state)
        if self._offloaded is not None:
            self._offloaded.answer_for(self)


def _offloads(module: nn.Module) -> bool:
    hook = attached_hook(module)
    return hook is not None and hook._holds_weights()


def _shared_or_placed(
    tensor: Tensor, device: torch.device, name: str, tied_params_map: TiedParams | None
) -> Tensor:
    shared = None if device.type == "meta" else shared_copies(tied_params_map, tensor)
    if shared is None:
        return place(tensor, None, device, name=name)
    if device not in shared:
        shared[device] = place(tensor, None, device, name=name)
    return shared[device]
