"""What happens around forward(): hooks that align devices, offload and cast weights, and undo themselves."""

from acc_ops.lazy import lazy_exports

from .__about__ import __version__ as __version__

_NAMES = {
    "AlignDevicesHook": "align",
    "CpuOffload": "offload",
    "LayerwiseCastingHook": "casting",
    "ModelHook": "hook",
    "OffloadedWeightError": "origin",
    "TensorPlacement": "tensors",
    "PrefixedDataset": "prefixed",
    "SequentialHook": "hook",
    "UserCpuOffloadHook": "offload",
    "add_hook_to_module": "hook",
    "align_module_device": "visit",
    "attach_align_device_hook": "attach",
    "attach_align_device_hook_on_blocks": "attach",
    "attach_execution_device_hook": "attach",
    "attach_layerwise_casting_hooks": "casting",
    "attached_hook": "hook",
    "has_offloaded_params": "visit",
    "iterate_hooks": "hook",
    "register_placer": "tensors",
    "remove_hook_from_module": "hook",
    "remove_hook_from_submodules": "hook",
    "set_module_tensor_to_device": "tensors",
    "tied_groups": "ties",
}

__getattr__, __dir__, __all__ = lazy_exports(__name__, _NAMES)
