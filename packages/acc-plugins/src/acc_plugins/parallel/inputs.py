"""What a model would work out from its input alone, and would get wrong from a part of a sequence: places, padding, the labels' shift.

Only modules that take `input_ids` (as transformers' models do) are helped; a wrapped call passes on what the outer one filled in.
"""

from __future__ import annotations

import inspect
import weakref
from typing import Any

import torch
from torch import Tensor, nn

from acc_plugins.parallel.attention import Attention, Keys
from acc_plugins.parallel.exchange import Line
from acc_plugins.parallel.masks import SequenceError, from_padding

_FULL, _SLIDING = "full_attention", "sliding_attention"  # transformers' names for what a layer attends to
_IGNORED = -100  # transformers' label for what has no target
_known: weakref.WeakKeyDictionary[type, tuple[str, ...]] = weakref.WeakKeyDictionary()


def takes_tokens(module: nn.Module) -> bool:
    """Whether the module is a model over tokens: its forward has `input_ids`."""
    return "input_ids" in _parameters(module)


def fill_in(
    module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any], attention: Attention
) -> dict[str, Any]:
    """`kwargs`, with what follows from the whole sequence.

    `position_ids` where none are given; a mask of attention over all keys in place of a padding mask (batch, time); `shift_labels` beside
    the `labels` of a causal language model, whose last target here is the next rank's first. Raises SequenceError where a padding mask leaves open
    what the model would make of it.
    """
    names = _parameters(module)
    given = {**dict(zip(names, args)), **kwargs}  # noqa: B905 - fewer arguments than parameters
    tokens = _first_tensor(given.get("input_ids"), given.get("inputs_embeds"))
    if tokens is None or tokens.dim() < 2 or tokens.shape[1] not in attention.lengths:
        return kwargs
    line, length = attention.line, tokens.shape[1]
    filled = dict(kwargs)
    if "position_ids" in names and given.get("position_ids") is None:
        first = line.rank * length
        filled["position_ids"] = torch.arange(first, first + length, device=tokens.device)[None]
    mask = given.get("attention_mask")
    if "attention_mask" in names[len(args) :] and (
        mask is None or (isinstance(mask, Tensor) and mask.shape == tokens.shape[:2])
    ):
        filled["attention_mask"] = _mask(module, mask, tokens, attention)
    if (
        isinstance(given.get("labels"), Tensor)
        and given.get("shift_labels") is None
        and _predicts_the_next(module)
    ):
        filled["shift_labels"] = _next_labels(given["labels"], line)
    return filled


def shifted(labels: Tensor) -> Tensor:
    """Labels (batch, time) as targets: each place has the label of the next one, the last place none."""
    return torch.nn.functional.pad(labels, (0, 1), value=_IGNORED)[:, 1:].contiguous()


def _next_labels(labels: Tensor, line: Line) -> Tensor:
    firsts = line.join(labels[:, :1], 1)  # (batch, ranks)
    following = firsts[:, line.rank + 1 : line.rank + 2]
    if line.rank == line.size - 1:
        following = torch.full_like(labels[:, :1], _IGNORED)
    return torch.cat((labels[:, 1:], following), 1)


def _predicts_the_next(module: nn.Module) -> bool:
    """Whether a model of transformers shifts its labels itself."""
    return getattr(getattr(module, "loss_function", None), "__name__", "") == "ForCausalLMLoss"


def _mask(module: nn.Module, mask: Any, tokens: Tensor, attention: Attention) -> Any:
    """What the model is given in place of a padding mask over the places here: None, or what its queries see, for each kind of layer."""
    line, rows = attention.line, tokens.shape[1]
    window, kinds = _windows(module)
    if mask is not None:
        present = line.join(mask.detach().bool(), 1)  # (batch, keys)
    elif window is not None:
        present = torch.ones(tokens.shape[0], rows * line.size, dtype=torch.bool, device=tokens.device)
    else:
        return None
    if window is None and bool(present.all()):
        return None
    causal_or_not = {
        one.is_causal for one in module.modules() if isinstance(getattr(one, "is_causal", None), bool)
    }
    if len(causal_or_not) != 1 or not set(kinds) <= {_FULL, _SLIDING}:
        raise SequenceError(
            f"what {type(module).__name__} makes of its attention_mask with the sequence split over {line.size} ranks cannot be told (padding, or "
            f"layers of kind {', '.join(kinds) or 'unknown'}): give a mask (batch, 1, this rank's places, all places), or batches without padding "
            "and no attention_mask"
        )
    local = isinstance(attention, Keys)
    first, count = (line.rank * rows, rows) if local else (0, rows * line.size)
    seen = {
        kind: from_padding(
            present,
            first,
            count,
            is_causal=True in causal_or_not,
            window=window if kind == _SLIDING else None,
        )
        for kind in kinds
    }
    return seen if len(seen) > 1 else seen[kinds[0]]


def _windows(module: nn.Module) -> tuple[int | None, list[str]]:
    """How many places a layer with a window sees (None: no layer has one), and the kinds of the model's layers."""
    config = getattr(module, "config", None)
    window = getattr(config, "sliding_window", None)
    told = [str(kind) for kind in getattr(config, "layer_types", None) or ()]
    kinds = list(dict.fromkeys(told)) or [_FULL if window is None else _SLIDING]
    return (window if _SLIDING in kinds else None), kinds


def _first_tensor(*candidates: Any) -> Tensor | None:
    return next((one for one in candidates if isinstance(one, Tensor)), None)


def _parameters(module: nn.Module) -> tuple[str, ...]:
    kind = type(module)
    names = _known.get(kind)
    if names is None:
        try:
            names = tuple(inspect.signature(kind.forward).parameters)[1:]
        except (TypeError, ValueError):  # written in C
            names = ()
        _known[kind] = names
    return names
