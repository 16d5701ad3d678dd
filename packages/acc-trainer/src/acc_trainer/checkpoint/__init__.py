"""A checkpoint folder appears whole or not at all."""

from __future__ import annotations

from acc_ops.lazy import lazy_exports

# name -> the submodule that defines it; __init__.pyi gives the types
_NAMES = {
    "CheckpointError": "layout",
    "CheckpointInfo": "listing",
    "Checkpoints": "listing",
    "Manifest": "manifest",
    "check_whole": "manifest",
    "give_names": "contents",
    "is_whole": "manifest",
    "load_accelerator_state": "plain",
    "load_custom_state": "read",
    "load_state": "read",
    "look": "listing",
    "look_in_project": "listing",
    "newest_whole": "listing",
    "save_accelerator_state": "plain",
    "save_custom_state": "write",
    "save_state": "write",
}

__getattr__, __dir__, __all__ = lazy_exports(__name__, _NAMES)
