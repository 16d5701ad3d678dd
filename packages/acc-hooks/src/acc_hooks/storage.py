"""The storage of a placeholder has a size and no memory: what would be written to it is refused, not lost."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from acc_hooks.origin import ORIGIN, Origin, origin_of, refuse_call


def storage_of(placeholder: Tensor) -> torch.UntypedStorage:
    """What `placeholder.untyped_storage()` gives."""
    with torch._C.DisableTorchFunctionSubclass(), torch._C._DisableTorchDispatch():
        storage: Any = placeholder.untyped_storage()
    storage.__class__ = _Storage
    setattr(storage, ORIGIN, origin_of(placeholder))
    return storage


class _Storage(torch.UntypedStorage):
    def _refuse(self, *args: Any, **kwargs: Any) -> Any:  # noqa: ARG002
        origin: Origin = getattr(self, ORIGIN)
        raise refuse_call(origin.name, "untyped_storage")

    fill_ = copy_ = resize_ = byteswap = share_memory_ = __setitem__ = _refuse
