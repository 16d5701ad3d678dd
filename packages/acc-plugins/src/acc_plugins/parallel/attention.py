"""Attention over a sequence of which each rank holds a part: two ways to the numbers that one process would compute.

[Note: which part] Rank r of n holds places r * T / n up to (r + 1) * T / n of a sequence of T: in order, so places and causal masks follow from the
rank. `Keys` (context parallelism) joins keys and values of all ranks and lets local queries see them. `Heads` (sequence parallelism, Ulysses:
https://arxiv.org/abs/2309.14509) gives each rank the whole sequence of some of the heads, and takes the result back.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from acc_plugins.parallel.exchange import Line
from acc_plugins.parallel.masks import SequenceError, causal, rows_here, rows_of_all, with_all_keys


class Asked(NamedTuple):
    """What torch's function is asked: queries (..., heads, time, size), keys, values, which keys each query sees, and its other options."""

    query: Tensor
    key: Tensor
    value: Tensor
    mask: Tensor | None
    is_causal: bool
    options: dict[str, Any]

    def answer(self) -> Tensor:
        """What it returns for these tensors alone."""
        return F.scaled_dot_product_attention(
            self.query, self.key, self.value, attn_mask=self.mask, is_causal=self.is_causal, **self.options
        )


class Attention:
    """`scaled_dot_product_attention` of queries (..., heads, time, size), keys and values that are split along time."""

    def __init__(self, line: Line) -> None:
        self.line = line
        self.lengths: set[int] = set()  # how many places of a sequence that is split are here, in some batch

    @torch.compiler.disable  # exchanges in a compiled graph wait for each other in another order on each rank
    def __call__(
        self,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        attn_mask: Tensor | None = None,
        dropout_p: float = 0.0,
        is_causal: bool = False,
        scale: float | None = None,
        enable_gqa: bool = False,
    ) -> Tensor:
        """What torch's function returns for the queries here. Raises SequenceError for what cannot be told from the parts."""
        options: dict[str, Any] = {"dropout_p": dropout_p, "scale": scale}
        if enable_gqa:
            options["enable_gqa"] = True
        asked = Asked(query, key, value, attn_mask, is_causal, options)
        if not self._is_split(query, key, is_causal):
            return asked.answer()
        if is_causal and attn_mask is not None:
            raise SequenceError("attention takes either attn_mask or is_causal=True, not both: leave one out")
        return self.attend(asked)

    def attend(self, asked: Asked) -> Tensor:
        """The same where all of them are split."""
        raise NotImplementedError

    def _is_split(self, query: Tensor, key: Tensor, is_causal: bool) -> bool:
        """Whether the keys are: an encoder's output that every rank has whole is not, and its queries need nobody else."""
        queries_are, keys_are = (t.shape[-2] in self.lengths for t in (query, key))
        if keys_are and queries_are:
            return True
        if keys_are or (queries_are and is_causal):
            raise SequenceError(
                f"this attention has {query.shape[-2]} queries and {key.shape[-2]} keys"
                f"{' and is causal' if is_causal else ''}, while split sequences have {sorted(self.lengths)} places on each of "
                f"{self.line.size} ranks: split both along the sequence, or only the queries of an attention that is not causal"
            )
        return False


class Keys(Attention):
    """Context parallelism: keys and values come from all ranks, the queries stay."""

    def attend(self, asked: Asked) -> Tensor:
        query, key, value, mask, is_causal, options = asked
        line, rows, places = self.line, query.shape[-2], key.shape[-2]
        if key.shape == value.shape and key.dtype == value.dtype:  # one exchange for both
            key, value = line.join(torch.stack((key, value)), -2).unbind(0)
        else:
            key, value = line.join(key, -2), line.join(value, -2)
        if mask is not None:
            mask = rows_here(with_all_keys(mask, places, line), rows, line)
        elif is_causal:
            first = line.rank * rows
            seen = first + rows  # nobody here sees what comes later
            key, value = key[..., :seen, :], value[..., :seen, :]
            if first:
                mask, is_causal = causal(first, rows, seen, query.device), False
        return Asked(query, key, value, mask, is_causal and mask is None, options).answer()


class Heads(Attention):
    """Sequence parallelism: each rank attends with its share of the heads over the whole sequence."""

    def _is_split(self, query: Tensor, key: Tensor, is_causal: bool) -> bool:
        if not self.lengths and torch.is_grad_enabled():
            raise SequenceError(
                "sp_size asks for sequences that are cut, and no batch was cut for this model: iterate over "
                "accelerator.deepspeed_ulysses_dl_adapter(loader, model)"
            )
        return super()._is_split(query, key, is_causal)

    def attend(self, asked: Asked) -> Tensor:
        query, key, value, mask, is_causal, options = asked
        line, rows, heads = self.line, query.shape[-2], query.shape[-3] if query.dim() > 2 else 1
        if heads % line.size:
            raise SequenceError(
                f"{heads} attention heads cannot be divided over {line.size} ranks: choose an sp_size that divides them, or cp_size"
            )
        if key.shape[-3] % line.size:  # fewer than there are ranks: as many copies as there are queries
            copies = heads // key.shape[-3]
            key, value = key.repeat_interleave(copies, -3), value.repeat_interleave(copies, -3)
            options = {name: option for name, option in options.items() if name != "enable_gqa"}
        if mask is not None:
            mask = rows_of_all(with_all_keys(mask, key.shape[-2], line), rows, line)
            if mask.dim() > 2 and mask.shape[-3] == heads > 1:
                mask = line.mine(mask, -3)
        query, key, value = (line.swap(t, -3, -2) for t in (query, key, value))
        return line.swap(Asked(query, key, value, mask, is_causal, options).answer(), -2, -3)
