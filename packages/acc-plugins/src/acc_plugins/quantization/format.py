"""What every way to keep weights in few bits answers, so that loading asks no "which library is this?"."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from os import PathLike
from typing import Any

import torch
from torch import Tensor, nn

from acc_bigmodel.stores.store import WeightStore
from acc_ops.enums import CustomDtype
from acc_plugins.quantization.layers import get_keys_to_not_convert, linear_layers


@dataclass(frozen=True, kw_only=True)
class Stored:
    """Where a checkpoint has a weight: under the name `values`; beside it, if it has few bits already, `statistics` (their local name -> entry)."""

    values: str
    statistics: Mapping[str, str] = field(default_factory=dict)


class WeightFormat:
    """One way to keep the weights of linear layers in few bits. The calls it receives, in order:

    1. `left_out(model)`, `exchange(model, left_out)` and `names(model, left_out)`, with the model on meta or not
    2. `statistics_of(name, store)` for each weight of a checkpoint; `check`
    3. `put` or, where it `can_offload`, `offload`, for each weight
    4. `mark(model)`
    """

    target_dtype: torch.dtype | CustomDtype = torch.int8  # what a weight counts as when a plan is made
    rest_dtype: torch.dtype | None = None  # of everything else; None: as it is
    skip_modules: Sequence[str] | None = None
    keep_in_fp32: Sequence[str] = ()
    can_offload = False

    def left_out(self, model: nn.Module) -> list[str]:
        """The names of modules whose layers stay as they are."""
        skipped = get_keys_to_not_convert(model) if self.skip_modules is None else self.skip_modules
        return [*skipped, *self.keep_in_fp32]

    def exchange(self, model: nn.Module, left_out: Sequence[str]) -> None:
        """Put layers that can hold few bits in the place of the linear ones; here those can."""

    def names(self, model: nn.Module, left_out: Sequence[str]) -> list[str]:
        """The weights that shall get few bits, before the exchange or after; not those that have them."""
        return [f"{path}.weight" for path in linear_layers(model, left_out)]

    def statistics_of(self, name: str, store: WeightStore) -> dict[str, str]:  # noqa: ARG002
        """The entries of `store`, by their local name, that say what the few bits of the entry `name` mean; none: it has all its bits."""
        return {}

    def check(self, layer: Any, stored: Stored, store: WeightStore) -> str | None:
        """What does not fit between the weight of `layer` and the entry that was found for it."""
        wanted, found = (layer.out_features, layer.in_features), tuple(store.shape(stored.values))
        if found != wanted:
            return f"{stored.values!r} has the shape {found} in the checkpoint and {wanted} in the model"
        return None

    def put(
        self,
        model: nn.Module,
        name: str,
        value: Tensor,
        statistics: Mapping[str, Tensor],
        device: torch.device,
    ) -> None:
        """Put `value` on `device` in few bits; it has them already where there are `statistics`."""
        raise NotImplementedError

    def offload(
        self,
        model: nn.Module,
        name: str,
        value: Tensor,
        statistics: Mapping[str, Tensor],
        folder: str | PathLike[str],
    ) -> dict[str, Any]:
        """Write `value` to `folder` in few bits, and leave the weight on meta; the entries for the folder's index."""
        raise NotImplementedError

    def mark(self, model: nn.Module) -> None:
        """Say on the model what it is, where other libraries look for that."""
