"""Where weights live: plan, load, run and save PyTorch models larger than memory."""

from acc_ops.lazy import lazy_exports

from .__about__ import __version__ as __version__

# public name -> the submodule that defines it; __init__.pyi gives the types
_NAMES = {
    "CheckpointMismatch": "load_plan",
    "LoadReport": "load_plan",
    "OffloadedWeightsLoader": "stores.disk",
    "Placement": "placement",
    "PlacementError": "placement",
    "WeightStore": "stores.store",
    "calculate_maximum_sizes": "measure",
    "check_device_map": "device_map",
    "check_tied_parameters_in_config": "tying",
    "check_tied_parameters_on_same_device": "tying",
    "clean_device_map": "device_map",
    "compute_module_sizes": "measure",
    "compute_module_total_buffer_size": "measure",
    "cpu_offload": "dispatch",
    "cpu_offload_with_hook": "dispatch",
    "describe_device_map": "device_map",
    "disk_offload": "dispatch",
    "dispatch_model": "dispatch",
    "expand_device_map": "device_map",
    "extract_submodules_state_dict": "offload",
    "fallback_allocate": "device_map",
    "find_tied_parameters": "tying",
    "get_balanced_memory": "budget",
    "get_max_layer_size": "measure",
    "get_max_memory": "budget",
    "get_module_leaves": "measure",
    "get_module_size_with_ties": "measure",
    "get_state_dict_from_offload": "collect",
    "get_state_dict_offloaded_model": "collect",
    "infer_auto_device_map": "device_map",
    "init_empty_weights": "empty",
    "init_on_device": "empty",
    "load_checkpoint_and_dispatch": "load",
    "load_checkpoint_in_model": "load",
    "load_offloaded_weight": "offload",
    "load_offloaded_weights": "offload",
    "load_state_dict": "load",
    "load_weights": "save",
    "offload_state_dict": "offload",
    "offload_weight": "offload",
    "open_store": "checkpoint_files",
    "plan": "placement",
    "plan_model": "device_map",
    "retie_parameters": "tying",
    "save_offload_index": "offload",
    "save_weights": "save",
}

__getattr__, __dir__, __all__ = lazy_exports(__name__, _NAMES)
